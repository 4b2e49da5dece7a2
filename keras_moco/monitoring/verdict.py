"""What the logged numbers of a run mean, in one word and one sentence."""

import math
from typing import NamedTuple

# Share of the chance loss within which a loss counts as there.
NEAR = 0.01
# How often the queue must have been replaced, and how many steps must have
# passed, before a loss of chance is held against a run.
TURNOVERS, STEPS = 4, 200
# Deviation of features that are spread over the sphere is 1; alike they are 0.
COLLAPSED_SPREAD = 0.02
# Directions that features span; healthy networks start with several.
COLLAPSED_RANK = 1.05
# Share of queries that find their key; published runs that learn stay below.
EASY = 0.95
# Gain in kNN accuracy, over three measurements or more, that is none.
FLAT = 0.02
# Share of what was learned that must be lost again. The published CIFAR run
# rises by a quarter in its first three epochs and ends well.
LOST = 0.5

SENTENCES = {
    "filling": "The queue still holds random keys: the loss may rise until "
    "they are gone, which is expected. Wait.",
    "learning": "The loss is below chance and the features are spread.",
    "at chance": "The loss is that of guessing: nothing is learned. Look at "
    "the views (keras-moco preview), and try another learning rate or a lower "
    "temperature.",
    "collapsed": "Features of different images are alike. Try a lower learning "
    "rate, a key momentum nearer to 1, or batch normalisation in the encoder.",
    "shortcut suspected": "Queries find their key almost always and the "
    "features do not get better: something else than content gives it away. "
    "Try stronger views, more batch_norm_groups and a key momentum below 1.",
    "diverged": "The loss has lost what it had learned. Try a lower learning "
    "rate or a longer warm-up, from a checkpoint before it.",
}


class Verdict(NamedTuple):
    """A judgement on a run so far.

    Attributes:
        name: Str. "filling", "learning", "at chance", "collapsed",
            "shortcut suspected" or "diverged".
        sentence: Str. What it means and what to try.
    """

    name: str
    sentence: str

    def __str__(self):
        return f"{self.name}: {self.sentence}"


def verdicts(rows, settings):
    """Judges a run after each of its epochs, by nothing but its log.

    - diverged: the loss is not finite, a tenth above chance, or has lost half
      of what it had gained on chance;
    - collapsed: `feature_spread` below 0.02, or `feature_rank` below 1.05;
    - filling: for most of the epoch the queue held random keys;
    - at chance: within 1 % of the chance loss ln(K + 1) through an epoch, after
      200 steps and 4 turnovers of the queue;
    - shortcut suspected: `contrast_top1` of 0.95 while kNN accuracy is flat
      over three measurements (or, without labels, while negatives are at right
      angles to their queries: a mean similarity below 0.1); or a
      `key_momentum` of 1 with a `key_query_drift` above 0.5, where queries
      learn what a network says that has never learned;
    - learning: none of these.

    The first that fits is given.

    Args:
        rows: List of dicts, the lines of metrics.jsonl: `loss`, `step`, and
            what else there is of the names above.
        settings: Dict of the run's `queue_size`, `batch_size` and `symmetric`;
            of `num_images` with a memory bank.

    Returns:
        List of `Verdict`, one a row.

    Example:
        >>> rows = [{"step": 97, "loss": 6.957}, {"step": 194, "loss": 7.25}]
        >>> settings = {"queue_size": 4096, "batch_size": 512}
        >>> [verdict.name for verdict in verdicts(rows, settings)]
        ['learning', 'learning']
    """
    return [judge(rows[: n + 1], settings) for n in range(len(rows))]


def judge(rows, settings):
    """The `Verdict` on the last of the rows; see `verdicts`."""
    row, chance = rows[-1], chance_loss(settings)
    start = _step(rows[-2]) if len(rows) > 1 else 0
    turnover = turnover_steps(settings)
    if _diverged(rows, chance, turnover):
        name = "diverged"
    elif (
        row.get("feature_spread", 1.0) < COLLAPSED_SPREAD
        or row.get("feature_rank", math.inf) < COLLAPSED_RANK
    ):
        name = "collapsed"
    elif turnover > (start + _step(row)) / 2:
        name = "filling"
    elif _step(row) < max(STEPS, TURNOVERS * turnover):
        name = "learning"
    elif start >= turnover and abs(row["loss"] - chance) <= NEAR * chance:
        name = "at chance"
    elif _is_shortcut(rows):
        name = "shortcut suspected"
    else:
        name = "learning"
    return Verdict(name, SENTENCES[name])


def chance_loss(settings):
    """ln(K + 1), the loss of guessing which of K + 1 keys is the right one."""
    return math.log((settings["queue_size"] or settings["batch_size"] - 1) + 1)


def turnover_steps(settings):
    """Steps that write every key of queue or bank once; 0 without either."""
    keys_per_step = settings["batch_size"] * (
        1 + bool(settings.get("symmetric"))
    )
    keys = settings.get("num_images") or settings["queue_size"]
    return keys / keys_per_step


def _step(row):
    # Logs of before 0.4 lack it: nothing that hangs on time is held back then.
    return row.get("step", math.inf)


def _diverged(rows, chance, turnover):
    loss = rows[-1]["loss"]
    if not math.isfinite(loss) or loss > 1.1 * chance:
        return True
    # Of epochs with real keys alone: random ones make the loss look better.
    losses = [
        row["loss"]
        for before, row in zip(rows, rows[1:], strict=False)
        if _step(before) >= turnover
    ]
    best = min(losses, default=chance)
    return best < 0.9 * chance and loss - best > LOST * (chance - best)


def _is_shortcut(rows):
    row = rows[-1]
    # A momentum that has risen to 1 leaves the encoders side by side.
    if row.get("key_momentum") == 1 and row.get("key_query_drift", 0) > 0.5:
        return True
    if row.get("contrast_top1", 0.0) < EASY:
        return False
    knn = [r["knn_top1"] for r in rows if r.get("knn_top1") is not None]
    if knn:
        # What is good from the beginning has no need to rise.
        return len(knn) >= 3 and knn[-1] - knn[0] < FLAT and knn[-1] < 0.9
    return abs(row.get("negative_similarity", 1.0)) < 0.1
