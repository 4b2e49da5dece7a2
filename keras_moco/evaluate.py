"""How good an encoder's features are: nearest neighbours."""

import functools

import numpy as np
import tensorflow as tf

CHUNK = 1024  # Queries a matrix product; it bounds the memory.


def knn_accuracy(encoder, bank, queries, k=200, temperature=0.1):
    """Weighted k-nearest-neighbour accuracy of an encoder's features.

    The k bank images with the highest cosine vote for their class with
    exp(cosine / temperature). Nothing is trained, so it is a quick and honest
    measure of a frozen encoder.

    Args:
        encoder: `keras.Model`, images -> (batch, features), run in inference
            mode. None compares raw pixels.
        bank: `tf.data.Dataset` of (images, labels) batches.
        queries: `tf.data.Dataset` of (images, labels) batches.
        k: Int >= 1. Capped at the size of the bank. Defaults to 200.
        temperature: Float > 0. Defaults to 0.1.

    Returns:
        Float in [0, 1], top-1 accuracy on `queries`.

    Raises:
        ValueError: `k` or `temperature` out of range, or no image.

    Example:
        >>> bank = labeled_dataset("cifar10", "train", image_size=32)
        >>> test = labeled_dataset("cifar10", "test", image_size=32)
        >>> knn_accuracy(model.encoder, bank, test)

    Reference:
        Wu et al. 2018, arXiv:1805.01978, section 3.4.
    """
    if k < 1:
        raise ValueError(f"`k` must be at least 1. Received: {k}")
    if not temperature > 0:
        raise ValueError(f"`temperature` must be > 0. Received: {temperature}")
    return knn_vote(
        *embed(encoder, bank),
        *embed(encoder, queries),
        k=k,
        temperature=temperature,
    )


def knn_vote(bank, bank_labels, queries, query_labels, k, temperature):
    """`knn_accuracy` of features that are already there.

    Args:
        bank: Float array (bank size, features); rows need no unit length.
        bank_labels: Int array (bank size,), from 0.
        queries: Float array (queries, features).
        query_labels: Int array (queries,).
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
    classes = int(max(bank_labels.max(), query_labels.max())) + 1
    bank, queries = _unit_rows(bank), _unit_rows(queries)
    votes = tf.one_hot(bank_labels, classes)  # (bank size, classes)
    k = min(k, len(bank))
    right = 0
    for start in range(0, len(queries), CHUNK):
        cosine = tf.matmul(
            queries[start : start + CHUNK], bank, transpose_b=True
        )
        cosine, nearest = tf.math.top_k(cosine, k)  # (chunk, k)
        # exp of a difference, so that a small temperature cannot overflow.
        weight = tf.exp((cosine - cosine[:, :1]) / temperature)
        score = tf.einsum("qk,qkc->qc", weight, tf.gather(votes, nearest))
        answer = tf.argmax(score, axis=1).numpy()
        right += int((answer == query_labels[start : start + CHUNK]).sum())
    return right / len(queries)


def embed(encoder, dataset):
    """Features and labels of a labelled dataset.

    Args:
        encoder: `keras.Model` in inference mode; None flattens the pixels.
        dataset: `tf.data.Dataset` of (images, labels) batches.

    Returns:
        Float32 array (images, features) and int array (images,).
    """
    features, labels = [], []
    for images, batch_labels in dataset:
        if encoder is None:
            batch = images.numpy().reshape(len(images), -1)
        else:
            batch = _compiled(encoder)(images)
        features.append(np.asarray(batch, np.float32))
        labels.append(batch_labels.numpy())
    return np.concatenate(features), np.concatenate(labels)


@functools.lru_cache(maxsize=1)
def _compiled(encoder):
    # Not `predict`: under a strategy it repeats the batch on every replica.
    return tf.function(lambda images: encoder(images, training=False))


def _unit_rows(array):
    return tf.math.l2_normalize(tf.constant(array, tf.float32), axis=1)
