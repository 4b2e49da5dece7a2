"""What notices a loss or gradient that is not finite, step by step."""

import keras
import tensorflow as tf

from keras_moco import distribute

# Steps between two looks from outside: each waits for the device once.
LOOK_EVERY = 16


class NotFinite(ValueError):
    """A loss or a gradient became infinite or NaN."""


class StepGuard(keras.layers.Layer):
    """Counts the steps, and those whose loss or gradient is not finite.

    All of it is in the graph: the host is not waited for.

    Attributes:
        steps: int64 scalar. Steps so far.
        bad: int64 scalar. Those that were not finite.
        bad_step: int64 scalar. The number of the first one, or of the latest
            one where they are dropped; -1 if there is none.
        drops: Bool. Whether such a step leaves everything as it was.
    """

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.drops = False  # `Guard` decides.
        for name, value in (("steps", 0), ("bad", 0), ("bad_step", -1)):
            weight = self.add_weight(
                (),
                initializer=keras.initializers.Constant(value),
                dtype="int64",
                trainable=False,
                autocast=False,
                aggregation="only_first_replica",
                name=name,
            )
            setattr(self, name, weight)
        self.built = True

    def remember(self, variables):
        """The values that `run` puts back if it drops the step."""
        return [(v, v.value.read_value()) for v in variables if self.drops]

    def run(self, learn, loss, gradients, before):
        """Calls `learn`, or puts back the values from before the step.

        Args:
            learn: Function that changes weights.
            loss: Scalar of this replica.
            gradients: List of tensors of this replica.
            before: What `remember` gave.
        """
        # One pass over the gradients, and no array of their size.
        sums = [tf.reduce_sum(tf.cast(g, tf.float32)) for g in gradients]
        finite = tf.reduce_all(tf.math.is_finite(tf.stack([loss, *sums])))
        everywhere = distribute.gather(tf.cast([finite], tf.int32))
        finite = tf.reduce_min(everywhere) > 0
        latest = self.drops | (self.bad.value == 0)
        named = tf.logical_and(~finite, latest)
        self.bad_step.assign(
            tf.where(named, self.steps.value, self.bad_step.value)
        )
        self.bad.assign(self.bad.value + tf.cast(~finite, tf.int64))
        self.steps.assign(self.steps.value + 1)
        if not self.drops:
            learn()
            return

        def put_back():
            for variable, value in before:
                variable.assign(value)

        tf.cond(finite, learn, put_back)

    def dropped(self):
        """Whether the step before was dropped, a bool scalar."""
        return self.bad_step.value == self.steps.value - 1

    def is_broken(self):
        """Whether the weights are beyond a step that was not finite."""
        return not self.drops and int(self.bad.numpy()) > 0


class Guard(keras.callbacks.Callback):
    """Ends a run whose loss or gradient is not finite.

    `fit` adds it when it is not given. It looks every 16 steps, at the end of
    an epoch and before every checkpoint, and raises `NotFinite`, which names
    step, learning rate, loss scale and images; with `on_nan="skip"` the step
    is dropped (weights, optimizer, queue and means stay as they were). What
    mixed_float16 does when its loss scale is too high is no such step.

    A run that learns nothing, or collapses, is finite: see `verdicts`.

    Args:
        on_nan: "stop" or "skip". Defaults to "stop".
        max_skipped: Int. Steps that "skip" drops in a run; one more ends it.
            Defaults to 10.
        say: Function that prints a line.

    Raises:
        ValueError: `on_nan` is neither, or "skip" on several replicas.

    Example:
        >>> model.fit(pairs, epochs=200, callbacks=[Guard(on_nan="skip")])
    """

    def __init__(self, on_nan="stop", max_skipped=10, say=print):
        super().__init__()
        if on_nan not in ("stop", "skip"):
            raise ValueError(
                f"`on_nan` must be stop or skip. Received: {on_nan!r}"
            )
        self.on_nan = on_nan
        self.max_skipped = max_skipped
        self.say = say
        self.names = None  # Of the images of a batch; `MoCo.fit` knows them.
        self.checkpoint = None
        self.first_step = 0

    def set_model(self, model):
        super().set_model(model)
        drops = self.on_nan == "skip"
        replicas = model.distribute_strategy.num_replicas_in_sync
        if drops and replicas > 1:
            raise ValueError(
                "`on_nan` must be stop on several replicas: they cannot drop "
                f"a step together. Received: {self.on_nan} on {replicas}"
            )
        if drops != model.step_guard.drops:
            model.step_guard.drops = drops
            model.train_function = None  # Traced for the other answer.

    def on_train_begin(self, logs=None):
        guard = self.model.step_guard
        if not guard.drops:
            guard.bad.assign(0)  # Those that another call has dropped.
        self.dropped = int(guard.bad.numpy())

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.begin = int(self.model.step_guard.steps.numpy()) - self.first_step
        self.first_step = self.looks = 0

    def on_train_batch_end(self, batch, logs=None):
        # A call of `fit` may run several steps.
        if (batch + 1) // LOOK_EVERY > self.looks:
            self.looks = (batch + 1) // LOOK_EVERY
            self._look()

    def on_epoch_end(self, epoch, logs=None):
        self._look()

    def _look(self):
        guard = self.model.step_guard
        bad = int(guard.bad.numpy())
        if bad == self.dropped:
            return
        if not guard.drops or bad > self.max_skipped:
            raise NotFinite(self._describe())
        self.say(f"Dropped step {bad} of {self.max_skipped}: {self._where()}")
        self.dropped = bad

    def _where(self):
        step = int(self.model.step_guard.bad_step.numpy()) - self.begin
        names = self.names(self.epoch, step) if self.names else None
        images = "; images not known by name"
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            images = f"; images {', '.join(names[:8])}{more}"
        optimizer = self.model.optimizer
        rate = float(keras.ops.convert_to_numpy(optimizer.learning_rate))
        scale = 1.0
        if hasattr(optimizer, "dynamic_scale"):
            scale = float(optimizer.dynamic_scale.numpy())
        return (
            f"step {step + 1} of epoch {self.epoch + 1} (learning rate "
            f"{rate:g}, loss scale {scale:g}{images})"
        )

    def _describe(self):
        kept = ""
        if self.checkpoint and self.checkpoint.saved:
            kept = f" The checkpoint of {self.checkpoint.saved} is kept."
        return (
            f"The loss or a gradient is not finite in {self._where()}.{kept} "
            "A lower learning rate helps mostly (--set base_learning_rate=..., "
            "in a run of its own), --on-nan skip leaves single steps out."
        )
