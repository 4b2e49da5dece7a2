"""What the answers of a classifier are worth: one dict for all of them."""

import math

import numpy as np


def score(labels, ranking, last, num_classes, *, holdout_top1, setting):
    """The figures of a classifier, from its answers to the test images.

    Args:
        labels: Int array (test images,), from 0.
        ranking: Int array (test images, answers). The best answers of the
            classifier as it was selected, five or as many as there are.
        last: Int array (test images,). The best answer after the last epoch.
        num_classes: Int >= 2.
        holdout_top1: Float in [0, 1]. What it was selected by.
        setting: Dict. The settings that were selected, with their epoch.

    Returns:
        Dict of `test_top1`, `test_top5`, `test_top1_last` (the same setting
        after its last epoch), `interval` (of 95 %, Wilson's, for `test_top1`),
        `holdout_top1`, `setting`, `per_class` (accuracy of each class; None
        where the test images have none) and `confusion` (counts, true class by
        answer).

    Example:
        >>> score(labels, ranking, last, 10, holdout_top1=0.5, setting={})
    """
    right = ranking == labels[:, None]
    top1 = float(np.mean(right[:, 0]))
    confusion = np.zeros((num_classes, num_classes), int)
    np.add.at(confusion, (labels, ranking[:, 0]), 1)
    counts = confusion.sum(axis=1)
    return {
        "test_top1": top1,
        "test_top5": float(np.mean(right.any(axis=1))),
        "test_top1_last": float(np.mean(last == labels)),
        "interval": wilson_interval(top1, len(labels)),
        "holdout_top1": holdout_top1,
        "setting": setting,
        "per_class": [
            float(share / count) if count else None
            for share, count in zip(np.diag(confusion), counts, strict=True)
        ],
        "confusion": confusion.tolist(),
    }


def wilson_interval(share, count, z=1.959964):
    """The 95 % interval of a share that was counted.

    Args:
        share: Float in [0, 1].
        count: Int >= 1.
        z: Float. Quantile of the normal distribution.

    Returns:
        Pair of floats.
    """
    spread = z * math.sqrt(
        share * (1 - share) / count + z * z / (4 * count * count)
    )
    middle = share + z * z / (2 * count)
    scale = 1 + z * z / count
    return [(middle - spread) / scale, (middle + spread) / scale]


def check_labels(labels, test_labels):
    """Returns the number of classes, or raises what is wrong with them.

    Args:
        labels: Int array (training images,), from 0.
        test_labels: Int array (test images,), from 0.

    Raises:
        ValueError: One class only, or classes that cannot be learnt.
    """
    known = np.unique(labels)
    if len(known) < 2:
        raise ValueError(
            "A classifier needs images of two classes at least; all training "
            f"images are of class {known[0]}."
        )
    unknown = np.setdiff1d(test_labels, known)
    if len(unknown):
        raise ValueError(
            "The test images have classes that the training images lack: "
            f"{', '.join(map(str, unknown[:10]))}"
        )
    classes = int(known[-1]) + 1
    if classes > 1000 * len(known):
        raise ValueError(
            "Labels must be numbers from 0 to one below the number of classes. "
            f"Received: up to {known[-1]}, of {len(known)} classes"
        )
    return classes
