"""Colour operations with torchvision's semantics, on planar images.

Planar is (batch, 3, height, width): with the long axis innermost a compiler
can use vector instructions. `recolor` in `views.py` takes and gives NHWC.
Every factor is float32 (batch,), one per image.
"""

import tensorflow as tf

from keras_moco.augment.barrier import materialize_before

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)


def _per_image(values):
    return tf.reshape(values, (-1, 1, 1, 1))


def luminance(images):
    """Grey level of every pixel: (batch, 1, height, width)."""
    red, green, blue = tf.split(images, 3, axis=1)
    return 0.2989 * red + 0.587 * green + 0.114 * blue


def mean_luminance(images):
    """Mean grey level of every image: (batch, 1, 1, 1)."""
    return tf.reduce_mean(luminance(images), axis=(2, 3), keepdims=True)


def to_grayscale(images):
    """Grey images that keep three equal channels."""
    return tf.broadcast_to(luminance(images), tf.shape(images))


def blend(images, target, factor):
    """Moves images from `target` (factor 0) through themselves (factor 1)."""
    factor = _per_image(factor)
    blended = factor * images + (1.0 - factor) * target
    return tf.clip_by_value(blended, 0.0, 1.0)


def adjust_brightness(images, factor):
    """Scales images."""
    return blend(images, 0.0, factor)


def adjust_contrast(images, factor):
    """Scales the distance from the mean grey level of the image."""
    return blend(images, mean_luminance(images), factor)


def adjust_saturation(images, factor):
    """Scales the distance from the grey level of the pixel."""
    return blend(images, luminance(images), factor)


def adjust_hue(images, turns):
    """Turns the hue by a share of the circle, in [-0.5, 0.5].

    The same as changing H in HSV, without S: a channel lies below the
    largest one by `spread` times a piecewise linear function of the hue.
    """
    red, green, blue = tf.split(images, 3, axis=1)
    largest = tf.maximum(tf.maximum(red, green), blue)
    spread = largest - tf.minimum(tf.minimum(red, green), blue)
    is_red, is_green = red == largest, green == largest
    sixths = tf.where(
        is_red,
        green - blue,
        tf.where(is_green, blue - red, red - green),
    )
    sixths /= tf.where(spread > 0.0, spread, 1.0)
    sixths += tf.where(is_red, 0.0, tf.where(is_green, 2.0, 4.0))
    sixths += 6.0 * _per_image(turns)  # all (batch, 1, height, width)

    def turned(parts):
        largest, spread, sixths = parts
        position = sixths + tf.constant([5.0, 3.0, 1.0])[:, None, None]
        position -= 6.0 * tf.floor(position / 6.0)
        below = tf.minimum(position, 4.0 - position)
        return largest - spread * tf.clip_by_value(below, 0.0, 1.0)

    return materialize_before(
        turned, (largest, spread, sixths), tf.math.is_finite(turns[0])
    )


def jitter(images, applied, order, factors):
    """Brightness, contrast, saturation and hue in an order per image.

    Args:
        images: float32 (batch, 3, height, width) in [0, 1].
        applied: Bool (batch,). Images where it is false stay as they are.
        order: int32 (batch, 4). See `draw_parameters`.
        factors: float32 (batch, 4). See `draw_parameters`.

    Returns:
        float32 (batch, 3, height, width) in [0, 1].
    """
    # An image without jitter gets brightness of strength 1 four times.
    order = tf.where(applied[:, None], order, BRIGHTNESS)
    factors = tf.where(applied[:, None], factors, 1.0)

    def adjust(place, images):
        operation = tf.gather(order, place, axis=1)
        factor = tf.gather(factors, operation, batch_dims=1)
        return place + 1, _adjust(images, operation, factor)

    # A loop, so that each operation is compiled once and not at each place.
    return tf.while_loop(
        lambda place, _: place < 4, adjust, (0, images), maximum_iterations=4
    )[1]


def _adjust(images, operation, factor):
    """One operation per image: (batch,) numbers and their factors."""
    contrast, saturation, hue = (
        _per_image(operation == number)
        for number in (CONTRAST, SATURATION, HUE)
    )

    def adjust_others():
        mean = tf.cond(
            tf.reduce_any(contrast),
            lambda: mean_luminance(images),
            lambda: tf.zeros_like(images[:, :1, :1, :1]),
        )
        grey = tf.where(saturation, luminance(images), 0.0)
        return blend(images, tf.where(contrast, mean, grey), factor)

    return tf.cond(
        tf.reduce_any(hue),
        lambda: tf.where(hue, adjust_hue(images, factor), adjust_others()),
        adjust_others,
    )


def solarize(images, threshold=0.5):
    """Inverts the pixels at or above the threshold."""
    return tf.where(images >= threshold, 1.0 - images, images)
