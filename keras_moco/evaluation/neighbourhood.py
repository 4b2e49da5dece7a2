"""What a space of features looks like: neighbours, a plane, clusters."""

import numpy as np

from keras_moco.data.labeled import image_dataset
from keras_moco.evaluation.extract import features
from keras_moco.evaluation.knn import nearest


def sample_features(encoder, images, size, count=1000, seed=0):
    """Features of some images, chosen at random.

    Args:
        encoder: `keras.Model`, run in inference mode.
        images: `Images`.
        size: Int. Side in pixels at which the encoder sees them.
        count: Int. Images at most. Defaults to 1000.
        seed: Int. Chooses them. Defaults to 0.

    Returns:
        Int array (chosen,), the numbers of the images, rising and without
        broken ones, and their `Features`.

    Raises:
        ValueError: The images are read as a stream, which has no numbers.
    """
    draw = np.random.default_rng(seed)
    rows = np.sort(draw.permutation(len(images))[:count])
    found = features(encoder, image_dataset(images, size, rows=rows))
    return rows[np.isin(rows, images.kept)], found


def thumbnails(images, rows, size):
    """Small squares of images.

    Args:
        images: `Images`.
        rows: Int array (chosen,). Their numbers.
        size: Int. Side in pixels.

    Returns:
        Float32 array (chosen, size, size, 3) in [0, 1].
    """
    batches = image_dataset(images, size, rows=rows)
    pixels = [b[0] if isinstance(b, tuple) else b for b in batches]
    return np.concatenate(pixels)


def nearest_images(vectors, queries, count):
    """The images nearest to some, by the cosine of their features.

    Args:
        vectors: Float array (images, features).
        queries: Int array (queries,), rows of `vectors`.
        count: Int >= 1. Neighbours of each.

    Returns:
        Int array (queries, 1 + count): each query itself, then the others by
        falling similarity.
    """
    # One more, as an image finds itself; among its doubles it may not.
    _, places = nearest(vectors, vectors[queries], count + 1)
    rows = []
    for itself, found in zip(queries, places, strict=True):
        others = found[found != itself]
        rows.append([itself, *others[: places.shape[1] - 1]])
    return np.array(rows)


def principal_plane(vectors):
    """Features, normalised, on their two principal components.

    Args:
        vectors: Float array (images, features).

    Returns:
        Float array (images, 2), and the share of the variance that these two
        components hold.
    """
    unit = unit_rows(vectors)
    centred = unit - unit.mean(axis=0)
    _, scales, axes = np.linalg.svd(centred, full_matrices=False)
    axes = np.concatenate([axes, np.zeros((2, axes.shape[1]))])[:2]
    total = np.sum(scales**2)
    share = float(np.sum(scales[:2] ** 2) / total) if total > 0 else 0.0
    return centred @ axes.T, share


def clusters(vectors, count, rounds=20):
    """Groups of images, by k-means on normalised features.

    It begins with images that are far from each other, so that it needs no
    seed.

    Args:
        vectors: Float array (images, features).
        count: Int >= 1. Groups; at most the number of images.
        rounds: Int.

    Returns:
        Int array (images,), the group of each.
    """
    unit = unit_rows(vectors)
    centres = unit[:1].copy()
    while len(centres) < min(count, len(unit)):
        nearest = np.max(unit @ centres.T, axis=1)
        centres = np.concatenate([centres, unit[[np.argmin(nearest)]]])
    for _ in range(rounds):
        distance = np.sum(centres**2, axis=1) - 2 * unit @ centres.T
        group = np.argmin(distance, axis=1)
        for number in range(len(centres)):
            if np.any(group == number):
                centres[number] = unit[group == number].mean(axis=0)
    return group


def unit_rows(array):
    """Rows of length 1; those of zeros stay."""
    array = np.asarray(array, np.float64)
    length = np.linalg.norm(array, axis=1, keepdims=True)
    return array / np.maximum(length, 1e-12)
