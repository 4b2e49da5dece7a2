import numpy as np
import pytest
import tensorflow as tf

from keras_moco.queue import KeyQueue, unit_length


@pytest.mark.parametrize("batch", [1, 5, 6, 16])
def test_queue_is_a_ring_for_any_batch_up_to_its_size(batch):
    queue = KeyQueue(16, 4)
    expected, pointer = queue.keys.numpy(), 0
    rng = np.random.default_rng(0)
    for _ in range(7):
        keys = rng.normal(size=(batch, 4)).astype("float32")
        queue.enqueue(tf.constant(keys))
        for key in keys:
            expected[pointer] = key
            pointer = (pointer + 1) % 16
        np.testing.assert_array_equal(queue.keys.numpy(), expected)
        assert queue.pointer.numpy() == pointer


def test_queue_smaller_than_the_batch_keeps_the_newest():
    queue = KeyQueue(3, 4)
    keys = np.arange(20, dtype="float32").reshape(5, 4)
    queue.enqueue(tf.constant(keys), tf.range(5))
    rows = {tuple(row) for row in queue.keys.numpy()}
    assert rows == {tuple(row) for row in keys[2:]}
    assert set(queue.index.numpy()) == {2, 3, 4}
    assert queue.filled.numpy() == 3


def test_each_row_remembers_its_image():
    queue = KeyQueue(5, 4)
    for index in ([7, 8, 9], [1, 2, 3]):
        queue.enqueue(tf.zeros((3, 4)), tf.constant(index))
    np.testing.assert_array_equal(queue.index.numpy(), [3, 8, 9, 1, 2])


def test_keys_without_an_image_are_of_no_image():
    queue = KeyQueue(5, 4)
    queue.enqueue(tf.zeros((3, 4)), tf.constant([7, 8, 9]))
    queue.enqueue(tf.zeros((3, 4)))
    np.testing.assert_array_equal(queue.index.numpy(), [-1, 8, 9, -1, -1])


def test_queue_starts_as_random_directions():
    keys = KeyQueue(4096, 4).keys.numpy()
    np.testing.assert_allclose(np.linalg.norm(keys, axis=1), 1, rtol=1e-5)
    assert np.abs(keys.mean(axis=0)).max() < 0.05


def test_fill_counts_real_keys_up_to_all():
    queue, fills = KeyQueue(5, 4), []
    for _ in range(3):
        queue.enqueue(tf.zeros((2, 4)))
        fills.append((float(queue.fill()), float(queue.is_full())))
    np.testing.assert_allclose(fills, [(0.4, 0), (0.8, 0), (1, 1)])


def test_replicas_hold_the_same_queue(two_replicas):
    strategy = two_replicas
    with strategy.scope():
        queue = KeyQueue(5, 2)

    @tf.function
    def step():
        context = tf.distribute.get_replica_context()
        number = context.replica_id_in_sync_group
        keys = tf.fill((3, 2), tf.cast(number, tf.float32))
        queue.enqueue(keys, tf.repeat(number, 3))

    strategy.run(step)
    copies = strategy.experimental_local_results(queue.keys.value)
    # Keys 0 0 0 1 1 1 in a ring of 5: the last one is written over the first.
    for copy in copies:
        np.testing.assert_array_equal(copy.numpy()[:, 0], [1, 0, 0, 1, 1])
    np.testing.assert_array_equal(queue.index.numpy(), [1, 0, 0, 1, 1])


def test_a_row_of_zeros_stays_and_has_no_gradient():
    rows = tf.constant([[3.0, 4.0], [0.0, 0.0], [0.0, -2.0]])
    with tf.GradientTape() as tape:
        tape.watch(rows)
        unit = unit_length(rows)
        total = tf.reduce_sum(unit[:, 0])
    np.testing.assert_allclose(unit, [[0.6, 0.8], [0, 0], [0, -1]], rtol=1e-6)
    # d(x / r) / dx = y^2 / r^3 and d(x / r) / dy = -x y / r^3.
    np.testing.assert_allclose(
        tape.gradient(total, rows),
        [[16 / 125, -12 / 125], [0, 0], [1 / 2, 0]],
        rtol=1e-5,
    )
