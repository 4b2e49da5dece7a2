"""The order of the images, and how a pipeline starts anywhere in it."""

import numpy as np


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
        start_at: Function of (epoch, step) -> the same dataset from there on.
            Of unknown length where the step is not 0.
    """

    def __init__(self, first_epoch, steps, identity=None, names=None):
        self.place = first_epoch, 0
        self.steps = steps
        self.identity = identity
        self.names = names
        self.start_at = None

    def begin(self):
        """Returns (epoch, first step) of the pass that begins now."""
        epoch, step = self.place
        self.place = epoch + 1, 0
        return epoch, step
