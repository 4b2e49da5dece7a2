"""The contrastive loss: pure functions of tensors."""

import tensorflow as tf


def info_nce(positive, negative, temperature, excluded=None):
    """The InfoNCE loss of each query: one positive key against the negatives.

    Cross-entropy of a softmax over 1 + K similarities in which the positive
    is the right answer. Chance is `ln(K + 1)`.

    Args:
        positive: Float tensor (batch,). Cosine of each query and its key.
        negative: Float tensor (batch, K). Cosines of queries and negatives.
        temperature: Float > 0.
        excluded: Bool tensor (batch, K) or None. Negatives left out of the
            sum, such as keys of the query's own image.

    Returns:
        Float32 tensor (batch,), in nats.

    Example:
        >>> float(info_nce(tf.ones(1), tf.zeros((1, 3)), 1.0)[0])
        0.7436...  # ln(1 + 3 / e)

    Reference:
        van den Oord et al. 2018, arXiv:1807.03748; eq. 1 of He et al. 2019,
        arXiv:1911.05722.
    """
    # Half precision overflows at exp(1 / 0.07).
    positive = tf.cast(positive, tf.float32) / temperature
    negative = tf.cast(negative, tf.float32)
    if excluded is not None:
        negative = tf.where(excluded, negative.dtype.min, negative)
    # log(e^p + sum e^n) - p = softplus(log(sum e^n) - p): the two parts are
    # never concatenated.
    return tf.nn.softplus(_log_sum_exp(negative, temperature) - positive)


def _log_sum_exp(similarity, temperature):
    """log(sum(exp(similarity / temperature))) of each row.

    The (batch, K) exponentials are kept for the gradient, and no other array
    of that size: with 65536 keys one takes 64 MB for 256 queries.
    """

    @tf.custom_gradient
    def compute(similarity):
        top = tf.reduce_max(similarity, axis=1)
        weight = tf.exp((similarity - top[:, None]) / temperature)
        total = tf.reduce_sum(weight, axis=1)

        def gradient(upstream):
            return weight * (upstream / (total * temperature))[:, None]

        return tf.math.log(total) + top / temperature, gradient

    return compute(similarity)


def contrast_top1(positive, negative, excluded=None):
    """Share of queries whose own key is nearer than every negative.

    Args:
        positive: Float tensor (batch,).
        negative: Float tensor (batch, K).
        excluded: Bool tensor (batch, K) or None.

    Returns:
        Float32 scalar in [0, 1].
    """
    if excluded is not None:
        negative = tf.where(excluded, negative.dtype.min, negative)
    nearest = tf.reduce_max(negative, axis=1)
    return tf.reduce_mean(tf.cast(positive > nearest, tf.float32))


def feature_std(features):
    """Mean over dimensions of the deviation of L2-normalised features.

    It is near 1 / sqrt(dim) for features spread over the sphere and 0 when the
    encoder gives every image the same answer (collapse).

    Args:
        features: Float tensor (batch, dim).

    Returns:
        Float32 scalar.

    Reference:
        Chen and He 2020, arXiv:2011.10566, section 4.1.
    """
    features = tf.math.l2_normalize(tf.cast(features, tf.float32), axis=1)
    return tf.reduce_mean(tf.math.reduce_std(features, axis=0))
