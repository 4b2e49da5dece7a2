"""How the result of a classifier is shown: lines, picture, JSON, TensorBoard.

All of them take the dict of `keras_moco.scores.score`.
"""

import json
import pathlib
import textwrap

import numpy as np
import tensorflow as tf
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tensorboard.plugins.hparams import api as hparams


def result_lines(name, result):
    """Accuracy, the setting that gave it, and how it was selected.

    Args:
        name: Str. What the result is of, such as "encoder".
        result: Dict of `score`.

    Returns:
        Str of three lines or more, within 80 columns.
    """
    low, high = (100 * bound for bound in result["interval"])
    top1, top5, last, holdout = (
        100 * result[name]
        for name in ("test_top1", "test_top5", "test_top1_last", "holdout_top1")
    )
    setting = dict(result["setting"])
    epoch = setting.pop("epoch")
    lines = [
        f"top-1 {top1:.2f} % ({low:.1f} to {high:.1f}), top-5 {top5:.2f} %",
        f"epoch {epoch}, with {holdout:.2f} % on the holdout; last epoch "
        f"{last:.2f} %",
        ", ".join(f"{k.replace('_', ' ')} {v:g}" for k, v in setting.items()),
    ]
    indent = 11 * " "
    wrapped = [
        textwrap.fill(line, 80, initial_indent=indent, subsequent_indent=indent)
        for line in lines
    ]
    return f"{name:10} " + "\n".join(wrapped)[len(indent) :]


def save_report(results, names, *, json=None, picture=None, tensorboard=None):
    """Writes a result, with those to compare it with, wherever it is wanted.

    Args:
        results: Dict from a name to the dict of `score`. The first is the one
            that counts, the others are its baselines.
        names: List of str. Of the classes.
        json: Str, path or None. A JSON file of the first result with
            `per_class` by name, and the others as its `baselines`.
        picture: Str, path or None. A picture (.png, .pdf or .svg) of the first
            confusion matrix.
        tensorboard: Str, path or None. A folder for TensorBoard, with a run
            for each result: accuracies, confusion matrix, and the setting as
            hyperparameters.

    Raises:
        ValueError: A picture of another kind.

    Example:
        >>> save_report({"encoder": result}, names, json="probe.json")
    """
    first, *others = results
    if json:
        content = {
            **_by_name(results[first], names),
            "baselines": {n: _by_name(results[n], names) for n in others},
        }
        _write_json(json, content)
    if picture:
        check_picture(picture)
        pathlib.Path(picture).parent.mkdir(parents=True, exist_ok=True)
        draw_confusion(results[first]["confusion"], names).savefig(
            picture, dpi=120
        )
    if tensorboard:
        for name, result in results.items():
            folder = pathlib.Path(tensorboard, name.replace(" ", "_"))
            _write_events(result, names, folder)


def check_picture(path):
    """Raises unless a picture can be written under that name."""
    known = FigureCanvasAgg.get_supported_filetypes()
    if pathlib.Path(path).suffix[1:] not in known:
        raise ValueError(
            f"A picture ends in one of {', '.join(sorted(known))}. "
            f"Received: {path}"
        )


def draw_confusion(confusion, names):
    """The share of each true class (row) that got each answer, as a figure.

    Args:
        confusion: Int array (classes, classes), true class by answer.
        names: List of str. Of the classes.

    Returns:
        `matplotlib.figure.Figure`.
    """
    counts = np.array(confusion)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 2.0 + 0.35 * min(len(names), 100)
    figure = Figure(figsize=(side + 0.6, side), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    image = axis.imshow(100 * shares, vmin=0, vmax=100, cmap="cividis")
    figure.colorbar(image, ax=axis, label="% of the class", shrink=0.8)
    axis.set(xlabel="answer", ylabel="class")
    ticks = range(len(names))
    if len(names) <= 30:
        axis.set_xticks(ticks, names, rotation=90, fontsize=8)
        axis.set_yticks(ticks, names, fontsize=8)
        for row, column in np.ndindex(shares.shape):
            share = 100 * shares[row, column]
            axis.text(
                column,
                row,
                f"{share:.0f}",
                ha="center",
                va="center",
                fontsize=6,
                color="black" if share > 60 else "white",
            )
    return figure


def _by_name(result, names):
    per_class = dict(zip(names, result["per_class"], strict=True))
    return {**result, "per_class": per_class}


def _write_json(path, content):
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(path).write_text(json.dumps(content, indent=2) + "\n")


def _write_events(result, names, folder):
    figure = draw_confusion(result["confusion"], names)
    figure.canvas.draw()
    picture = np.asarray(figure.canvas.buffer_rgba())[None]
    writer = tf.summary.create_file_writer(str(folder))
    with writer.as_default(step=result["setting"]["epoch"]):
        hparams.hparams(result["setting"])
        for name in ("test_top1", "test_top5", "test_top1_last"):
            tf.summary.scalar(name, result[name])
        tf.summary.scalar("holdout_top1", result["holdout_top1"])
        tf.summary.image("confusion", picture)
    writer.close()
