"""From an encoder and labelled images to a classifier, as one function."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import pathlib
import time
import warnings

import keras
import numpy as np
import tensorflow as tf

from keras_moco import distribute, terminal
from keras_moco.data.augmented import augmented_dataset
from keras_moco.data.labeled import (
    check_labeled,
    labeled_dataset,
)
from keras_moco.evaluation import extract
from keras_moco.evaluation.classifier import (
    Classifier,
    build_classifier_optimizer,
    check_frozen,
)
from keras_moco.evaluation.scores import check_labels, score
from keras_moco.export import export_classifier
from keras_moco.layers import average_statistics, swap_batch_norm
from keras_moco.load import load_encoder, trained_image_size
from keras_moco.monitoring.run import (
    export_folder,
    finished_line,
    open_run,
    origin,
)
from keras_moco.safety.lock import RunLock

BEST = "best.weights.h5"
LAST = "last.weights.h5"  # With the optimizer, to go on from.


def fit_classifier(
    encoder,
    train,
    test,
    recipe,
    *,
    class_names=None,
    image_size=None,
    devices="auto",
    run_dir=None,
    export_to=None,
    verbose=True,
):
    """Trains a linear layer on an encoder, frozen or along with it.

    It is trained on random resized crops and flips. `LINEAR_PROBE` is the
    published protocol: the encoder runs in inference mode, and is checked not
    to have moved. `FINETUNE` trains the encoder too, batch normalisation in
    training mode, and exports the classifier. The best epoch is chosen on a
    holdout of the training images; the test images are read at the end. An
    interrupted run goes on when it is called again with the same arguments; a
    finished one returns its result.

    Args:
        encoder: Functional or Sequential `keras.Model`, images -> (batch,
            features); a path that `load_encoder` takes; None takes raw
            pixels. It is copied, and stays as it is.
        train: `Images` with labels.
        test: `Images` with labels.
        recipe: `Recipe`, as `LINEAR_PROBE` or `FINETUNE`.
        class_names: List of str, for the export. None takes the numbers.
        image_size: Int. Side of the images in pixels. None takes the one that
            the encoder was trained on, else the images' own.
        devices: As in `pretrain`, on one machine.
        run_dir: Folder of the run. None takes `runs/<dataset>-<recipe>`, with
            a number behind it if that holds a run of other settings.
        export_to: Folder of the export of an encoder that was trained along.
            None takes `saved_models/<name of the run folder>`.
        verbose: Bool. Report to the terminal.

    Returns:
        Dict, see `keras_moco.evaluation.scores.score`, with `run` and, if there
        is one, `export`.

    Raises:
        ValueError: In one line: labels missing, too few or of one class; test
            images of other classes; no encoder that can be trained; a loss or
            features that are not finite.
        RuntimeError: A frozen encoder has moved.

    Example:
        >>> train, test, names = labeled_images("cifar10")
        >>> recipe = FINETUNE.replace(labels=0.1)
        >>> fit_classifier("saved_models/cifar10", train, test, recipe,
        ...                class_names=names)["test_top1"]

    Reference:
        Section 4.1 of He et al. 2019, arXiv:1911.05722.
    """
    say = print if verbose else lambda *_: None
    strategy = distribute.choose_strategy(devices)
    replicas = strategy.num_replicas_in_sync
    if distribute.over_machines(strategy):
        raise ValueError("A classifier trains on one machine: unset TF_CONFIG.")
    for images in (train, test):
        check_labeled(images)
    num_classes = check_labels(train.labels, test.labels)
    names = class_names or [str(number) for number in range(num_classes)]
    kept, held = split_labels(train.labels, recipe)
    encoder, size = _prepare_encoder(encoder, train, image_size)
    batch_size = min(recipe.batch_size, len(kept) // replicas * replicas)
    if batch_size % replicas or not batch_size:
        raise ValueError(
            f"`batch_size` must be a multiple of the {replicas} devices. "
            f"Received: {recipe.batch_size}, of {len(kept)} images"
        )
    steps = len(kept) // batch_size
    settings = {
        "data": f"{train.source}, {len(train)} images, {train.fingerprint}, "
        f"test {test.fingerprint}, labels {_digest(train.labels, test.labels)}",
        "encoder": _digest(*_layers(encoder), *encoder.get_weights()),
        "image_size": size,
        **dataclasses.asdict(recipe),
    }
    run = open_run(run_dir, train.source, recipe.name, settings, say=say)
    if not recipe.frozen:
        export_to = export_folder(export_to, run, "classifier")
    result = run.read("result.json")
    if result:
        say(finished_line(run, result, export_to))
        return result
    say(
        terminal.wrap(
            f"{train.source}: {len(kept):,} images to train on, {len(held):,} "
            f"to choose by, {len(test):,} to test; {num_classes} classes"
        )
    )
    say(
        f"{encoder.name}: {encoder.count_params():,} parameters, "
        f"{encoder.output_shape[-1]} features"
    )
    say(terminal.size_line(train, size))
    if replicas > 1:
        say(f"{replicas} replicas of {batch_size // replicas} images")
    some = labeled_dataset(train, image_size=size, rows=kept[:256])
    found = extract.features(encoder, some)
    extract.check_features(found, "training")
    extract.warn_if_constant(found)

    keras.utils.set_random_seed(recipe.seed)
    with strategy.scope():
        model = Classifier(
            swap_batch_norm(encoder), num_classes, recipe.frozen, recipe.seed
        )
        model.compile(build_classifier_optimizer(recipe, model, steps))
    data = functools.partial(
        augmented_dataset, train, kept, size, batch_size, recipe.seed
    )
    holdout = labeled_dataset(train, image_size=size, rows=held)
    test_data = labeled_dataset(test, image_size=size)
    with RunLock(run.path, say):
        try:
            _train(run, model, data, steps, holdout, batch_size, recipe, say)
        except tf.errors.OpError:
            train.check()  # The cause, in one line, if broken files are.
            raise
        if recipe.frozen:
            check_frozen(encoder, model.encoder)
        result = _test(run, model, test_data, num_classes, recipe)
        result["run"] = str(run.path)
        if not recipe.frozen:
            result["export"] = str(export_to)
            card = {"settings": run.settings, "test_top1": result["test_top1"]}
            export_classifier(model.plain(), export_to, names, card)
        run.write("result.json", result)
    return result


def _train(run, model, data, steps, holdout, batch_size, recipe, say):
    """Trains from the last epoch that the run folder holds to the end."""
    done = restore(run, model) // steps
    if not done:
        run.write("run.json", {"settings": run.settings, **origin()})
    # Lines of epochs that are to be done again go.
    lines = [row for row in run.metrics() if row["epoch"] <= done]
    run.replace("metrics.jsonl", "".join(json.dumps(x) + "\n" for x in lines))
    if done:
        say(f"Going on after epoch {done} of {recipe.epochs}, from {run.path}")
    try:
        model.fit(
            data(done),
            epochs=recipe.epochs,
            initial_epoch=done,
            callbacks=[_EpochLog(run, holdout, batch_size, recipe.epochs, say)],
            shuffle=False,
            verbose=0,
        )
    except KeyboardInterrupt:
        if rows := run.metrics():
            text = (
                f"{len(rows)} of {recipe.epochs} epochs are in {run.path}: the "
                "same command goes on from there."
            )
            say("\n" + terminal.wrap(text))
        raise


def _test(run, model, test_data, num_classes, recipe):
    """The result: the last epoch's, and that of the one chosen."""
    last, labels, _ = extract.features(model, test_data)
    model.load_weights(run.path / BEST)
    selected, labels, _ = extract.features(model, test_data)
    rows = run.metrics()
    best = max(rows, key=lambda row: row["holdout_top1"])
    if rows[-1]["loss"] > 2 * math.log(num_classes):
        warnings.warn(
            f"The loss ends at {rows[-1]['loss']:.3g}, where guessing gives "
            f"{math.log(num_classes):.3g}: the learning rate of "
            f"{recipe.learning_rate:g} is too high, or {recipe.epochs} epochs "
            "are too few for it.",
            stacklevel=3,
        )
    return score(
        labels,
        tf.math.top_k(selected, min(5, num_classes)).indices.numpy(),
        last.argmax(axis=1),
        num_classes,
        holdout_top1=best["holdout_top1"],
        setting={**recipe.setting, "epoch": best["epoch"]},
    )


class _EpochLog(keras.callbacks.Callback):
    """After each epoch: holdout accuracy, log, best weights, checkpoint."""

    def __init__(self, run, held, batch_size, epochs, say):
        super().__init__()
        self.run = run
        self.held = held
        self.batch_size = batch_size
        self.epochs = epochs
        self.say = say
        rows = run.metrics()
        self.best = max([row["holdout_top1"] for row in rows], default=-1.0)
        self.writer = tf.summary.create_file_writer(str(run.path))

    def on_train_begin(self, logs=None):
        self.epoch_ends = [time.perf_counter()]

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch_time = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        average_statistics(self.model)
        seconds = time.perf_counter() - self.epoch_time
        images = self.params["steps"] * self.batch_size
        logits, labels, _ = extract.features(self.model, self.held)
        if not (math.isfinite(logs["loss"]) and np.isfinite(logits).all()):
            raise ValueError(
                f"The classifier diverged in epoch {epoch + 1} (loss "
                f"{logs['loss']:g}): the learning rate is too high. Give a "
                "lower --learning-rate."
            )
        row = {
            "epoch": epoch + 1,
            "loss": float(logs["loss"]),
            "holdout_top1": float(np.mean(logits.argmax(axis=1) == labels)),
            "learning_rate": float(self.model.optimizer.learning_rate),
            "images_per_second": images / seconds,
        }
        if row["holdout_top1"] > self.best:
            self.best = row["holdout_top1"]
            save(self.run, self.model, BEST)
        with open(self.run.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(row) + "\n")
        with self.writer.as_default(step=epoch + 1):
            for name, value in row.items():
                if name != "epoch":
                    tf.summary.scalar(name, value)
        self.writer.flush()
        save(self.run, self.model, LAST)
        self.epoch_ends.append(time.perf_counter())
        left = terminal.seconds_left(self.epoch_ends, self.epochs - epoch - 1)
        self.say(terminal.epoch_line(row, self.epochs, left))


def save(run, model, name):
    """Writes weights and optimizer beside their place, then moves them there.

    Args:
        run: `RunFolder`.
        model: Compiled `Classifier`.
        name: Str. `BEST` or `LAST`.
    """
    draft = run.path / f".tmp.{name}"
    try:
        model.save_weights(draft)
        draft.replace(run.path / name)
    finally:
        draft.unlink(missing_ok=True)


def restore(run, model):
    """Loads the last epoch that was saved, if there is one.

    Args:
        run: `RunFolder`.
        model: Compiled `Classifier`.

    Returns:
        Int. Steps that are done.
    """
    path = run.path / LAST
    if not path.exists():
        return 0
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)
    try:
        model.load_weights(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} is damaged or of another model ({error}). Delete it to "
            "begin again, or give another folder with --run-dir."
        ) from error
    return int(model.optimizer.iterations.numpy())


def split_labels(labels, recipe):
    """Draws the images to train on and those to choose by, from each class.

    Args:
        labels: Int array (images,).
        recipe: `Recipe`, of which `labels`, `holdout` and `seed` are read.

    Returns:
        Pair of int arrays: numbers of the images.

    Raises:
        ValueError: A class is left with less than the two images that takes.
    """
    draw = np.random.default_rng(recipe.seed)
    kept, held = [], []
    for label in np.unique(labels):
        rows = draw.permutation(np.flatnonzero(labels == label))
        count = round(recipe.labels * len(rows))
        if count < 2:
            raise ValueError(
                f"{100 * recipe.labels:g} % of the {len(rows)} training images "
                f"of class {label} is {count}, but each class needs two: one "
                "to train on and one to choose the epoch by. Use more labels."
            )
        num_held = min(max(1, round(recipe.holdout * count)), count - 1)
        held.append(rows[:num_held])
        kept.append(rows[num_held:count])
    return np.concatenate(kept), np.concatenate(held)


def _prepare_encoder(encoder, images, image_size):
    """The encoder as a model, and the size of the images that it takes."""
    if isinstance(encoder, (str, pathlib.Path)):
        if image_size is None:
            image_size = trained_image_size(encoder)
        encoder = load_encoder(encoder)
    size = extract.evaluation_size(images, encoder, image_size)
    if encoder is None:
        layers = [keras.Input((size, size, 3)), keras.layers.Flatten()]
        return keras.Sequential(layers, name="pixels"), size
    if len(getattr(encoder, "output_shape", ())) != 2 or not encoder.inputs:
        raise ValueError(
            "An encoder to be trained is a Functional or Sequential Keras "
            f"model, images -> (batch, features). Received: {encoder!r}"
        )
    return encoder, size


def _layers(encoder):
    """What each layer is; names are left out, as Keras counts them on."""
    for layer in encoder._flatten_layers(include_self=False):
        config = {}
        if not isinstance(layer, keras.Model):  # Its own layers follow.
            with contextlib.suppress(NotImplementedError):
                config = layer.get_config()
        config.pop("name", None)
        # An object that JSON does not know prints its place in memory.
        config = json.dumps(config, default=lambda value: type(value).__name__)
        yield [f"{type(layer).__name__} {config}"]


def _digest(*arrays):
    """Identifies arrays by their shapes and what they hold."""
    digest = hashlib.sha256()
    for array in map(np.asarray, arrays):
        digest.update(f"{array.shape} {array.dtype}".encode() + array.tobytes())
    return digest.hexdigest()[:12]
