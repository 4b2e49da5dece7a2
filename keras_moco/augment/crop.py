"""Crop, resize and flip by gathering a few weighted source pixels.

`tf.image.crop_and_resize` has no antialias and cannot be compiled by XLA.
"""

import math

import tensorflow as tf

from keras_moco.augment.barrier import materialize_before


def filter_taps(start, length, size, source_size, antialias=True):
    """Source pixels and weights that make each output pixel.

    The triangle filter of Pillow and torchvision: centred on the output
    pixel, as wide as the reduction when `antialias` is true, and never
    reaching outside of the box.

    Args:
        start: Int tensor (batch,). First source pixel of the box.
        length: Int tensor (batch,). Pixels of the box.
        size: Int. Output pixels.
        source_size: Int. Source pixels.
        antialias: Bool. Widens the filter when the box is reduced.

    Returns:
        Pair (batch, size, taps): int32 pixels, and float32 weights with rows
        of sum 1.
    """
    start, length = (
        tf.cast(value, tf.float32)[:, None, None] for value in (start, length)
    )
    scale = length / size
    support = tf.maximum(scale, 1.0) if antialias else tf.ones_like(scale)
    # As many taps as the longest possible box needs.
    taps = math.ceil(2 * max(source_size / size, 1.0)) if antialias else 2
    center = (tf.range(size, dtype=tf.float32)[:, None] + 0.5) * scale
    pixels = tf.math.ceil(center - support - 0.5)  # (batch, size, 1)
    pixels += tf.range(taps, dtype=tf.float32)
    weights = tf.nn.relu(1.0 - tf.abs(pixels + 0.5 - center) / support)
    inside = (pixels >= 0.0) & (pixels < length)
    weights = tf.where(inside, weights, 0.0)
    weights /= tf.reduce_sum(weights, axis=-1, keepdims=True)
    pixels = start + tf.clip_by_value(pixels, 0.0, length - 1.0)
    return tf.cast(pixels, tf.int32), weights


def crop(images, parameters, size, antialias=True):
    """Cuts a box out of each image, resizes it and flips it.

    Equals torchvision's bilinear `resized_crop`, then `hflip`.

    Args:
        images: uint8, or float in [0, 1], (batch, height, width, 3). Height
            and width of a single image may be unknown: `tf.image.resize`
            then does the same, which XLA cannot compile.
        parameters: Dictionary with `box` (batch, 4) and `flip` (batch,), see
            `draw_parameters`.
        size: Int. Height and width of the result.
        antialias: Bool. As torchvision's. Defaults to True.

    Returns:
        float32 (batch, size, size, 3) in [0, 1].
    """
    _, height, width, _ = images.shape
    if height is None or width is None:
        return _crop_one(images, parameters, size, antialias)
    top, left, box_height, box_width = tf.unstack(parameters["box"], axis=1)
    rows, row_weights = filter_taps(top, box_height, size, height, antialias)
    columns, column_weights = filter_taps(
        left, box_width, size, width, antialias
    )
    flip = parameters["flip"][:, None, None]
    columns = tf.where(flip, tf.reverse(columns, [1]), columns)
    column_weights = tf.where(
        flip, tf.reverse(column_weights, [1]), column_weights
    )
    if images.dtype == tf.uint8:
        row_weights /= 255.0
    # (batch, size, taps, width, 3), where the taps are summed
    shrunk = tf.cast(tf.gather(images, rows, batch_dims=1), tf.float32)
    shrunk = tf.reduce_sum(row_weights[..., None, None] * shrunk, axis=2)

    def resample_columns(shrunk):  # (batch, size, size, taps, 3)
        taps = tf.gather(shrunk, columns, axis=2, batch_dims=1)
        weights = column_weights[:, None, :, :, None]
        return tf.reduce_sum(weights * taps, axis=3)

    return materialize_before(resample_columns, shrunk, box_width[0] > 0)


def _crop_one(images, parameters, size, antialias):
    top, left, height, width = tf.unstack(parameters["box"][0])
    box = images[:, top : top + height, left : left + width]
    box = tf.image.resize(box, (size, size), antialias=antialias)
    if images.dtype == tf.uint8:
        box /= 255.0
    return tf.where(parameters["flip"][0], tf.reverse(box, [2]), box)
