"""The main job, from images to an exported encoder, as one function."""

import contextlib
import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time

import keras
import tensorflow as tf

from keras_moco import distribute, terminal
from keras_moco.augment import device_views
from keras_moco.build import (
    JIT,
    PRECISIONS,
    build_model,
    check_choice,
    prepare,
)
from keras_moco.callbacks import KNNMonitor
from keras_moco.data.encoded import StreamedImages
from keras_moco.data.images import MissingSplit, match_classes
from keras_moco.data.labeled import labeled_dataset
from keras_moco.data.pipeline import num_steps, pretrain_dataset
from keras_moco.data.sources import load_images
from keras_moco.encoders import encoder_names
from keras_moco.evaluate import knn_accuracy
from keras_moco.export import export_encoder
from keras_moco.presets import Preset
from keras_moco.run import (
    RunFolder,
    RunLog,
    export_folder,
    open_run,
    origin,
    peak_memory_mb,
)


def pretrain(
    dataset="shapes",
    preset=None,
    settings=(),
    *,
    encoder=None,
    width=None,
    image_size=None,
    batch_size=None,
    epochs=None,
    steps_per_epoch=None,
    seed=0,
    precision="float32",
    jit="auto",
    devices="auto",
    worker_timeout=60,
    run_dir=None,
    data_dir=None,
    knn_every=1,
    max_broken=0.01,
    augment="cpu",
    export_to=None,
    verbose=True,
):
    """Pretrains an encoder on unlabelled images and exports it.

    Labels, where there are any, serve only to measure kNN accuracy beside the
    training. An interrupted run goes on when it is called again with the same
    arguments; a finished one returns its result.

    Args:
        dataset: "shapes" (built in), a TFDS name, a folder of images (flat, or
            with `train` and `test` in it), several in a list, or a uint8 array
            (N, H, W, 3).
        preset: Name in `PRESETS`, or None for the one that suits the dataset.
        settings: "FIELD=VALUE" strings that change fields of the preset.
        encoder: Name of an encoder, or a `keras.Model` (built, images ->
            features). None takes the preset's.
        width: Int. Channels of the first stage of a named encoder.
        image_size: Int. Side of the views in pixels.
        batch_size: Int. Images a step over all devices; the learning rate
            follows it.
        epochs: Int.
        steps_per_epoch: Int or None. Fewer steps than the data has batches.
        seed: Int >= 0. Of weights, order and views.
        precision: "float32", "mixed_bfloat16" or "mixed_float16".
        jit: "on", "off" or "auto": whether XLA compiles the train step.
        devices: "auto" (all GPUs, else the CPU), "cpu", "all", or how many.
            Where TF_CONFIG names several machines, all devices of all of them;
            the first machine alone writes then.
        worker_timeout: Seconds after which a silent machine is given up.
        run_dir: Folder of the run. None takes `runs/<dataset>-<preset>`, with
            a number behind it if that holds a run of other settings.
        data_dir: Folder of TFDS' data.
        knn_every: Int. Epochs between kNN measurements; 0 leaves them out.
        max_broken: Float in [0, 1]. Share of broken files that is skipped.
        augment: Where the views are made: "cpu", beside the training, or
            "device", inside the train step.
        export_to: Folder. None takes `saved_models/<name of the run folder>`.
        verbose: Bool. Report to the terminal.

    Returns:
        Dict, empty but on the first machine, also in `result.json`:
        `knn_top1`, `knn_top1_untrained` and
        `knn_top1_pixels` (where there are labels), `loss`,
        `images_per_second`, `seconds`, `peak_memory_mb`, `run`, `export`.

    Raises:
        ValueError: In one line, what was expected, what came and what to do.
            Nothing has been written then.

    Example:
        >>> result = keras_moco.pretrain("photos/", epochs=100)
        >>> encoder = keras_moco.load_encoder(result["export"])
    """
    _check_options(precision, jit, augment, seed, knn_every, steps_per_epoch)
    if encoder is not None and not isinstance(encoder, (str, keras.Model)):
        raise ValueError(
            "`encoder` must be a name or a built keras.Model. Received: "
            f"{encoder!r}"
        )
    strategy = distribute.choose_strategy(devices, worker_timeout)
    chief = distribute.is_chief(strategy)
    verbose = verbose and chief
    say = print if verbose else lambda *_: None
    with strategy.scope():
        preset_name, preset, images, source = prepare(
            dataset,
            preset,
            settings,
            data_dir=data_dir,
            max_broken=max_broken,
            encoder=encoder if isinstance(encoder, str) else None,
            width=width,
            image_size=image_size,
            batch_size=batch_size,
            epochs=epochs,
        )
    settings = {
        "data": f"{images.source}, {len(images)} images, {images.fingerprint}",
        "preset": preset_name,
        **dataclasses.asdict(preset),
        "encoder": getattr(encoder, "name", preset.encoder),
        "steps_per_epoch": steps_per_epoch,
        "seed": seed,
        "precision": precision,
    }
    del settings["summary"]
    steps = num_steps(images, preset.batch_size, steps_per_epoch)
    run = open_run(run_dir, images.source, preset_name, settings)
    export_to = export_folder(export_to, run)
    result = run.read("result.json")
    if "export" in result:
        say(f"The run in {run.path} is finished already; this is its result.")
        say(terminal.result_lines(result))
        return result
    knn_data = ()
    if knn_every and chief:
        knn_data = _knn_data(dataset, images, preset, source, say)

    begin = time.perf_counter()
    keras.utils.set_random_seed(seed)
    total_steps = steps * preset.epochs
    with strategy.scope():
        model = build_model(preset, encoder, total_steps, precision, jit)
        say(terminal.plan_lines(images, preset_name, preset, model, steps))
    encoder = model.encoder
    broken_before = len(images.broken)

    with strategy.scope():
        done = run.restore(model) // steps
    distribute.agree(strategy, settings, done)
    if not chief:
        # It keeps pace with the chief, but nothing that it writes stays.
        scratch = tempfile.TemporaryDirectory()
        run = RunFolder(scratch.name, settings)
    before = dict(run.read("run.json"))
    if not before:
        baselines = {}
        if knn_data:
            baselines = {
                "knn_top1_pixels": knn_accuracy(None, *knn_data),
                "knn_top1_untrained": knn_accuracy(encoder, *knn_data),
            }
        before = {"settings": settings, "baselines": baselines, **origin()}
        run.write("run.json", before)
    if before.get("baselines"):
        say(terminal.baseline_line(**before["baselines"]))
    run.keep_metrics(done)
    if done:
        say(f"Going on after epoch {done} of {preset.epochs}, from {run.path}")
    if augment == "device":
        model.make_views = device_views(preset, seed)

    def make_pairs(*share):
        return pretrain_dataset(
            images,
            preset,
            None,
            preset.batch_size,
            seed,
            first_epoch=done,
            augment="device" if augment == "device" else None,
            share=share,
            steps_per_epoch=steps,
        )

    pairs, fit_options = make_pairs(0, 1), {}
    if distribute.over_machines(strategy):
        pairs = distribute.distribute_batches(
            strategy,
            lambda *share: make_pairs(*share).repeat(preset.epochs - done),
            preset.batch_size,
        )
        fit_options["steps_per_epoch"] = steps  # It has no length.
    callbacks = [RunLog(run, preset.batch_size, preset.epochs, say)]
    if knn_data:
        callbacks.insert(0, KNNMonitor(*knn_data, every=knn_every))
    if verbose and sys.stdout.isatty():
        callbacks.insert(0, terminal.LossBar())
    try:
        model.fit(
            pairs,
            epochs=preset.epochs,
            initial_epoch=done,
            callbacks=callbacks,
            verbose=0,
            **fit_options,
        )
    except KeyboardInterrupt:
        say(
            f"\nStopped. {len(run.metrics())} of {preset.epochs} epochs are in "
            f"{run.path}; the same command goes on from there."
        )
        raise
    except tf.errors.OpError as error:
        images.check()  # The cause, in one line, if broken files are.
        if distribute.over_machines(strategy):
            raise ConnectionError(
                "Another worker of this run does not answer any more "
                f"({type(error).__name__}). Start all workers again with the "
                "same command: they go on after epoch "
                f"{len(run.metrics())} of {preset.epochs}."
            ) from error
        raise
    if not chief:
        return {}
    rows = run.metrics()
    result = {
        "knn_top1": rows[-1].get("knn_top1"),
        **before.get("baselines", {}),
        "loss": rows[-1]["loss"],
        # The first epoch of a process compiles.
        "images_per_second": statistics.median(
            row["images_per_second"] for row in rows[1:] or rows
        ),
        "seconds": round(time.perf_counter() - begin, 1),
        "peak_memory_mb": round(peak_memory_mb()),
        "run": str(run.path),
        "export": str(export_to),
    }
    result = {
        name: value for name, value in result.items() if value is not None
    }
    export_encoder(encoder, export_to, card={"settings": settings, **result})
    run.write("result.json", result)
    if len(images.broken) > broken_before:
        say(terminal.broken_line(images.broken))
    say(terminal.result_lines(result))
    return result


def export_run(run_dir, folder):
    """Exports the encoder of a run folder as its last epoch left it.

    Args:
        run_dir: Folder of a run by `pretrain`, finished or not, of an encoder
            given by name.
        folder: Str or path. Where the export goes.

    Returns:
        `pathlib.Path` of the export.

    Raises:
        ValueError: No run there, no epoch finished, or an encoder of the
            user's own, which the folder does not describe.

    Example:
        >>> export_run("runs/shapes-demo", "saved_models/so_far")
    """
    path = pathlib.Path(run_dir)
    if not (path / "run.json").is_file():
        raise ValueError(f"{path} is no run folder: it holds no run.json.")
    run = RunFolder(path, None)
    settings = run.settings
    fields = {field.name for field in dataclasses.fields(Preset)}
    preset = Preset(
        summary="",
        **{
            name: tuple(value) if isinstance(value, list) else value
            for name, value in settings.items()
            if name in fields
        },
    )
    if preset.encoder not in encoder_names():
        raise ValueError(
            f"The encoder {preset.encoder!r} of {path} was not built by name: "
            "rebuild it in Python and load the checkpoint into its MoCo."
        )
    model = build_model(preset, None, 1, settings["precision"])
    steps = run.restore(model)
    if not steps:
        raise ValueError(f"No epoch of the run in {path} is finished yet.")
    card = {"settings": settings, "run": str(path), "steps": steps}
    folder = export_folder(folder, run)
    return export_encoder(model.encoder, folder, card)


def _check_options(precision, jit, augment, seed, knn_every, steps_per_epoch):
    check_choice("precision", precision, PRECISIONS)
    check_choice("jit", jit, JIT)
    check_choice("augment", augment, ("cpu", "device"))
    if seed >= 2**32:
        raise ValueError(f"`seed` must be below 2**32. Received: {seed}")
    for name, value, low in (
        ("seed", seed, 0),
        ("knn_every", knn_every, 0),
        ("steps_per_epoch", steps_per_epoch, 1),
    ):
        if value is not None and value < low:
            raise ValueError(f"`{name}` must be >= {low}. Received: {value}")


def _knn_data(dataset, images, preset, source, say):
    """The labelled bank and test set, or () with a line that says why not."""
    with contextlib.suppress(MissingSplit):
        if isinstance(images, StreamedImages):
            say("No kNN accuracy beside the training: the data are a stream.")
            return ()
        test = load_images(dataset, "test", **source)
        bank = images
        if images.labels is None:
            bank = load_images(dataset, "train", **source)
        if bank.labels is not None and test.labels is not None:
            size = preset.image_size
            test = match_classes(bank, test)
            return [labeled_dataset(i, image_size=size) for i in (bank, test)]
    say(
        terminal.wrap(
            "No kNN accuracy beside the training: that takes labels, as train/ "
            "and test/ with a folder a class in them."
        )
    )
    return ()
