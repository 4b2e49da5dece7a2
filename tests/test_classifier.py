import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_moco as km
from keras_moco.evaluation.classifier import (
    Classifier,
    LayerwiseSGD,
    check_frozen,
)


def test_one_step_is_the_gradient_of_cross_entropy(tiny_encoder):
    model = Classifier(tiny_encoder(), 2, frozen=True, seed=4)
    model.compile(km.SGD(0.5))
    images = np.random.default_rng(0).random((6, 8, 8, 3), "float32")
    labels = np.arange(6) % 2
    kernel, bias = model.head.get_weights()
    assert abs(kernel.std() - 0.01) < 0.006 and not bias.any()
    x = model.encoder(images, training=False).numpy()
    logits = x @ kernel
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    error = (shares - np.eye(2)[labels]) / 6
    model.train_on_batch(images, labels)
    found = model.head.get_weights()
    np.testing.assert_allclose(found[0], kernel - 0.5 * x.T @ error, atol=1e-6)
    np.testing.assert_allclose(found[1], -0.5 * error.sum(axis=0), atol=1e-6)


def test_layers_move_at_rates_of_their_own():
    weights = [keras.Variable([1.0, 2.0]), keras.Variable([3.0])]
    optimizer = LayerwiseSGD([0.1, 1.0], learning_rate=0.5, momentum=0.9)
    optimizer.build(weights)
    for _ in range(2):
        optimizer.apply([tf.ones(2), tf.ones(1)])
    # Velocities 1 and 1.9, times the rates.
    np.testing.assert_allclose(weights[0], [1 - 0.145, 2 - 0.145], rtol=1e-6)
    np.testing.assert_allclose(weights[1], [3 - 1.45], rtol=1e-6)


def test_moved_encoder_is_found(tiny_encoder):
    encoder = tiny_encoder()
    copy = keras.models.clone_model(encoder)
    copy.set_weights(encoder.get_weights())
    check_frozen(encoder, copy)
    statistic = copy.layers[1].moving_mean
    statistic.assign(statistic + 1e-6)
    with pytest.raises(RuntimeError, match="moving_mean .*has changed"):
        check_frozen(encoder, copy)


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_is_inference_mode_in_training_too(tiny_encoder, frozen):
    model = Classifier(tiny_encoder(), 2, frozen)
    images = np.random.default_rng(0).random((4, 8, 8, 3), "float32")
    training, inference = (model(images, training=t) for t in (True, False))
    assert np.allclose(training, inference, atol=1e-7) == frozen
    assert len(model.trainable_variables) == (2 if frozen else 6)
