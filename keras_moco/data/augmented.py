"""Labelled images as a classifier is trained on: cropped and flipped."""

import tensorflow as tf

from keras_moco.augment import two_views
from keras_moco.data.passes import Passes
from keras_moco.data.pipeline import (
    cut_views,
    read,
    shuffled_batches,
    steady,
    take,
    threads,
)
from keras_moco.presets import View

CROP_AND_FLIP = View(
    crop_scale=(0.08, 1.0), jitter_probability=0.0, grayscale=0.0, blur=0.0
)


def augmented_dataset(
    images, rows, image_size, batch_size, seed=0, first_epoch=0
):
    """Batches of (view, label), newly drawn in every epoch.

    Each view is a random resized crop, flipped or not: what published linear
    probes and fine-tuning train on. As in `pretrain_dataset`, one pass is one
    epoch, and the views depend on seed, epoch and image alone.

    Args:
        images: `Images` with labels.
        rows: Int array. Numbers of the images to train on.
        image_size: Int. Side of the views in pixels.
        batch_size: Int in 1..len(rows). The rest of an epoch is dropped.
        seed: Int. Defaults to 0.
        first_epoch: Int. Number of the first pass. Defaults to 0.

    Returns:
        `tf.data.Dataset` of float32 (batch_size, image_size, image_size, 3) in
        [0, 1] and int64 (batch_size,).

    Example:
        >>> train = augmented_dataset(images, np.arange(1000), 32, 64)
    """
    steps = len(rows) // batch_size
    labels = tf.constant(images.labels)
    options = {
        "seed": seed,
        "image_size": image_size,
        "views": (CROP_AND_FLIP,),
    }
    passes = Passes(first_epoch, steps)
    whole = slice(0, batch_size)
    batches = shuffled_batches(rows, batch_size, whole, seed, passes)

    def of_array(epoch, index):
        (view,) = two_views(take(images, index), index, epoch[0], **options)
        return view, tf.gather(labels, index)

    def with_content(epoch, index):
        return epoch, index, read(images, index)

    def of_files(crops, drawn, index):
        return tf.cast(crops[0], tf.float32) / 255.0, tf.gather(labels, index)

    if images.array is not None:
        data = batches.map(of_array, threads())
    else:
        batches = batches.map(with_content, threads())
        crops = cut_views(batches, images, batch_size, **options)
        data = crops.map(of_files, threads())
    # The pass of a generator has no length of its own.
    return steady(data.apply(tf.data.experimental.assert_cardinality(steps)))
