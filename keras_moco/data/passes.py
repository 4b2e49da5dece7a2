"""The order of the images, and how a pipeline starts anywhere in it."""

import numpy as np
import tensorflow as tf


def draw_order(seed, epoch, rows):
    """The images of an epoch in their order, int64 `(number of images,)`.

    `rows` is that number, or an int array of the images that are chosen. A
    function of its arguments alone: whoever needs step `s` of an epoch takes
    `order[s * batch_size : (s + 1) * batch_size]` and nothing before it.
    """
    return np.random.default_rng([seed, epoch]).permutation(rows)


class Passes:
    """Where the next pass of a dataset starts: the attribute `passes` of it.

    A pass begins at step 0 of the epoch after that of the pass before; only
    the one after `start_at` begins within an epoch.

    Args:
        first_epoch: Int. Of the first pass.
        steps: Int. Batches of a whole pass.
        identity: Dict. What the batches are a function of, by name. It and
            `names` are for a `Checkpoint`.
        names: Function of (epoch, step) -> names of the images of that batch,
            or None where they are known only once they are read.

    Attributes:
        waited: Float. Seconds that whoever reads has waited for batches.
        start_at: Function of (epoch, step) -> the same dataset from there on.
            Of unknown length where the step is not 0.
    """

    def __init__(self, first_epoch, steps, identity=None, names=None):
        self.place = first_epoch, 0
        self.steps = steps
        self.identity = identity
        self.names = names
        self.start_at = None
        self.waited = 0.0

    def begin(self):
        """Returns (epoch, first step) of the pass that begins now."""
        epoch, step = self.place
        self.place = epoch + 1, 0
        return epoch, step

    def clocked(self, dataset):
        """The same dataset; adds up in `waited` how long a batch takes to come.

        Args:
            dataset: `tf.data.Dataset` of tuples, as it is read.
        """

        def note(seconds):
            self.waited += float(seconds)
            return np.int64(0)

        def came(asked, *batch):
            noted = tf.numpy_function(note, [tf.timestamp() - asked], tf.int64)
            with tf.control_dependencies([noted]):
                return tuple(map(tf.identity, batch))

        # A zip asks its parts one after the other, this one first.
        asked = tf.data.Dataset.from_tensors(0.0).repeat()
        asked = asked.map(lambda _: tf.timestamp())
        return tf.data.Dataset.zip(asked, dataset).map(
            lambda asked, batch: came(asked, *batch)
        )
