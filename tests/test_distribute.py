import numpy as np
import tensorflow as tf

from keras_moco import distribute


def test_gather_joins_rows_in_order_on_every_replica(two_replicas):
    strategy = two_replicas

    def step():
        context = tf.distribute.get_replica_context()
        rows = tf.stack(
            [context.replica_id_in_sync_group * 10 + i for i in range(3)]
        )
        return distribute.gather(rows), distribute.first_row(rows)

    gathered, first = strategy.run(tf.function(step))
    for copy in strategy.experimental_local_results(gathered):
        np.testing.assert_array_equal(copy, [0, 1, 2, 10, 11, 12])
    assert [int(x) for x in strategy.experimental_local_results(first)] == [
        0,
        3,
    ]
    with strategy.scope():
        assert distribute.num_replicas() == 2


def test_on_one_device_nothing_happens():
    rows = tf.constant([1, 2])
    assert distribute.gather(rows) is rows
    assert int(distribute.first_row(rows)) == 0
    assert distribute.num_replicas() == 1
