"""The main job, from images to an exported encoder, as one function."""

import contextlib
import copy
import dataclasses
import math
import re
import statistics
import sys
import tempfile
import time

import keras
import numpy as np
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
from keras_moco.checks import OK, check_machine, check_plan
from keras_moco.data.encoded import StreamedImages
from keras_moco.data.images import MissingSplit, match_classes
from keras_moco.data.labeled import labeled_dataset
from keras_moco.data.pipeline import num_steps, pretrain_dataset
from keras_moco.data.sources import load_images
from keras_moco.doctor import look_at_machine, look_at_plan
from keras_moco.evaluation.knn import KNNMonitor, knn_accuracy
from keras_moco.evaluation.projector import write_projector
from keras_moco.export import export_encoder
from keras_moco.kinds import check_kind
from keras_moco.load import load_run
from keras_moco.monitoring.quality import QualityMonitor
from keras_moco.monitoring.run import (
    RunFolder,
    RunLog,
    export_folder,
    finished_line,
    open_run,
    origin,
    peak_memory_mb,
)
from keras_moco.safety.checkpoint import Checkpoint, refuse_version_0_2
from keras_moco.safety.guards import Guard

VOICES = {"text": terminal.say_text, "json": terminal.say_json}


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
    checkpoint_every="10min",
    keep_every_epochs=None,
    fresh=False,
    on_nan="stop",
    verbose=True,
    log_format="text",
):
    """Pretrains an encoder on unlabelled images and exports it.

    Labels, where there are any, serve only to measure kNN accuracy beside the
    training. An interrupted run goes on from its newest checkpoint when it is
    called again with the same arguments, and equals one that never stopped; a
    finished one returns its result.

    Args:
        dataset: "shapes" (built in), a TFDS name, a folder of images (flat, or
            with `train` and `test` in it), several in a list, or a uint8 array
            (N, H, W, 3).
        preset: Name in `PRESETS`, a `Preset` of your own, or None for the one
            that suits the dataset.
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
        checkpoint_every: Int or str. Steps ("500") or minutes ("10min") from
            one checkpoint to the next; the end of an epoch has one always.
        keep_every_epochs: Int or None. Checkpoints of every so many epochs are
            kept besides the last three.
        fresh: Bool. Start anew, in a folder with the next free number.
        on_nan: "stop" or "skip": what follows a loss or gradient that is not
            finite, see `Guard`.
        verbose: Bool. Report to the terminal.
        log_format: "text" for people, or "json": one JSON object a line, each
            with a `text`, and with the figures of epochs, verdicts and result.

    Returns:
        Dict, empty but on the first machine. After a signal (SIGTERM, SIGINT,
        SIGUSR1) of `run` and `stopped`, the signal's name. Else as in
        `result.json`: `knn_top1`, `knn_top1_untrained` and
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
    check_choice("log_format", log_format, VOICES)
    cadence = parse_cadence(checkpoint_every)
    if encoder is not None and not isinstance(encoder, (str, keras.Model)):
        raise ValueError(
            "`encoder` must be a name or a built keras.Model. Received: "
            f"{encoder!r}"
        )
    strategy = distribute.choose_strategy(devices, worker_timeout)
    chief = distribute.is_chief(strategy)
    verbose = verbose and chief
    say = VOICES[log_format] if verbose else terminal.say_nothing
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
    if preset.memory_bank:
        settings["num_images"] = len(images)
    steps = num_steps(images, preset.batch_size, steps_per_epoch)
    run = open_run(run_dir, images.source, preset_name, settings, fresh, say)
    export_to = export_folder(export_to, run)
    result = run.read("result.json")
    if "export" in result:
        say(finished_line(run, result, export_to))
        say(terminal.result_lines(result), **result)
        return result
    knn_data = ()
    if knn_every and chief:
        knn_data = _knn_data(dataset, images, preset, source, say)

    def warn(line):
        say(terminal.wrap(line))

    checkpoint = Checkpoint(
        run.path, **cadence, keep_every_epochs=keep_every_epochs, say=warn
    )
    guard = Guard(on_nan, say=warn)
    refuse_version_0_2(run.path)
    begin = time.perf_counter()
    keras.utils.set_random_seed(seed)
    total_steps = steps * preset.epochs
    with strategy.scope():
        model = build_model(
            preset, encoder, total_steps, precision, jit, len(images)
        )
        say(terminal.plan_lines(images, preset_name, preset, model, steps))
        plan = look_at_plan(images, preset, model, steps, precision, jit)
    machine = look_at_machine(run.path)
    for finding in check_machine(machine) + check_plan(preset, plan, machine):
        if finding.mark != OK:
            say(terminal.wrap(finding.text), mark=finding.mark)
    encoder = model.encoder
    broken_before = len(images.broken)

    distribute.agree(strategy, settings)
    if augment == "device":
        model.make_views = device_views(preset, seed)
    pairs, fit_options = _pairs(images, preset, seed, augment, steps, strategy)
    with contextlib.ExitStack() as stack:
        if chief:
            stack.enter_context(checkpoint.lock)
        else:
            # It keeps pace with the chief, but nothing that it writes stays.
            scratch = stack.enter_context(tempfile.TemporaryDirectory())
            run = RunFolder(scratch, settings)
        baselines = _begin(run, settings, encoder, knn_data)
        if baselines:
            say(terminal.baseline_line(**baselines), **baselines)
        callbacks = [guard]
        if verbose and log_format == "text" and sys.stdout.isatty():
            callbacks.append(terminal.LossBar())
        if knn_data:
            callbacks.append(KNNMonitor(*knn_data, every=knn_every))
        quality = passes = None
        if strategy.num_replicas_in_sync == 1:  # Else others read ahead.
            passes = pairs.passes
        try:
            if chief:
                views = _fixed_views(images, preset, seed, steps)
                quality = QualityMonitor(views)
                callbacks.append(quality)
            log = RunLog(
                run, preset.batch_size, preset.epochs, say, quality, passes
            )
            callbacks += [log, checkpoint]
            model.fit(
                pairs,
                epochs=preset.epochs,
                callbacks=callbacks,
                verbose=0,
                **fit_options,
            )
        except (tf.errors.OpError, MemoryError) as error:
            images.check()  # The cause, in one line, if broken files are.
            lost = distribute.over_machines(strategy)
            if lost and checkpoint.signals.asked:  # And the chief, too.
                return {}
            reason = _reason(error, lost, preset, precision, checkpoint)
            if reason is None:
                raise
            raise reason from error
        if not chief:
            return {}
        if checkpoint.stopped and checkpoint.place.epoch < preset.epochs:
            warn(
                f"Stopped after {checkpoint.place} of {preset.epochs}; the "
                f"checkpoint is of {checkpoint.saved}."
            )
            return {"run": str(run.path), "stopped": checkpoint.stopped}
        result = {
            **_figures(log.rows or run.metrics()),
            **baselines,
            "seconds": round(time.perf_counter() - begin, 1),
            "peak_memory_mb": round(peak_memory_mb()),
            "run": str(run.path),
            "export": str(export_to),
        }
        card = {"settings": run.settings, **result}
        export_encoder(encoder, export_to, card=card)
        try:
            write_projector(run.path, encoder, images, preset.image_size)
        except (OSError, ValueError) as error:  # A full disk; a stream.
            warn(f"No embedding projector: {error}")
        run.write("result.json", result)
    if len(images.broken) > broken_before:
        say(terminal.broken_line(images.broken))
    say(terminal.result_lines(result), **result)
    return result


def _pairs(images, preset, seed, augment, steps, strategy):
    """The dataset of a run, and what `fit` has to know of it."""

    def share_of(*share):
        return pretrain_dataset(
            images,
            preset,
            batch_size=preset.batch_size,
            seed=seed,
            augment="device" if augment == "device" else None,
            share=share,
            steps_per_epoch=steps,
        )

    pairs = share_of(0, 1)
    if not distribute.over_machines(strategy):
        return pairs, {}

    def start_at(epoch, step):
        def make(*share):
            passes = share_of(*share).passes
            return passes.start_at(epoch, step).repeat(preset.epochs - epoch)

        return distribute.distribute_batches(strategy, make, preset.batch_size)

    whole = start_at(0, 0)
    whole.passes = copy.copy(pairs.passes)
    whole.passes.start_at = start_at
    return whole, {"steps_per_epoch": steps}  # It has no length.


def _fixed_views(images, preset, seed, steps_per_epoch):
    """Views that the features of all epochs are measured on."""
    # A 64th of an epoch: that takes less than 3 % of its time.
    count = min(256, max(32, steps_per_epoch * preset.batch_size // 64))
    # In batches of the run's own size, whose views are compiled anyway.
    batch_size = min(256, max(2, preset.batch_size))
    steps = min(math.ceil(count / batch_size), len(images) // batch_size)
    pairs = pretrain_dataset(
        images, preset, None, batch_size, seed, steps_per_epoch=steps
    )
    queries, keys, _ = zip(*pairs.as_numpy_iterator(), strict=True)
    return [np.concatenate(views)[:count] for views in (queries, keys)]


def _begin(run, settings, encoder, knn_data):
    """Notes what the run is, once; returns what its training has to beat."""
    before = run.read("run.json")
    if not before:
        baselines = {}
        if knn_data:
            baselines = {
                "knn_top1_pixels": knn_accuracy(None, *knn_data),
                "knn_top1_untrained": knn_accuracy(encoder, *knn_data),
            }
        before = {"settings": settings, "baselines": baselines, **origin()}
        run.write("run.json", before)
    return before.get("baselines", {})


def _reason(error, machines, preset, precision, checkpoint):
    """What a failure of TensorFlow means, as an exception, or None."""
    if machines:
        return distribute.WorkerLost(
            "Another worker of this run does not answer any more "
            f"({type(error).__name__}). Start all workers again with the same "
            "command: they go on after the last checkpoint."
        )
    if not isinstance(error, (tf.errors.ResourceExhaustedError, MemoryError)):
        return None
    kept = f" Kept: {checkpoint.saved}." if checkpoint.saved else ""
    return ValueError(
        "Out of memory. What drives it: batch_size "
        f"{preset.batch_size} x views of {preset.image_size} px x encoder "
        f"{preset.encoder} in {precision}; the queue of {preset.queue_size} x "
        f"{preset.head_output_dim} takes "
        f"{preset.queue_size * preset.head_output_dim * 4 / 2**20:.0f} MB. "
        f"Halve --batch-size first, or take --precision mixed_bfloat16.{kept}"
    )


def _figures(rows):
    """What a result takes from the lines of the log, which may be damaged."""
    last = rows[-1] if rows else {}
    names = ("knn_top1", "loss")
    figures = {n: last[n] for n in names if last.get(n) is not None}
    speeds = [r["images_per_second"] for r in rows if "images_per_second" in r]
    if speeds:  # The first epoch of a process compiles.
        figures["images_per_second"] = statistics.median(speeds[1:] or speeds)
    return figures


def export_run(run_dir, folder):
    """Exports the encoder of a run folder as its newest checkpoint has it.

    Args:
        run_dir: Folder of a run by `pretrain`, finished or not, of an encoder
            given by name.
        folder: Str or path. Where the export goes.

    Returns:
        `pathlib.Path` of the export.

    Raises:
        ValueError: No run there, no checkpoint yet, or an encoder of the
            user's own, which the folder does not describe.

    Example:
        >>> export_run("runs/shapes-demo", "saved_models/so_far")
    """
    model, run, steps = load_run(run_dir)
    card = {"settings": run.settings, "run": str(run.path), "steps": steps}
    folder = export_folder(folder, run)
    return export_encoder(model.encoder, folder, card)


def parse_cadence(text):
    """`Checkpoint`'s options of "500" (steps) or "10min"."""
    found = re.fullmatch(r"(\d+)( ?min)?", str(text))
    if not found or not int(found[1]):
        raise ValueError(
            "`checkpoint_every` must be a number of steps such as 500, or of "
            f"minutes such as 10min. Received: {text!r}"
        )
    return {"every_minutes" if found[2] else "every_steps": int(found[1])}


def _check_options(precision, jit, augment, seed, knn_every, steps_per_epoch):
    check_choice("precision", precision, PRECISIONS)
    check_choice("jit", jit, JIT)
    check_choice("augment", augment, ("cpu", "device"))
    check_kind("seed", seed, int)
    if seed >= 2**32:
        raise ValueError(f"`seed` must be below 2**32. Received: {seed}")
    for name, value, low in (
        ("seed", seed, 0),
        ("knn_every", knn_every, 0),
        ("steps_per_epoch", steps_per_epoch, 1),
    ):
        check_kind(name, value, int | None)
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
