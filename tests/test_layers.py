import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_moco.layers import (
    BatchNormalization,
    check_groups,
    norm_layers,
    num_groups,
    plain_float32,
    swap_batch_norm,
)

SHAPES = {"map": (12, 5, 4, 3), "vector": (12, 3), "tokens": (12, 7, 3)}


def batch(shape, seed=0):
    rng = np.random.default_rng(seed)
    return (2 * rng.normal(size=shape) + 3).astype("float32")


def built(layer, shape, seed=1):
    layer.build(shape)
    rng = np.random.default_rng(seed)
    layer.set_weights(
        [rng.random(w.shape).astype("float32") + 0.5 for w in layer.weights]
    )
    return layer


def forward_and_gradient(layer, x, training):
    x = tf.constant(x)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, training=training)
        loss = tf.reduce_sum(y * tf.constant(batch(y.shape, seed=2)))
    return y, tape.gradient(loss, [x, *layer.trainable_variables])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("affine", [True, False])
def test_one_group_equals_keras(shape, training, affine):
    options = {"momentum": 0.9, "epsilon": 1e-5}
    options |= {"scale": affine, "center": affine}
    ours = built(BatchNormalization(**options), shape)
    keras_own = built(keras.layers.BatchNormalization(**options), shape)
    a = forward_and_gradient(ours, batch(shape), training)
    b = forward_and_gradient(keras_own, batch(shape), training)
    for x, y in zip(tf.nest.flatten(a), tf.nest.flatten(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    for x, y in zip(ours.weights, keras_own.weights, strict=True):
        assert x.name == y.name
        np.testing.assert_allclose(x.numpy(), y.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_groups_are_normalised_by_their_own_statistics(shape):
    x = batch(shape)
    layer = built(BatchNormalization(groups=3, momentum=0.8), x.shape)
    gamma, beta, mean, variance = (w.numpy() for w in layer.weights)
    y = layer(x, training=True)
    parts = x.reshape(3, -1, 3)
    expected = (parts - parts.mean(axis=1, keepdims=True)) / np.sqrt(
        parts.var(axis=1, keepdims=True) + layer.epsilon
    )
    expected = (expected * gamma + beta).reshape(x.shape)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    np.testing.assert_allclose(
        layer.moving_mean.numpy(),
        0.8 * mean + 0.2 * parts.mean(axis=1).mean(axis=0),
        rtol=1e-5,
    )
    np.testing.assert_allclose(
        layer.moving_variance.numpy(),
        0.8 * variance + 0.2 * parts.var(axis=1).mean(axis=0),
        rtol=1e-5,
    )


def test_frozen_layer_uses_moving_statistics():
    x = batch(SHAPES["map"])
    layer = built(BatchNormalization(groups=2), x.shape)
    inference = layer(x, training=False)
    layer.trainable = False
    np.testing.assert_array_equal(layer(x, training=True), inference)


def test_bfloat16_is_not_upcast():
    layer = BatchNormalization(dtype="mixed_bfloat16")
    y = layer(batch(SHAPES["map"]), training=True)
    assert y.dtype == tf.bfloat16
    assert layer.moving_mean.dtype == "float32"
    np.testing.assert_allclose(
        tf.reduce_mean(tf.cast(y, tf.float32), axis=(0, 1, 2)), 0, atol=0.02
    )


def test_xla_gives_the_same():
    x = batch(SHAPES["map"])
    layer = built(BatchNormalization(groups=2), x.shape)
    call = tf.function(lambda x: layer(x, training=True), jit_compile=True)
    np.testing.assert_allclose(call(x), layer(x, training=True), atol=1e-5)


def nested():
    inner = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(momentum=0.7),
        ]
    )
    images = keras.Input((8, 8, 3))
    x = inner(images)
    x = keras.layers.BatchNormalization(epsilon=0.1)(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    model = keras.Model(images, x)
    for weight in model.weights:
        weight.assign(weight + 0.1)
    return model


def test_swapping_keeps_function_settings_and_weights():
    model, x = nested(), batch((6, 8, 8, 3))
    swapped = swap_batch_norm(model, groups=2)
    layers = norm_layers(swapped)
    assert [layer.groups for layer in layers] == [2, 2]
    assert {layer.momentum for layer in layers} == {0.7, 0.99}
    assert {layer.epsilon for layer in layers} == {1e-3, 0.1}
    np.testing.assert_allclose(swapped(x), model(x), atol=1e-5)
    assert num_groups(swapped) == 2
    assert num_groups(model) == num_groups(swap_batch_norm(model)) == 1


def test_plain_copy_has_no_layer_of_ours_and_computes_in_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = swap_batch_norm(nested(), groups=2)
    finally:
        keras.config.set_dtype_policy("float32")
    plain, x = plain_float32(model), batch((6, 8, 8, 3))
    assert "keras_moco" not in plain.to_json()
    assert plain(x).dtype == tf.float32
    np.testing.assert_allclose(
        plain(x), tf.cast(model(x), tf.float32), rtol=0.05, atol=0.05
    )


def test_config_round_trip():
    layer = BatchNormalization(groups=4, momentum=0.5)
    copy = BatchNormalization.from_config(layer.get_config())
    assert (copy.groups, copy.momentum) == (4, 0.5)


def test_groups_start_at_one():
    with pytest.raises(ValueError, match="`groups`.*0"):
        BatchNormalization(groups=0)


def test_groups_need_channels_on_the_last_axis():
    images = keras.Input((3, 8, 8))
    x = keras.layers.BatchNormalization(axis=1, name="first")(images)
    model = keras.Model(images, keras.layers.Flatten()(x))
    with pytest.raises(ValueError, match="'first' normalises axis 1") as error:
        swap_batch_norm(model, groups=2)
    assert "\n" not in str(error.value)
    x = batch((4, 3, 8, 8))
    swapped = swap_batch_norm(model)
    np.testing.assert_allclose(
        swapped(x, training=True), model(x, training=True), atol=1e-5
    )


@pytest.mark.parametrize("groups, size", [(3, 8), (8, 8), (4, 6), (1, 1)])
def test_batch_must_fall_into_groups_of_two_or_more(groups, size):
    words = f"batch_norm_groups={groups}, batch_size={size}"
    with pytest.raises(ValueError, match=words):
        check_groups(size, groups)
    check_groups(groups * 2, groups)


def test_synchronised_statistics_are_those_of_all_replicas(two_replicas):
    x = batch((8, 5, 4, 3))
    with pytest.raises(ValueError, match="whole batch"):
        BatchNormalization(groups=2, synchronized=True)
    with two_replicas.scope():
        layer = built(
            BatchNormalization(synchronized=True, momentum=0.9), x.shape
        )
    gamma, beta, mean, variance = (w.numpy() for w in layer.weights)

    def step():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        share = tf.constant(x)[4 * replica : 4 * replica + 4]
        return layer(share, training=True)

    shares = two_replicas.run(tf.function(step))
    y = np.concatenate(two_replicas.experimental_local_results(shares))
    flat = x.reshape(-1, 3)
    expected = (x - flat.mean(axis=0)) / np.sqrt(
        flat.var(axis=0) + layer.epsilon
    )
    np.testing.assert_allclose(y, expected * gamma + beta, atol=1e-4)
    np.testing.assert_allclose(
        layer.moving_mean.numpy(),
        0.9 * mean + 0.1 * flat.mean(axis=0),
        rtol=1e-4,
    )


def test_swapping_can_synchronise(tiny_encoder):
    swapped = swap_batch_norm(tiny_encoder(), synchronized=True)
    assert [layer.synchronized for layer in norm_layers(swapped)] == [True]
    kept = swap_batch_norm(swapped)
    assert [layer.synchronized for layer in norm_layers(kept)] == [True]


@pytest.mark.parametrize("copy", [swap_batch_norm, plain_float32])
def test_copies_normalise_as_the_user_adapted_it(copy):
    images = np.random.default_rng(0).uniform(3, 9, (8, 4, 4, 3))
    normalize = keras.layers.Normalization()
    normalize.adapt(images)
    inputs = keras.Input((4, 4, 3))
    model = keras.Model(inputs, keras.layers.Flatten()(normalize(inputs)))
    np.testing.assert_allclose(
        copy(model)(images), model(images), rtol=1e-5, atol=1e-5
    )
    axes = (0, 1, 2)
    expected = (images - images.mean(axes)) / images.std(axes)
    np.testing.assert_allclose(
        copy(model)(images), expected.reshape(8, -1), rtol=1e-4, atol=1e-4
    )


@keras.saving.register_keras_serializable(package="test")
class Block(keras.layers.Layer):
    """A user's own layer around batch normalisation."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = keras.layers.BatchNormalization()

    def call(self, x, training=False):
        return self.norm(x, training=training)


def test_what_cannot_be_put_into_groups_is_warned_of():
    model = keras.Sequential([keras.Input((4, 4, 3)), Block()])
    with pytest.warns(UserWarning, match="cannot be put into groups"):
        swap_batch_norm(model, groups=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swap_batch_norm(model)
