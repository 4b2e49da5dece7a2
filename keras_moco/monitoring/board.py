"""A run as TensorBoard shows it: `tensorboard --logdir RUN`."""

import numpy as np
import tensorflow as tf
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import summary as custom_scalar
from tensorboard.plugins.histogram import metadata as histogram
from tensorboard.plugins.hparams import api as hparams

from keras_moco.monitoring.quality import BINS
from keras_moco.monitoring.verdict import chance_loss, judge

GROUPS = {
    "loss": ("loss", "chance"),
    "contrast": (
        "positive_similarity",
        "negative_similarity",
        "contrast_top1",
        "positive_histogram",
        "negative_histogram",
    ),
    "quality": (
        "knn_top1",
        "retrieval_top1",
        "alignment",
        "uniformity",
        "feature_rank",
        "projection_rank",
        "feature_std",
        "feature_spread",
    ),
    "queue": (
        "queue_fill",
        "key_age",
        "oldest_key_age",
        "key_consistency",
        "key_query_drift",
    ),
    "schedule": ("learning_rate", "key_momentum", "step"),
    "speed": ("images_per_second", "data_wait", "seconds"),
}
TAGS = {name: f"{group}/{name}" for group in GROUPS for name in GROUPS[group]}


class Board:
    """The event file of a run, made of the lines of its log.

    A process that goes on with a run writes them all into a file of its own
    and removes the one before: so no epoch is missing or there twice.

    Args:
        folder: `pathlib.Path` of the run.
        settings: Dict of the run.
        views: uint8 array (height, width, 3) or None. A picture of the views.
    """

    def __init__(self, folder, settings, views=None):
        self.folder = folder
        self.settings = settings
        self.views = views
        self.writer = None
        self.files = []
        self.written = 0
        self.told = None  # The verdict that was written last.

    def write(self, rows):
        """Adds the rows that are not there yet.

        Args:
            rows: List of dicts, all lines of metrics.jsonl.

        Raises:
            OSError, tf.errors.OpError: The folder cannot be written.
        """
        if self.writer is None or not all(map(tf.io.gfile.exists, self.files)):
            self._open()
        for number in range(self.written, len(rows)):
            with self.writer.as_default(step=rows[number]["epoch"]):
                self._write(rows[number])
                verdict = judge(rows[: number + 1], self.settings)
                if verdict.name != self.told:
                    self.told = verdict.name
                    tf.summary.text("verdict", str(verdict))
        self.writer.flush()
        self.written = len(rows)

    def _open(self):
        before = _event_files(self.folder)
        self.writer = tf.summary.create_file_writer(str(self.folder))
        self.written, self.told = 0, None
        with self.writer.as_default(step=0):
            hparams.hparams(
                {name: _plain(value) for name, value in self.settings.items()},
                trial_id=self.folder.name,
            )
            tf.summary.experimental.write_raw_pb(
                _loss_and_chance().SerializeToString()
            )
            if self.views is not None:
                tf.summary.image("views", self.views[None])
        self.writer.flush()
        self.files = sorted(_event_files(self.folder) - before)
        for path in before:
            path.unlink(missing_ok=True)

    def _write(self, row):
        tf.summary.scalar(TAGS["chance"], chance_loss(self.settings))
        for name, value in row.items():
            tag = TAGS.get(name, f"other/{name}")
            if isinstance(value, list):
                tf.summary.write(
                    tag,
                    np.stack([BINS[:-1], BINS[1:], value], axis=1),
                    metadata=histogram.create_summary_metadata(None, None),
                )
            elif name != "epoch":
                tf.summary.scalar(tag, value)


def _event_files(folder):
    return set(folder.glob("events.out.tfevents.*"))


def _plain(value):
    """A setting as the hparams plugin takes it."""
    if isinstance(value, (bool, int, float, str)):
        return value
    return "" if value is None else str(value)


def _loss_and_chance():
    """Both curves in one chart, of the page Custom Scalars."""
    content = layout_pb2.MultilineChartContent(
        tag=[TAGS["loss"], TAGS["chance"]]
    )
    chart = layout_pb2.Chart(title="loss and chance", multiline=content)
    category = layout_pb2.Category(title="loss", chart=[chart])
    return custom_scalar.pb(layout_pb2.Layout(category=[category]))
