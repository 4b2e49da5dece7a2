"""What a run says in the terminal, within 80 columns."""

import json
import math
import shlex
import textwrap

import keras

from keras_moco import distribute
from keras_moco.data.encoded import StreamedImages
from keras_moco.layers import groups_per_replica


def say_text(text, **figures):
    """Prints a text for people; at once, also where a file takes it."""
    print(text, flush=True)


def say_json(text, **figures):
    """Prints one line for programs: a JSON object of text and figures.

    Args:
        text: Str. Its lines become one.
        **figures: What JSON takes.
    """
    line = {"text": " ".join(text.split()), **figures}
    print(json.dumps(line), flush=True)


def say_nothing(text, **figures):
    """Prints nothing."""


def plan_lines(images, preset_name, preset, model, steps):
    """What is about to happen, in the numbers that decide it.

    Args:
        images: `Images` that are trained on.
        preset_name: Str.
        preset: `Preset`, with every field filled in.
        model: `MoCo`.
        steps: Int. Steps an epoch.

    Returns:
        Str of several lines.
    """
    size = f", {images.size[0]}x{images.size[1]}" if images.size else ""
    encoder, base = model.encoder, preset.base_learning_rate
    negatives = preset.queue_size or preset.batch_size - 1
    lines = [
        f"{images.source}: {len(images):,} images{size}; preset {preset_name}",
        f"{encoder.name}: {encoder.count_params():,} parameters, "
        f"{encoder.output_shape[-1]} features; views of {preset.image_size} px",
        f"Epochs: {preset.epochs}, of {steps} steps of {preset.batch_size}; "
        f"learning rate {base:g} x {preset.batch_size} / 256 = "
        f"{base * preset.batch_size / 256:g}",
        f"{negatives:,} negatives, temperature {preset.temperature:g}, "
        f"momentum {preset.momentum:g}; chance loss "
        f"{math.log(negatives + 1):.2f}",
    ]
    if isinstance(images, StreamedImages):
        lines.append(
            "Images are read as a stream, shuffled by files and among "
            f"{images.num_shuffled:,}"
        )
    elif images.array is None:
        lines.append("Images are decoded file by file, at every step")
    else:
        megabytes = images.array.nbytes / 1e6
        lines.append(f"Images are held in memory, decoded: {megabytes:.0f} MB")
    replicas = distribute.num_replicas()
    if replicas > 1:
        lines.append(
            f"{replicas} replicas of {preset.batch_size // replicas} images, "
            "each with the same queue"
        )
    groups = replicas * groups_per_replica(preset)
    if preset.sync_batch_norm:
        lines.append("Batch normalisation by the whole batch")
    elif groups > 1:
        lines.append(
            f"Batch normalisation in {groups} groups of "
            f"{preset.batch_size // groups}, keys shuffled among them"
        )
    if images.broken:
        lines.append(broken_line(images.broken))
    if preset.memory_bank:
        lines.append(
            f"Negatives are drawn from a memory bank of {len(images):,} keys, "
            "one of each image; those of the query's own are left out."
        )
    return "\n".join(map(wrap, lines))


def finding_line(finding):
    """One finding of `doctor`, its mark in front."""
    return textwrap.fill(
        finding.text,
        80,
        initial_indent=f"{finding.mark:9}",
        subsequent_indent=" " * 9,
        break_long_words=False,
        break_on_hyphens=False,
    )


def baseline_line(knn_top1_pixels, knn_top1_untrained):
    """What training has to beat."""
    return wrap(
        "kNN top-1 (backbone features, cosine, k 200, T 0.1): raw pixels "
        f"{100 * knn_top1_pixels:.1f} %, untrained "
        f"{100 * knn_top1_untrained:.1f} %"
    )


def epoch_line(row, epochs, seconds_left):
    """One epoch of metrics.jsonl.

    Args:
        row: Dict, the line of the epoch.
        epochs: Int. Of the whole run.
        seconds_left: Float.
    """
    parts = [f"epoch {row['epoch']}/{epochs}", f"loss {row['loss']:.3f}"]
    if "knn_top1" in row:
        parts.append(f"kNN {100 * row['knn_top1']:.1f} %")
    if "holdout_top1" in row:
        parts.append(f"holdout {100 * row['holdout_top1']:.1f} %")
    if row.get("queue_fill", 1.0) < 1.0:
        parts.append(f"queue {100 * row['queue_fill']:.0f} %")
    parts.append(f"{row['images_per_second']:.0f} img/s")
    if row.get("data_wait", 0.0) >= 0.05:  # Of the training, for data.
        parts.append(f"wait {100 * row['data_wait']:.0f} %")
    if seconds_left:
        parts.append(f"{duration(seconds_left)} left")
    return wrap("  ".join(parts))


def result_lines(result):
    """The end of a run, from what there is in the dict of result.json."""
    lines = []
    accuracies = {
        "kNN top-1": "knn_top1",
        "untrained": "knn_top1_untrained",
        "raw pixels": "knn_top1_pixels",
    }
    if "knn_top1" in result:
        parts = [
            f"{words} {100 * result[name]:.1f} %"
            for words, name in accuracies.items()
            if name in result
        ]
        lines.append("; ".join(parts))
    parts = []
    if "images_per_second" in result:
        parts.append(f"{result['images_per_second']:.0f} images/s")
    if "seconds" in result:
        parts.append(duration(result["seconds"]))
    if "peak_memory_mb" in result:
        parts.append(f"{result['peak_memory_mb']:,} MB peak")
    lines.append(", ".join(parts))
    if "run" in result:
        lines.append(f"Run      {result['run']}")
        logs = shlex.quote(result["run"])
        lines.append(f"Curves   tensorboard --logdir {logs}")
    lines.append(f"Encoder  {result['export']}")
    return "\n".join(filter(None, lines))


def seconds_left(ends, epochs):
    """What epochs to come will take, by those that are done.

    Args:
        ends: List of floats. When the run began and when each epoch ended, in
            seconds.
        epochs: Int >= 0. To come.

    Returns:
        Float.
    """
    # The first epoch compiles: it counts only while there is no other.
    ends = ends[len(ends) > 2 :]
    return (ends[-1] - ends[0]) / (len(ends) - 1) * epochs


def size_line(images, size):
    """At which size an encoder sees images; it may not be their own."""
    if not images.size or set(images.size) == {size}:
        return f"Images of {size} px"
    height, width = images.size
    return wrap(
        f"Images of {width} x {height} px, resized to the {size} px that the "
        "encoder takes"
    )


def broken_line(broken):
    """Names (the first ten) and number of the files that were left out."""
    shown = ", ".join(broken[:10]) + (", ..." if len(broken) > 10 else "")
    files = "file" if len(broken) == 1 else "files"
    return wrap(f"{len(broken)} broken image {files} left out: {shown}")


def duration(seconds):
    """Seconds in words, such as "1 h 5 min"."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def wrap(text):
    """A paragraph within 80 columns; paths stay whole."""
    return textwrap.fill(
        text, 80, break_long_words=False, break_on_hyphens=False
    )


class LossBar(keras.callbacks.ProgbarLogger):
    """Keras' progress bar with the loss alone, within 80 columns."""

    def set_params(self, params):
        super().set_params({**params, "verbose": 1})

    def on_train_batch_end(self, batch, logs=None):
        super().on_train_batch_end(batch, {"loss": (logs or {}).get("loss")})

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, {"loss": (logs or {}).get("loss")})
