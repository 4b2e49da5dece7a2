"""Batch normalisation on TensorFlow's fused operation, in groups."""

import warnings

import keras
import tensorflow as tf
from keras.src.models import Functional

from keras_moco import distribute


@keras.saving.register_keras_serializable(package="keras_moco")
class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization`, faster, and in groups of the batch.

    (batch, ..., channels) runs on TensorFlow's fused operation, which neither
    upcasts half precision nor writes intermediate arrays; everything else
    (another axis, a mask, `synchronized` over several replicas) is Keras' own
    layer, under the same weight names.

    With `groups`, each consecutive share of the batch is normalised by its own
    statistics, as if it sat on a device of its own; the moving statistics take
    the mean over the groups. MoCo needs this on one device: a query and its
    key in one batch betray each other through common statistics.

    Args:
        groups: Int >= 1. Must divide the batch. Defaults to 1.
        **kwargs: As for `keras.layers.BatchNormalization`.

    Raises:
        ValueError: `groups` below 1, with `synchronized`, or on an axis that
            is not the last.

    Example:
        >>> layer = BatchNormalization(groups=8, momentum=0.9, epsilon=1e-5)
        >>> layer(tf.ones((128, 8, 8, 16)), training=True)  # 16 a group

    Reference:
        Ioffe and Szegedy 2015, arXiv:1502.03167; section 3.3 of He et al.
        2019, arXiv:1911.05722.
    """

    def __init__(self, groups=1, **kwargs):
        super().__init__(**kwargs)
        if groups < 1:
            raise ValueError(f"`groups` must be at least 1. Received: {groups}")
        if groups > 1 and self.synchronized:
            raise ValueError(
                "Synchronised statistics are those of the whole batch: "
                f"`groups` must be 1. Received: {groups}"
            )
        self.groups = groups

    def build(self, input_shape):
        rank = len(input_shape)
        if self.groups > 1 and self.axis % rank != rank - 1:
            raise ValueError(
                "`groups` needs the channels on the last axis, but "
                f"{self.name!r} normalises axis {self.axis} of {rank}: build "
                "the model channels-last, or take `groups=1` (preset field "
                "batch_norm_groups)."
            )
        super().build(input_shape)

    def call(self, inputs, training=None, mask=None):
        rank = len(inputs.shape)
        across = self.synchronized and distribute.num_replicas() > 1
        if across or mask is not None or self.axis % rank != rank - 1:
            return super().call(inputs, training=training, mask=mask)
        x = tf.cast(inputs, self.compute_dtype)
        if rank != 4:
            batch = tf.shape(x)[0] if x.shape[0] is None else x.shape[0]
            x = tf.reshape(x, (batch, 1, -1, x.shape[-1]))
        affine = self._affine(x.shape[-1])
        if training and self.trainable:
            x = self._normalize_groups(x, affine)
        else:
            moving = self.moving_mean.value, self.moving_variance.value
            x = self._fused(x, *affine, *moving, is_training=False).y
        if rank != 4:
            x = tf.ensure_shape(tf.reshape(x, tf.shape(inputs)), inputs.shape)
        return x

    def _normalize_groups(self, x, affine):
        """Normalises by the statistics of each group, and moves their means."""
        if x.shape[0] is not None:
            check_groups(x.shape[0], self.groups)
        none = tf.zeros((0,))
        results = [
            self._fused(part, *affine, none, none, is_training=True)
            for part in (tf.split(x, self.groups) if self.groups > 1 else [x])
        ]
        # The operation gives the unbiased variance, Keras keeps the biased.
        count = tf.cast(tf.size(x) // x.shape[-1] // self.groups, tf.float32)
        mean = tf.add_n([r.batch_mean for r in results])
        variance = tf.add_n([r.batch_variance for r in results])
        self._move(self.moving_mean, mean / self.groups)
        self._move(
            self.moving_variance,
            variance * ((count - 1.0) / (count * self.groups)),
        )
        if self.groups == 1:
            return results[0].y
        return tf.concat([r.y for r in results], axis=0)

    def _affine(self, channels):
        """Scale and offset of the channels, float32."""
        scale = self.gamma if self.scale else tf.ones((channels,))
        offset = self.beta if self.center else tf.zeros((channels,))
        return tf.cast(scale, tf.float32), tf.cast(offset, tf.float32)

    def _fused(self, x, scale, offset, mean, variance, is_training):
        return tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=scale,
            offset=offset,
            mean=tf.cast(mean, tf.float32),
            variance=tf.cast(variance, tf.float32),
            epsilon=self.epsilon,
            is_training=is_training,
        )

    def _move(self, moving, value):
        momentum = self.momentum
        moving.assign(moving * momentum + value * (1.0 - momentum))

    def get_config(self):
        return {**super().get_config(), "groups": self.groups}


def swap_batch_norm(model, groups=1, synchronized=None):
    """Copies a model with its batch normalisation made fast and in groups.

    Args:
        model: Functional or Sequential `keras.Model`, nested ones included.
        groups: Int >= 1.
        synchronized: Bool. Take the statistics over all replicas; None leaves
            each layer as it is.

    Returns:
        `keras.Model` with the same weights; a subclassed model, which Keras
        cannot take apart, is returned as it is. A warning names what is
        normalised inside layers of the user's own, and stays as it is.

    Example:
        >>> encoder = keras.applications.ResNet50(
        ...     include_top=False, weights=None, pooling="avg")
        >>> encoder = swap_batch_norm(encoder, groups=8)
    """
    if not isinstance(model, (Functional, keras.Sequential)):
        _warn_of_others(model, groups)
        return model

    def swapped(layer):
        if isinstance(layer, keras.layers.BatchNormalization):
            config = {**layer.get_config(), "groups": groups}
            if synchronized is not None:
                config["synchronized"] = synchronized
            return BatchNormalization.from_config(config)
        return layer.__class__.from_config(layer.get_config())

    copy = rebuild(model, swapped)
    _warn_of_others(copy, groups)
    return copy


def _warn_of_others(model, groups):
    others = [
        layer.name
        for layer in model._flatten_layers(include_self=False)
        if isinstance(layer, keras.layers.BatchNormalization)
        and not isinstance(layer, BatchNormalization)
    ]
    if others and groups > 1:
        warnings.warn(
            f"Batch normalisation inside a layer of its own ({others[0]}, "
            f"{len(others)} in all) cannot be put into groups: it may tell a "
            "query which key is its own. Build it of Keras' layers, or use "
            "keras_moco.layers.BatchNormalization in it.",
            stacklevel=3,
        )


def plain_float32(model):
    """Copies a model with Keras' own layers only, computing in float32.

    Args:
        model: As for `swap_batch_norm`.

    Returns:
        `keras.Model` with the same weights, free of this package.
    """

    def plain(layer):
        config = layer.get_config()
        if "dtype" in config:
            config["dtype"] = "float32"
        if isinstance(layer, BatchNormalization):
            del config["groups"]
            return keras.layers.BatchNormalization.from_config(config)
        return layer.__class__.from_config(config)

    return rebuild(model, plain)


def default_groups(batch_size):
    """Groups for a batch over all devices: up to 8 of 16 samples or more."""
    for groups in (8, 4, 2):
        if batch_size % groups == 0 and batch_size // groups >= 16:
            return groups
    return 1


def groups_per_replica(preset):
    """How many of a preset's groups fall to each replica, at least one."""
    if preset.sync_batch_norm:
        return 1
    groups = preset.batch_norm_groups or default_groups(preset.batch_size)
    return max(1, groups // distribute.num_replicas())


def check_groups(batch_size, groups):
    """Raises unless a batch falls into groups of two or more samples."""
    if batch_size % groups or batch_size // groups < 2:
        raise ValueError(
            "`batch_norm_groups` must divide the batch into groups of at least "
            f"2 samples. Received: batch_norm_groups={groups}, "
            f"batch_size={batch_size}"
        )


def rebuild(model, clone_function):
    """Copies a model layer by layer, nested models too, and its weights."""
    copy = keras.models.clone_model(
        model, clone_function=clone_function, recursive=True
    )
    copy_weights(model, copy)
    return copy


def copy_weights(model, copy):
    """Gives a copy of a model its weights."""
    copy.set_weights(model.get_weights())
    for layer in copy._flatten_layers():
        if isinstance(layer, keras.layers.Normalization):
            layer.finalize_state()  # It computes with constants of these.


def num_groups(model):
    """The most groups that a model normalises a batch in."""
    return max([layer.groups for layer in norm_layers(model)], default=1)


def normalizes_in_shares(model):
    """Whether samples of one batch are normalised apart from each other."""
    if distribute.num_replicas() == 1:
        return num_groups(model) > 1
    return any(
        isinstance(layer, keras.layers.BatchNormalization)
        and not layer.synchronized
        for layer in model._flatten_layers(include_self=False)
    )


def norm_layers(model):
    """All batch normalisation of this package in a model."""
    layers = model._flatten_layers(include_self=False)
    return [layer for layer in layers if isinstance(layer, BatchNormalization)]


def average_statistics(model):
    """Gives each replica the mean of the moving statistics of all.

    Each moves its own in training. The mean of moving averages is the
    moving average of the means, so it may be taken once an epoch.
    """
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return
    variables = [
        statistic.value
        for layer in model._flatten_layers(include_self=False)
        if isinstance(layer, keras.layers.BatchNormalization)
        for statistic in (layer.moving_mean, layer.moving_variance)
    ]

    def average():
        means = tf.distribute.get_replica_context().all_reduce(
            tf.distribute.ReduceOp.MEAN, [v.read_value() for v in variables]
        )
        for variable, mean in zip(variables, means, strict=True):
            variable.assign(mean)

    if variables:
        strategy.run(tf.function(average))
