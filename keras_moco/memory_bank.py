"""A memory bank: negatives from one key of every training image."""

import keras
import tensorflow as tf

from keras_moco import distribute
from keras_moco.queue import random_unit_rows


class MemoryBank(keras.layers.Layer):
    """One key for each training image; a step draws its negatives from all.

    It stands where `KeyQueue` does. A key is as old as the last time that its
    image was seen, up to an epoch, so that the keys of a step come from many
    different encoders: that is what the queue was made to avoid. There is no
    average to slow them down, so train it with `momentum=0`. Entries are
    overwritten; the average over entries of Wu et al. is left out.

    Everything is a Keras weight, so that it is saved with the model. On several
    replicas each holds the same bank, and draws the same rows.

    Args:
        num_images: Int >= 1. Training images; batches have to name theirs by
            an index in [0, num_images).
        dim: Int. Length of a key.
        num_negatives: Int in 1..num_images. Keys drawn for a step, with
            replacement.
        **kwargs: As for `keras.layers.Layer` (`name`).

    Attributes:
        keys: (num_images, dim) float32, of unit length; random directions at
            first.
        index: (num_images,) int64. The image of each key, -1 while it is
            random.

    Raises:
        ValueError: More negatives than images.

    Example:
        >>> bank = MemoryBank(50000, 128, num_negatives=4096)
        >>> keys, images = bank.negatives(step)  # (4096, 128), (4096,)
        >>> bank.enqueue(keys_of_the_batch, index)

    Reference:
        Wu et al. 2018, arXiv:1805.01978; section 3.2 of He et al. 2019,
        arXiv:1911.05722.
    """

    def __init__(self, num_images, dim, num_negatives, **kwargs):
        super().__init__(**kwargs)
        if not 1 <= num_negatives <= num_images:
            raise ValueError(
                "A memory bank draws at least 1 and at most as many keys as "
                f"there are images. Received: {num_negatives} keys of "
                f"{num_images} images. Give another `queue_size`."
            )
        self.num_images = num_images
        self.num_negatives = num_negatives
        # Every replica assigns the same values, so one is all.
        options = {
            "trainable": False,
            "autocast": False,
            "aggregation": "only_first_replica",
        }
        self.keys = self.add_weight(
            (num_images, dim),
            initializer=random_unit_rows,
            dtype="float32",
            name="keys",
            **options,
        )
        self.index = self.add_weight(
            (num_images,),
            initializer=keras.initializers.Constant(-1),
            dtype="int64",
            name="index",
            **options,
        )
        self.built = True

    def rows(self, step):
        """The images whose keys are the negatives of a step.

        Args:
            step: Int scalar tensor. All replicas draw the same rows from it.

        Returns:
            int64 (num_negatives,).
        """
        # `distribute.shuffle` takes the draws of (0, step).
        seed = (1, tf.cast(step, tf.int32))
        return tf.random.stateless_uniform(
            (self.num_negatives,), seed, 0, self.num_images, tf.int64
        )

    def negatives(self, step):
        """Returns keys (num_negatives, dim) and the image of each."""
        rows = self.rows(step)
        return tf.gather(self.keys.value, rows), rows

    def enqueue(self, keys, index):
        """Writes keys over those of the same images.

        Args:
            keys: (batch, dim) tensor, this replica's share.
            index: Int tensor (batch,). The image of each key.
        """
        keys = distribute.gather(keys)
        index = distribute.gather(tf.cast(index, tf.int64))
        # Of an image that is there twice (`symmetric`) the last key counts,
        # in whatever order a device writes.
        places = tf.range(tf.shape(index)[0])
        last = tf.math.unsorted_segment_max(places, index, self.num_images)
        keys = tf.gather(keys, tf.gather(last, index))
        for weight, values in ((self.keys, keys), (self.index, index)):
            weight.value.scatter_update(tf.IndexedSlices(values, index))

    def fill(self):
        """Share of the images that have a real key, float32 in [0, 1]."""
        return tf.reduce_mean(tf.cast(self.index.value >= 0, tf.float32))

    def is_full(self):
        """1.0 once no key is random, else 0.0."""
        return tf.cast(tf.reduce_all(self.index.value >= 0), tf.float32)
