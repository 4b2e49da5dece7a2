"""The run folder: its settings and its log.

run.json                  all settings, versions, the data
metrics.jsonl             one line an epoch
events.out.tfevents.*     the same for TensorBoard
checkpoints/              see `Checkpoint`
lock                      while a process writes here
result.json               at the end
"""

import contextlib
import itertools
import json
import pathlib
import platform
import re
import subprocess
import sys
import time

import keras
import psutil
import tensorflow as tf

import keras_moco
from keras_moco import terminal
from keras_moco.export import check_export_folder, read_card
from keras_moco.monitoring.board import Board
from keras_moco.monitoring.quality import feature_spread, key_age
from keras_moco.monitoring.verdict import judge
from keras_moco.notes import check_json, read_json
from keras_moco.outputs import check_writable


class RunFolder:
    """A folder that belongs to one run and its settings.

    Args:
        path: Str or path.
        settings: Dict. Everything that decides the run's result. None takes
            those of the run that is there, only to read it.

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
            if not (self.path / "run.json").is_file():
                raise ValueError(
                    f"{self.path} is no run folder: it holds no run.json."
                )
            self.settings = self.read("run.json").get("settings") or {}
        else:
            self.check()

    def check(self):
        """Raises unless this run may be written here; writes nothing."""
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(
                f"The run folder must be a folder; {self.path} is a file."
            )
        check_writable(self.path)
        if not (self.path / "run.json").exists():
            own = {"lock", ".run.json.tmp"}  # Of a run that had just begun.
            there = self.path.iterdir() if self.path.is_dir() else ()
            if {path.name for path in there} - own:
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
        # Its own name for the data, which may have moved.
        there = self.read("run.json").get("settings") or {}
        self.settings = {**self.settings, **there}

    def differences(self):
        """What the run that is there was set to otherwise, a line each."""
        there = self.read("run.json").get("settings") or {}
        # What an older version did not know of is as it was if it is off.
        new = {name for name, value in self.settings.items() if value}
        names = {**there, **{name: None for name in new}}
        return [
            f"{name} was {there.get(name)!r}, now {self.settings.get(name)!r}"
            for name in names
            if _content(name, there) != _content(name, self.settings)
        ]

    def read(self, name):
        """Returns a JSON file of the folder; {} if it is not there."""
        try:
            return read_json(self.path / name)
        except FileNotFoundError:
            return {}
        except ValueError as error:  # Not JSON, or not even text.
            raise ValueError(
                f"{self.path / name} is damaged ({error}). Give another run "
                "folder."
            ) from error

    def require(self, *names):
        """Raises unless the settings of the run have all these names."""
        missing = set(names) - set(self.settings)
        if missing and "frozen" in self.settings:
            raise ValueError(
                f"{self.path} is the run of a classifier (linear-probe or "
                "finetune), not one of pretrain."
            )
        if missing:
            raise ValueError(
                f"{self.path / 'run.json'} is damaged: it lacks "
                f"{', '.join(sorted(missing))}."
            )

    def write(self, name, content):
        """Writes a JSON file of the folder, whole or not at all."""
        self.replace(name, json.dumps(content, indent=2) + "\n")

    def replace(self, name, text):
        """Writes a file beside its place, then moves it there."""
        self.path.mkdir(parents=True, exist_ok=True)
        draft = self.path / f".{name}.tmp"
        try:
            draft.write_text(text)
            draft.replace(self.path / name)
        finally:
            draft.unlink(missing_ok=True)

    def metrics(self):
        """The lines of metrics.jsonl, as dicts, up to the first broken one."""
        path = self.path / "metrics.jsonl"
        rows = []
        if path.exists():
            for line in path.read_text(errors="replace").splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:
                    break
                if not is_row(row):
                    break
                rows.append(row)
        return rows


def is_row(row):
    """Whether a line of metrics.jsonl is one: an epoch, and numbers."""
    try:
        check_json(row)
    except ValueError:
        return False
    return type(row.get("epoch")) is int and all(
        isinstance(value, (int, float, list)) for value in row.values()
    )


class RunLog(keras.callbacks.Callback):
    """Writes each epoch to the run folder and to the terminal.

    Put it behind `KNNMonitor` and `QualityMonitor`, whose figures it logs, with
    the verdict on them where it changes. The line of an epoch is written before
    its checkpoint, so that no saved epoch lacks its line; lines of epochs that
    are done again are dropped. A folder that cannot be written is said, and
    written once it can be.

    Args:
        run: `RunFolder`.
        batch_size: Int. Images a step, over all devices.
        epochs: Int. Of the whole run.
        say: Function of a text and, by name, of the figures in it; see
            `terminal.say_text`.
        quality: `QualityMonitor` or None. Its histograms and views are for
            TensorBoard.
        passes: `Passes` of the dataset, or None. What they waited is logged.
    """

    def __init__(
        self,
        run,
        batch_size,
        epochs,
        say=terminal.say_text,
        quality=None,
        passes=None,
    ):
        super().__init__()
        self.run = run
        self.batch_size = batch_size
        self.epochs = epochs
        self.say = say
        self.quality = quality
        self.passes = passes
        self.verdict = "learning"  # That it learns nobody has to be told.
        self.about = run.read("run.json")
        self.rows = None
        self.board = None

    def on_train_begin(self, logs=None):
        self.epoch_ends = [time.perf_counter()]
        # What verdicts go by; the settings of a run hold the same.
        self.judged_by = {
            "queue_size": self.model.queue_size,
            "batch_size": self.batch_size,
            "symmetric": self.model.symmetric,
            "num_images": self.model.num_images,
        }
        self.board = Board(
            self.run.path,
            {**self.run.settings, **self.judged_by},
            self.quality and self.quality.grid(),
        )

    def on_epoch_begin(self, epoch, logs=None):
        if self.rows is None:
            self.rows = [r for r in self.run.metrics() if r["epoch"] <= epoch]
            if self.rows:  # Said by the process before.
                self.verdict = judge(self.rows, self.judged_by).name
        self.waited = self.passes.waited if self.passes else 0.0
        self.epoch_time = self.last_batch_time = time.perf_counter()
        self.steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.steps = batch + 1
        self.last_batch_time = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        model = self.model
        row = {"epoch": epoch + 1, "step": model.step_guard.steps}
        row |= logs or {}
        if "feature_std" in row:
            row["feature_spread"] = feature_spread(
                row["feature_std"], model.encoder.output_shape[-1]
            )
        if float(model.contrast_top1.count.numpy()) > 0:
            row["contrast_top1"] = model.contrast_top1.result()
        row["learning_rate"] = model.optimizer.learning_rate
        row["key_momentum"] = model.key_momentum()
        row |= self._queue_ages()
        train_seconds = self.last_batch_time - self.epoch_time
        row["images_per_second"] = self.steps * self.batch_size / train_seconds
        if self.passes:
            waited = self.passes.waited - self.waited
            row["data_wait"] = min(1.0, waited / train_seconds)
        row["seconds"] = time.perf_counter() - self.epoch_time
        row = {name: _number(value) for name, value in row.items()}
        if self.quality is not None:
            row |= self.quality.histograms
        self.rows.append(row)
        try:
            self._write()
        except (OSError, tf.errors.OpError) as error:
            reason = getattr(error, "strerror", None) or type(error).__name__
            self.say(
                terminal.wrap(
                    f"The log cannot be written: {reason} ({self.run.path}). "
                    "The run goes on and tries again after the next epoch."
                )
            )
        self.epoch_ends.append(time.perf_counter())
        left = terminal.seconds_left(
            self.epoch_ends, self.epochs - row["epoch"]
        )
        self.say(
            terminal.epoch_line(row, self.epochs, left),
            **{k: v for k, v in row.items() if not isinstance(v, list)},
            epochs=self.epochs,
            seconds_left=round(left),
        )
        verdict = judge(self.rows, self.judged_by)
        if verdict.name != self.verdict:
            self.verdict = verdict.name
            self.say(terminal.wrap(str(verdict)), verdict=verdict.name)

    def _queue_ages(self):
        model = self.model
        if not model.queue_size or model.num_images:
            return {}
        mean, oldest = key_age(
            int(model.step_guard.steps.numpy()),
            self.batch_size * (1 + model.symmetric),
            model.queue_size,
        )
        # The share of the key encoder that is left of the one it was then.
        consistency = float(model.key_momentum()) ** oldest
        return {
            "key_age": mean,
            "oldest_key_age": oldest,
            "key_consistency": consistency,
        }

    def _write(self):
        # All lines: what could not be written before, or was deleted, too.
        text = "".join(json.dumps(row) + "\n" for row in self.rows)
        self.run.replace("metrics.jsonl", text)
        if not (self.run.path / "run.json").exists():
            self.run.write("run.json", self.about)
        self.board.write(self.rows)


def _content(name, settings):
    """A setting; of data what they hold, not where they are."""
    value = settings.get(name)
    if name == "data" and isinstance(value, str):
        return re.sub("^.*(?=, [0-9]+ images, )", "", value)
    return value


def open_run(run_dir, source, preset_name, settings, fresh=False, say=print):
    """The folder that a run goes to.

    Args:
        run_dir: Folder asked for, or None for `runs/<source>-<preset>`, with
            a number behind it: the last one that fits the settings.
        source: Str. Where the images come from.
        preset_name: Str.
        settings: Dict.
        fresh: Bool. A folder that is not there yet, whatever fits.
        say: Function that prints a line.
    """
    if run_dir is not None and not fresh:
        return RunFolder(run_dir, settings)
    stem = pathlib.Path(source.split(",")[0]).resolve().name or "images"
    name = run_dir or pathlib.Path("runs", f"{stem}-{preset_name}")
    fitting, refused = None, None
    for number in itertools.count(1):
        path = pathlib.Path(name if number == 1 else f"{name}-{number}")
        if not path.exists():
            break
        try:
            fitting = RunFolder(path, settings)
        except ValueError as error:
            refused = error
    if fresh or fitting is None:
        if refused and not fresh:
            say(terminal.wrap(f"{refused} This one goes to {path}."))
        return RunFolder(path, settings)
    return fitting


def export_folder(export_to, run, kind="encoder"):
    """The folder asked for, or the first of the run's name that is free."""
    for number in itertools.count(1):
        suffix = "" if number == 1 else f"-{number}"
        folder = pathlib.Path(
            export_to or f"saved_models/{run.path.name}{suffix}"
        )
        check_export_folder(folder, kind)
        if folder.absolute() == run.path.absolute():
            raise ValueError(
                f"{folder} is the run folder: export to another one."
            )
        card = read_card(folder)
        if not card or card.get("settings") == run.settings:
            return folder
        if export_to:
            raise ValueError(
                f"{folder} holds the {kind} of another run. Give another "
                "folder with --export-to."
            )


def finished_line(run, result, export_to):
    """What is said in place of a run that has its result already."""
    text = f"The run in {run.path} is finished already; this is its result."
    folder = result.get("export", export_to)
    if folder is not None and not pathlib.Path(folder).exists():
        text += f" Its export, {folder}, is not there any more."
    elif export_to is not None and str(export_to) != str(folder):
        text += f" Its export is in {folder}, not in {export_to}."
    return terminal.wrap(text)


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
