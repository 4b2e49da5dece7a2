import numpy as np
import tensorflow as tf

from keras_moco.losses import contrast_top1, feature_std, info_nce


def numpy_info_nce(positive, negative, temperature, excluded=None):
    logits = np.concatenate([positive[:, None], negative], axis=1) / temperature
    if excluded is not None:
        logits[:, 1:][excluded] = -np.inf
    logits -= logits.max(axis=1, keepdims=True)
    return np.log(np.exp(logits).sum(axis=1)) - logits[:, 0]


def draw(batch=5, negatives=7):
    rng = np.random.default_rng(0)
    return rng.uniform(-1, 1, batch), rng.uniform(-1, 1, (batch, negatives))


def test_info_nce_is_cross_entropy_of_the_positive():
    positive, negative = draw()
    loss = info_nce(positive, negative, 0.07)
    np.testing.assert_allclose(
        loss, numpy_info_nce(positive, negative, 0.07), rtol=1e-5
    )


def test_gradient_is_that_of_the_softmax():
    positive, negative = draw()
    x, y = tf.constant(positive, tf.float32), tf.constant(negative, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch([x, y])
        loss = tf.reduce_sum(info_nce(x, y, 0.07))
    logits = np.concatenate([positive[:, None], negative], axis=1) / 0.07
    answer = np.exp(logits - logits.max(axis=1, keepdims=True))
    answer /= answer.sum(axis=1, keepdims=True)
    of_positive, of_negative = tape.gradient(loss, [x, y])
    np.testing.assert_allclose(
        of_positive, (answer[:, 0] - 1) / 0.07, rtol=1e-4
    )
    np.testing.assert_allclose(of_negative, answer[:, 1:] / 0.07, rtol=1e-4)


def test_equal_similarities_give_the_chance_loss():
    loss = info_nce(tf.zeros(2), tf.zeros((2, 4096)), 0.2)
    np.testing.assert_allclose(loss, np.log(4097), rtol=1e-6)


def test_excluded_negatives_do_not_count():
    positive, negative = draw()
    excluded = np.random.default_rng(1).random(negative.shape) < 0.5
    loss = info_nce(positive, negative, 0.2, excluded)
    np.testing.assert_allclose(
        loss, numpy_info_nce(positive, negative, 0.2, excluded), rtol=1e-5
    )


def test_loss_and_gradient_stay_finite_when_all_are_excluded():
    positive = tf.constant([0.3])
    with tf.GradientTape() as tape:
        tape.watch(positive)
        loss = info_nce(positive, tf.ones((1, 3)), 0.07, tf.ones((1, 3), bool))
    assert loss[0] == 0.0
    assert tape.gradient(loss, positive)[0] == 0.0


def test_half_precision_similarities_do_not_overflow():
    ones = tf.ones((2, 3), tf.float16)
    loss = info_nce(ones[:, 0], ones, 0.01)  # exp(100) is no float16
    np.testing.assert_allclose(loss, np.log(4), rtol=1e-4)


def test_top1_counts_queries_whose_key_beats_every_negative():
    positive = tf.constant([0.5, 0.5, 0.5])
    negative = tf.constant([[0.4, 0.1], [0.6, 0.1], [0.4, 0.9]])
    assert np.isclose(contrast_top1(positive, negative), 1 / 3)
    excluded = tf.constant([[False, False], [True, False], [False, False]])
    assert np.isclose(contrast_top1(positive, negative, excluded), 2 / 3)


def test_feature_std_tells_spread_from_collapse():
    rng = np.random.default_rng(0)
    spread = feature_std(rng.normal(size=(4096, 64)))
    np.testing.assert_allclose(spread, 1 / np.sqrt(64), rtol=0.05)
    assert feature_std(np.ones((16, 64))) < 1e-6
