"""Runs in processes of its own, of as many devices as the test wants.

    replicas.py golden OUT CPUS [N] the golden trajectory on so many CPUs, or
                                    N of its batches joined in each step
    replicas.py shuffled OUT CPUS   one forward pass of keys with batch norm
    replicas.py pretrain OUT ...    `keras-moco pretrain ...`, weights to OUT

With TF_CONFIG in the environment they are workers of a cluster.
"""

import os
import pathlib
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_moco as km  # noqa: E402
from keras_moco import distribute  # noqa: E402


def golden(cpus, joined=1):
    """Loss and queue of every step, and the weights at the end."""
    here = pathlib.Path(__file__).parent
    z = dict(np.load(here / "golden" / "moco_steps.npz"))
    strategy = strategy_of(cpus)
    with strategy.scope():
        encoder = keras.Sequential(
            [
                keras.Input((4, 4, 3)),
                keras.layers.Flatten(),
                keras.layers.Dense(16, activation="relu"),
            ]
        )
        head = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8)])
        encoder.set_weights([z["init_w1"], z["init_b1"]])
        head.set_weights([z["init_w2"], z["init_b2"]])
        model = km.MoCo(encoder, head, queue_size=16, momentum=0.9)
        model.queue.assign(z["init_queue"])
        model.compile(km.SGD(0.1, momentum=0.9, weight_decay=0.01))
    views = z["views"].astype("float32")  # (12, 2, 6, 4, 4, 3)
    views = np.concatenate(np.split(views, joined), axis=2)
    losses = []
    for step in range(len(views)):
        pairs = pairs_of(strategy, views[step : step + 1])
        history = model.fit(pairs, steps_per_epoch=1, verbose=0)
        losses.append(history.history["loss"][0])
    copies = strategy.experimental_local_results(model.queue.value)
    queues = np.stack([copy.numpy() for copy in copies])
    weights = [*encoder.get_weights(), *head.get_weights()]
    weights += model.key_encoder.get_weights()
    weights += model.key_projector.get_weights()
    names = [
        f"{kind}_{name}"
        for kind in ("query", "key")
        for name in ("w1", "b1", "w2", "b2")
    ]
    return {
        "losses": losses,
        "queues": queues,
        **dict(zip(names, weights, strict=True)),
    }


def pairs_of(strategy, views):
    """A dataset of (query, key), each process reading its own share."""

    def share(number, shares):
        size = views.shape[2] // shares
        own = slice(number * size, (number + 1) * size)
        return tf.data.Dataset.from_tensor_slices(
            (views[:, 0, own], views[:, 1, own])
        )

    if distribute.over_machines(strategy):
        return distribute.distribute_batches(strategy, share, views.shape[2])
    return share(0, 1)


def strategy_of(cpus):
    if cpus > 1:
        distribute.split_cpu(cpus)
    return distribute.choose_strategy("all")


def shuffled(cpus):
    """Keys of images in order, with a layer that normalises by the batch."""
    strategy = strategy_of(cpus)
    images = np.random.default_rng(0).random((8, 3, 3, 2), "float32")
    results = {"images": images}
    with strategy.scope():
        for name, norm in (("norm", True), ("plain", False)):
            layers = [keras.Input((3, 3, 2))]
            if norm:
                layers.append(keras.layers.BatchNormalization(epsilon=1e-5))
            encoder = keras.Sequential([*layers, keras.layers.Flatten()])
            head = keras.Sequential(
                [keras.Input((18,)), keras.layers.Identity()]
            )
            model = km.MoCo(encoder, head, queue_size=8)
            model.compile(km.SGD(0.1))
            results[name] = keys_of(strategy, model, images)
            order = tf.random.stateless_uniform((8,), (0, 0))
            results["order"] = tf.argsort(order).numpy()
    return results


def keys_of(strategy, model, images):
    def encode():
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        size = len(images) // strategy.num_replicas_in_sync
        own = tf.constant(images)[replica * size : (replica + 1) * size]
        return model.encode_key(own)

    keys = strategy.run(tf.function(encode))
    return np.concatenate(strategy.experimental_local_results(keys))


def pretrain(*arguments):
    """The command itself; the weights that it ends with."""
    from keras_moco.cli import main

    models = []
    fit = km.MoCo.fit

    def spied(self, *args, **kwargs):
        models.append(self)
        return fit(self, *args, **kwargs)

    km.MoCo.fit = spied
    try:
        main(["pretrain", *arguments])
    except SystemExit as done:
        if done.code:
            raise
    weights = models[0].get_weights() if models else []
    return {f"w{n}": weight for n, weight in enumerate(weights)}


if __name__ == "__main__":
    task, out, *rest = sys.argv[1:]
    if task == "pretrain":
        results = pretrain(*rest)
    else:
        results = {"golden": golden, "shuffled": shuffled}[task](
            *map(int, rest)
        )
    np.savez(out, **results)
