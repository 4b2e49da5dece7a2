import json
import os

import pytest

import keras_moco as km
from keras_moco.run import RunFolder, RunLog

SETTINGS = {"seed": 0, "crop_scale": (0.2, 1.0)}


def moco(encoder, pairs, run, epochs=2, callbacks=(), rate=0.05):
    model = km.MoCo(encoder, km.projection_head(4, 4), queue_size=16)
    model.compile(km.SGD(rate))
    run.write("run.json", {"settings": run.settings})
    done = run.restore(model) // len(pairs)
    run.keep_metrics(done)
    log = RunLog(run, 6, epochs, say=lambda line: None)
    model.fit(
        pairs,
        epochs=epochs,
        initial_epoch=done,
        callbacks=[log, *callbacks],
        verbose=0,
    )
    return model


def test_metrics_hold_one_line_an_epoch(tmp_path, tiny_encoder, random_pairs):
    run = RunFolder(tmp_path / "run", SETTINGS)
    moco(tiny_encoder(), random_pairs(), run, epochs=3)
    rows = run.metrics()
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert set(rows[-1]) == {
        "epoch",
        "loss",
        "queue_fill",
        "positive_similarity",
        "negative_similarity",
        "contrast_top1",
        "learning_rate",
        "key_momentum",
        "feature_std",
        "images_per_second",
        "seconds",
    }
    assert rows[0]["learning_rate"] == pytest.approx(0.05)
    assert rows[0]["key_momentum"] == 0.999


def test_contrast_top1_waits_for_a_full_queue(
    tmp_path, tiny_encoder, random_pairs
):
    run = RunFolder(tmp_path / "run", SETTINGS)
    moco(tiny_encoder(), random_pairs(steps=1), run, epochs=4)
    rows = run.metrics()
    # 6 keys a step: after two steps 12 of 16 are real.
    assert ["contrast_top1" in row for row in rows] == [
        False,
        False,
        False,
        True,
    ]


def test_tensorboard_gets_the_same_scalars(
    tmp_path, tiny_encoder, random_pairs
):
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )
    from tensorboard.util.tensor_util import make_ndarray

    run = RunFolder(tmp_path / "run", SETTINGS)
    moco(tiny_encoder(), random_pairs(), run)
    events = EventAccumulator(str(run.path))
    events.Reload()
    losses = [make_ndarray(e.tensor_proto) for e in events.Tensors("loss")]
    assert losses == pytest.approx([row["loss"] for row in run.metrics()])


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(
    tmp_path, tiny_encoder, random_pairs
):
    import keras

    class Interrupt(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.optimizer.iterations.numpy()) == 5:
                raise KeyboardInterrupt

    whole = RunFolder(tmp_path / "whole", SETTINGS)
    keras.utils.set_random_seed(1)
    moco(tiny_encoder(), random_pairs(), whole, epochs=3)
    broken = RunFolder(tmp_path / "broken", SETTINGS)
    keras.utils.set_random_seed(1)
    with pytest.raises(KeyboardInterrupt):
        moco(tiny_encoder(), random_pairs(), broken, 3, [Interrupt()])
    assert len(broken.metrics()) == 1
    keras.utils.set_random_seed(2)  # Other weights, until the checkpoint.
    moco(tiny_encoder(), random_pairs(), broken, epochs=3)
    for a, b in zip(whole.metrics(), broken.metrics(), strict=True):
        for name in ("epoch", "loss", "positive_similarity", "queue_fill"):
            assert a[name] == pytest.approx(b[name], rel=1e-6), name


def test_a_line_without_its_checkpoint_is_dropped(tmp_path):
    run = RunFolder(tmp_path / "run", SETTINGS)
    run.write("run.json", {"settings": run.settings})
    lines = "".join(json.dumps({"epoch": e}) + "\n" for e in (1, 2, 3))
    (run.path / "metrics.jsonl").write_text(lines)
    run.keep_metrics(2)
    assert [row["epoch"] for row in run.metrics()] == [1, 2]


def test_a_line_that_broke_off_is_dropped(tmp_path):
    run = RunFolder(tmp_path / "run", SETTINGS)
    run.write("run.json", {"settings": run.settings})
    (run.path / "metrics.jsonl").write_bytes(b'{"epoch": 1}\n{"epo\xff')
    assert run.metrics() == [{"epoch": 1}]


@pytest.mark.parametrize("content", [b"", b"text", b"\x89HDF\r\n\x1a\n"])
def test_a_damaged_checkpoint_is_named(tmp_path, tiny_encoder, content):
    run = RunFolder(tmp_path / "run", SETTINGS)
    run.write("run.json", {"settings": run.settings})
    (run.path / "checkpoint.weights.h5").write_bytes(content)
    model = km.MoCo(tiny_encoder(), km.projection_head(4, 4), queue_size=16)
    model.compile(km.SGD(0.05))
    with pytest.raises(ValueError, match="checkpoint.*is damaged"):
        run.restore(model)


def test_a_loss_that_is_not_finite_stops_the_run(
    tmp_path, tiny_encoder, random_pairs
):
    run = RunFolder(tmp_path / "run", SETTINGS)
    with pytest.raises(ValueError, match="loss is nan in epoch 1"):
        moco(tiny_encoder(), random_pairs(), run, rate=1e38)
    assert run.metrics() == []


def test_other_settings_are_refused_and_named(tmp_path):
    RunFolder(tmp_path, SETTINGS).write("run.json", {"settings": SETTINGS})
    RunFolder(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match="seed was 0, now 1"):
        RunFolder(tmp_path, {**SETTINGS, "seed": 1})


def test_foreign_files_are_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="files that are no run"):
        RunFolder(tmp_path, SETTINGS)


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ValueError, match="folder"):
            RunFolder(place, SETTINGS)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_place_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match="cannot be written"):
        RunFolder(tmp_path / "run", SETTINGS)


def test_unreadable_settings_are_one_line(tmp_path):
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match="run.json is damaged"):
        RunFolder(tmp_path, SETTINGS)
