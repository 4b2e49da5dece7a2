"""How good features are without a label, on one fixed batch of views."""

import keras
import numpy as np
import tensorflow as tf

from keras_moco.queue import unit_length

CHUNK = 64  # Images at a time through the encoder; it bounds the memory.
BINS = np.linspace(-1.0, 1.0, 41)  # Edges of the histograms of cosines.


class QualityMonitor(keras.callbacks.Callback):
    """Measures the features of the same views after every epoch.

    Nothing is trained, drawn or moved by it: encoders run in inference mode.
    Added to the logs, for the callbacks behind it:

    - `alignment`: mean squared distance of the two projections of an image, in
      [0, 4]; 0 where its views look alike.
    - `uniformity`: log of the mean exp(-2 squared distance) of projections of
      different images, at most 0; the lower, the more evenly spread.
    - `feature_rank`, `projection_rank`: how many directions the features and
      projections span, in [1, min(images, features)]; near 1 is collapse.
    - `retrieval_top1`: share of images whose nearest second view, by the cosine
      of features, is their own.
    - `key_query_drift`: distance of the two encoders' trained weights, relative
      to the length of the query encoder's.

    Args:
        pairs: `tf.data.Dataset` of (query, key) or (query, key, index) batches,
            a short one: it is read once, to its end. Or a pair of arrays of
            images in [0, 1].
        every: Int >= 1. Epochs between measurements; the last epoch of `fit` is
            always measured. Defaults to 1.

    Attributes:
        views: Pair of uint8 arrays (images, height, width, 3).
        histograms: Dict of `positive_histogram` and `negative_histogram`, lists
            of counts of the cosines of queries with their own key and with the
            keys of the other images, in 40 bins from -1 to 1. {} before the
            first measurement, and in epochs without one.

    Raises:
        ValueError: Fewer than two images, or `every` below 1.

    Example:
        >>> fixed = pretrain_dataset(images, preset, 96, steps_per_epoch=1)
        >>> model.fit(pairs, epochs=200, callbacks=[QualityMonitor(fixed)])

    Reference:
        Wang and Isola 2020, arXiv:2005.10242 (alignment, uniformity); Garrido
        et al. 2022, arXiv:2210.02885 (rank).
    """

    def __init__(self, pairs, every=1):
        super().__init__()
        if every < 1:
            raise ValueError(f"`every` must be at least 1. Received: {every}")
        if isinstance(pairs, tf.data.Dataset):
            batches = [
                [_as_bytes(view) for view in batch[:2]]
                for batch in pairs.as_numpy_iterator()
            ]
            self.views = tuple(map(np.concatenate, zip(*batches, strict=True)))
        else:
            self.views = tuple(map(_as_bytes, pairs))
        if len(self.views[0]) < 2:
            raise ValueError(
                "`pairs` must hold at least 2 images, to compare them. "
                f"Received: {len(self.views[0])}"
            )
        self.every = every
        self.histograms = {}

    def set_model(self, model):
        super().set_model(model)

        @tf.function
        def encode(query_view, key_view):
            """Features and projections of both views, the query, the key."""
            pixels = tf.concat([query_view, key_view], axis=0)
            images = tf.cast(pixels, tf.float32) / 255.0
            features = model.encoder(images, training=False)
            projections = model.projector(features, training=False)
            query, _ = tf.split(projections, 2)
            if model.predictor is not None:
                query = model.predictor(query, training=False)
            _, key_images = tf.split(images, 2)
            keys = model.key_encoder(key_images, training=False)
            keys = model.key_projector(keys, training=False)
            return (
                *tf.split(tf.cast(features, tf.float32), 2),
                *tf.split(tf.cast(projections, tf.float32), 2),
                unit_length(query),
                unit_length(keys),
            )

        self.encode = encode

    def on_epoch_end(self, epoch, logs=None):
        last = epoch + 1 == self.params.get("epochs")
        self.histograms = {}
        if (epoch + 1) % self.every and not last:
            return
        chunks = [
            self.encode(*(view[start : start + CHUNK] for view in self.views))
            for start in range(0, len(self.views[0]), CHUNK)
        ]
        features, other_features, *projections, query, key = (
            np.concatenate(parts) for parts in zip(*chunks, strict=True)
        )
        cosine = query @ key.T
        own = np.eye(len(cosine), dtype=bool)
        self.histograms = {
            "positive_histogram": histogram(cosine[own]),
            "negative_histogram": histogram(cosine[~own]),
        }
        views = [_unit(projection) for projection in projections]
        logs["alignment"] = alignment(*views)
        logs["uniformity"] = sum(map(uniformity, views)) / 2
        logs["feature_rank"] = effective_rank(features)
        logs["projection_rank"] = effective_rank(projections[0])
        logs["retrieval_top1"] = retrieval_top1(features, other_features)
        logs["key_query_drift"] = drift(self.model.averaged_pairs())

    def grid(self, pairs=16, columns=4):
        """Views as one picture, query and key side by side.

        Returns:
            uint8 array (height, width, 3).
        """
        count = min(pairs, len(self.views[0]))
        shown = np.concatenate([v[:count] for v in self.views], axis=2)
        gap = max(1, shown.shape[1] // 16)
        shown = np.pad(
            shown,
            ((0, -count % columns), (0, gap), (0, gap), (0, 0)),
            constant_values=255,
        )
        tiles = shown.reshape(-1, columns, *shown.shape[1:])
        rows = [np.concatenate(list(row), axis=1) for row in tiles]
        return np.concatenate(rows)


def alignment(a, b):
    """Mean squared distance of paired unit vectors, in [0, 4].

    Args:
        a: Float array (images, dim) of unit length.
        b: The same of the other views.
    """
    return float(np.mean(np.sum((a - b) ** 2, axis=1, dtype="float64")))


def uniformity(x):
    """Log of the mean of exp(-2 d^2) over all pairs of unit vectors, <= 0.

    Args:
        x: Float array (images, dim) of unit length, two images or more.
    """
    x = np.asarray(x, "float64")
    squared = 2.0 - 2.0 * (x @ x.T)[np.triu_indices(len(x), 1)]
    return float(np.log(np.mean(np.exp(-2.0 * np.maximum(squared, 0.0)))))


def effective_rank(x):
    """Exp of the entropy of the singular values, as shares of their sum.

    Args:
        x: Float array (images, dim).

    Returns:
        Float in [1, min(images, dim)]; 1 of zeros and of what is not finite.
    """
    x = np.asarray(x, "float64")
    if not np.isfinite(x).all() or not x.any():
        return 1.0
    values = np.linalg.svd(x, compute_uv=False)
    shares = values / values.sum()
    shares = shares[shares > 0]
    return float(np.exp(-np.sum(shares * np.log(shares))))


def retrieval_top1(a, b):
    """Share of rows of a whose row of b has the highest cosine of all.

    Of equal cosines the own one counts last, so that features that are all
    alike find nothing.

    Args:
        a: Float array (images, dim).
        b: The same of the other views.
    """
    cosine = _unit(a) @ _unit(b).T
    own = np.diag(cosine).copy()
    np.fill_diagonal(cosine, -np.inf)
    return float(np.mean(own > cosine.max(axis=1)))


def histogram(cosine):
    """Counts of cosines in 40 bins from -1 to 1, a list of ints."""
    return np.histogram(np.clip(cosine, -1.0, 1.0), BINS)[0].tolist()


def drift(pairs):
    """Length of all differences, relative to that of all query weights.

    Args:
        pairs: List of (query, key) variables.
    """
    apart, length = 0.0, 0.0
    for query, key in pairs:
        query, key = query.numpy(), key.numpy()
        apart += np.sum((query - key) ** 2, dtype="float64")
        length += np.sum(query**2, dtype="float64")
    return float(np.sqrt(apart / length)) if length else 0.0


def feature_spread(feature_std, dim):
    """The deviation of features relative to that of evenly spread ones.

    Args:
        feature_std: Float. Of unit vectors; 1 / sqrt(dim) is spread over the
            sphere, 0 is all alike.
        dim: Int. Their length.

    Returns:
        Float. 1 is spread, 0 is all alike, whatever the dimension.
    """
    return feature_std * dim**0.5


def key_age(step, keys_per_step, queue_size):
    """Steps since the real keys of the queue were made, as the next one meets.

    Args:
        step: Int. Steps so far, from 1.
        keys_per_step: Int. Keys that a step writes.
        queue_size: Int >= 1.

    Returns:
        Pair of the mean age and the age of the oldest, in steps; those of the
        step before have the age 1.
    """
    keys_per_step = min(keys_per_step, queue_size)
    real = min(step * keys_per_step, queue_size)
    whole, rest = divmod(real, keys_per_step)  # Rest: of the oldest step.
    total = keys_per_step * whole * (whole + 1) / 2 + rest * (whole + 1)
    return total / real, whole + bool(rest)


def _as_bytes(view):
    # A quarter of the memory of floats; photographs have 8 bits as well.
    return np.uint8(np.round(255.0 * view))


def _unit(x):
    length = np.linalg.norm(x, axis=1, keepdims=True)
    return x / np.maximum(length, 1e-12)
