"""Images as the evaluators read them: in order and unaugmented."""

import math

import numpy as np
import tensorflow as tf

from keras_moco.augment import crop
from keras_moco.data.encoded import StreamedImages
from keras_moco.data.images import Images, match_classes
from keras_moco.data.pipeline import natural_size, steady, take, threads
from keras_moco.data.sources import load_images
from keras_moco.kinds import check_kind

# Up to this size images are taken whole; above, the centre of 224/256 is.
WHOLE_IMAGE = 96


def labeled_images(source, image_size=None, data_dir=None, max_broken=0.01):
    """The training and the test images of a labelled source.

    Args:
        source: What `load_images` takes.
        image_size: Int or None. Side in pixels, of "shapes" only.
        data_dir: Str or path. As in `load_images`.
        max_broken: Float in [0, 1]. As in `load_images`.

    Returns:
        Tuple of two `Images` and the list of the names of their classes.
        Classes are matched by name.

    Raises:
        ValueError: A split or the labels are missing, a class of the test
            images has no training image, or they do not fit into memory.

    Example:
        >>> train, test, names = labeled_images("cifar10")
    """
    train, test = (
        load_images(
            source,
            split,
            data_dir=data_dir,
            max_broken=max_broken,
            image_size=image_size or 32,
        )
        for split in ("train", "test")
    )
    for images in (train, test):
        check_labeled(images)
    test = match_classes(train, test)
    count = int(train.labels.max()) + 1
    names = train.class_names or [str(number) for number in range(count)]
    return train, test, names[:count]


def labeled_splits(source, image_size=None, data_dir=None, max_broken=0.01):
    """`labeled_images`, as the datasets that evaluators read.

    Args:
        source: What `load_images` takes.
        image_size: Int or None. As for `labeled_dataset`.
        data_dir: Str or path. As in `load_images`.
        max_broken: Float in [0, 1]. As in `load_images`.

    Returns:
        Tuple of two datasets, see `labeled_dataset`, and the list of the names
        of their classes. Classes are matched by name.

    Raises:
        ValueError: A split or the labels are missing.

    Example:
        >>> bank, test, names = labeled_splits("cifar10")
    """
    *splits, names = labeled_images(source, image_size, data_dir, max_broken)
    datasets = [labeled_dataset(i, image_size=image_size) for i in splits]
    return *datasets, names


def labeled_dataset(
    images,
    split="train",
    image_size=None,
    batch_size=256,
    data_dir=None,
    rows=None,
):
    """Batches of (image, label) for evaluation, in order and unaugmented.

    Images above 96 pixels are cut to the centre of 224/256 of their shorter
    side, as published; smaller ones are taken whole (their largest square).

    Args:
        images: `Images` with labels, or what `load_images` takes: "shapes", a
            TFDS name, a folder with class folders.
        split: Str. "train" (a bank) or "test"; not used for `Images`.
        image_size: Int. Side in pixels. None takes the images' own (at most
            224).
        batch_size: Int. Defaults to 256; the last batch may be smaller.
        data_dir: Str or path. As in `load_images`.
        rows: Int array. Numbers of the images to take; None takes all.

    Returns:
        `tf.data.Dataset` of float32 (batch, image_size, image_size, 3) in
        [0, 1] and int64 (batch,). Its attribute `images` is the `Images`.

    Raises:
        ValueError: The images have no labels, or do not fit into memory.

    Example:
        >>> bank = labeled_dataset("cifar10", "train", image_size=32)
    """
    if not isinstance(images, Images):
        images = load_images(images, split, data_dir=data_dir)
    check_labeled(images)
    return image_dataset(images, image_size, batch_size, rows)


def image_dataset(images, image_size=None, batch_size=256, rows=None):
    """`labeled_dataset` of images with labels or without.

    Args:
        images: `Images`.
        image_size: Int or None. As for `labeled_dataset`.
        batch_size: Int.
        rows: Int array. Numbers of the images to take; None takes all.

    Returns:
        `tf.data.Dataset` of (images, labels), or of images where there are no
        labels. Its attributes `images` and `rows`, the `Images` and the
        numbers of those taken, are for their names.

    Raises:
        ValueError: The images do not fit into memory, or a size below 1.

    Example:
        >>> data = image_dataset(load_images("photos/"), image_size=96)
    """
    _check_in_memory(images)
    check_kind("image_size", image_size, int | None)
    if image_size is not None and image_size < 1:
        raise ValueError(f"`image_size` must be >= 1. Received: {image_size}")
    size = image_size or natural_size(images)
    rows = np.arange(len(images)) if rows is None else np.asarray(rows)
    slices = (rows,) if images.labels is None else (rows, images.labels[rows])
    data = tf.data.Dataset.from_tensor_slices(slices)
    if images.array is not None:
        data = data.batch(batch_size).map(
            lambda index, *label: (_centre(take(images, index), size), *label),
            threads(),
        )
    else:
        min_side = math.ceil(size * 256 / 224)
        data = data.map(
            lambda index, *label: (
                _centre(_decode(images, index, min_side)[None], size)[0],
                *label,
            ),
            threads(),
        ).batch(batch_size)
    data = steady(data)
    data.images, data.rows = images, rows
    return data


def check_labeled(images):
    """Raises unless images have labels and can be read in any order."""
    if not isinstance(images, Images):
        raise ValueError(
            "Expected `Images`, as `labeled_images` gives. Received: "
            f"{type(images).__name__}"
        )
    _check_in_memory(images)
    if images.labels is None:
        raise ValueError(
            "Evaluation needs labels: expected class folders or a labelled "
            f"dataset. {len(images)} images without labels came."
        )


def _check_in_memory(images):
    if isinstance(images, StreamedImages):
        raise ValueError(
            f"{images.source} does not fit into half of the free memory, which "
            "evaluation needs: take a part of it, as in split='train[:10%]'."
        )


def _decode(images, index, min_side):
    image = tf.numpy_function(
        lambda i: images.decode(int(i), min_side), [index], tf.uint8
    )
    return tf.ensure_shape(image, (None, None, 3))


def _centre(images, size):
    """The centre square of each image, resized with antialias."""
    height, width = tf.shape(images)[1], tf.shape(images)[2]
    side = tf.minimum(height, width)
    if size > WHOLE_IMAGE:
        side = tf.cast(
            tf.round(tf.cast(side, tf.float32) * (224 / 256)), tf.int32
        )
    box = tf.stack([(height - side) // 2, (width - side) // 2, side, side])
    count = tf.shape(images)[0]
    parameters = {
        "box": tf.repeat(box[None], count, axis=0),
        "flip": tf.zeros((count,), tf.bool),
    }
    return tf.ensure_shape(
        crop(images, parameters, size), (None, size, size, 3)
    )
