import numpy as np
import pytest
import tensorflow as tf

from keras_moco import losses
from keras_moco.losses import feature_std, info_nce


def numpy_info_nce(query, key, negatives, temperature, excluded=None):
    """Losses and their gradient to the query, in float64."""
    negative = query @ negatives.T
    if excluded is not None:
        negative[excluded] = -np.inf
    positive = (query * key).sum(axis=1, keepdims=True)
    logits = np.concatenate([positive, negative], axis=1) / temperature
    logits -= logits.max(axis=1, keepdims=True)
    answer = np.exp(logits)
    total = answer.sum(axis=1, keepdims=True)
    answer /= total
    pull = answer[:, 1:] @ negatives + (answer[:, :1] - 1) * key
    return np.log(total)[:, 0] - logits[:, 0], pull / temperature


def draw(batch=5, negatives=7, dim=16):
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(2 * batch + negatives, dim))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    return rows[:batch], rows[batch : 2 * batch], rows[2 * batch :]


def gradient_of(query, key, negatives, temperature, excluded=None):
    query = tf.cast(query, tf.float32)
    with tf.GradientTape() as tape:
        tape.watch(query)
        loss = info_nce(query, key, negatives, temperature, excluded)[0]
    return loss, tape.gradient(loss, query)


@pytest.fixture(params=["one block", "blocks", "of unknown number"])
def call(request, monkeypatch):
    """`gradient_of` with the negatives in one block, in three, in one."""
    if request.param == "blocks":
        monkeypatch.setattr(losses, "BLOCK", 3)
    if request.param != "of unknown number":
        return gradient_of
    rows = tf.TensorSpec((None, 16), tf.float32)
    signature = [rows, rows, rows, tf.TensorSpec((), tf.float32)]
    plain = tf.function(gradient_of, signature)
    mask = tf.TensorSpec((None, None), tf.bool)
    masked = tf.function(gradient_of, [*signature, mask])

    def traced(*arguments):
        *arrays, temperature = (
            tf.constant(x, tf.float32) for x in arguments[:4]
        )
        function = plain if len(arguments) == 4 else masked
        return function(*arrays, temperature, *arguments[4:])

    return traced


@pytest.mark.parametrize("temperature", [0.2, 0.07, 0.002])
def test_info_nce_and_its_gradient_are_those_of_the_softmax(call, temperature):
    views = draw()
    loss, gradient = call(*views, temperature)
    expected, pull = numpy_info_nce(*views, temperature)
    np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(gradient, pull, rtol=1e-3, atol=1e-4)


def test_excluded_negatives_do_not_count(call):
    views = draw()
    excluded = np.random.default_rng(1).random((5, 7)) < 0.5
    excluded[:, :3] |= np.arange(5)[:, None] == 2  # A whole block of one query.
    loss, gradient = call(*views, 0.2, excluded)
    expected, pull = numpy_info_nce(*views, 0.2, excluded)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(gradient, pull, rtol=1e-4, atol=1e-6)


def test_loss_and_gradient_vanish_when_all_are_excluded(call):
    query, key, negatives = draw()
    loss, gradient = call(query, key, negatives, 0.07, np.ones((5, 7), bool))
    np.testing.assert_array_equal(loss, np.zeros(5))
    np.testing.assert_array_equal(gradient, np.zeros((5, 16)))


def test_equal_similarities_give_the_chance_loss():
    query = tf.one_hot([0, 0], 4)
    others = tf.one_hot(tf.ones(4096, tf.int32), 4)
    loss, *_ = info_nce(query, tf.one_hot([2, 2], 4), others, 0.2)
    np.testing.assert_allclose(loss, np.log(4097), rtol=1e-6)


def test_cosines_of_the_own_key_and_of_the_nearest_negative(monkeypatch):
    monkeypatch.setattr(losses, "BLOCK", 3)
    query, key, negatives = draw()
    _, positive, nearest = info_nce(query, key, negatives, 0.2)
    np.testing.assert_allclose(positive, (query * key).sum(axis=1), rtol=1e-5)
    cosine = query @ negatives.T
    np.testing.assert_allclose(nearest, cosine.max(axis=1), rtol=1e-5)
    excluded = cosine == cosine.max(axis=1, keepdims=True)
    nearest = info_nce(query, key, negatives, 0.2, excluded)[2]
    expected = np.sort(cosine, axis=1)[:, -2]
    np.testing.assert_allclose(nearest, expected, rtol=1e-5)


def test_half_precision_similarities_do_not_overflow():
    ones = tf.one_hot([1, 1, 1], 4, dtype=tf.float16)
    loss = info_nce(ones, ones, ones, 0.01)[0]  # exp(100) is no float16
    np.testing.assert_allclose(loss, np.log(4), rtol=1e-4)


def test_feature_std_tells_spread_from_collapse():
    rng = np.random.default_rng(0)
    spread = feature_std(rng.normal(size=(4096, 64)))
    np.testing.assert_allclose(spread, 1 / np.sqrt(64), rtol=0.05)
    assert feature_std(np.ones((16, 64))) < 1e-6
