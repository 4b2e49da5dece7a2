import json
import socket

import numpy as np
import pytest
import tensorflow as tf

import keras_moco as km
from keras_moco import distribute
from keras_moco.build import build_model, prepare
from keras_moco.layers import num_groups


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


def test_shuffled_rows_come_back_from_all_replicas(two_replicas):
    def step():
        context = tf.distribute.get_replica_context()
        rows = context.replica_id_in_sync_group * 10 + tf.range(3)
        dealt, order = distribute.shuffle(rows, 7)
        return dealt, order, distribute.unshuffle(dealt, order)

    dealt, order, back = two_replicas.run(tf.function(step))
    rows = np.array([0, 1, 2, 10, 11, 12])
    orders = [o.numpy() for o in two_replicas.experimental_local_results(order)]
    np.testing.assert_array_equal(orders[0], orders[1])
    assert sorted(orders[0]) == list(range(6))
    dealt = np.concatenate(two_replicas.experimental_local_results(dealt))
    np.testing.assert_array_equal(dealt, rows[orders[0]])
    back = np.concatenate(two_replicas.experimental_local_results(back))
    np.testing.assert_array_equal(back, rows)


def test_unequal_shares_come_back_too(two_replicas):
    """As of the last batch of an array."""
    rows = tf.data.Dataset.range(3).batch(4)
    rows = two_replicas.experimental_distribute_dataset(rows)

    def step(rows):
        dealt, order = distribute.shuffle(rows, 7)
        return distribute.first_row(rows), distribute.unshuffle(dealt, order)

    @tf.function
    def run(iterator):
        return two_replicas.run(step, [next(iterator)])

    first, back = run(iter(rows))
    local = two_replicas.experimental_local_results
    assert [int(row) for row in local(first)] == [0, 2]
    assert [rows.numpy().tolist() for rows in local(back)] == [[0, 1], [2]]


# Which devices


def test_one_device_takes_no_strategy():
    for devices in ("auto", "cpu", 1, "1"):
        strategy = distribute.choose_strategy(devices)
        assert strategy is tf.distribute.get_strategy()
        assert distribute.is_chief(strategy)


def test_strategy_of_the_scope_is_taken(two_replicas):
    with two_replicas.scope():
        assert distribute.choose_strategy(1) is two_replicas


@pytest.mark.parametrize("devices", [3, "3", 0, "-1", "gpu", 1.5])
def test_devices_must_be_there(devices):
    with pytest.raises(ValueError, match="up to 2, the logical CPUs") as error:
        distribute.choose_strategy(devices)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "no json",
        "[]",
        "{}",
        '{"cluster": {"worker": ["a:1"]}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "ps", "index": 0}}',
        '{"cluster": {"worker": ["a:1"]},'
        ' "task": {"type": "worker", "index": 1}}',
        '{"cluster": {"worker": ["a"]},'
        ' "task": {"type": "worker", "index": 0}}',
    ],
)
def test_malformed_cluster_is_one_line_with_an_example(monkeypatch, text):
    monkeypatch.setenv("TF_CONFIG", text)
    with pytest.raises(ValueError, match="TF_CONFIG is malformed.*host1") as e:
        distribute.choose_strategy()
    assert "\n" not in str(e.value)


def test_port_in_use_is_one_line(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = {
            "cluster": {"worker": [f"localhost:{port}"]},
            "task": {"type": "worker", "index": 0},
        }
        monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
        with pytest.raises(ValueError, match=f"Port {port}.*opened") as error:
            distribute.choose_strategy()
    assert "\n" not in str(error.value)


def test_batch_must_be_shared_out_evenly(two_replicas):
    images = np.zeros((12, 8, 8, 3), np.uint8)
    options = {"width": 2, "encoder": "resnet18"}
    with two_replicas.scope():
        for size in (9, 2):
            with pytest.raises(ValueError, match="each of the 2 replicas"):
                prepare(images, batch_size=size, **options)
        prepare(images, batch_size=4, **options)


def test_groups_are_counted_over_all_replicas(two_replicas):
    images = np.zeros((128, 8, 8, 3), np.uint8)
    options = {"width": 2, "encoder": "resnet18", "batch_size": 128}
    with two_replicas.scope():
        _, preset, _, _ = prepare(images, **options)
        model = build_model(preset, None, 10, "float32")
    assert preset.batch_norm_groups == 8
    assert num_groups(model.encoder) == 4
    assert model.jit_compile is False


def test_synchronised_preset_has_no_groups():
    images = np.zeros((128, 8, 8, 3), np.uint8)
    options = {"width": 2, "encoder": "resnet18", "batch_size": 128}
    sync = "sync_batch_norm=true"
    _, preset, _, _ = prepare(images, settings=sync, **options)
    assert preset.batch_norm_groups == 1
    model = build_model(preset, None, 10, "float32")
    norm = model.encoder.get_layer("stem_bn")
    assert norm.synchronized and norm.groups == 1
    with pytest.raises(ValueError, match="`batch_norm_groups` must be 1"):
        prepare(images, settings=(sync, "batch_norm_groups=2"), **options)
    assert km.PRESETS["moco_v3"].sync_batch_norm
