import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_moco as km
from keras_moco import distribute
from keras_moco.queue import unit_length
from keras_moco.schedules import CosineMomentum


class Recorder(keras.callbacks.Callback):
    """Keeps loss, queue and pointer of every step."""

    def __init__(self):
        super().__init__()
        self.losses, self.queues, self.pointers = [], [], []

    def on_train_batch_end(self, batch, logs=None):
        self.losses.append(logs["loss"])
        self.queues.append(self.model.queue.numpy())
        self.pointers.append(int(self.model.queue_pointer.numpy()))
        self.model.reset_metrics()


def query_weights(model):
    return model.encoder.get_weights() + model.projector.get_weights()


def key_weights(model):
    return model.key_encoder.get_weights() + model.key_projector.get_weights()


def assert_golden_weights(model, golden):
    for kind, weights in (
        ("query", query_weights(model)),
        ("key", key_weights(model)),
    ):
        for name, weight in zip(("w1", "b1", "w2", "b2"), weights, strict=True):
            expected = golden[f"final_{kind}_{name}"]
            np.testing.assert_allclose(weight, expected, atol=1e-5)


def tiny_moco(encoder, **options):
    options = {"queue_size": 16, **options}
    width = encoder.output_shape[-1]
    return km.MoCo(encoder, km.projection_head(width, 4), **options)


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
def test_golden_trajectory(
    build_golden, golden_pairs, golden_sgd, golden_steps, jit
):
    model, recorder = build_golden(), Recorder()
    model.compile(golden_sgd(), jit_compile=jit)
    model.fit(golden_pairs, callbacks=[recorder], verbose=0)
    golden = golden_steps
    np.testing.assert_allclose(recorder.losses, golden["step_loss"], atol=1e-5)
    np.testing.assert_allclose(recorder.queues, golden["step_queue"], atol=1e-5)
    assert recorder.pointers == list(golden["step_ptr"])
    assert_golden_weights(model, golden)


@pytest.mark.parametrize("steps", [3, 5, 12])
def test_golden_weights_with_several_steps_in_one_call(
    build_golden, golden_pairs, golden_sgd, golden_steps, steps
):
    model = build_golden()
    model.compile(golden_sgd(), steps_per_execution=steps)
    model.fit(golden_pairs, verbose=0)
    assert_golden_weights(model, golden_steps)


def test_golden_weights_through_train_on_batch(
    build_golden, golden_pairs, golden_sgd, golden_steps
):
    model = build_golden()
    model.compile(golden_sgd())
    for query, key in golden_pairs:
        model.train_on_batch(query, key)
    assert_golden_weights(model, golden_steps)


def test_logged_similarities_are_the_golden_ones(
    build_golden, golden_pairs, golden_sgd, golden_steps
):
    model = build_golden()
    model.compile(golden_sgd())
    logs = model.fit(golden_pairs.take(1), verbose=0).history
    golden = golden_steps
    assert np.isclose(logs["positive_similarity"], golden["step_positive"][0])
    assert np.isclose(
        logs["negative_similarity"], golden["step_negative"][0], atol=1e-6
    )


def test_key_encoder_equals_query_encoder_at_build(tiny_encoder):
    model = tiny_moco(tiny_encoder())
    for query, key in zip(
        query_weights(model), key_weights(model), strict=True
    ):
        np.testing.assert_array_equal(query, key)
    assert model.encoder is not model.key_encoder


def test_average_covers_trainable_weights_only(tiny_encoder, random_pairs):
    model = tiny_moco(tiny_encoder(), momentum=0.9)
    model.compile(km.SGD(0.1))
    before = key_weights(model)
    model.fit(random_pairs(steps=1), verbose=0)
    trainable = {v.path for v in model.encoder.trainable_variables}
    seen = 0
    for old, query, key in zip(
        before, model.encoder.weights, model.key_encoder.weights, strict=False
    ):
        averaged = 0.9 * old + 0.1 * query.numpy()
        same = np.allclose(key.numpy(), averaged, atol=1e-7)
        assert same == (query.path in trainable), query.path
        seen += query.path not in trainable
    assert seen == 2  # Moving mean and variance are the key encoder's own.


def test_key_encoder_normalises_by_its_batch_in_training(
    tiny_encoder, random_pairs
):
    model = tiny_moco(tiny_encoder())
    _, images = next(iter(random_pairs()))
    keys = model.encode_key(images)
    features = model.key_encoder(images, training=True)
    expected = unit_length(model.key_projector(features))
    np.testing.assert_allclose(keys, expected, atol=1e-6)
    inference = model.encode_key(images, training=False)
    assert np.abs(keys - inference).max() > 1e-3


def test_without_queue_negatives_are_the_other_keys_of_the_batch(
    build_golden, golden_pairs, golden_sgd
):
    model = build_golden(queue_size=0)
    model.compile(golden_sgd())
    query, key = next(iter(golden_pairs))
    q = unit_length(model.projector(model.encoder(query))).numpy()
    k = unit_length(model.projector(model.encoder(key))).numpy()
    logits = q @ k.T / 0.2
    lse = np.log(np.exp(logits).sum(axis=1))
    expected = (lse - np.diag(logits)).mean()
    loss = model.train_on_batch(query, key, return_dict=True)["loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def test_symmetric_loss_is_the_mean_and_enqueues_once(
    build_golden, golden_pairs
):
    query, key = next(iter(golden_pairs))
    model = build_golden(symmetric=True)
    model.compile(km.SGD(0.0))
    a = unit_length(model.projector(model.encoder(query))).numpy()
    b = unit_length(model.projector(model.encoder(key))).numpy()
    queue = model.queue.numpy()

    def direction(q, k):
        logits = np.concatenate(
            [(q * k).sum(axis=1, keepdims=True), q @ queue.T], axis=1
        )
        logits /= 0.2
        return (np.log(np.exp(logits).sum(axis=1)) - logits[:, 0]).mean()

    expected = (direction(a, b) + direction(b, a)) / 2
    loss = model.train_on_batch(query, key, return_dict=True)["loss"]
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    written = model.queue.numpy()[:12]
    np.testing.assert_allclose(written, np.concatenate([b, a]), atol=1e-5)
    assert model.queue_pointer.numpy() == 12


def test_keys_of_the_querys_own_image_are_masked(build_golden, golden_pairs):
    query, key = next(iter(golden_pairs))
    model = build_golden(mask_same_image=True)
    model.compile(km.SGD(0.0))
    index = np.array([3, 1, 4, 1, 5, 9])
    held = np.array([3, 3, 1, 7] * 4)
    model.queue_index.assign(held)
    q = unit_length(model.projector(model.encoder(query))).numpy()
    k = unit_length(model.projector(model.encoder(key))).numpy()
    negative = q @ model.queue.numpy().T / 0.2
    negative[index[:, None] == held[None, :]] = -np.inf
    positive = (q * k).sum(axis=1) / 0.2
    total = np.exp(positive) + np.exp(negative).sum(axis=1)
    expected = (np.log(total) - positive).mean()
    logs = model.train_on_batch(query, key, index, return_dict=True)
    np.testing.assert_allclose(logs["loss"], expected, rtol=1e-5)
    np.testing.assert_array_equal(model.queue_index.numpy()[:6], index)


def test_an_index_changes_nothing_when_masking_is_off(
    build_golden, golden_pairs, golden_sgd, golden_steps
):
    model = build_golden()
    model.compile(golden_sgd())
    index = tf.data.Dataset.from_tensors(tf.zeros(6, tf.int64)).repeat()
    triples = tf.data.Dataset.zip(golden_pairs, index).map(
        lambda pair, index: (*pair, index)
    )
    model.fit(triples, verbose=0)
    assert_golden_weights(model, golden_steps)


def test_contrast_top1_counts_only_once_the_queue_is_full(
    build_golden, golden_pairs, golden_sgd
):
    model = build_golden()
    model.compile(golden_sgd())
    model.fit(golden_pairs.take(3), verbose=0)
    assert model.contrast_top1.count.numpy() == 0
    model.fit(golden_pairs.take(2), verbose=0)
    assert model.contrast_top1.count.numpy() == 2


def test_queue_fill_is_logged(build_golden, golden_pairs, golden_sgd):
    model = build_golden()
    model.compile(golden_sgd())
    assert model.fit(golden_pairs.take(2), verbose=0).history["queue_fill"] == [
        12 / 16
    ]


def test_key_weights_stay_out_of_training_whatever_trainable_is_set_to(
    tiny_encoder, random_pairs
):
    model = tiny_moco(tiny_encoder(), momentum=1.0)
    model.trainable = False
    assert model.trainable_variables == []
    model.trainable = True
    keys = {id(v) for v in model.key_encoder.variables}
    assert not keys & {id(v) for v in model.trainable_variables}
    model.compile(km.SGD(1.0))
    before = [v.numpy() for v in model.key_encoder.variables]
    model.fit(random_pairs(steps=2), verbose=0)
    after = [v.numpy() for v in model.key_encoder.variables]
    for b, a, v in zip(before, after, model.key_encoder.variables, strict=True):
        assert np.array_equal(b, a) != ("moving" in v.path), v.path


def test_frozen_encoder_weights_are_left_alone(tiny_encoder, random_pairs):
    encoder = tiny_encoder()
    encoder.layers[0].trainable = False
    model = tiny_moco(encoder, momentum=0.5)
    model.compile(km.SGD(0.5))
    before = encoder.layers[0].get_weights()
    model.fit(random_pairs(), verbose=0)
    for part in (model.encoder, model.key_encoder):
        for b, a in zip(before, part.layers[0].get_weights(), strict=True):
            np.testing.assert_array_equal(b, a)


def test_momentum_follows_its_schedule(build_golden, golden_pairs):
    model = build_golden(momentum=CosineMomentum(0.5, 1.0, 2))
    model.compile(km.SGD(0.1))
    before = key_weights(model)
    model.fit(golden_pairs.take(1), verbose=0)
    # After the first optimizer step the step is 1, half way: momentum 0.75.
    for old, query, key in zip(
        before, query_weights(model), key_weights(model), strict=True
    ):
        np.testing.assert_allclose(key, 0.75 * old + 0.25 * query, atol=1e-6)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss scale"])
def test_keys_move_when_accumulated_gradients_do(
    build_golden, golden_pairs, scaled
):
    model = build_golden(momentum=0.75)
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    if scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 1.0)
    model.compile(optimizer)
    expected = key_weights(model)
    for step, (query, key, *_) in enumerate(golden_pairs.take(4), start=1):
        model.train_on_batch(query, key)
        if step % 2 == 0:
            expected = [
                0.75 * old + 0.25 * new
                for old, new in zip(expected, query_weights(model), strict=True)
            ]
        for old, found in zip(expected, key_weights(model), strict=True):
            np.testing.assert_allclose(found, old, atol=1e-6)
    assert not np.allclose(expected[0], query_weights(model)[0], atol=1e-4)


def test_regularization_of_the_encoder_is_part_of_the_gradient(golden_pairs):
    def weights_after_one_step(strength):
        keras.utils.set_random_seed(1)
        encoder = keras.Sequential(
            [
                keras.Input((4, 4, 3)),
                keras.layers.Flatten(),
                keras.layers.Dense(
                    4, kernel_regularizer=keras.regularizers.L2(strength)
                ),
            ]
        )
        model = tiny_moco(encoder)
        model.compile(km.SGD(0.1, momentum=0.0))
        before = encoder.get_weights()[0]
        model.fit(golden_pairs.take(1), verbose=0)
        return before, encoder.get_weights()[0]

    before, plain = weights_after_one_step(0.0)
    _, decayed = weights_after_one_step(0.5)
    # The gradient of 0.5 w^2 is w.
    np.testing.assert_allclose(plain - decayed, 0.1 * before, atol=1e-6)


def test_evaluate_reports_the_loss_and_changes_nothing(
    build_golden, golden_pairs, golden_sgd, golden_steps
):
    model = build_golden()
    model.compile(golden_sgd())
    loss = model.evaluate(golden_pairs.take(1), verbose=0, return_dict=True)
    assert np.isclose(loss["loss"], golden_steps["step_loss"][0])
    assert model.queue_pointer.numpy() == 0


def test_two_replicas_give_the_golden_trajectory(
    two_replicas, build_golden, golden_pairs, golden_sgd, golden_steps
):
    with two_replicas.scope():
        model = build_golden()
        model.compile(golden_sgd())
    model.fit(golden_pairs, verbose=0)
    assert_golden_weights(model, golden_steps)
    np.testing.assert_allclose(
        model.queue.numpy(), golden_steps["step_queue"][-1], atol=1e-5
    )


def test_replicas_share_their_statistics_at_the_end_of_an_epoch(two_replicas):
    images = np.random.default_rng(0).random((2, 6, 8, 8, 3), "float32")
    with two_replicas.scope():
        encoder = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                keras.layers.BatchNormalization(momentum=0.9),
                keras.layers.GlobalAveragePooling2D(),
            ]
        )
        model = tiny_moco(encoder)
        model.compile(km.SGD(0.1))
    pairs = tf.data.Dataset.from_tensors(tuple(images))
    model.fit(pairs, verbose=0)
    norm = model.encoder.layers[0]
    copies = two_replicas.experimental_local_results(norm.moving_mean.value)
    for copy in copies:  # Both of three images; they began at 0.
        expected = 0.1 * images[0].mean(axis=(0, 1, 2))
        np.testing.assert_allclose(copy, expected, rtol=1e-5)
    variance = images[0].reshape(2, -1, 3).var(axis=1).mean(axis=0)
    np.testing.assert_allclose(
        norm.moving_variance.numpy(), 0.9 + 0.1 * variance, rtol=1e-5
    )


def test_several_steps_per_execution_are_refused_on_two_replicas(
    two_replicas, build_golden, golden_pairs, golden_sgd
):
    with two_replicas.scope():
        model = build_golden()
        model.compile(golden_sgd(), steps_per_execution=2)
    with pytest.raises(ValueError, match="`steps_per_execution` must be 1"):
        model.fit(golden_pairs, verbose=0)


def test_saved_model_goes_on_as_if_nothing_had_happened(
    build_golden, golden_pairs, golden_sgd, golden_steps, tmp_path
):
    model = build_golden()
    model.compile(golden_sgd())
    model.fit(golden_pairs.take(5), verbose=0)
    model.save(tmp_path / "moco.keras")
    copy = keras.models.load_model(tmp_path / "moco.keras")
    copy.fit(golden_pairs.skip(5), verbose=0)
    assert_golden_weights(copy, golden_steps)
    np.testing.assert_allclose(
        copy.queue.numpy(), golden_steps["step_queue"][-1], atol=1e-5
    )


def test_fit_works_beside_keras_checkpoints_and_tensorboard(
    build_golden, golden_pairs, golden_sgd, tmp_path
):
    model = build_golden()
    model.compile(golden_sgd())
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras")
    board = keras.callbacks.TensorBoard(tmp_path / "logs")
    model.fit(golden_pairs, epochs=2, callbacks=[checkpoint, board], verbose=0)
    loaded = keras.models.load_model(tmp_path / "best.keras")
    np.testing.assert_array_equal(loaded.queue.numpy(), model.queue.numpy())
    assert list((tmp_path / "logs").rglob("events*"))


def test_fit_takes_arrays(build_golden, golden_sgd, golden_steps):
    views = golden_steps["views"].astype("float32")
    query, key = (views[:, i].reshape(-1, 4, 4, 3) for i in range(2))
    model = build_golden()
    model.compile(golden_sgd())
    model.fit(query, key, batch_size=6, shuffle=False, verbose=0)
    assert_golden_weights(model, golden_steps)


def test_config_round_trip(tiny_encoder):
    model = tiny_moco(
        tiny_encoder(),
        temperature=0.3,
        momentum=CosineMomentum(0.9, 1.0, 7),
        symmetric=True,
        mask_same_image=True,
    )
    copy = km.MoCo.from_config(model.get_config())
    for name in ("queue_size", "temperature", "symmetric", "mask_same_image"):
        assert getattr(copy, name) == getattr(model, name)
    assert copy.momentum.get_config() == model.momentum.get_config()
    images = np.ones((2, 8, 8, 3), "float32")
    assert copy(images).shape == model(images).shape


def test_preset_builds_head_predictor_and_schedule(tiny_encoder):
    preset = km.PRESETS["moco_v3"].replace(head_hidden_dim=8, head_output_dim=4)
    model = km.MoCo.from_preset(preset, tiny_encoder(), total_steps=10)
    assert model.predictor.output_shape == (None, 4)
    assert float(model.momentum(10)) == 1.0
    assert model.queue.shape == (0, 4)
    with pytest.raises(ValueError, match="`total_steps` is needed"):
        km.MoCo.from_preset(preset, tiny_encoder())


def test_v3_trains(tiny_encoder, random_pairs):
    preset = km.PRESETS["moco_v3"].replace(
        head_hidden_dim=8, head_output_dim=4, batch_size=6
    )
    model = km.MoCo.from_preset(preset, tiny_encoder(), total_steps=3)
    model.compile(km.build_optimizer(preset, 6, 3))
    before = model.predictor.get_weights()[0]
    logs = model.fit(random_pairs(), verbose=0).history
    assert np.isfinite(logs["loss"]).all()
    assert np.abs(model.predictor.get_weights()[0] - before).max() > 0


@pytest.mark.parametrize(
    "options, message",
    [
        ({"queue_size": -1}, "`queue_size`.*-1"),
        ({"temperature": 0}, "`temperature`.*0"),
        ({"momentum": 1.1}, "`momentum`.*1.1"),
        ({"queue_size": 16.0}, "`queue_size` is of type int.*16.0"),
        ({"queue_size": None}, "`queue_size` is of type int.*None"),
        ({"temperature": "0.2"}, "`temperature` is of type float.*'0.2'"),
        ({"temperature": float("nan")}, "`temperature`.*nan"),
        ({"momentum": "0.99"}, "`momentum` is of type float.*'0.99'"),
    ],
)
def test_arguments_of_wrong_type_or_range_are_named(
    tiny_encoder, options, message
):
    with pytest.raises(ValueError, match=message):
        tiny_moco(tiny_encoder(), **options)


def test_head_must_take_what_the_encoder_gives(tiny_encoder):
    with pytest.raises(ValueError, match="takes 7 features.*gives 4"):
        km.MoCo(tiny_encoder(), km.projection_head(7, 4), queue_size=16)


def test_mixed_float16_keeps_queue_and_loss_in_float32(random_pairs):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        encoder = keras.Sequential(
            [
                keras.Input((8, 8, 3)),
                keras.layers.Conv2D(4, 3),
                keras.layers.GlobalAveragePooling2D(),
            ]
        )
        model = tiny_moco(encoder, temperature=0.07)
    finally:
        keras.config.set_dtype_policy(policy)
    model.compile(km.SGD(0.01))
    logs = model.fit(random_pairs(), verbose=0).history
    assert np.isfinite(logs["loss"]).all()
    assert model.queue.dtype == "float32"
    norms = np.linalg.norm(model.queue.numpy(), axis=1)
    np.testing.assert_allclose(norms, 1, rtol=1e-5)


def test_float16_gradients_are_those_of_float32(tiny_encoder, random_pairs):
    """With the loss scale at work, which keeps small ones from vanishing."""
    gradients = {}
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(3)
        keras.config.set_dtype_policy(policy)
        try:
            model = tiny_moco(tiny_encoder(features=8))
            sgd = km.SGD(1.0, momentum=0.0)
            if policy == "mixed_float16":  # From 2 ** 15 the first step skips.
                scaled = keras.optimizers.LossScaleOptimizer
                sgd = scaled(sgd, initial_scale=2.0**10)
            model.compile(sgd)
        finally:
            keras.config.set_dtype_policy("float32")
        before = [v.numpy() for v in model.trainable_variables]
        model.fit(random_pairs(steps=1, batch=16), verbose=0)
        after = [v.numpy() for v in model.trainable_variables]
        gradients[policy] = np.concatenate(
            [(b - a).ravel() for a, b in zip(after, before, strict=True)]
        )
    a, b = gradients.values()
    assert np.linalg.norm(a) > 0
    assert np.linalg.norm(a - b) < 1e-2 * np.linalg.norm(a)


def test_the_step_is_traced_once(tiny_encoder, random_pairs):
    traces = []

    class Counting(km.MoCo):
        def train_step(self, data):
            traces.append("step")
            return super().train_step(data)

        def key_momentum(self):
            traces.append("update")
            return super().key_momentum()

    model = Counting(tiny_encoder(), km.projection_head(4, 4), queue_size=16)
    model.compile(km.SGD(0.1))
    model.fit(random_pairs(steps=1), verbose=0)
    after_one_step = list(traces)
    assert set(traces) == {"step", "update"}
    model.fit(random_pairs(steps=5, seed=1), epochs=2, verbose=0)
    assert traces == after_one_step


def test_in_batch_negatives_are_those_of_all_replicas(
    two_replicas, build_golden, golden_pairs, golden_sgd
):
    found = []
    for strategy in (tf.distribute.get_strategy(), two_replicas):
        with strategy.scope():
            model = build_golden(queue_size=0)
            model.compile(golden_sgd())
        history = model.fit(golden_pairs, verbose=0).history
        found.append([np.array(history["loss"]), *query_weights(model)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5)


# What users bring


def test_a_normalisation_that_was_adapted_is_the_keys_too():
    images = np.random.default_rng(0).uniform(3, 9, (8, 4, 4, 3))
    normalize = keras.layers.Normalization()
    normalize.adapt(images)
    layers = [keras.Input((4, 4, 3)), normalize, keras.layers.Flatten()]
    encoder = keras.Sequential([*layers, keras.layers.Dense(4)])
    model = tiny_moco(encoder)
    np.testing.assert_array_equal(
        model.key_encoder(images), model.encoder(images)
    )
    expected = (images - images.mean((0, 1, 2))) / images.std((0, 1, 2))
    kernel, bias = encoder.layers[-1].get_weights()
    np.testing.assert_allclose(
        model.key_encoder(images),
        expected.reshape(8, -1) @ kernel + bias,
        rtol=1e-3,
        atol=1e-4,
    )


@pytest.mark.parametrize("seed", [None, 7])
def test_query_and_key_draw_apart(seed):
    layers = [keras.Input((500,)), keras.layers.Dropout(0.5, seed=seed)]
    model = tiny_moco(keras.Sequential(layers))
    rows = tf.ones((2, 500))
    query = model.encoder(rows, training=True).numpy() > 0
    key = model.key_encoder(rows, training=True).numpy() > 0
    assert 0.4 < (query == key).mean() < 0.6


def test_penalties_of_all_query_parts_count_once(random_pairs):
    """Symmetric: not once for each direction."""
    penalized = keras.layers.Dense(
        4, kernel_regularizer=keras.regularizers.L2(0.5)
    )
    encoder = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(4),
        ]
    )
    projector = keras.Sequential([keras.Input((4,)), penalized])
    plain = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    kept, moved = (encoder.get_weights(), projector.get_weights()), []
    for head in (projector, plain):
        encoder.set_weights(kept[0])
        head.set_weights(kept[1])
        model = km.MoCo(encoder, head, queue_size=16, symmetric=True)
        model.queue.assign(unit_length(tf.reshape(tf.range(64.0), (16, 4))))
        model.compile(km.SGD(0.1, momentum=0.0))
        model.fit(random_pairs(steps=1), verbose=0)
        moved.append(head.get_weights()[0])
    kernel = kept[1][0]
    # The derivative of 0.5 w^2 is w.
    np.testing.assert_allclose(moved[0] - moved[1], -0.1 * kernel, atol=1e-5)


def test_activity_is_penalised_in_half_precision(random_pairs):
    layers = [
        keras.Input((8, 8, 3)),
        keras.layers.GlobalAveragePooling2D(),
        keras.layers.Dense(4, activity_regularizer="l2", dtype="mixed_float16"),
    ]
    model = tiny_moco(keras.Sequential(layers))
    model.compile(km.SGD(0.1))
    logs = model.fit(random_pairs(), verbose=0).history
    assert np.isfinite(logs["loss"]).all()


def test_v3_loss_is_both_directions_times_twice_the_temperature(
    build_golden, golden_pairs
):
    moved = []
    for v3_loss in (False, True):
        model = build_golden(
            temperature=0.5, symmetric=True, v3_loss=v3_loss, queue_size=16
        )
        before = query_weights(model)
        model.compile(km.SGD(0.1, momentum=0.0))
        logs = model.fit(golden_pairs.take(1), verbose=0).history
        after = query_weights(model)
        moved.append([b - a for a, b in zip(after, before, strict=True)])
        moved[-1].append(logs["loss"])
    *mean, loss = moved[0]
    *scaled, same = moved[1]
    assert loss == same
    for one, other in zip(mean, scaled, strict=True):
        np.testing.assert_allclose(other, 2 * 0.5 * 2 * one, atol=1e-6)


def test_the_first_batch_by_hand_has_its_average_in_several_steps_a_call(
    build_golden, golden_pairs
):
    model = build_golden()
    model.compile(km.SGD(0.1), steps_per_execution=2)
    before = key_weights(model)
    model.train_on_batch(*next(iter(golden_pairs)))
    for old, query, key in zip(
        before, query_weights(model), key_weights(model), strict=True
    ):
        np.testing.assert_allclose(key, 0.9 * old + 0.1 * query, atol=1e-6)


def test_the_average_may_be_asked_for_before_any_step(build_golden):
    model = build_golden()
    before = key_weights(model)
    model.update_key_encoder()
    for old, new in zip(before, key_weights(model), strict=True):
        np.testing.assert_allclose(new, old, atol=1e-6)


def test_keys_are_shuffled_for_a_projector_that_normalises_in_shares(
    two_replicas, random_pairs, monkeypatch
):
    calls = []
    shuffle = distribute.shuffle

    def spy(*arguments):
        calls.append(arguments)
        return shuffle(*arguments)

    monkeypatch.setattr(distribute, "shuffle", spy)
    with two_replicas.scope():
        layers = [keras.Input((8, 8, 3)), keras.layers.GlobalAveragePooling2D()]
        head = km.projection_head(3, 4, batch_norm=True)
        model = km.MoCo(keras.Sequential(layers), head, queue_size=16)
        model.compile(km.SGD(0.1))
    model.fit(random_pairs(steps=1), verbose=0)
    assert calls


def test_evaluate_counts_every_image_once(build_golden, golden_steps):
    model = build_golden()
    model.compile(km.SGD(0.1))
    views = golden_steps["views"].astype("float32")[0]
    query, key = np.concatenate([views[0]] * 2), np.concatenate([views[1]] * 2)
    count = len(query) - 1
    parts = [
        model.evaluate(query[i:j], key[i:j], batch_size=64, verbose=0)
        for i, j in ((0, count - 1), (count - 1, count))
    ]
    together = model.evaluate(
        query[:count], key[:count], batch_size=count - 1, verbose=0
    )
    expected = ((count - 1) * parts[0][0] + parts[1][0]) / count
    np.testing.assert_allclose(together[0], expected, rtol=1e-5)


def test_similarity_to_other_keys_of_the_batch_leaves_out_the_own(
    build_golden, golden_pairs, golden_sgd
):
    model = build_golden(queue_size=0)
    model.compile(golden_sgd())
    query, key = next(iter(golden_pairs))
    logs = model.test_on_batch(query, key, return_dict=True)
    cosine = unit_length(model.projector(model.encoder(query))).numpy() @ (
        unit_length(model.key_projector(model.key_encoder(key))).numpy().T
    )
    others = cosine[~np.eye(len(cosine), dtype=bool)]
    np.testing.assert_allclose(
        logs["negative_similarity"], others.mean(), rtol=1e-4, atol=1e-6
    )


def test_exported_it_gives_features(tmp_path, tiny_encoder):
    model = tiny_moco(tiny_encoder())
    model.export(tmp_path / "served", verbose=False)
    images = np.random.default_rng(0).random((3, 8, 8, 3), "float32")
    served = tf.saved_model.load(str(tmp_path / "served"))
    np.testing.assert_allclose(served.serve(images), model(images), atol=1e-6)


def test_a_saved_loss_scale_comes_back(tmp_path, tiny_encoder, random_pairs):
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = tiny_moco(tiny_encoder())
        model.compile(km.SGD(0.1))
        model.fit(random_pairs(steps=12), verbose=0)
    finally:
        keras.config.set_dtype_policy(policy)
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert isinstance(again.optimizer, keras.optimizers.LossScaleOptimizer)
    steps = int(model.optimizer.iterations)
    assert int(again.optimizer.iterations) == steps > 0
    again.fit(random_pairs(steps=1), verbose=0)


def test_weights_of_half_precision_are_refused():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        layers = [keras.Input((12,)), keras.layers.Dense(4)]
        with pytest.raises(ValueError, match="mixed_bfloat16") as error:
            tiny_moco(keras.Sequential(layers))
    finally:
        keras.config.set_dtype_policy(policy)
    assert "\n" not in str(error.value)


def test_callbacks_may_stand_in_their_place(build_golden, golden_steps):
    model, recorder = build_golden(), Recorder()
    model.compile(km.SGD(0.1))
    views = golden_steps["views"].astype("float32")[0]
    model.fit(*views, len(views[0]), 1, 0, [recorder])
    assert len(recorder.losses) == 1
    with pytest.raises(ValueError, match="`callbacks` must be a list"):
        model.fit(*views, callbacks=keras.callbacks.CallbackList([]))
