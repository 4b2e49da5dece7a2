"""Features: what an encoder makes of images, as arrays."""

import functools
import os
import sys
import typing
import warnings

import keras
import numpy as np
import tensorflow as tf

from keras_moco.data.images import Images, class_numbers
from keras_moco.data.labeled import image_dataset
from keras_moco.data.pipeline import natural_size
from keras_moco.data.sources import load_images
from keras_moco.load import load_encoder, trained_image_size


class Features(typing.NamedTuple):
    """Features of images, in their order.

    Attributes:
        features: Float32 array (images, features).
        labels: Int array (images,), or None.
        names: List of str, the file names, or None.
    """

    features: np.ndarray
    labels: np.ndarray | None = None
    names: list | None = None


def features(encoder, dataset, image_size=None, verbose=False):
    """Features of images by an encoder, with labels and names if there are any.

    Args:
        encoder: `keras.Model`, images -> (batch, features), run in inference
            mode; or a path that `load_encoder` takes: an export, a run folder,
            a SavedModel, a `.keras` file. None takes the pixels themselves.
        dataset: `tf.data.Dataset` of (images, labels) or of images, float32
            (batch, height, width, 3) in [0, 1]; or `Images`, or what
            `load_images` takes: a folder, a name, a uint8 array.
        image_size: Int. Side that images are taken at where `dataset` is no
            `tf.data.Dataset`. None takes the one that the encoder takes alone,
            or was trained on where its path says so, else the images' own.
        verbose: Bool. Show the progress in a terminal. Defaults to False.

    Returns:
        `Features`. Files that turn out to be broken are left out (and named in
        the `broken` of the `Images`).

    Raises:
        ValueError: In one line: no image, no encoder at the path, or a model
            that is no encoder.

    Example:
        >>> found = features("saved_models/stl10", "photos/")
        >>> found.features.shape, found.names[0]
    """
    if isinstance(encoder, (str, os.PathLike)):
        if image_size is None:
            image_size = trained_image_size(encoder)
        encoder = load_encoder(encoder, trainable=False)
    size = None if encoder is None else input_size(encoder)
    if not isinstance(dataset, tf.data.Dataset):
        if not isinstance(dataset, Images):
            dataset = load_images(dataset)
        if image_size is None and size:
            image_size = size[0]
        dataset = image_dataset(dataset, image_size)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError(
            "The dataset never ends: each image is wanted once, without "
            "`repeat()`."
        )
    found, labels = [], []
    bar = None
    if verbose and sys.stdout.isatty():
        batches = int(dataset.cardinality())  # Negative where not known.
        bar = keras.utils.Progbar(
            batches if batches > 0 else None, unit_name="batch"
        )
    for batch in dataset:
        pixels, *more = batch if isinstance(batch, tuple) else (batch,)
        if encoder is None:
            rows = pixels.numpy().reshape(len(pixels), -1)
        else:
            if not found:
                _warn_of_bytes(pixels)
            if size and pixels.shape[1:3] != size:
                if not found:
                    _say_resized(pixels.shape[1:3], size)
                pixels = tf.image.resize(pixels, size, antialias=True)
            encode = _compiled(encoder, pixels.shape[1:], pixels.dtype)
            rows = np.asarray(encode(pixels))
        if rows.ndim != 2:
            raise ValueError(
                "An encoder gives one vector an image, (batch, features). "
                f"{encoder.name} gives {rows.shape}: it is none, or lacks its "
                "pooling."
            )
        found.append(rows.astype(np.float32, copy=False))
        labels.extend(label.numpy() for label in more[:1])
        if bar:
            bar.add(1)
    if not found:
        raise ValueError("There are no images to take features of.")
    result = Features(_join(found), np.concatenate(labels) if labels else None)
    images = getattr(dataset, "images", None)
    return result if images is None else _name(result, images, dataset.rows)


def labeled_features(encoder, bank, test):
    """Features of images to learn from and of images to test with.

    Where both datasets name their classes, as those of `labeled_dataset` do,
    the labels of `test` become the bank's numbers of the same names.

    Args:
        encoder: As for `features`.
        bank: `tf.data.Dataset` of (images, labels) batches.
        test: The same.

    Returns:
        Two `Features`, checked.

    Raises:
        ValueError: No dataset, no image, no label, features that are not
            finite, or classes of `test` that the bank lacks.
    """
    for data in (bank, test):
        if not isinstance(data, tf.data.Dataset):
            raise ValueError(
                "Expected a tf.data.Dataset of (images, labels) batches, as "
                f"`labeled_dataset` gives. Received: {data!r:.80}"
            )
    if isinstance(encoder, (str, os.PathLike)):  # Once for both.
        encoder = load_encoder(encoder, trainable=False)
    found = check_features(features(encoder, bank), "training")
    asked = check_features(features(encoder, test), "test")
    names = [
        getattr(getattr(data, "images", None), "class_names", None)
        for data in (bank, test)
    ]
    if all(names):
        numbers = class_numbers(*names)
        asked = asked._replace(labels=numbers[asked.labels])
    return found, asked


def check_features(found, what):
    """Features that can be judged, or a ValueError.

    Args:
        found: `Features`.
        what: Str. Which they are, for the message: "training" or "test".

    Returns:
        `Features`, whose labels are int64 (images,).
    """
    rows, labels, _ = found
    if not len(rows):
        raise ValueError(f"There are no {what} images.")
    if rows.ndim != 2:
        raise ValueError(
            f"The {what} features must be (images, features). Received: "
            f"{rows.shape}"
        )
    labels = np.asarray([] if labels is None else labels)
    whole = labels.dtype.kind in "iub"
    if not labels.size or (whole and labels.min() < 0):
        raise ValueError(
            f"The {what} images have no labels, or not all of them. Expected "
            "batches of (images, labels), labels from 0."
        )
    if not whole or labels.size != len(rows):
        raise ValueError(
            f"The labels of the {what} images must be class numbers, one an "
            "image (of one-hot labels the argmax). Received: "
            f"{labels.dtype} of shape {labels.shape}"
        )
    check_finite(found, what)
    return found._replace(labels=labels.reshape(-1).astype("int64"))


def warn_if_constant(found):
    """Warns of an encoder that gives all images the same features."""
    rows = found.features
    least = 1e-5 * np.abs(rows[0]).max()
    for part in (rows[:100], rows):  # Mostly the first few settle it.
        if (np.ptp(part, axis=0) > least).any():
            return
    warnings.warn(
        "All features are constant: the encoder tells nothing apart.",
        stacklevel=3,
    )


def check_finite(found, what):
    """Raises a ValueError that names the images whose features are not."""
    rows, _, names = found
    with np.errstate(over="ignore"):  # Sums of large features; looked at below.
        bad = np.flatnonzero(~np.isfinite(rows.sum(axis=1)))
    bad = bad[~np.isfinite(rows[bad]).all(axis=1)]
    if len(bad):
        shown = ", ".join(names[i] if names else str(i) for i in bad[:10])
        raise ValueError(
            f"The features of {len(bad)} {what} images are not finite "
            f"({shown}{', ...' if len(bad) > 10 else ''}): the encoder has "
            "diverged, or cannot take them."
        )


def input_size(encoder):
    """The height and width that an encoder takes alone, or None for any.

    Raises:
        ValueError: It is no encoder: it takes something else than RGB images.
    """
    shape = getattr(encoder, "input_shape", (None, None, None, 3))
    if not isinstance(shape, tuple) or len(shape) != 4 or shape[3] != 3:
        raise ValueError(
            "An encoder takes images, (batch, height, width, 3). "
            f"{encoder.name} takes {shape}."
        )
    return None if None in shape[1:3] else shape[1:3]


def evaluation_size(images, encoder, image_size=None):
    """The side in pixels at which an encoder is to see images.

    Args:
        images: `Images`.
        encoder: `keras.Model`, or None for raw pixels.
        image_size: Int. What was asked for; None takes what the encoder
            demands, else the images' own (at most 224).

    Returns:
        Int.

    Raises:
        ValueError: The encoder takes images of another size, or none that are
            square.
    """
    if image_size is not None and image_size < 1:
        raise ValueError(f"`image_size` must be >= 1. Received: {image_size}")
    only = None if encoder is None else input_size(encoder)
    if not only:
        return image_size or natural_size(images)
    if only[0] != only[1]:
        raise ValueError(
            "Expected an encoder of square images. This one takes "
            f"{only[1]}x{only[0]} px."
        )
    if image_size not in (None, only[0]):
        raise ValueError(
            f"The encoder takes images of {only[0]} px only. Received: "
            f"image_size={image_size}"
        )
    return only[0]


def _warn_of_bytes(pixels):
    most = float(tf.reduce_max(pixels))
    if most > 16:  # More than any standardised image holds.
        warnings.warn(
            f"The images reach {most:g}. Encoders of this package take values "
            "in [0, 1]: divide by 255.",
            stacklevel=3,
        )


def _say_resized(came, size):
    warnings.warn(
        f"Images of {came[1]}x{came[0]} px are resized to {size[1]}x{size[0]}, "
        "the size that the encoder takes.",
        stacklevel=3,
    )


@functools.lru_cache(maxsize=1)
def _compiled(encoder, shape, dtype):
    # Not `predict`: under a strategy it repeats the batch on every replica.
    return tf.function(
        lambda images: encoder(images, training=False),
        # Of any length: the last batch is shorter.
        input_signature=[tf.TensorSpec((None, *shape), dtype)],
    )


def _join(parts):
    """The rows of all parts, which it frees: never all of them twice."""
    end = sum(map(len, parts))
    joined = np.empty((end, parts[0].shape[1]), np.float32)
    while parts:
        part = parts.pop()
        joined[end - len(part) : end] = part
        end -= len(part)
    return joined


def _name(found, images, numbers):
    """Adds the names, and leaves out what stands in for broken images."""
    rows, labels, _ = found
    kept = np.isin(numbers, images.kept)
    if not kept.all():
        rows = rows[kept]
        labels = None if labels is None else labels[kept]
    return Features(rows, labels, [images.name(i) for i in numbers[kept]])
