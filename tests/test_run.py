import json
import os
import shutil

import keras
import pytest

import keras_moco as km
from keras_moco.monitoring.run import RunFolder, RunLog, open_run
from keras_moco.monitoring.verdict import Verdict

SETTINGS = {"seed": 0, "crop_scale": (0.2, 1.0)}


def moco(encoder, pairs, run, epochs=2, callbacks=(), lines=None):
    lines = [] if lines is None else lines
    model = km.MoCo(encoder, km.projection_head(4, 4), queue_size=16)
    model.compile(km.SGD(0.05))
    run.write("run.json", {"settings": run.settings})
    log = RunLog(run, 6, epochs, lambda line, **_: lines.append(line))
    saves = km.Checkpoint(run.path, say=lines.append)
    callbacks = [log, *callbacks, saves]
    model.fit(pairs, epochs=epochs, callbacks=callbacks, verbose=0)
    return model


def test_metrics_hold_one_line_an_epoch(tmp_path, tiny_encoder, random_pairs):
    run = RunFolder(tmp_path / "run", SETTINGS)
    moco(tiny_encoder(), random_pairs(), run, epochs=3)
    rows = run.metrics()
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert set(rows[-1]) == {
        "epoch",
        "step",
        "loss",
        "queue_fill",
        "positive_similarity",
        "negative_similarity",
        "contrast_top1",
        "learning_rate",
        "key_momentum",
        "feature_std",
        "feature_spread",
        "key_age",
        "oldest_key_age",
        "key_consistency",
        "images_per_second",
        "seconds",
    }
    assert rows[0]["learning_rate"] == pytest.approx(0.05)
    assert rows[0]["key_momentum"] == 0.999
    # 3 steps of 6 keys into 16 rows: 6, 6 and 4 of the ages 1, 2 and 3.
    assert [row["step"] for row in rows] == [3, 6, 9]
    assert rows[0]["key_age"] == pytest.approx((6 + 12 + 12) / 16)
    assert rows[0]["oldest_key_age"] == 3
    assert rows[0]["key_consistency"] == pytest.approx(0.999**3)
    spread = rows[0]["feature_std"] * 4**0.5
    assert rows[0]["feature_spread"] == pytest.approx(spread)


def test_a_verdict_is_said_where_it_changes(
    tmp_path, tiny_encoder, random_pairs, monkeypatch
):
    """And not again by a process that goes on."""
    told = ["learning", "at chance", "at chance", "at chance", "learning"]
    monkeypatch.setattr(
        "keras_moco.monitoring.run.judge",
        lambda rows, settings: Verdict(told[len(rows) - 1], "So it is."),
    )
    run, lines = RunFolder(tmp_path / "run", SETTINGS), []
    for epochs in (2, 5):
        moco(tiny_encoder(), random_pairs(), run, epochs, lines=lines)
    said = [line for line in lines if line.endswith("So it is.")]
    assert said == ["at chance: So it is.", "learning: So it is."]


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


class Call(keras.callbacks.Callback):
    """Calls a function at the begin of an epoch."""

    def __init__(self, epoch, function):
        super().__init__()
        self.epoch = epoch
        self.function = function

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.epoch:
            self.function()


def test_lines_of_epochs_that_are_done_again_are_dropped(
    tmp_path, tiny_encoder, random_pairs
):
    """Those that were written, and whose checkpoint was not."""
    run = RunFolder(tmp_path / "run", SETTINGS)
    moco(tiny_encoder(), random_pairs(), run, epochs=2)
    rows = run.metrics()
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"epoch": 3, "loss": 0.0}) + "\n")
    moco(tiny_encoder(), random_pairs(), run, epochs=4)
    assert [row["epoch"] for row in run.metrics()] == [1, 2, 3, 4]
    assert run.metrics()[:2] == rows
    assert run.metrics()[2]["loss"] > 0


def test_a_line_that_broke_off_is_dropped(tmp_path):
    run = RunFolder(tmp_path / "run", SETTINGS)
    run.write("run.json", {"settings": run.settings})
    path = run.path / "metrics.jsonl"
    lines = (
        b'{"epo\xff',
        b'{"epoch": null}',
        b'{"epoch": 2, "loss": "x"}',
        b'{"epoch": 2, "knn_top1": [1]}',
        b"5",
    )
    for broken in lines:
        path.write_bytes(b'{"epoch": 1}\n' + broken + b'\n{"epoch": 3}\n')
        assert run.metrics() == [{"epoch": 1}]


def test_a_folder_that_is_deleted_gets_its_log_again(
    tmp_path, tiny_encoder, random_pairs
):
    run = RunFolder(tmp_path / "run", SETTINGS)
    gone = Call(1, lambda: shutil.rmtree(run.path))
    moco(tiny_encoder(), random_pairs(), run, callbacks=[gone])
    assert [row["epoch"] for row in run.metrics()] == [1, 2]
    assert run.differences() == []


def test_a_log_that_cannot_be_written_is_said_and_written_later(
    tmp_path, tiny_encoder, random_pairs
):
    run, lines = RunFolder(tmp_path / "run", SETTINGS), []
    obstacle = run.path / "metrics.jsonl"
    put = Call(0, obstacle.mkdir)
    take = Call(1, obstacle.rmdir)
    pairs = random_pairs()
    moco(tiny_encoder(), pairs, run, 2, [put, take], lines)
    said = [line for line in lines if "cannot be written" in line]
    assert len(said) == 1 and "Is a directory" in said[0]
    assert [row["epoch"] for row in run.metrics()] == [1, 2]


def test_a_run_that_had_just_begun_is_no_foreign_folder(tmp_path):
    (tmp_path / "lock").write_text("")
    RunFolder(tmp_path, SETTINGS)


def test_the_folder_of_a_run_is_the_last_that_fits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = []

    def opened(settings, **options):
        run = open_run(None, "x", "demo", settings, say=lines.append, **options)
        run.write("run.json", {"settings": settings})
        return run.path.name

    assert opened({"seed": 0}) == "x-demo"
    assert opened({"seed": 0}) == "x-demo" and not lines
    assert opened({"seed": 1}) == "x-demo-2"
    assert "seed was 0, now 1" in lines[0] and "x-demo-2" in lines[0]
    assert opened({"seed": 0}, fresh=True) == "x-demo-3"
    assert opened({"seed": 0}) == "x-demo-3"
    assert opened({"seed": 1}) == "x-demo-2" and len(lines) == 1
    fresh = open_run("own", "x", "demo", {}, fresh=True)
    fresh.write("run.json", {})
    assert open_run("own", "x", "demo", {}, fresh=True).path.name == "own-2"


def test_other_settings_are_refused_and_named(tmp_path):
    RunFolder(tmp_path, SETTINGS).write("run.json", {"settings": SETTINGS})
    RunFolder(tmp_path, SETTINGS)
    with pytest.raises(ValueError, match="seed was 0, now 1"):
        RunFolder(tmp_path, {**SETTINGS, "seed": 1})


def test_a_run_goes_on_where_its_data_have_moved(tmp_path):
    before = {"data": "photos/, 3 images, 0a1b", "epochs": 3}
    RunFolder(tmp_path, before).write("run.json", {"settings": before})
    for data in ("photos, 3 images, 0a1b", "b, c, 3 images, 0a1b"):
        again = RunFolder(tmp_path, {**before, "data": data})
        assert again.settings == before
    with pytest.raises(ValueError, match="data was 'photos/, 3 .*, 9999'"):
        RunFolder(tmp_path, {**before, "data": "photos/, 3 images, 9999"})


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
    (tmp_path / "run.json").write_text('{"settings": [1]}')
    with pytest.raises(ValueError, match=r"damaged \(settings is \[1\]\)"):
        RunFolder(tmp_path, SETTINGS)
    (tmp_path / "run.json").write_text('{"settings": {"epochs": 1}}')
    with pytest.raises(ValueError, match="damaged: it lacks batch_size"):
        RunFolder(tmp_path, None).require("epochs", "batch_size")
    (tmp_path / "run.json").write_text('{"settings": {"frozen": true}}')
    with pytest.raises(ValueError, match="is the run of a classifier"):
        RunFolder(tmp_path, None).require("queue_size")


def test_what_an_older_version_did_not_know_is_off(tmp_path):
    RunFolder(tmp_path / "run", {"seed": 0}).write(
        "run.json", {"settings": {"seed": 0}}
    )
    RunFolder(tmp_path / "run", {"seed": 0, "memory_bank": False})
    with pytest.raises(ValueError, match="memory_bank was None, now True"):
        RunFolder(tmp_path / "run", {"seed": 0, "memory_bank": True})
