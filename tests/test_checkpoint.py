import hashlib
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_moco as km
from keras_moco.safety.checkpoint import Checkpoint
from keras_moco.safety.state import (
    Place,
    checkpoints,
    place_of,
    read_whole,
    state_of,
)

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def moco(tiny_encoder):
    """A function that builds and compiles the same model every time."""

    def build(seed=0, dim=4, **options):
        keras.utils.set_random_seed(seed)
        head = km.projection_head(4, dim)
        model = km.MoCo(tiny_encoder(), head, queue_size=16)
        model.compile(km.SGD(0.05), **options)
        return model

    return build


@pytest.fixture
def images():
    """Two dozen images, which are their own views: 4 steps of 6."""
    pixels = np.random.default_rng(0).integers(0, 255, (24, 8, 8, 3), np.uint8)

    def pairs(**options):
        options = {"batch_size": 6, "augment": lambda x: x, **options}
        return km.pretrain_dataset(pixels, km.PRESETS["demo"], 8, **options)

    return pairs


class Raise(keras.callbacks.Callback):
    """Ends `fit` after so many steps, as a crash would."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_train_batch_end(self, batch, logs=None):
        if int(self.model.step_guard.steps.numpy()) >= self.steps:
            raise RuntimeError("crash")


class Call(keras.callbacks.Callback):
    """Calls a function after a step, once."""

    def __init__(self, step, function):
        super().__init__()
        self.step = step
        self.function = function

    def on_train_batch_end(self, batch, logs=None):
        self.step -= 1
        if not self.step:
            self.function()


def fit(model, pairs, folder, *others, epochs=3, lines=None, **options):
    say = (lines if lines is not None else []).append
    saves = Checkpoint(folder, say=say, **options)
    model.fit(pairs, epochs=epochs, callbacks=[*others, saves], verbose=0)
    return saves


def names(folder):
    """The last part of a name is the digest of everything that is saved."""
    return [path.name for path in checkpoints(folder / "checkpoints")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, kills", [("array", 12), ("devices", 2), ("folder", 2)]
)
def test_a_run_that_is_killed_equals_one_that_never_was(tmp_path, kind, kills):
    command = [sys.executable, HERE / "killed.py", tmp_path, kind, str(kills)]
    subprocess.run(command, check=True, timeout=600)
    ends = json.loads((tmp_path / "kills.json").read_text())
    assert [end[-1] for end in ends] == [-signal.SIGKILL] * kills + [0, 0], ends
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert len(names(whole)) == 3
    assert names(killed)[0] == names(whole)[0]

    def rows(run):
        lines = (run / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        for row in rows:  # All but what the clock says.
            for name in ("seconds", "images_per_second", "data_wait"):
                row.pop(name, None)
        return rows

    assert rows(killed) == rows(whole)
    assert [row["epoch"] for row in rows(whole)] == list(range(1, 13))
    assert curve(killed) == {r["epoch"]: r["loss"] for r in rows(whole)}


def curve(run):
    """TensorBoard's loss by epoch."""
    from tensorboard.backend.event_processing.event_accumulator import (
        EventAccumulator,
    )
    from tensorboard.util.tensor_util import make_ndarray

    points = {}
    for path in run.glob("events*"):
        events = EventAccumulator(str(path), {"tensors": 0})  # All of them.
        events.Reload()
        if "loss/loss" in events.Tags()["tensors"]:
            for event in events.Tensors("loss/loss"):
                loss = float(make_ndarray(event.tensor_proto))
                assert points.setdefault(event.step, loss) == loss
    return points


def test_all_that_moves_is_in_the_file(tmp_path, moco, images):
    model = moco()
    fit(model, images(), tmp_path, epochs=1)
    content = read_whole(checkpoints(tmp_path / "checkpoints")[0])
    variables = state_of(model)
    assert set(content) == {*variables, "about"}
    everything = [*model.variables, *model.optimizer.variables]
    assert {id(v) for v in everything} <= {id(v) for v in variables.values()}
    for name, variable in variables.items():
        np.testing.assert_array_equal(content[name], variable.numpy(), name)


def test_an_epoch_goes_on_within_itself(tmp_path, moco, images):
    fit(moco(), images(), tmp_path / "whole")
    crashed, lines = tmp_path / "crashed", []
    for seed, crash in enumerate((3, 7, 11)):
        with pytest.raises(RuntimeError, match="crash"):
            fit(moco(seed), images(), crashed, Raise(crash), every_steps=2)
    history = keras.callbacks.History()
    fit(moco(9), images(), crashed, history, every_steps=2, lines=lines)
    assert lines[0].startswith("Going on after 2 epochs and 2 steps")
    assert history.epoch == [2]
    assert names(crashed)[0] == names(tmp_path / "whole")[0]


def test_several_steps_in_one_call_are_counted(tmp_path, moco, images):
    options = {"steps_per_execution": 3}  # Of 4 steps: one call of 1.
    fit(moco(**options), images(), tmp_path / "whole", every_steps=1, keep=9)
    steps = [
        place_of(p)[1] for p in checkpoints(tmp_path / "whole" / "checkpoints")
    ]
    assert steps[::-1] == [3, 0] * 3
    crashed = tmp_path / "crashed"
    with pytest.raises(RuntimeError, match="crash"):
        fit(moco(**options), images(), crashed, Raise(7), every_steps=1)
    os.remove(checkpoints(crashed / "checkpoints")[0])  # After 7: goes on at 4.
    fit(moco(1, **options), images(), crashed, every_steps=1)
    assert names(crashed) == names(tmp_path / "whole")[:3]


def test_another_dataset_goes_on_by_reading_on(tmp_path, moco, random_pairs):
    pairs = random_pairs(steps=4)
    fit(moco(), pairs, tmp_path / "whole")
    crashed = tmp_path / "crashed"
    with pytest.raises(RuntimeError, match="crash"):
        fit(moco(), pairs, crashed, Raise(7), every_steps=1)
    fit(moco(1), pairs, crashed, every_steps=1)
    assert names(crashed)[0] == names(tmp_path / "whole")[0]
    endless = tmp_path / "endless"
    for end in (Raise(7), Raise(99)):
        saves = Checkpoint(endless, every_steps=1, say=lambda line: None)
        try:
            moco(0).fit(
                pairs.repeat(),
                epochs=3,
                steps_per_epoch=4,
                callbacks=[saves, end],
                verbose=0,
            )
        except RuntimeError:
            assert saves.saved == (1, 2)
    assert names(endless)[0] == names(tmp_path / "whole")[0]


def test_a_dataset_of_unknown_length_is_refused(tmp_path, moco, random_pairs):
    pairs = random_pairs().filter(lambda *_: True)
    with pytest.raises(ValueError, match="has to know the steps of an epoch"):
        fit(moco(), pairs, tmp_path)


def test_the_order_starts_anywhere_without_reading_before(images):
    whole = [index.numpy().tolist() for *_, index in images(first_epoch=1)]
    later = images().passes.start_at(1, 3)
    assert [index.numpy().tolist() for *_, index in later] == whole[3:]
    following = [index.numpy().tolist() for *_, index in later]
    assert len(following) == 4 and following != whole


def test_the_newest_are_kept_and_every_so_many_epochs(tmp_path, moco, images):
    options = {"keep": 2, "keep_every_epochs": 2, "every_steps": 3}
    fit(moco(), images(), tmp_path, epochs=5, **options)
    paths = checkpoints(tmp_path / "checkpoints")
    kept = [place_of(path) for path in paths]
    assert kept == [(5, 0), (4, 3), (4, 0), (2, 0)]
    assert not list(tmp_path.rglob(".*"))
    assert not (tmp_path / "lock").exists()


# Damage


@pytest.fixture
def two_files(tmp_path, moco, images):
    """A folder with two checkpoints, and the bytes of the newest."""
    fit(moco(), images(), tmp_path, epochs=2)
    newest, before = checkpoints(tmp_path / "checkpoints")
    return tmp_path, newest, newest.read_bytes()


def test_no_damage_of_a_bit_or_of_the_end_is_overlooked(two_files):
    _, path, content = two_files
    draw = random.Random(0)
    for number in range(200):
        place = draw.randrange(len(content))
        damaged = bytearray(content[: place if number % 2 else None])
        if not number % 2:
            damaged[place] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        assert read_whole(path) is None
    path.write_bytes(content)
    assert read_whole(path)


@pytest.mark.parametrize("damage", [b"", b"x" * 99, "half", "flip"])
def test_a_damaged_file_is_said_and_passed_over(two_files, moco, damage):
    folder, path, content = two_files
    if damage == "half":
        damage = content[: len(content) // 2]
    elif damage == "flip":
        damage = content[:-200] + bytes([content[-200] ^ 1]) + content[-199:]
    path.write_bytes(damage)
    lines, model = [], moco(5)
    assert Checkpoint(folder, say=lines.append).restore(model) == (1, 0)
    assert lines == [f"{path} is damaged; the one before is taken."]
    before = read_whole(checkpoints(folder / "checkpoints")[1])
    np.testing.assert_array_equal(before["queue/0"], model.queue)
    assert path.exists()


def test_a_draft_is_no_checkpoint(two_files, moco):
    folder, path, content = two_files
    path.rename(path.with_name(".draft"))
    lines = []
    assert Checkpoint(folder, say=lines.append).restore(moco()) == (1, 0)
    assert not lines


def test_no_whole_file_is_an_error(two_files, moco):
    folder, *_ = two_files
    for path in checkpoints(folder / "checkpoints"):
        path.write_bytes(b"")
    with pytest.raises(ValueError, match="None of the 2 .*--fresh"):
        Checkpoint(folder, say=lambda line: None).restore(moco())


def test_pickles_are_not_loaded(tmp_path):
    """A file of others, digest and all, that would run code."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    draft = folder / "draft.npz"
    np.savez(draft, about=np.array([pathlib.Path()], object))
    digest = hashlib.sha256(draft.read_bytes()).hexdigest()[:32]
    path = draft.rename(folder / f"epoch-00001-step-0000000-{digest}.npz")
    with pytest.raises(ValueError, match="allow_pickle=False"):
        read_whole(path)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dim": 5}, "another model: .* there and .* here"),
        ({"seed": 1}, "other data: seed was 0, now 1"),
        ({"batch_size": 8}, "other data: batch_size was 6, now 8; steps"),
    ],
)
def test_another_model_or_data_is_named(
    two_files, moco, images, options, message
):
    dim = options.pop("dim", 4)
    with pytest.raises(ValueError, match=message):
        fit(moco(dim=dim), images(**options), two_files[0])


def test_a_checkpoint_of_version_0_2_is_named(tmp_path, moco):
    (tmp_path / "checkpoint.weights.h5").write_bytes(b"")
    with pytest.raises(ValueError, match="keras_moco 0.2.*--fresh"):
        Checkpoint(tmp_path).restore(moco())


def test_a_checkpoint_of_format_1_loads(tmp_path):
    """Written by `small_model` of this version, with 0, 1, 2, ... in all."""
    shutil.copytree(HERE / "golden" / "checkpoint_1", tmp_path / "checkpoints")
    model = small_model()
    assert Checkpoint(tmp_path).restore(model) == (3, 2)
    for number, variable in enumerate(state_of(model).values()):
        count = np.arange(np.prod(variable.shape)) + number
        np.testing.assert_array_equal(
            np.ravel(variable), count.astype(variable.dtype)
        )


def small_model():
    encoder = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    head = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model = km.MoCo(encoder, head, queue_size=4)
    model.compile(km.SGD(0.1))
    return model


def write_small_model(folder):
    """How the file of the test above was made."""
    model = small_model()
    model.step_guard.drops = True  # It has counted steps that were not finite.
    model.optimizer.build(model.trainable_variables)
    for number, variable in enumerate(state_of(model).values()):
        count = np.arange(np.prod(variable.shape)) + number
        variable.assign(count.reshape(variable.shape))
    saves = Checkpoint(folder)
    saves.set_model(model)
    saves.place = Place(3, 2)
    assert saves.save()


# Trouble


def test_a_full_disk_is_one_line_and_tried_again(tmp_path, moco, images):
    """A quota: the system refuses files beyond a size."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    quota = lambda size: resource.setrlimit(  # noqa: E731
        resource.RLIMIT_FSIZE, (size, limits[1])
    )
    lines = []
    full = Call(4, lambda: quota(5000))
    room = Call(9, lambda: quota(limits[0]))
    try:
        fit(moco(), images(), tmp_path, full, room, lines=lines, keep=9)
    finally:
        quota(limits[0])
    # The second call came before the end of the first epoch.
    assert [line.split(" (")[0] for line in lines] == [
        "Not saved: File too large"
    ] * 2
    assert lines[0].endswith("No other; the run goes on and tries again.")
    assert [place_of(p) for p in checkpoints(tmp_path / "checkpoints")] == [
        (3, 0)
    ]
    assert not list(tmp_path.rglob(".draft"))


def test_the_checkpoint_before_outlives_a_full_disk(two_files, moco):
    folder, path, content = two_files
    model = moco()
    saves = Checkpoint(folder, say=lambda line: None)
    saves.restore(model)
    saves.set_model(model)
    saves.place = Place(5, 0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    try:
        assert not saves.save()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == content
    assert saves.saved == (2, 0)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, moco, images):
    """For root, who may write anywhere, a file takes the folder's place."""
    folder, lines = tmp_path / "checkpoints", []

    def lose():
        shutil.rmtree(folder)
        folder.write_text("")

    fit(moco(), images(), tmp_path, Call(5, lose), lines=lines)
    assert len(lines) == 2 and "The last is of 1 epochs" in lines[0]


def test_a_folder_that_is_deleted_is_made_again(tmp_path, moco, images):
    run = tmp_path / "run"
    fit(moco(), images(), run, Call(5, lambda: shutil.rmtree(run)))
    assert len(names(run)) == 2
    fit(moco(), images(), tmp_path / "whole")
    assert names(run)[0] == names(tmp_path / "whole")[0]


def test_the_clock_may_be_set_back(two_files, moco, monkeypatch):
    folder, path, _ = two_files
    os.utime(path, (0, 0))
    monkeypatch.setattr("time.time", lambda: -1.0)
    monkeypatch.setattr("time.localtime", lambda *_: (1960, 1, 1, 0, 0, 0))
    saves, model = Checkpoint(folder), moco()
    assert saves.restore(model) == (2, 0)
    saves.set_model(model)
    assert saves.save()


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_a_signal_stops_after_the_step(tmp_path, moco, images, name):
    send = Call(6, lambda: os.kill(os.getpid(), getattr(signal, name)))
    history, handler = (
        keras.callbacks.History(),
        signal.getsignal(getattr(signal, name)),
    )
    lines = []
    saves = fit(moco(), images(), tmp_path, send, history, lines=lines)
    assert saves.stopped == name
    # The thread that reads it may be a step late.
    assert Place(1, 2) <= saves.saved <= Place(2, 0)
    assert signal.getsignal(getattr(signal, name)) is handler
    assert history.epoch in ([0], [0, 1])
    assert lines[0].startswith(f"{name}: stopping after this step")
    fit(moco(3), images(), tmp_path)
    fit(moco(), images(), tmp_path / "whole")
    assert names(tmp_path)[0] == names(tmp_path / "whole")[0]


def test_a_signal_during_a_save_lets_it_end(
    tmp_path, moco, images, monkeypatch
):
    sync = os.fsync

    def interrupted(file):
        monkeypatch.setattr(os, "fsync", sync)
        os.kill(os.getpid(), signal.SIGTERM)
        sync(file)

    monkeypatch.setattr(os, "fsync", interrupted)
    saves = fit(moco(), images(), tmp_path, every_steps=2)
    assert saves.stopped == "SIGTERM"
    assert all(map(read_whole, checkpoints(tmp_path / "checkpoints")))
    assert not list(tmp_path.rglob(".draft"))


@pytest.mark.parametrize(
    "options",
    [
        {"every_steps": 0},
        {"every_minutes": 0},
        {"keep": 0},
        {"keep_every_epochs": -1},
    ],
    ids=str,
)
def test_arguments_out_of_range_are_refused(tmp_path, options):
    (name,) = options
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        Checkpoint(tmp_path, **options)


def test_two_checkpoints_are_one_too_many(tmp_path, moco, images):
    with pytest.raises(ValueError, match="One `Checkpoint`"):
        moco().fit(images(), callbacks=[Checkpoint(tmp_path)] * 2)
