"""The queue of keys that serve as negatives."""

import keras
import tensorflow as tf

from keras_moco import distribute


class KeyQueue(keras.layers.Layer):
    """A ring of past keys: each step writes over the oldest.

    Everything is a Keras weight, so that it is saved with the model. On several
    replicas each holds the same queue: keys are gathered and every replica
    writes the same rows.

    Args:
        size: Int >= 0. Keys held. 0 holds none.
        dim: Int. Length of a key.
        **kwargs: As for `keras.layers.Layer` (`name`).

    Attributes:
        keys: (size, dim) float32, of unit length; random directions at first.
        index: (size,) int64. The image of each key, -1 if unknown.
        pointer: int64 scalar. Row that the next key is written to.
        filled: int64 scalar. Rows that hold real keys.

    Example:
        >>> queue = KeyQueue(4096, 128)
        >>> queue.enqueue(keys, index)  # (batch, 128), (batch,)

    Reference:
        He et al. 2019, arXiv:1911.05722, section 3.2.
    """

    def __init__(self, size, dim, **kwargs):
        super().__init__(**kwargs)
        self.size = size
        # Every replica assigns the same values, so one is all.
        options = {
            "trainable": False,
            "autocast": False,
            "aggregation": "only_first_replica",
        }
        self.keys = self.add_weight(
            (size, dim),
            initializer=random_unit_rows,
            dtype="float32",
            name="keys",
            **options,
        )
        constant = keras.initializers.Constant
        options["dtype"] = "int64"
        self.index = self.add_weight(
            (size,), initializer=constant(-1), name="index", **options
        )
        self.pointer = self.add_weight(
            (), initializer=constant(0), name="pointer", **options
        )
        self.filled = self.add_weight(
            (), initializer=constant(0), name="filled", **options
        )
        self.built = True

    def negatives(self, step=None):
        """Returns all keys (size, dim) and the image of each, at any step."""
        del step
        return self.keys.value, self.index.value

    def enqueue(self, keys, index=None):
        """Writes keys over the oldest ones; of more than `size` the newest.

        Args:
            keys: (batch, dim) tensor, this replica's share.
            index: Int tensor (batch,) or None. The image of each key.
        """
        if not self.size:
            return
        if index is None:
            index = -tf.ones(tf.shape(keys)[:1], tf.int64)
        keys = distribute.gather(keys)
        index = distribute.gather(tf.cast(index, tf.int64))
        count = tf.shape(keys, out_type=tf.int64)[0]
        newest = tf.minimum(count, self.size)
        start = self.pointer.value + count - newest
        rows = (start + tf.range(newest)) % self.size
        # A scatter touches only its rows; an assignment copies the queue.
        for weight, values in ((self.keys, keys), (self.index, index)):
            update = tf.IndexedSlices(values[count - newest :], rows)
            weight.value.scatter_update(update)
        self.pointer.assign((start + newest) % self.size)
        self.filled.assign(tf.minimum(self.filled.value + count, self.size))

    def fill(self):
        """Share of the rows that hold real keys, float32 in [0, 1]."""
        return tf.cast(self.filled.value, tf.float32) / max(self.size, 1)

    def is_full(self):
        """1.0 once no random row is left, else 0.0."""
        return tf.cast(self.filled.value >= self.size, tf.float32)


def unit_length(x):
    """Scales rows to length 1, in float32.

    A row of zeros, which points nowhere, stays zero and has no gradient: the
    derivative of the length would give it one without bounds.
    """
    x = tf.cast(x, tf.float32)
    square = tf.reduce_sum(x * x, axis=1, keepdims=True)
    points = square > 1e-12
    scale = tf.math.rsqrt(tf.where(points, square, 1.0))
    return x * tf.where(points, scale, 0.0)


def random_unit_rows(shape, dtype=None):
    """Initializer of the queue: random directions."""
    return unit_length(keras.random.normal(shape, dtype=dtype))
