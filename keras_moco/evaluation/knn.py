"""How good an encoder's features are: nearest neighbours."""

import math

import keras
import numpy as np
import tensorflow as tf

from keras_moco.evaluation.extract import labeled_features, warn_if_constant
from keras_moco.kinds import check_kind

QUERIES, BANK = 1024, 4096  # Rows a matrix product; they bound the memory.


def knn_accuracy(encoder, bank, queries, k=200, temperature=0.1):
    """Weighted k-nearest-neighbour accuracy of an encoder's features.

    The k bank images with the highest cosine vote for their class with
    exp(cosine / temperature). Nothing is trained, so it is a quick and honest
    measure of a frozen encoder. Of equal cosines the image that comes first in
    the bank is nearer; of equal votes the lower class wins.

    Args:
        encoder: `keras.Model`, images -> (batch, features), run in inference
            mode, or a path that `load_encoder` takes. Give the backbone: its
            features are better than those behind the projection. None compares
            raw pixels.
        bank: `tf.data.Dataset` of (images, labels) batches.
        queries: `tf.data.Dataset` of (images, labels) batches.
        k: Int >= 1. Capped at the size of the bank. Defaults to 200.
        temperature: Float > 0. Defaults to 0.1.

    Returns:
        Float in [0, 1], top-1 accuracy on `queries`.

    Raises:
        ValueError: `k` or `temperature` out of range, no image, no label, or
            features that are not finite.

    Example:
        >>> bank = labeled_dataset("cifar10", "train", image_size=32)
        >>> test = labeled_dataset("cifar10", "test", image_size=32)
        >>> knn_accuracy(model.encoder, bank, test)

    Reference:
        Wu et al. 2018, arXiv:1805.01978, section 3.4.
    """
    _check_vote(k, temperature)
    bank, queries = labeled_features(encoder, bank, queries)
    warn_if_constant(bank)
    return knn_vote(*bank[:2], *queries[:2], k=k, temperature=temperature)


def knn_vote(bank, bank_labels, queries, query_labels, k, temperature):
    """`knn_accuracy` of features that are already there.

    Args:
        bank: Float array (bank size, features); rows need no unit length.
        bank_labels: Int array (bank size,), from 0.
        queries: Float array (queries, features).
        query_labels: Int array (queries,). A class that the bank lacks is
            never right.
        k: Int >= 1.
        temperature: Float > 0.

    Returns:
        Float in [0, 1].
    """
    if not len(bank) or not len(queries):
        raise ValueError(
            "kNN needs images on both sides. Received: "
            f"{len(bank)} in the bank, {len(queries)} queries"
        )
    classes = int(bank_labels.max()) + 1
    right = 0
    for start in range(0, len(queries), QUERIES):
        rows = slice(start, start + QUERIES)
        cosine, found = nearest(bank, queries[rows], k)  # (rows, k)
        # exp of a difference, so that a small temperature cannot overflow.
        weight = np.exp((cosine - cosine[:, :1]) / temperature)
        place = bank_labels[found] + classes * np.arange(len(found))[:, None]
        votes = np.bincount(
            place.ravel(), weight.ravel(), classes * len(found)
        ).reshape(-1, classes)
        right += int((votes.argmax(axis=1) == query_labels[rows]).sum())
    return right / len(queries)


def _check_vote(k, temperature):
    check_kind("k", k, int)
    if k < 1:
        raise ValueError(f"`k` must be at least 1. Received: {k}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be > 0. Received: {temperature}")


def nearest(bank, queries, k):
    """The rows of a bank with the highest cosine to each query.

    The bank is read in parts of 4096 rows, for 1024 queries at a time, and
    never copied. Beside bank, queries and result that takes at most 300 MB at
    2048 features, however large bank and queries are: 1.3 million rows and
    50,000 queries take 10.6 GB and 0.4 GB themselves.

    Args:
        bank: Float array (bank size, features); rows need no unit length.
        queries: Float array (queries, features).
        k: Int >= 1. Capped at the size of the bank.

    Returns:
        Float32 array (queries, k) of cosines, falling, and int array
        (queries, k) of rows of the bank. Of equals the first comes first.

    Example:
        >>> found = features(encoder, "photos/")
        >>> cosine, rows = nearest(found.features, found.features[:1], k=5)
    """
    k = min(k, len(bank))
    parts = [
        _nearest(bank, queries[start : start + QUERIES], k)
        for start in range(0, len(queries), QUERIES)
    ]
    cosine, rows = zip(*parts, strict=True)
    return np.concatenate(cosine), np.concatenate(rows)


def _nearest(bank, queries, k):
    """`nearest` of one part of the queries."""
    queries = np.asarray(queries, np.float32)
    queries = queries / _lengths(queries)[:, None]
    best = tf.fill((len(queries), k), -np.inf)
    rows = tf.zeros((len(queries), k), tf.int32)
    for start in range(0, len(bank), BANK):
        part = np.asarray(bank[start : start + BANK], np.float32)
        cosine = tf.matmul(queries, part, transpose_b=True) / _lengths(part)
        # Those found so far stand first, and so win where there are equals.
        best, place = tf.math.top_k(tf.concat([best, cosine], axis=1), k)
        before = tf.gather(rows, tf.minimum(place, k - 1), batch_dims=1)
        rows = tf.where(place < k, before, place - k + start)
    return best.numpy(), rows.numpy()


def _lengths(rows):
    """The lengths of rows as vectors, never 0; without a copy of them."""
    return np.maximum(np.sqrt(np.einsum("ij,ij->i", rows, rows)), 1e-15)


class KNNMonitor(keras.callbacks.Callback):
    """Measures k-nearest-neighbour accuracy while the encoder learns.

    Adds `knn_top1` to the logs of the epoch, for the callbacks behind it.

    Args:
        bank: `tf.data.Dataset` of (images, labels) batches.
        queries: `tf.data.Dataset` of (images, labels) batches.
        every: Int >= 1. Epochs between measurements; the last epoch of `fit`
            is always measured. Defaults to 1.
        k: Int. Neighbours. Defaults to 200.
        temperature: Float. Of the votes. Defaults to 0.1.

    Example:
        >>> monitor = KNNMonitor(bank, test, every=10)
        >>> history = model.fit(pairs, epochs=200, callbacks=[monitor])
        >>> history.history["knn_top1"]

    Reference:
        Wu et al. 2018, arXiv:1805.01978, section 3.4.
    """

    def __init__(self, bank, queries, every=1, k=200, temperature=0.1):
        super().__init__()
        if every < 1:
            raise ValueError(f"`every` must be at least 1. Received: {every}")
        _check_vote(k, temperature)
        self.bank = bank
        self.queries = queries
        self.every = every
        self.k = k
        self.temperature = temperature

    def on_epoch_end(self, epoch, logs=None):
        if not np.isfinite(logs.get("loss", 0.0)):
            return  # Diverged: whoever watches the loss says so.
        last = epoch + 1 == self.params.get("epochs")
        if (epoch + 1) % self.every == 0 or last:
            logs["knn_top1"] = knn_accuracy(
                self.model.encoder,
                self.bank,
                self.queries,
                self.k,
                self.temperature,
            )
