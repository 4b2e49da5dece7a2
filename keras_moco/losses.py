"""The contrastive loss: pure functions of tensors."""

import tensorflow as tf

BLOCK = 16384  # Negatives whose similarities are held at once.


def info_nce(query, key, negatives, temperature, excluded=None):
    """The InfoNCE loss of each query: its own key against the negatives.

    Cross-entropy of a softmax over 1 + K cosines in which that of the query's
    own key is the right answer. Chance is `ln(K + 1)`. The cosines are held in
    blocks, never all of them: with 65536 keys they take 64 MB for 256 queries.

    Args:
        query: Float tensor (batch, dim), rows of unit length.
        key: Float tensor (batch, dim), rows of unit length.
        negatives: Float tensor (K, dim), rows of unit length. They get no
            gradient, as in the papers.
        temperature: Float > 0.
        excluded: Bool tensor (batch, K) or None. Negatives left out of the
            sum, such as keys of the query's own image.

    Returns:
        Three float32 tensors (batch,): the loss in nats, the cosine of the
        query's own key, and that of the nearest negative.

    Example:
        >>> query, negatives = tf.eye(1, 4), tf.eye(4)[1:]
        >>> float(info_nce(query, query, negatives, 1.0)[0][0])
        0.7436...  # ln(1 + 3 / e)

    Reference:
        van den Oord et al. 2018, arXiv:1807.03748; eq. 1 of He et al. 2019,
        arXiv:1911.05722.
    """
    # Half precision overflows at exp(1 / 0.07).
    query, key, negatives = (
        tf.cast(x, tf.float32) for x in (query, key, negatives)
    )
    positive = tf.reduce_sum(query * key, axis=1)
    others, nearest = _log_sum_exp(query, negatives, temperature, excluded)
    # log(e^p + sum e^n) - p = softplus(log(sum e^n) - p).
    loss = tf.nn.softplus(others - positive / temperature)
    return loss, positive, nearest


def _log_sum_exp(query, negatives, temperature, excluded):
    """log(sum(exp(cosine / temperature))) over the negatives, and their top.

    Its gradient, the negatives' mean by softmax, is made along with it.
    """

    @tf.custom_gradient
    def compute(query):
        tops, totals, sums = [], [], []
        for rows in _blocks(negatives.shape[0]):
            # After the block before, or all would be held after all.
            with tf.control_dependencies(sums[-1:]):
                block = negatives[rows]
            cosine = tf.matmul(query, block, transpose_b=True)
            if excluded is not None:
                cosine = tf.where(excluded[:, rows], cosine.dtype.min, cosine)
            tops.append(tf.reduce_max(cosine, axis=1))
            weight = tf.exp((cosine - tops[-1][:, None]) / temperature)
            totals.append(tf.reduce_sum(weight, axis=1))
            sums.append(tf.matmul(weight, block))
        top = tf.reduce_max(tops, axis=0)
        scale = tf.exp((tops - top) / temperature)  # (blocks, batch)
        total = tf.reduce_sum(scale * totals, axis=0)
        mean = tf.reduce_sum(scale[:, :, None] * sums, axis=0) / total[:, None]

        def gradient(upstream, _):
            return mean * (upstream / temperature)[:, None]

        return (tf.math.log(total) + top / temperature, top), gradient

    return compute(query)


def _blocks(count):
    """Slices of BLOCK rows; one where the number of rows is not known."""
    if count is None:
        return [slice(None)]
    return [slice(start, start + BLOCK) for start in range(0, count, BLOCK)]


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
