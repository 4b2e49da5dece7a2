import numpy as np
import pytest
import tensorflow as tf

import keras_moco as km


def labelled(count=20, size=8):
    images = np.random.default_rng(0).random((count, size, size, 3), "float32")
    labels = np.arange(count) % 4
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(8)


def moco(encoder):
    model = km.MoCo(encoder, km.projection_head(4, 4), queue_size=16)
    model.compile(km.SGD(0.01))
    return model


def test_fit_adds_the_momentum_update_once(tiny_encoder, random_pairs):
    class Counting(km.MomentumUpdate):
        calls = 0

        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            Counting.calls += 1

    model = moco(tiny_encoder())
    updates = []
    rule = model.update_key_encoder
    model.update_key_encoder = lambda: (updates.append(1), rule())
    model.fit(random_pairs(steps=3), verbose=0)
    assert len(updates) == 3
    model.fit(random_pairs(steps=3), callbacks=[Counting()], verbose=0)
    assert len(updates) == 6
    assert Counting.calls == 3


def test_two_momentum_updates_are_one_too_many(tiny_encoder, random_pairs):
    twice = [km.MomentumUpdate(), km.MomentumUpdate()]
    with pytest.raises(ValueError, match="2 are among"):
        moco(tiny_encoder()).fit(random_pairs(), callbacks=twice, verbose=0)


def test_plain_fit_never_leaves_the_key_encoder_behind(
    tiny_encoder, random_pairs
):
    model = moco(tiny_encoder())
    model.momentum = 0.5  # At 0.999 three steps are lost in rounding.
    before = model.key_encoder.get_weights()[0]
    model.fit(random_pairs(), verbose=0)
    assert np.abs(model.key_encoder.get_weights()[0] - before).max() > 0


def test_several_steps_in_one_call_are_put_back_to_one(
    tiny_encoder, random_pairs
):
    model = moco(tiny_encoder())
    model.compile(km.SGD(0.01), steps_per_execution=3)
    model.fit(random_pairs(), verbose=0)
    assert model.update_in_step
    model.compile(km.SGD(0.01))
    model.fit(random_pairs(), verbose=0)
    assert not model.update_in_step


def test_knn_is_logged_every_so_many_epochs_and_at_the_end(
    tiny_encoder, random_pairs
):
    seen = []

    class Watch(km.MomentumUpdate):
        def on_epoch_end(self, epoch, logs=None):
            if "knn_top1" in logs:
                seen.append((epoch, logs["knn_top1"]))

    model = moco(tiny_encoder())
    monitor = km.KNNMonitor(labelled(), labelled(), every=2, k=1)
    model.fit(random_pairs(), epochs=5, callbacks=[monitor, Watch()], verbose=0)
    # The bank holds the queries themselves.
    assert seen == [(1, 1.0), (3, 1.0), (4, 1.0)]


def test_knn_monitor_needs_a_positive_interval():
    for name in ("every", "k", "temperature"):
        with pytest.raises(ValueError, match=f"`{name}`.*0"):
            km.KNNMonitor(None, None, **{name: 0})


def test_knn_of_a_diverged_encoder_is_not_measured():
    logs = {"loss": float("nan")}
    km.KNNMonitor(None, None).on_epoch_end(0, logs)
    assert set(logs) == {"loss"}


def test_trace_holds_the_weights_before_and_after_each_step(
    tiny_encoder, random_pairs, tmp_path
):
    model = moco(tiny_encoder())
    model.momentum = 0.5
    pairs = model.averaged_pairs()
    before = np.concatenate([q.numpy().ravel() for q, _ in pairs])
    trace = km.WeightTrace(tmp_path / "new/trace.npz", num_weights=10**6)
    model.fit(random_pairs(steps=3), callbacks=[trace], verbose=0)
    after = [np.concatenate([v.numpy().ravel() for v in x])
             for x in zip(*pairs, strict=True)]  # fmt: skip
    found = np.load(trace.path)
    assert found["query"].shape == found["key"].shape == (4, len(before))
    assert np.array_equal(found["query"][0], before)
    assert np.array_equal(found["query"][-1], after[0])
    assert np.array_equal(found["key"][-1], after[1])
    assert found["momentum"].tolist() == [0.5] * 3
    for step in (1, 2, 3):
        halfway = (found["key"][step - 1] + found["query"][step]) / 2
        assert np.allclose(found["key"][step], halfway, atol=3e-7)
    assert [path.name for path in trace.path.parent.iterdir()] == ["trace.npz"]


def test_trace_follows_some_of_the_weights_and_a_schedule(
    tiny_encoder, random_pairs, tmp_path
):
    schedule = km.schedules.CosineMomentum(0.5, 1.0, total_steps=4)
    model = moco(tiny_encoder())
    model.momentum = schedule
    trace = km.WeightTrace(tmp_path / "trace.npz", num_weights=5, seed=1)
    model.fit(random_pairs(steps=4), callbacks=[trace], verbose=0)
    found = np.load(trace.path)
    assert found["query"].shape == (5, 5)
    assert np.allclose(found["momentum"], [schedule(t) for t in (1, 2, 3, 4)])


def test_trace_cannot_see_inside_several_steps(tiny_encoder, random_pairs):
    model = moco(tiny_encoder())
    model.compile(km.SGD(0.1), steps_per_execution=2)
    with pytest.raises(ValueError, match="`steps_per_execution=1`.*2"):
        model.fit(random_pairs(), callbacks=[km.WeightTrace("x.npz")])
    with pytest.raises(ValueError, match="`num_weights`.*0"):
        km.WeightTrace("x.npz", num_weights=0)
