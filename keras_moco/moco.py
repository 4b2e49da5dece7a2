"""Momentum contrast as a Keras model."""

import math

import keras
import tensorflow as tf

from keras_moco import distribute
from keras_moco.batches import check_sizes, check_views
from keras_moco.callbacks import MomentumUpdate
from keras_moco.encoders import feature_dim, frozen_copy, projection_head
from keras_moco.kinds import check_kind
from keras_moco.layers import (
    groups_per_replica,
    normalizes_in_shares,
    num_groups,
    swap_batch_norm,
)
from keras_moco.losses import feature_std, info_nce
from keras_moco.memory_bank import MemoryBank
from keras_moco.queue import KeyQueue, unit_length
from keras_moco.safety.checkpoint import Checkpoint, Stopped
from keras_moco.safety.guards import Guard, StepGuard
from keras_moco.schedules import CosineMomentum

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "keras_moco needs Keras' TensorFlow backend. Set KERAS_BACKEND="
        f"tensorflow before keras is imported. It is: {keras.backend.backend()}"
    )


@keras.saving.register_keras_serializable(package="keras_moco")
class MoCo(keras.Model):
    """An encoder learns to tell its images apart, against a queue of keys.

    Two views of each image are encoded: the query by the encoder that learns,
    the key by its slowly moving average. A query must find its own key among
    `queue_size` keys of earlier images. `fit` trains it; `model(images)` gives
    features; `model.encoder` is what one keeps.

    The rule of the average is `update_key_encoder`; `MomentumUpdate` calls it
    after every step, and `fit` adds that callback when it is not given, as it
    does `Guard`, which ends a run that is not finite.

    Args:
        encoder: `keras.Model`, images -> (batch, features).
        projector: `keras.Model`, (batch, features) -> (batch, dim).
        predictor: `keras.Model` or None. A further head for queries only
            (MoCo v3). Defaults to None.
        queue_size: Int. Past keys kept as negatives; 0 takes the other keys of
            the batch. Defaults to 65536.
        temperature: Float > 0. Defaults to 0.2.
        momentum: Float in [0, 1] or a Keras schedule of the step. Share of
            itself that the key encoder keeps in a step. Defaults to 0.999.
        symmetric: Bool. Use both views as query and as key; the loss is the
            mean of the two, the keys enter the queue once, after both.
            Defaults to False.
        mask_same_image: Bool. Leave keys of the query's own image out of the
            negatives; needs batches with an index. Defaults to False.
        num_images: Int or None. Draw the negatives from a `MemoryBank` of so
            many training images instead of a queue; an image's own key is
            left out. Defaults to None.
        v3_loss: Bool. Follow the gradient of MoCo v3's loss: the sum of both
            directions, each times 2 * temperature. What is reported is the
            mean. Defaults to False.
        **kwargs: As for `keras.Model` (`name`).

    Batches: `(query, key)` or `(query, key, index)`; both views float
    (batch, height, width, 3), the index int (batch,) names the image.

    Attributes:
        encoder, projector, key_encoder, key_projector: The four networks.
        make_views: None, or a function (images, index, epoch) -> (query, key)
            that makes the views inside the step, on the device; batches are
            then (images, epoch, index).
        key_queue: `KeyQueue`, or `MemoryBank`; `queue`, `queue_index` and
            `queue_pointer` are its weights.
        step_guard: `StepGuard`, which counts the steps.

    Raises:
        ValueError: An argument out of range; an encoder that does not give one
            vector an image.

    Example:
        >>> encoder = resnet("resnet18", image_size=32, width=16)
        >>> model = MoCo(encoder, projection_head(128), queue_size=4096)
        >>> model.compile(SGD(0.03, weight_decay=1e-4))
        >>> model.fit(pairs, epochs=10)

    Reference:
        He et al. 2019, arXiv:1911.05722; Chen et al. 2020, arXiv:2003.04297;
        Chen et al. 2021, arXiv:2104.02057.
    """

    def __init__(
        self,
        encoder,
        projector,
        predictor=None,
        queue_size=65536,
        temperature=0.2,
        momentum=0.999,
        symmetric=False,
        mask_same_image=False,
        num_images=None,
        v3_loss=False,
        **kwargs,
    ):
        super().__init__(**kwargs)
        _check_arguments(queue_size, temperature, momentum)
        _check_projector(projector, feature_dim(encoder))
        _check_precision(encoder, projector, predictor)
        self.encoder = encoder
        self.projector = projector
        self.predictor = predictor
        self.queue_size = queue_size
        self.temperature = temperature
        self.momentum = momentum
        self.symmetric = symmetric
        # A bank holds a key of every image, the query's own as well.
        self.mask_same_image = mask_same_image or num_images is not None
        self.num_images = num_images
        self.v3_loss = v3_loss

        self.key_encoder = frozen_copy(encoder)
        self.key_projector = frozen_copy(projector)
        dim = projector.output_shape[-1]
        if num_images is None:
            self.key_queue = KeyQueue(queue_size, dim)
        else:
            self.key_queue = MemoryBank(num_images, dim, queue_size)
        self.step_guard = StepGuard()
        self.loss_tracker = keras.metrics.Mean("loss")
        self.positive_tracker = keras.metrics.Mean("positive_similarity")
        self.negative_tracker = keras.metrics.Mean("negative_similarity")
        self.std_tracker = keras.metrics.Mean("feature_std")
        # Weighted by whether the queue is full: before, it means nothing.
        self.contrast_top1 = keras.metrics.Mean("contrast_top1")
        self.make_views = None
        self.update_in_step = False  # `MomentumUpdate` decides.
        self._compiled_update = self._update_key_encoder  # Until a step is.
        self.built = True

    @classmethod
    def from_preset(cls, preset, encoder, total_steps=None, num_images=None):
        """Builds the model that a preset describes around an encoder.

        `model.encoder` is the copy that learns: its batch normalisation is
        replaced by `keras_moco.layers.BatchNormalization` in groups.

        Args:
            preset: `Preset`, such as `PRESETS["moco_v2"]`.
            encoder: `keras.Model`, images -> (batch, features).
            total_steps: Int. Steps of the run; needed by presets whose
                momentum rises.
            num_images: Int. Training images; needed by presets with a memory
                bank.

        Returns:
            `MoCo`, not yet compiled.
        """
        if preset.memory_bank and num_images is None:
            raise ValueError(
                "`num_images` is needed: the memory bank of this preset holds "
                "one key for each training image."
            )
        momentum = preset.momentum
        if preset.final_momentum is not None:
            if total_steps is None:
                raise ValueError(
                    "`total_steps` is needed: the momentum of this preset "
                    f"rises to {preset.final_momentum} by the last step."
                )
            momentum = CosineMomentum(
                momentum, preset.final_momentum, total_steps
            )
        encoder = swap_batch_norm(
            encoder,
            groups_per_replica(preset),
            synchronized=preset.sync_batch_norm or None,
        )
        head = {
            "output_dim": preset.head_output_dim,
            "hidden_dim": preset.head_hidden_dim,
            "batch_norm": preset.head_batch_norm,
            "sync_batch_norm": preset.sync_batch_norm,
        }
        predictor = None
        if preset.predictor_layers:
            predictor = projection_head(
                preset.head_output_dim,
                layers=preset.predictor_layers,
                last_batch_norm=False,
                name="predictor",
                **head,
            )
        return cls(
            encoder,
            projection_head(
                feature_dim(encoder), layers=preset.head_layers, **head
            ),
            predictor,
            queue_size=preset.queue_size,
            temperature=preset.temperature,
            momentum=momentum,
            symmetric=preset.symmetric,
            mask_same_image=bool(preset.mask_same_image),
            num_images=num_images if preset.memory_bank else None,
            v3_loss=preset.v3_loss,
        )

    def call(self, images, training=False):
        """Returns the encoder's features, (batch, features)."""
        return self.encoder(images, training=training)

    def train_step(self, data):
        """One step of momentum contrast; the average follows after it."""
        directions, index = self.unpack(data)
        before = self.step_guard.remember(self.moved_by_a_pass())
        keys = [self.encode_key(key) for _, key in directions]
        with tf.GradientTape() as tape:
            losses, penalties = [], [0.0]
            for (query, _), key in zip(directions, keys, strict=True):
                query = self.encode_query(query)
                losses.append(self.contrast(query, key, index))
                penalties += self.penalties()
            losses = tf.add_n(losses) / len(directions)
            loss = tf.reduce_mean(losses)
            factor = 2 * len(directions) * self.temperature
            total = loss * factor if self.v3_loss else loss
            total += tf.add_n(penalties) / len(directions)
            # Gradients are summed over replicas.
            share = total / distribute.num_replicas()
            scaled_loss = self.optimizer.scale_loss(share)
        variables = self.trainable_variables
        gradients = tape.gradient(scaled_loss, variables)
        self.loss_tracker.update_state(losses)

        def learn():
            self.optimizer.apply(gradients, variables)
            images = None if index is None else tf.tile(index, [len(keys)])
            self.key_queue.enqueue(tf.concat(keys, axis=0), images)

        self.step_guard.run(learn, loss, self.unscaled(gradients), before)
        if self.update_in_step:
            self.update_key_encoder()
        return self.report()

    def test_step(self, data):
        """The loss of held-out pairs against the queue as it is."""
        directions, index = self.unpack(data)
        losses = [
            self.contrast(
                self.encode_query(query, training=False),
                self.encode_key(key, training=False),
                index,
            )
            for query, key in directions
        ]
        self.loss_tracker.update_state(tf.add_n(losses) / len(directions))
        return self.report()

    def export(self, *args, **kwargs):
        """As Keras'; images in, features out, as in `model(images)`."""
        (images,) = self.encoder.inputs
        signature = [keras.InputSpec(images.dtype, images.shape)]
        kwargs.setdefault("input_signature", signature)
        return super().export(*args, **kwargs)

    def unpack(self, data):
        """Returns the directions [(query, key), ...] and the index or None."""
        # A tuple of three looks to Keras like (x, y, sample_weight), and
        # `train_on_batch` makes one of every batch.
        query, key, index = keras.utils.unpack_x_y_sample_weight(data)
        if self.make_views is not None:
            query, key = self.make_views(query, index, key[0])
        check_views(query, key, index, self.mask_same_image)
        directions = [(query, key)]
        if self.symmetric:
            directions.append((key, query))
        return directions, index

    def encode_query(self, images, training=True):
        """Images -> queries of unit length, (batch, dim) float32."""
        features = self.encoder(images, training=training)
        self.std_tracker.update_state(
            feature_std(features), sample_weight=tf.shape(features)[0]
        )
        query = self.projector(features, training=training)
        if self.predictor is not None:
            query = self.predictor(query, training=training)
        return unit_length(query)

    def encode_key(self, images, training=True):
        """Images -> keys of unit length, (batch, dim) float32.

        In training the key encoder normalises by its batch too, as published;
        where it does so in shares of the batch (groups, replicas), the images
        are shuffled before and the keys put back in order after.
        """
        # Otherwise a query and its key share a group, whose statistics tell
        # which key is the right one (section 3.3).
        shuffled = training and (
            normalizes_in_shares(self.key_encoder)
            or normalizes_in_shares(self.key_projector)
        )
        if shuffled:
            images, order = distribute.shuffle(
                images, self.optimizer.iterations
            )
        features = self.key_encoder(images, training=training)
        key = unit_length(self.key_projector(features, training=training))
        if shuffled:
            key = distribute.unshuffle(key, order)
        return tf.stop_gradient(key)

    def contrast(self, query, key, index=None):
        """The loss of each query against its key and the negatives."""
        negatives, excluded = self.negatives(key, index)
        loss, positive, nearest = info_nce(
            query, key, negatives, self.temperature, excluded
        )
        self.positive_tracker.update_state(positive)
        # The mean over all pairs is the product of the means.
        similarity = tf.tensordot(
            tf.reduce_mean(query, axis=0), tf.reduce_mean(negatives, axis=0), 1
        )
        if not self.queue_size:  # The own key is none of them.
            count = tf.cast(tf.shape(negatives)[0], tf.float32)
            own = tf.reduce_mean(positive)
            similarity = (count * similarity - own) / (count - 1.0)
        rows = tf.shape(query)[0]
        self.negative_tracker.update_state(similarity, sample_weight=rows)
        self.contrast_top1.update_state(
            tf.cast(positive > nearest, tf.float32),
            sample_weight=self.key_queue.is_full(),
        )
        return loss

    def penalties(self):
        """What regularisers and `add_loss` ask for beside the contrast."""
        return [
            tf.cast(loss, tf.float32)
            for part in (self.encoder, self.projector, self.predictor)
            if part is not None
            for loss in part.losses
        ]

    def negatives(self, key, index):
        """Returns keys (K, dim) and which of them each query leaves out."""
        if self.queue_size:
            step = self.step_guard.steps.value
            negatives, images = self.key_queue.negatives(step)
            excluded = None
        else:
            negatives = distribute.gather(key)
            own = distribute.first_row(key) + tf.range(tf.shape(key)[0])
            everyone = tf.range(tf.shape(negatives)[0])
            excluded = own[:, None] == everyone[None, :]
            images = None if index is None else distribute.gather(index)
        if self.mask_same_image:
            same = tf.cast(index, images.dtype)[:, None] == images[None, :]
            excluded = same if excluded is None else excluded | same
        return negatives, excluded

    def update_key_encoder(self):
        """Moves the key weights: momentum * key + (1 - momentum) * query.

        The only code that does. Trainable weights alone take part: batch
        statistics belong to the key encoder, which makes its own. After the
        optimizer's step this is the published order, where the average comes
        before the next forward pass and the first one changes nothing.
        """
        self._compiled_update()

    def _update_key_encoder(self):
        momentum = self.key_momentum()
        if self.step_guard.drops:
            momentum = tf.where(self.step_guard.dropped(), 1.0, momentum)
        optimizer = getattr(self, "optimizer", None)
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        every = getattr(optimizer, "gradient_accumulation_steps", None)
        if every:  # In between the queries do not move either.
            moved = tf.equal(tf.math.floormod(optimizer._iterations, every), 0)
            momentum = tf.where(moved, momentum, 1.0)

        def average(key, query):
            key.assign(momentum * key + (1.0 - momentum) * query)

        # Each replica moves its own copy: nothing crosses devices.
        strategy = self.distribute_strategy
        with strategy.scope():
            for query, key in self.averaged_pairs():
                strategy.extended.update(key, average, args=(query,))

    def averaged_pairs(self):
        """The (query, key) `tf.Variable`s that the average ties together."""
        pairs = []
        for query, key in (
            (self.encoder, self.key_encoder),
            (self.projector, self.key_projector),
        ):
            trained = {id(v) for v in query.trainable_variables}
            pairs += [
                (q.value, k.value)
                for q, k in zip(query.variables, key.variables, strict=True)
                if id(q) in trained
            ]
        return pairs

    def key_momentum(self):
        """The momentum at the optimizer's step, a float or scalar tensor."""
        if callable(self.momentum):
            return self.momentum(self.optimizer.iterations)
        return self.momentum

    def moved_by_a_pass(self):
        """Variables that encoding changes: batch statistics and means."""
        averaged = {id(key) for _, key in self.averaged_pairs()}
        variables = [
            variable
            for part in (self.encoder, self.projector, self.predictor)
            if part is not None
            for variable in part.non_trainable_variables
        ]
        variables += [
            variable
            for part in (self.key_encoder, self.key_projector)
            for variable in part.variables
            if id(variable.value) not in averaged
        ]
        return variables + [v for m in self.metrics for v in m.variables]

    def unscaled(self, gradients):
        """The gradients; 0 for those that a loss scale still deals with."""
        gradients = [g for g in gradients if g is not None]
        scale = getattr(self.optimizer, "dynamic_scale", None)
        if scale is None:
            return gradients
        # It halves until they are finite: at 1 that has not helped.
        helpless = scale.value <= 1.0
        return [
            tf.where(helpless, tf.reduce_sum(tf.cast(g, tf.float32)), 0.0)
            for g in gradients
        ]

    def report(self):
        """What a step reports: the means of the epoch so far."""
        logs = {
            tracker.name: tracker.result()
            for tracker in (
                self.loss_tracker,
                self.positive_tracker,
                self.negative_tracker,
                self.std_tracker,
            )
        }
        if self.queue_size:
            logs["queue_fill"] = self.key_queue.fill()
        if distribute.over_machines(tf.distribute.get_strategy()):
            # Keras takes the mean over the first axis there.
            logs = {name: tf.reshape(x, (1,)) for name, x in logs.items()}
        return logs

    @property
    def queue(self):
        """(queue_size, dim) float32 keys of unit length; random at first.

        Of a memory bank (num_images, dim).
        """
        return self.key_queue.keys

    @property
    def queue_index(self):
        """(queue_size,) int64 image of each key, -1 if unknown.

        Of a memory bank (num_images,).
        """
        return self.key_queue.index

    @property
    def queue_pointer(self):
        """int64 scalar, row that the next key is written to."""
        return self.key_queue.pointer

    @property
    def metrics(self):
        """The means that `fit` resets at each epoch."""
        return [
            self.loss_tracker,
            self.positive_tracker,
            self.negative_tracker,
            self.std_tracker,
            self.contrast_top1,
        ]

    @property
    def trainable_variables(self):
        """Query weights only, whatever `trainable` was set to meanwhile."""
        parts = [self.encoder, self.projector, self.predictor]
        return [
            variable
            for part in parts
            if part is not None and self.trainable
            for variable in part.trainable_variables
        ]

    @property
    def trainable_weights(self):
        """The same as `trainable_variables`."""
        return self.trainable_variables

    def fit(
        self,
        x=None,
        y=None,
        batch_size=None,
        epochs=1,
        verbose="auto",
        callbacks=None,
        **kwargs,
    ):
        """As `keras.Model.fit`; adds `MomentumUpdate` and `Guard`.

        With a `Checkpoint` among the callbacks it starts where that one's
        files end, and returns early when a signal asks for it.
        """
        if isinstance(x, tf.data.Dataset):
            check_sizes(
                x.element_spec,
                num_groups(self.encoder),
                self.distribute_strategy.num_replicas_in_sync,
            )
        # Keras warns about its own default on every dataset.
        batched = (tf.data.Dataset, tf.distribute.DistributedDataset)
        kwargs.setdefault("shuffle", not isinstance(x, batched))
        args = (x, y, batch_size, epochs, verbose)
        callbacks, guard, checkpoint = _arrange(callbacks)
        passes = getattr(x, "passes", None)
        guard.names = passes and passes.names
        if checkpoint is None:
            return super().fit(*args, callbacks=callbacks, **kwargs)
        with checkpoint.of(self):
            x, ending = checkpoint.start(
                x, kwargs.get("steps_per_epoch"), kwargs.get("initial_epoch", 0)
            )
            kwargs["initial_epoch"], guard.first_step = checkpoint.place
            guard.checkpoint = checkpoint
            callbacks = [*ending, *callbacks]
            try:
                return super().fit(x, *args[1:], callbacks=callbacks, **kwargs)
            except Stopped:
                for callback in callbacks:
                    callback.on_train_end()
                return self.history

    def make_train_function(self, force=False):
        """As Keras'; compiles the momentum update anew along with it."""
        if self.train_function is None or force:
            # XLA reads both encoders once, where TensorFlow alone writes every
            # intermediate array; several devices are beyond it.
            alone = self.distribute_strategy.num_replicas_in_sync == 1
            self._compiled_update = tf.function(
                self._update_key_encoder, jit_compile=alone
            )
        return super().make_train_function(force)

    def train_on_batch(self, x, y=None, sample_weight=None, **kwargs):
        """One step on (query, key, index) with its average, as in `fit`."""
        callback = MomentumUpdate()
        callback.set_model(self)
        logs = super().train_on_batch(x, y, sample_weight, **kwargs)
        callback.on_train_batch_end(0)
        return logs

    def _symbolic_build(self, iterator=None, data_batch=None):
        # Everything but the optimizer is built at construction. Keras would
        # reduce a batch over replicas here, which fails on several workers.
        if not self.optimizer.built:
            self.optimizer.build(self.trainable_variables)

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        with self.distribute_strategy.scope():
            self._symbolic_build()

    def get_config(self):
        serialize = keras.saving.serialize_keras_object
        return {
            "name": self.name,
            "encoder": serialize(self.encoder),
            "projector": serialize(self.projector),
            "predictor": serialize(self.predictor),
            "queue_size": self.queue_size,
            "temperature": self.temperature,
            "momentum": serialize(self.momentum),
            "symmetric": self.symmetric,
            "mask_same_image": self.mask_same_image,
            "num_images": self.num_images,
            "v3_loss": self.v3_loss,
            # Without it a compiled loss scale would not come back.
            "dtype": serialize(self.dtype_policy),
        }

    @classmethod
    def from_config(cls, config, custom_objects=None):
        """Rebuilds the model, all its parts included."""
        restore = keras.saving.deserialize_keras_object
        parts = {
            name: restore(config[name], custom_objects=custom_objects)
            for name in ("encoder", "projector", "predictor", "momentum")
        }
        return cls(**{**config, **parts})


def _arrange(callbacks):
    """All callbacks in the order they need, the guard, the checkpoint."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        raise ValueError("`callbacks` must be a list; a CallbackList is none.")
    if isinstance(callbacks, keras.callbacks.Callback):
        callbacks = [callbacks]
    callbacks = list(callbacks or [])
    own = {}
    for kind in (MomentumUpdate, Guard, Checkpoint):
        found = [c for c in callbacks if isinstance(c, kind)]
        if len(found) > 1:
            raise ValueError(
                f"One `{kind.__name__}` is all that `fit` takes; {len(found)} "
                "are among the callbacks."
            )
        own[kind] = found[0] if found else None
    guard = own[Guard] or Guard()
    if not own[MomentumUpdate]:
        callbacks.insert(0, MomentumUpdate())
    checkpoint = own[Checkpoint]
    others = [c for c in callbacks if c not in (guard, checkpoint)]
    # Nothing is logged that is not finite, nothing is saved that is not logged.
    last = [checkpoint] if checkpoint else []
    return [guard, *others, *last], guard, checkpoint


def _check_projector(projector, features):
    shape = getattr(projector, "input_shape", None)
    if shape is not None and shape[-1] != features:
        raise ValueError(
            f"`projector` takes {shape[-1]} features, but `encoder` gives "
            f"{features}: projection_head({features})"
        )


def _check_precision(*parts):
    for part in parts:
        for variable in part.trainable_variables if part else ():
            if variable.dtype in ("float16", "bfloat16"):
                raise ValueError(
                    f"Weights must be float32: in {variable.dtype} the average "
                    "of the key encoder would stand still. Take the policy "
                    f"mixed_{variable.dtype}, which computes in it alone."
                )


def _check_arguments(queue_size, temperature, momentum):
    check_kind("queue_size", queue_size, int)
    check_kind("temperature", temperature, float)
    if queue_size < 0:
        raise ValueError(
            "`queue_size` must be 0 (negatives from the batch) or more. "
            f"Received: {queue_size}"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"`temperature` must be > 0. Received: {temperature}")
    if callable(momentum):
        return
    check_kind("momentum", momentum, float)
    if not 0 <= momentum <= 1:
        raise ValueError(f"`momentum` must be in [0, 1]. Received: {momentum}")
