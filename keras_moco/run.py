"""The run folder: its settings, its log, its checkpoint.

run.json                  all settings, versions, the data
metrics.jsonl             one line an epoch
events.out.tfevents.*     the same for TensorBoard
checkpoint.weights.h5     weights, queue, optimizer after the last epoch
result.json               at the end
"""

import contextlib
import itertools
import json
import math
import pathlib
import platform
import subprocess
import sys
import time

import keras
import psutil
import tensorflow as tf

import keras_moco
from keras_moco import terminal
from keras_moco.export import check_export_folder, check_writable, read_card

CHECKPOINT = "checkpoint.weights.h5"


class RunFolder:
    """A folder that belongs to one run and its settings.

    Args:
        path: Str or path.
        settings: Dict. Everything that decides the run's result. None takes
            those of the run that is there.

    Raises:
        ValueError: It cannot be written, holds other files, or a run with
            other settings.

    Example:
        >>> run = RunFolder("runs/first", {"seed": 0})
    """

    def __init__(self, path, settings):
        self.path = pathlib.Path(path)
        # What JSON makes of them (tuples are lists), to compare like with like.
        self.settings = json.loads(json.dumps(settings))
        if settings is None:
            self.settings = self.read("run.json").get("settings") or {}
        self.check()

    def check(self):
        """Raises unless this run may be written here; writes nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"The run folder must be a folder; {self.path} is a file."
            )
        check_writable(self.path)
        if not (self.path / "run.json").exists():
            if self.path.is_dir() and any(self.path.iterdir()):
                raise ValueError(
                    f"{self.path} holds files that are no run. Give a new or "
                    "empty folder with --run-dir."
                )
            return
        differing = self.differences()
        if differing:
            raise ValueError(
                f"{self.path} holds another run: {'; '.join(differing)}. Give "
                "another folder with --run-dir, or the same settings to go on."
            )

    def differences(self):
        """What the run that is there was set to otherwise, a line each."""
        there = self.read("run.json").get("settings") or {}
        names = {**there, **self.settings}
        return [
            f"{name} was {there.get(name)!r}, now {self.settings.get(name)!r}"
            for name in names
            if there.get(name) != self.settings.get(name)
        ]

    def read(self, name):
        """Returns a JSON file of the folder; {} if it is not there."""
        try:
            content = json.loads((self.path / name).read_text())
            if not isinstance(content, dict):
                raise ValueError("no object")
        except FileNotFoundError:
            return {}
        except ValueError as error:  # Not JSON, or not even text.
            raise ValueError(
                f"{self.path / name} is damaged ({error}). Give another folder "
                "with --run-dir."
            ) from error
        return content

    def write(self, name, content):
        """Writes a JSON file of the folder, whole or not at all."""
        self.path.mkdir(parents=True, exist_ok=True)
        draft = self.path / f".{name}.tmp"
        draft.write_text(json.dumps(content, indent=2) + "\n")
        draft.replace(self.path / name)

    def metrics(self):
        """The lines of metrics.jsonl, as dicts, up to one that broke off."""
        path = self.path / "metrics.jsonl"
        rows = []
        if path.exists():
            for line in path.read_text(errors="replace").splitlines():
                try:
                    rows.append(json.loads(line))
                except json.JSONDecodeError:
                    break
        return rows

    def restore(self, model):
        """Loads the checkpoint if there is one.

        Args:
            model: Compiled `MoCo`.

        Returns:
            Int. Steps that are done.
        """
        path = self.path / CHECKPOINT
        if not path.exists():
            return 0
        model.optimizer.build(model.trainable_variables)
        try:
            model.load_weights(path)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"The checkpoint {path} is damaged or of another model "
                f"({error}). Delete it to begin again, or give another folder "
                "with --run-dir."
            ) from error
        return int(model.optimizer.iterations.numpy())

    def keep_metrics(self, epochs):
        """Drops the lines of epochs that are to be done again."""
        lines = [row for row in self.metrics() if row["epoch"] <= epochs]
        text = "".join(json.dumps(row) + "\n" for row in lines)
        (self.path / "metrics.jsonl").write_text(text)

    def save(self, model):
        """Writes the checkpoint beside its place, then moves it there."""
        draft = self.path / f".tmp.{CHECKPOINT}"
        model.save_weights(draft)
        draft.replace(self.path / CHECKPOINT)


class RunLog(keras.callbacks.Callback):
    """Writes each epoch to the run folder and to the terminal.

    Put it behind `KNNMonitor`, whose figure it logs. The line of an epoch is
    written before its checkpoint, so that no saved epoch lacks its line.

    Args:
        run: `RunFolder`.
        batch_size: Int. Images a step, over all devices.
        epochs: Int. Of the whole run.
        say: Function that prints a line.
    """

    def __init__(self, run, batch_size, epochs, say=print):
        super().__init__()
        self.run = run
        self.batch_size = batch_size
        self.epochs = epochs
        self.say = say
        self.writer = tf.summary.create_file_writer(str(run.path))

    def on_train_begin(self, logs=None):
        self.begin_time = time.perf_counter()
        self.epochs_here = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch_time = self.last_batch_time = time.perf_counter()
        self.steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps = batch + 1
        self.last_batch_time = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        model = self.model
        row = {"epoch": epoch + 1, **(logs or {})}
        if float(model.contrast_top1.count.numpy()) > 0:
            row["contrast_top1"] = model.contrast_top1.result()
        row["learning_rate"] = model.optimizer.learning_rate
        row["key_momentum"] = model.key_momentum()
        train_seconds = self.last_batch_time - self.epoch_time
        row["images_per_second"] = self.steps * self.batch_size / train_seconds
        row["seconds"] = time.perf_counter() - self.epoch_time
        row = {name: _number(value) for name, value in row.items()}
        if not math.isfinite(row["loss"]):
            raise ValueError(
                f"The loss is {row['loss']} in epoch {epoch + 1}. A lower "
                "learning rate helps mostly: --set base_learning_rate=... in "
                "another run folder. Epochs before it are kept in "
                f"{self.run.path}"
            )
        with open(self.run.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        with self.writer.as_default(step=epoch + 1):
            for name, value in row.items():
                if name != "epoch":
                    tf.summary.scalar(name, value)
        self.writer.flush()
        self.run.save(model)
        self.epochs_here += 1
        spent = time.perf_counter() - self.begin_time
        left = spent / self.epochs_here * (self.epochs - row["epoch"])
        self.say(terminal.epoch_line(row, self.epochs, left))


def open_run(run_dir, source, preset_name, settings):
    """The folder asked for, or the first of its name that fits the settings."""
    if run_dir is not None:
        return RunFolder(run_dir, settings)
    stem = pathlib.Path(source.split(",")[0]).resolve().name or "images"
    for number in itertools.count(1):
        suffix = "" if number == 1 else f"-{number}"
        path = pathlib.Path("runs", f"{stem}-{preset_name}{suffix}")
        if not path.exists():
            return RunFolder(path, settings)
        with contextlib.suppress(ValueError):
            return RunFolder(path, settings)


def export_folder(export_to, run):
    """The folder asked for, or the first of the run's name that is free."""
    for number in itertools.count(1):
        suffix = "" if number == 1 else f"-{number}"
        folder = pathlib.Path(
            export_to or f"saved_models/{run.path.name}{suffix}"
        )
        check_export_folder(folder)
        if folder.absolute() == run.path.absolute():
            raise ValueError(
                f"{folder} is the run folder: export to another one."
            )
        card = read_card(folder)
        if not card or card.get("settings") == run.settings:
            return folder
        if export_to:
            raise ValueError(
                f"{folder} holds the encoder of another run. Give another "
                "folder with --export-to."
            )


def origin():
    """Where a result came from: versions, machine, revision of the user's."""
    revision = None
    with contextlib.suppress(OSError):  # There may be no git.
        command = ["git", "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True)
        revision = done.stdout.strip() or None
    return {
        "versions": {
            "keras_moco": keras_moco.__version__,
            "keras": keras.version(),
            "tensorflow": tf.version.VERSION,
            "python": platform.python_version(),
        },
        "devices": [d.device_type for d in tf.config.list_physical_devices()],
        "git_revision": revision,
    }


def peak_memory_mb():
    """The most memory that this process has held, in MB."""
    if sys.platform == "win32":
        return psutil.Process().memory_info().peak_wset / 2**20
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def _number(value):
    """A Python number of a tensor or of a number, for JSON."""
    return keras.ops.convert_to_numpy(value).item()
