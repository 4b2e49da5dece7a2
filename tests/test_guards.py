import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_moco as km
from keras_moco.data.images import Images
from keras_moco.safety.guards import NotFinite


def moco(encoder, optimizer=None):
    model = km.MoCo(encoder, km.projection_head(4, 4), queue_size=16)
    model.compile(optimizer or km.SGD(0.05))
    return model


def with_nan(pairs, *steps):
    """The batches, those of some steps spoilt."""

    def spoil(step, batch):
        query, *rest = batch
        bad = tf.reduce_any(step == tf.constant(steps, tf.int64))
        return tf.where(bad, math.nan, query), *rest

    return pairs.enumerate().map(spoil)


def fit(model, pairs, *callbacks, lines=None, epochs=1, **options):
    say = (lines if lines is not None else []).append
    guard = km.Guard(say=say, **options)
    callbacks = [guard, *callbacks]
    model.fit(pairs, epochs=epochs, callbacks=callbacks, verbose=0)
    return guard


def test_a_step_that_is_not_finite_is_named(
    tmp_path, tiny_encoder, random_pairs
):
    """The batch after an epoch that was good, whose checkpoint is kept."""
    good, rows = random_pairs(steps=20), []
    saves = km.Checkpoint(tmp_path, every_steps=1)
    moco(tiny_encoder()).fit(good, callbacks=[saves], verbose=0)
    saves = km.Checkpoint(tmp_path, every_steps=1, say=lambda line: None)
    log = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: rows.append(1))
    with pytest.raises(NotFinite) as error:
        fit(moco(tiny_encoder()), with_nan(good, 3, 5), saves, log, epochs=2)
    text = str(error.value)
    assert "in step 4 of epoch 2 (learning rate 0.05, loss scale 1;" in text
    assert "The checkpoint of 1 epochs and 3 steps is kept" in text
    assert saves.saved == (1, 3) and not rows


def test_the_images_of_the_batch_are_named(tiny_encoder):
    pixels = np.full((20, 8, 8, 3), 9, np.uint8)
    pixels[11] = 255
    names = [f"{number}.jpg" for number in range(20)]

    def augment(images):
        return tf.where(images == 1.0, math.nan, images)

    pairs = km.pretrain_dataset(
        Images(pixels, names=names),
        km.PRESETS["demo"],
        8,
        batch_size=4,
        augment=augment,
    )
    order = [index.numpy().tolist() for *_, index in pairs]
    (step,) = [s for s, batch in enumerate(order) if 11 in batch]
    listed = ", ".join(names[i] for i in order[step])
    pairs = pairs.passes.start_at(0, 0)
    with pytest.raises(
        NotFinite, match=f"step {step + 1} .*images {listed}\\)"
    ):
        fit(moco(tiny_encoder()), pairs)


@keras.saving.register_keras_serializable(package="test")
class Poison(keras.layers.Layer):
    """Passes on its inputs, and NaN for their gradients."""

    def call(self, inputs):
        @tf.custom_gradient
        def poison(x):
            return x, lambda upstream: upstream * math.nan

        return poison(inputs)


def test_a_gradient_alone_is_noticed(tiny_encoder, random_pairs):
    layers = [keras.Input((8, 8, 3)), tiny_encoder(), Poison()]
    model = moco(keras.Sequential(layers))
    with pytest.raises(NotFinite, match="in step 1 of epoch 1"):
        fit(model, random_pairs(steps=1))


def test_a_dropped_step_changes_nothing(tiny_encoder, random_pairs):
    """With it, or without its batch: the same to the bit."""
    pairs = random_pairs(steps=5, index=True)
    lines = []
    skipped = moco(tiny_encoder())
    fit(skipped, with_nan(pairs, 2), on_nan="skip", lines=lines)
    keras.utils.set_random_seed(0)
    without = moco(tiny_encoder())
    rest = pairs.enumerate().filter(lambda step, _: step != 2)
    rest = rest.map(lambda _, batch: batch)
    rest = rest.apply(tf.data.experimental.assert_cardinality(4))
    fit(without, rest, on_nan="skip")
    assert int(skipped.step_guard.bad) == 1 and int(without.step_guard.bad) == 0
    assert int(skipped.optimizer.iterations) == 4
    parts = ["encoder", "projector", "key_encoder", "key_projector"]
    for part in [*parts, "key_queue", "optimizer"]:
        for a, b in zip(
            getattr(skipped, part).variables,
            getattr(without, part).variables,
            strict=True,
        ):
            np.testing.assert_array_equal(a, b, a.path)
    for a, b in zip(skipped.metrics, without.metrics, strict=True):
        assert float(a.result()) == float(b.result()), a.name
    assert lines[0].startswith("Dropped step 1 of 10: step 3 of epoch 1")


def test_more_than_so_many_are_not_dropped(tiny_encoder, random_pairs):
    pairs = with_nan(random_pairs(steps=5), 1, 2, 4)
    fit(moco(tiny_encoder()), pairs, on_nan="skip", max_skipped=3)
    with pytest.raises(NotFinite, match="in step 5 of epoch 1"):
        fit(moco(tiny_encoder()), pairs, on_nan="skip", max_skipped=2)


def test_a_loss_scale_that_is_too_high_ends_nothing(tiny_encoder, random_pairs):
    optimizer = keras.optimizers.LossScaleOptimizer(
        km.SGD(0.05), initial_scale=2.0**127
    )
    model = moco(tiny_encoder(), optimizer)
    fit(model, random_pairs(steps=4))
    assert float(optimizer.dynamic_scale) < 2.0**127
    assert int(model.step_guard.bad) == 0


def test_a_loss_scale_that_cannot_help_is_noticed(tiny_encoder, random_pairs):
    layers = [keras.Input((8, 8, 3)), tiny_encoder(), Poison()]
    scaled = keras.optimizers.LossScaleOptimizer(km.SGD(0.05), initial_scale=4)
    with pytest.raises(NotFinite, match="loss scale"):
        fit(moco(keras.Sequential(layers), scaled), random_pairs(steps=20))


def test_it_looks_after_16_steps_however_many_one_call_runs(
    tiny_encoder, random_pairs
):
    model = moco(tiny_encoder())
    model.compile(km.SGD(0.05), steps_per_execution=10)
    with pytest.raises(NotFinite):
        fit(model, with_nan(random_pairs(steps=60), 3))
    assert int(model.step_guard.steps.numpy()) == 20


def test_bad_answers_are_refused(tiny_encoder, random_pairs, two_replicas):
    with pytest.raises(ValueError, match="`on_nan` must be stop or skip"):
        km.Guard(on_nan="hope")
    with two_replicas.scope():
        model = moco(tiny_encoder())
    with pytest.raises(ValueError, match="must be stop on several replicas"):
        fit(model, random_pairs(), on_nan="skip")
