"""Where the time of a run goes: data, step, both, momentum update."""

import math
import statistics
import tempfile
import time

import keras
import tensorflow as tf

from keras_moco.data.pipeline import num_steps, pretrain_dataset
from keras_moco.safety.checkpoint import Checkpoint


def bench(images, preset, model=None, *, data=True, steps=20):
    """Measures a preset's pipeline and train step on this machine.

    Args:
        images: `Images`.
        preset: `Preset`; its batch size is used.
        model: Compiled `MoCo`, or None to measure the data alone.
        data: Bool. False measures the step alone.
        steps: Int >= 2. Steps that each measurement takes. Defaults to 20.

    Returns:
        Dict of floats: `data_images_per_second` (both views of an image),
        `step_images_per_second` (on views that are there already),
        `pretrain_images_per_second` (both together), `data_wait` (share of
        the time of the last that the bare step does not need),
        `momentum_update_ms` and `checkpoint_seconds` (one save, below the
        current folder); what was left out is missing.

    Example:
        >>> images = load_images("shapes", "pretrain")
        >>> bench(images, PRESETS["demo"])["data_images_per_second"]
    """
    if steps < 2:
        raise ValueError(f"`steps` must be at least 2. Received: {steps}")
    batch_size, figures = preset.batch_size, {}
    if data:
        seconds = _seconds_per_batch(_pairs(images, preset, steps + 5))
        rate = batch_size / seconds
        figures["data_images_per_second"] = rate
    if model is None:
        return figures
    (views,) = _pairs(images, preset, 1)
    ready = tf.data.Dataset.from_tensors(views).repeat(steps + 2)
    options = tf.data.Options()
    options.autotune.enabled = False
    step = _seconds_per_step(model, ready.with_options(options))
    figures["step_images_per_second"] = batch_size / step
    if data:
        both = seconds_per_step(model, images, preset, steps)
        figures["pretrain_images_per_second"] = batch_size / both
        figures["data_wait"] = max(0.0, 1.0 - step / both)
    figures["momentum_update_ms"] = 1e3 * _median_seconds(
        model.update_key_encoder, steps
    )
    with tempfile.TemporaryDirectory(dir=".") as folder:
        saves = Checkpoint(folder)
        saves.set_model(model)
        figures["checkpoint_seconds"] = _median_seconds(saves.save, 3)
    return figures


def seconds_per_step(model, images, preset, steps=20):
    """Seconds of a step, data and all, on this machine: the median.

    Args:
        model: Compiled `MoCo`; it is trained by this.
        images: `Images`.
        preset: `Preset`; its batch size is used.
        steps: Int >= 2. Steps that are measured, besides two that compile.
    """
    return _seconds_per_step(model, _pairs(images, preset, steps + 2))


def bottleneck(figures):
    """One sentence: what limits a run, and what to change.

    Args:
        figures: Dict of `bench`, of data and step together.
    """
    wait = figures["data_wait"]
    if wait < 0.1:
        return (
            "The step limits: a GPU, --precision mixed_bfloat16, a narrower "
            "encoder or smaller views make it faster."
        )
    return (
        f"The data limit: {100 * wait:.0f} % of the time is spent on them. "
        "More cores, smaller views, or images of one size (they are kept "
        "decoded in memory) make them faster."
    )


def _pairs(images, preset, count):
    """At least so many batches, over several passes if need be."""
    passes = math.ceil(count / num_steps(images, preset.batch_size))
    each = math.ceil(count / passes)
    return pretrain_dataset(
        images, preset, None, preset.batch_size, steps_per_epoch=each
    ).repeat(passes)


def _seconds_per_batch(dataset):
    """Mean over all batches but the first five, which may be prefetched."""
    times = []
    for _ in dataset:
        times.append(time.perf_counter())
    return (times[-1] - times[4]) / (len(times) - 5)


def _seconds_per_step(model, dataset):
    """Median over all steps but the first two, which compile."""
    clock = _StepClock()
    model.fit(dataset, callbacks=[clock], verbose=0)
    spans = [b - a for a, b in zip(clock.times[1:], clock.times[2:])]  # noqa: B905
    return statistics.median(spans)


def _median_seconds(function, repeats):
    function()
    spans = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        spans.append(time.perf_counter() - begin)
    return statistics.median(spans)


class _StepClock(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.times = []

    def on_train_batch_end(self, batch, logs=None):
        self.times.append(time.perf_counter())
