"""Saving a run at any step, and going on from there."""

import contextlib
import json
import os
import pathlib
import time

import keras
import numpy as np
import tensorflow as tf

from keras_moco import distribute
from keras_moco.safety.lock import RunLock
from keras_moco.safety.signals import StopSignals
from keras_moco.safety.state import (
    FORMAT,
    Hashed,
    Place,
    assign,
    checkpoints,
    file_name,
    place_of,
    read_whole,
    state_of,
    sync_folder,
    write_state,
)

FOLDER = "checkpoints"


class Stopped(Exception):
    """Ends `fit` within an epoch, after a signal."""


class EpochEnd(keras.callbacks.Callback):
    """Ends an epoch that began within itself: Keras knows but whole ones.

    Args:
        steps: Int. Steps of a whole epoch.
        first_step: Int. Where the first epoch begins.
    """

    def __init__(self, steps, first_step):
        super().__init__()
        self.steps = steps
        self.first_step = first_step

    def on_train_batch_end(self, batch, logs=None):
        if self.first_step + batch + 1 >= self.steps:
            self.model.stop_training = "epoch"  # True is somebody else's.

    def on_epoch_end(self, epoch, logs=None):
        self.first_step = 0
        if self.model.stop_training == "epoch":
            self.model.stop_training = False


class Checkpoint(keras.callbacks.Callback):
    """Saves a run so that it goes on as if nothing had happened.

    At the end of every epoch, every so many steps or minutes, and when the
    process is asked to stop (SIGTERM, SIGINT, SIGUSR1: the step is finished,
    saved, and `fit` returns; a second signal ends at once). `MoCo.fit` starts
    from the newest file that is whole, in the middle of an epoch if need be.

    Saved are all weights, the queue, the optimizer, the means of the epoch so
    far, and the place in the data. With a dataset of `pretrain_dataset` the
    run that goes on equals one that never stopped; of another `tf.data.Dataset`
    the batches before the place are read once more and dropped.

    Args:
        run_dir: Str or path. Files go to `run_dir/checkpoints`, and one process
            at a time may write them.
        every_steps: Int >= 1 or None. Steps between two saves.
        every_minutes: Float > 0 or None. Minutes between two saves.
        keep: Int >= 1. How many are kept, the newest. Defaults to 3.
        keep_every_epochs: Int >= 1 or None. Those of every so many epochs are
            kept besides.
        say: Function that prints a line.

    Attributes:
        stopped: Name of the signal that ended `fit`, or None.

    Raises:
        ValueError: An argument out of range; on `fit`, a folder that another
            process writes or whose files are of another model or data.

    Example:
        >>> checkpoint = Checkpoint("runs/first", every_minutes=10)
        >>> model.fit(pairs, epochs=200, callbacks=[checkpoint])
    """

    def __init__(
        self,
        run_dir,
        every_steps=None,
        every_minutes=None,
        keep=3,
        keep_every_epochs=None,
        say=print,
    ):
        super().__init__()
        for name, value, low in (
            ("every_steps", every_steps, 1),
            ("every_minutes", every_minutes, 0),
            ("keep", keep, 1),
            ("keep_every_epochs", keep_every_epochs, 1),
        ):
            if value is not None and (value < low or not value):
                raise ValueError(
                    f"`{name}` must be {f'>= {low}' if low else '> 0'}. "
                    f"Received: {value}"
                )
        self.folder = pathlib.Path(run_dir) / FOLDER
        self.every_steps = every_steps
        self.every_minutes = every_minutes
        self.keep = keep
        self.keep_every_epochs = keep_every_epochs
        self.say = say
        self.lock = RunLock(run_dir, say)
        self.signals = StopSignals(say)
        self.stopped = None
        self.identity = {}  # Of the data, once `fit` has them.
        self.num_steps = None
        self.place = Place(0, 0)
        self.saved = None  # The place of the newest file that is whole.
        self.means = {}

    # Reading

    def start(self, x, steps_per_epoch=None, initial_epoch=0):
        """Loads the state and finds its place in the data.

        Args:
            x: `tf.data.Dataset` that knows its length.
            steps_per_epoch: Int or None. Where x is endless.
            initial_epoch: Int. Where to start if nothing is saved.

        Returns:
            Pair of the dataset from that place on, and a list of the callbacks
            that it needs.
        """
        passes = getattr(x, "passes", None)
        length = passes.steps if passes else length_of(x)
        steps = self.num_steps = steps_per_epoch or length
        if steps < 1 or length not in (steps, tf.data.INFINITE_CARDINALITY):
            raise ValueError(
                "`Checkpoint` has to know the steps of an epoch: give `fit` a "
                "tf.data.Dataset that knows its length (see tf.data."
                "experimental.assert_cardinality), or an endless one and "
                f"`steps_per_epoch`. Received: steps_per_epoch="
                f"{steps_per_epoch} of {type(x).__name__} of length {length}"
            )
        self.identity = passes.identity if passes else {}
        if not any(self.restore(self.model)):
            self.place = Place(initial_epoch, 0)
        else:
            self.say(f"Going on after {self.place}, from {self.folder.parent}")
        epoch, step = self.place
        distribute.agree(
            self.model.distribute_strategy, self.identity, self.place
        )
        ending = [EpochEnd(steps, step)] if step else []
        if passes:
            return passes.start_at(epoch, step), ending
        if length == tf.data.INFINITE_CARDINALITY:
            return x.skip(epoch * steps + step), ending
        return skip_once(x, step) if step else x, ending

    def restore(self, model):
        """Loads the newest checkpoint that is whole.

        Args:
            model: Compiled `MoCo`.

        Returns:
            `Place`; of epoch 0 and step 0 if there is none.

        Raises:
            ValueError: None is whole, or it is of another model or data.
        """
        refuse_version_0_2(self.folder.parent)
        paths = checkpoints(self.folder)
        for path in paths:
            content = read_whole(path)
            if content is None:
                self.say(f"{path} is damaged; the one before is taken.")
                continue
            self.place = self.saved = self._load(model, path, content)
            return self.place
        if paths:
            raise ValueError(
                f"None of the {len(paths)} checkpoints in {self.folder} is "
                "whole. Start anew with --fresh, or give another folder."
            )
        return self.place

    def _load(self, model, path, content):
        about = json.loads(str(content.pop("about")))
        if about["format"] > FORMAT:
            raise ValueError(
                f"{path} was written by a later version of keras_moco "
                f"(format {about['format']}; this one reads {FORMAT})."
            )
        differing = [
            f"{name} was {about['identity'].get(name)!r}, now {value!r}"
            for name, value in self.identity.items()
            if about["identity"].get(name, value) != value
        ]
        if differing:
            raise ValueError(
                f"{path} is of other data: {'; '.join(differing)}. Give "
                "another folder, or the same data to go on."
            )
        strategy = model.distribute_strategy
        if not model.optimizer.built:
            with strategy.scope():
                model.optimizer.build(model.trainable_variables)
        variables = state_of(model)
        for name in sorted({*variables, *content}):
            have = variables[name].shape if name in variables else None
            found = content[name].shape if name in content else None
            if name in about["per_replica"]:
                found = found[1:]
            if have is None or found is None or tuple(have) != tuple(found):
                raise ValueError(
                    f"{path} is of another model: {name} has the shape {found} "
                    f"there and {have} here. Give another folder, or build "
                    "the same model to go on."
                )
        for name, variable in variables.items():
            each = content[name] if name in about["per_replica"] else None
            values = [content[name]] if each is None else list(each)
            assign(strategy, variable, values)
            if name.startswith("metrics/"):
                self.means[name] = values
        return Place(about["epoch"], about["step"])

    # Writing

    def save(self):
        """Writes the model's state beside its place, then moves it there.

        What cannot be written is said in one line and tried again later.

        Returns:
            Bool. Whether it is saved.
        """
        if not distribute.is_chief(self.model.distribute_strategy):
            return False
        if self.model.step_guard.is_broken():  # It will say so itself.
            return False
        self.next_time = time.monotonic() + 60 * (self.every_minutes or 1)
        self.last_step = self.place.step
        try:
            self._write()
        except OSError as error:
            last = f"The last is of {self.saved}" if self.saved else "No other"
            self.say(
                f"Not saved: {error.strerror or error} ({self.folder}). {last};"
                " the run goes on and tries again."
            )
            self.next_time = min(self.next_time, time.monotonic() + 60)
            return False
        self.saved = self.place
        with contextlib.suppress(OSError):  # Another time, then.
            self._drop_old()
        return True

    def _write(self):
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self.folder / ".draft"
        try:
            with open(draft, "wb", buffering=0) as file:
                digest = write_state(
                    Hashed(file), self.model, self.place, self.identity
                )
                os.fsync(file.fileno())
            draft.replace(self.folder / file_name(self.place, digest))
        finally:
            draft.unlink(missing_ok=True)
        sync_folder(self.folder)

    def _drop_old(self):
        """Removes what is older than the newest few, up to this place."""
        # What lies beyond it was passed over as damaged; it is left alone.
        paths = [
            p for p in checkpoints(self.folder) if place_of(p) <= self.place
        ]
        for path in paths[self.keep :]:
            epoch, step = place_of(path)
            every = self.keep_every_epochs
            if not (every and step == 0 and epoch % every == 0):
                path.unlink(missing_ok=True)

    # Around the steps

    @contextlib.contextmanager
    def of(self, model):
        """Holds the folder and listens to signals, for a call of `fit`."""
        self.set_model(model)
        self.stopped = None
        chief = distribute.is_chief(model.distribute_strategy)
        with self.lock if chief else contextlib.nullcontext():
            with self.signals:
                yield
            self.stopped = self.signals.asked

    def on_train_begin(self, logs=None):
        self.next_time = time.monotonic() + 60 * (self.every_minutes or 0)
        self.last_step = self.place.step

    def on_epoch_begin(self, epoch, logs=None):
        if epoch != self.place.epoch:
            self.place, self.last_step = Place(epoch, 0), 0
        self.first_step = self.place.step
        if self.first_step:  # Keras has just set the means to zero.
            variables = state_of(self.model)
            for name, values in self.means.items():
                strategy = self.model.distribute_strategy
                assign(strategy, variables[name], values)
        self.means = {}

    def on_train_batch_end(self, batch, logs=None):
        step = self.first_step + batch + 1
        self.place = self.place._replace(step=step)
        if self.num_steps and step >= self.num_steps:
            return  # The end of the epoch saves.
        if self._asked():
            self.save()
            raise Stopped
        if self._is_due():
            self.save()

    def on_epoch_end(self, epoch, logs=None):
        self.place = Place(epoch + 1, 0)
        self.save()
        self.last_step = 0
        if self._asked():
            self.model.stop_training = True

    def _asked(self):
        # Another machine waits for the first one, whose step would fail else.
        return self.signals.asked and distribute.is_chief(
            self.model.distribute_strategy
        )

    def _is_due(self):
        steps = self.place.step - self.last_step
        return (self.every_steps and steps >= self.every_steps) or (
            self.every_minutes and time.monotonic() >= self.next_time
        )


def length_of(x):
    """Batches of a dataset; negative where nobody knows."""
    if isinstance(x, tf.data.Dataset):
        return int(x.cardinality())
    return tf.data.UNKNOWN_CARDINALITY


def skip_once(dataset, steps):
    """The dataset, whose first pass leaves out so many batches."""
    left = [steps]

    def take_left():
        count, left[0] = left[0], 0
        return np.int64(count)

    return tf.data.Dataset.range(1).flat_map(
        lambda _: dataset.skip(tf.numpy_function(take_left, [], tf.int64))
    )


def refuse_version_0_2(run_dir):
    """Raises where a run of version 0.2 would be taken for an empty folder."""
    old = run_dir / "checkpoint.weights.h5"
    if old.exists() and not (run_dir / FOLDER).exists():
        raise ValueError(
            f"{old} is a checkpoint of keras_moco 0.2, which lacks what this "
            "version goes on from. Start anew with --fresh, or finish the run "
            "with 0.2."
        )
