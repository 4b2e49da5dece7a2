"""How the result of a classifier is shown: lines, picture, JSON, TensorBoard.

All of them take the dict of `keras_moco.evaluation.scores.score`.
"""

import pathlib
import textwrap

import numpy as np
import tensorflow as tf
from tensorboard.plugins.hparams import api as hparams

from keras_moco.outputs import PICTURES, check_file, draft_of, write_json
from keras_moco.pictures import draw_confusion


def result_lines(name, result, names=()):
    """Accuracy, the setting that gave it, and how it was selected.

    Args:
        name: Str. What the result is of, such as "encoder".
        result: Dict of `score`.
        names: List of str. Of the classes, to say the accuracy of each.

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
        f"top-1 {top1:.2f} % ({low:.1f} to {high:.1f})"
        + (f", top-5 {top5:.2f} %" if len(result["per_class"]) > 5 else ""),
        f"epoch {epoch}, with {holdout:.2f} % on the holdout; last epoch "
        f"{last:.2f} %",
        ", ".join(f"{k.replace('_', ' ')} {v:g}" for k, v in setting.items()),
    ]
    shares = [
        f"{c} {100 * share:.1f} %"
        for c, share in zip(names, result["per_class"], strict=False)
        if share is not None
    ]
    if 0 < len(shares) <= 20:  # More are for the picture.
        lines.append("by class: " + ", ".join(shares))
    indent = 11 * " "
    wrapped = [
        textwrap.fill(
            line.replace(" %", "\N{NO-BREAK SPACE}%"),
            80,
            initial_indent=indent,
            subsequent_indent=indent,
        ).replace("\N{NO-BREAK SPACE}", " ")
        for line in lines
    ]
    return f"{name:10} " + "\n".join(wrapped)[len(indent) :]


def save_results(results, names, *, json=None, picture=None, tensorboard=None):
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
        >>> save_results({"encoder": result}, names, json="probe.json")
    """
    first, *others = results
    if json:
        content = {
            **_by_name(results[first], names),
            "baselines": {n: _by_name(results[n], names) for n in others},
        }
        write_json(json, content)
    if picture:
        check_file("The picture", picture, PICTURES)
        figure = draw_confusion(results[first]["confusion"], names)
        with draft_of(picture) as draft:
            figure.savefig(draft, dpi=120)
    if tensorboard:
        for name, result in results.items():
            folder = pathlib.Path(tensorboard, name.replace(" ", "_"))
            _write_events(result, names, folder)


def _by_name(result, names):
    per_class = dict(zip(names, result["per_class"], strict=True))
    return {**result, "per_class": per_class}


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
