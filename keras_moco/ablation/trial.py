"""One run of an ablation: the processes that make it, what it measured.

Reads what they leave in their folder, without TensorFlow.
"""

import json
import math
import pathlib
import re
import statistics
import sys

from keras_moco.ablation.studies import as_settings
from keras_moco.monitoring.verdict import chance_loss
from keras_moco.safety.lock import RunLock

MEASURES = {
    "knn_top1": "kNN accuracy at the end, in [0, 1]",
    "linear_top1": "accuracy of the linear probe on features, in [0, 1]",
    "loss": "mean loss of the last epoch, in nats",
    "chance_loss": "ln(K + 1) of K negatives",
    "wobble": "noise of the loss from epoch to epoch, in nats",
    "peak_memory_mb": "most memory that the process held, in MB",
    "seconds": "sum over the epochs",
    "knn_top1_untrained": "the same encoder before training",
}


class Trial:
    """A setting with a seed: the task of a process, then of another.

    Args:
        folder: Path of the ablation.
        setting: Str. Name of the setting.
        fields: Dict. The fields of the preset that make it.
        seed: Int.
        words: List of str. Options of `pretrain` that all runs share.
        datasets: Sequence of str. What `--dataset` is given.
        data_dir: Str or None.

    Attributes:
        run_dir, export, log: Paths of the run folder, of its encoder, and of
            the file that takes what the processes print.

    Example:
        >>> Trial(folder, "v1", STUDIES["v1-to-v2"].settings["v1"], 0, words)
    """

    def __init__(
        self, folder, setting, fields, seed, words, datasets=(), data_dir=None
    ):
        self.setting, self.fields, self.seed = setting, fields, seed
        name = re.sub(r"[^\w.=,+-]+", "-", f"{setting}-seed-{seed}")
        self.run_dir = folder / "runs" / name
        self.export = folder / "encoders" / name
        self.log = folder / "logs" / f"{name}.txt"
        self.words, self.datasets, self.data_dir = words, datasets, data_dir

    def __str__(self):
        return f"{self.setting}, seed {self.seed}"

    def next_command(self):
        """Pretraining, then the linear probe where there are labels, or None.

        Both are `keras-moco`'s own, and go on where they were interrupted.
        """
        found = read_run(self.run_dir)
        if not found:
            words = ["pretrain", *self.words]
            for setting in as_settings(self.fields):
                words += ["--set", setting]
            words += ["--seed", self.seed, "--run-dir", self.run_dir]
            words += ["--export-to", self.export]
            words += ["--knn-every", 10**6]  # The last epoch is in any case.
        elif (
            "linear_top1" in found
            or "knn_top1" not in found
            or len(self.datasets) > 1
        ):
            return None
        else:
            words = ["linear-probe", "--encoder", self.export]
            words += ["--dataset", *(self.datasets or ["shapes"])]
            words += ["--data-dir", self.data_dir] if self.data_dir else []
            words += ["--seed", self.seed]
            words += ["--json", self.run_dir / "linear.json"]
        return [sys.executable, "-m", "keras_moco.cli", *map(str, words)]

    def is_busy(self):
        """Whether a process that a killed ablation left behind is at it."""
        if not (self.run_dir / "lock").exists():
            return False
        try:
            with RunLock(self.run_dir, say=lambda line: None):
                return False
        except ValueError:
            return True


def read_run(folder):
    """What a run of `pretrain` and its probe measured.

    Args:
        folder: Path of a run folder; `linear.json` in it is what
            `linear-probe --json` wrote.

    Returns:
        Dict of the `MEASURES` that there are; {} of a run that is not
        finished.

    Example:
        >>> read_run("ablation/runs/momentum=0.9-seed-0")["knn_top1"]
    """
    folder = pathlib.Path(folder)
    result = _read(folder / "result.json")
    settings = _read(folder / "run.json").get("settings")
    if "export" not in result or not settings:
        return {}
    rows = epochs(folder)
    found = {
        "knn_top1": result.get("knn_top1"),
        "linear_top1": _read(folder / "linear.json").get("test_top1"),
        "loss": result["loss"],
        "chance_loss": chance_loss(settings),
        "wobble": wobble([row["loss"] for row in rows]),
        "peak_memory_mb": result["peak_memory_mb"],
        "seconds": sum(row["seconds"] for row in rows),
        "knn_top1_untrained": result.get("knn_top1_untrained"),
    }
    return {name: value for name, value in found.items() if value is not None}


def epochs(folder):
    """The lines of metrics.jsonl, as dicts, up to one that broke off."""
    rows = []
    try:
        text = (pathlib.Path(folder) / "metrics.jsonl").read_text()
        for line in text.splitlines():
            rows.append(json.loads(line))
    except (OSError, ValueError):
        pass
    return rows


def wobble(losses):
    """The noise of a loss from epoch to epoch, whatever its trend.

    The root mean square of its second differences over the second half of the
    epochs, the last three at least, over sqrt(6): of independent noise around
    a straight line that is the standard deviation.

    Args:
        losses: List of floats, one an epoch.

    Returns:
        Float >= 0, or None of fewer than three epochs.

    Example:
        >>> wobble([3.0, 2.0, 1.0])
        0.0
    """
    losses = losses[-max(3, math.ceil(len(losses) / 2)) :]
    if len(losses) < 3:
        return None
    bends = [
        a - 2 * b + c
        for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)
    ]
    return math.sqrt(statistics.fmean(bend * bend for bend in bends) / 6)


def _read(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
