import time

import numpy as np
import tensorflow as tf

from keras_moco.data.passes import Passes


def read(seconds_to_make, seconds_to_use):
    """The batches, and how long their reader has waited for them."""

    def batches():
        for number in range(4):
            time.sleep(seconds_to_make)
            yield number, -number

    scalar = tf.TensorSpec((), tf.int64)
    dataset = tf.data.Dataset.from_generator(
        batches, output_signature=(scalar, scalar)
    )
    passes = Passes(0, 4)
    found = []
    for batch in passes.clocked(dataset.prefetch(4)):
        found.append([int(part) for part in batch])
        time.sleep(seconds_to_use)
    assert found == [[n, -n] for n in range(4)]
    return passes.waited


def test_waiting_for_a_slow_source_is_counted():
    assert read(0.05, 0.0) > 0.15


def test_the_time_of_a_slow_reader_is_not():
    assert read(0.0, 0.25) < 0.5


def test_a_clocked_dataset_keeps_length_and_shapes():
    data = tf.data.Dataset.from_tensor_slices(np.zeros((6, 2, 3)))
    data = tf.data.Dataset.zip(data, data)
    clocked = Passes(0, 6).clocked(data)
    assert len(clocked) == 6
    assert clocked.element_spec == data.element_spec
