"""What happens around the steps of `fit`."""

import pathlib

import keras
import numpy as np
import tensorflow as tf

from keras_moco.layers import average_statistics


class MomentumUpdate(keras.callbacks.Callback):
    """Applies the momentum update after every training step.

    It owns the moment; the rule is `MoCo.update_key_encoder`. When Keras runs
    several steps in one call (`steps_per_execution`), batches end without a
    callback in between: the update is then placed inside the compiled step.
    At the end of an epoch it lets replicas share their batch statistics.

    Raises:
        ValueError: `steps_per_execution` above 1 on several replicas.

    Example:
        >>> model.fit(pairs, callbacks=[MomentumUpdate()])  # or without: the
        >>> model.fit(pairs)  # model adds it

    Reference:
        Eq. 2 of He et al. 2019, arXiv:1911.05722.
    """

    def set_model(self, model):
        super().set_model(model)
        in_step = model.steps_per_execution > 1
        replicas = model.distribute_strategy.num_replicas_in_sync
        if in_step and replicas > 1:
            raise ValueError(
                "`steps_per_execution` must be 1 on several replicas: Keras "
                "cannot run more inside one call there. Received: "
                f"steps_per_execution={model.steps_per_execution} on "
                f"{replicas} replicas"
            )
        if in_step != model.update_in_step:
            model.update_in_step = in_step
            model.train_function = None  # Traced for the other place.

    def on_train_batch_end(self, batch, logs=None):
        if not self.model.update_in_step:
            self.model.update_key_encoder()

    def on_epoch_end(self, epoch, logs=None):
        average_statistics(self.model)


class WeightTrace(keras.callbacks.Callback):
    """Records some query and key weights after every step, to look at them.

    `keras-moco momentum-filter --trace FILE` compares them with the average
    that they should be, and with its closed forms. The file is written when
    `fit` ends: NumPy arrays `query` and `key`, float32 (1 + steps,
    num_weights), as they were before the first step and after each one, and
    `momentum`, float64 (steps,).

    Put it behind `MomentumUpdate`, if you give that one yourself.

    Args:
        path: Str or path of the file (.npz).
        num_weights: Int >= 1. Numbers that are followed, drawn from all that
            the average covers. Defaults to 100.
        seed: Int >= 0. Of the draw. Defaults to 0.

    Raises:
        ValueError: `num_weights` below 1; `steps_per_execution` above 1, which
            hides the steps in between.

    Example:
        >>> model.fit(pairs, callbacks=[WeightTrace("trace.npz")])
    """

    def __init__(self, path, num_weights=100, seed=0):
        super().__init__()
        if num_weights < 1:
            raise ValueError(
                f"`num_weights` must be >= 1. Received: {num_weights}"
            )
        self.path = pathlib.Path(path)
        self.num_weights = num_weights
        self.seed = seed

    def on_train_begin(self, logs=None):
        if self.model.steps_per_execution > 1:
            raise ValueError(
                "`WeightTrace` needs `steps_per_execution=1`, to see every "
                f"step. Received: {self.model.steps_per_execution}"
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.sample = self._sampler()
        self.rows = [self.sample().numpy()]
        self.momenta = []

    def on_train_batch_end(self, batch, logs=None):
        self.rows.append(self.sample().numpy())
        self.momenta.append(float(self.model.key_momentum()))

    def on_train_end(self, logs=None):
        query, key = np.stack(self.rows, axis=1)
        draft = self.path.with_name(f".{self.path.name}.tmp")
        try:
            with open(draft, "wb") as file:
                momentum = np.array(self.momenta)
                np.savez(file, query=query, key=key, momentum=momentum)
            draft.replace(self.path)
        finally:
            draft.unlink(missing_ok=True)

    def _sampler(self):
        """A function that reads the weights, float32 (2, num_weights)."""
        pairs = self.model.averaged_pairs()
        sizes = [query.shape.num_elements() for query, _ in pairs]
        draw = np.random.default_rng(self.seed)
        count = min(self.num_weights, sum(sizes))
        chosen = np.sort(draw.choice(sum(sizes), count, replace=False))
        ends = np.cumsum(sizes)
        places = [
            chosen[(chosen >= end - size) & (chosen < end)] - (end - size)
            for size, end in zip(sizes, ends, strict=True)
        ]

        @tf.function
        def sample():
            parts = [
                tf.stack([tf.gather(tf.reshape(v, [-1]), place) for v in pair])
                for pair, place in zip(pairs, places, strict=True)
                if len(place)
            ]
            return tf.concat(parts, axis=1)

        return sample
