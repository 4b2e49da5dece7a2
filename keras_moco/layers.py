"""Batch normalisation on TensorFlow's fused operation, in groups."""

import keras
import tensorflow as tf
from keras.src.models import Functional


@keras.saving.register_keras_serializable(package="keras_moco")
class BatchNormalization(keras.layers.BatchNormalization):
    """`keras.layers.BatchNormalization`, faster, and in groups of the batch.

    (batch, height, width, channels) and (batch, channels) run on TensorFlow's
    fused operation, which neither upcasts half precision nor writes
    intermediate arrays; everything else is Keras' own layer, under the same
    weight names.

    With `groups`, each consecutive share of the batch is normalised by its own
    statistics, as if it sat on a device of its own; the moving statistics take
    the mean over the groups. MoCo needs this on one device: a query and its
    key in one batch betray each other through common statistics.

    Args:
        groups: Int >= 1. Must divide the batch. Defaults to 1.
        **kwargs: As for `keras.layers.BatchNormalization`.

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
        self.groups = groups

    def call(self, inputs, training=None, mask=None):
        rank = len(inputs.shape)
        if (
            mask is not None
            or rank not in (2, 4)
            or self.axis % rank != rank - 1
        ):
            return super().call(inputs, training=training, mask=mask)
        x = tf.cast(inputs, self.compute_dtype)
        if rank == 2:
            x = x[:, None, None, :]
        if training and self.trainable:
            x = self._normalize_groups(x)
        else:
            moving = self.moving_mean.value, self.moving_variance.value
            x = self._fused(x, *moving, is_training=False).y
        return x[:, 0, 0, :] if rank == 2 else x

    def _normalize_groups(self, x):
        """Normalises by the statistics of each group, and moves their means."""
        if x.shape[0] is not None and x.shape[0] % self.groups:
            raise ValueError(
                f"A batch of {x.shape[0]} cannot be normalised in "
                f"{self.groups} groups: take a batch that is a multiple, or "
                "another number of groups (preset field `batch_norm_groups`)."
            )
        none = tf.zeros((0,))
        results = [
            self._fused(part, none, none, is_training=True)
            for part in (tf.split(x, self.groups) if self.groups > 1 else [x])
        ]
        # The operation gives the unbiased variance, Keras keeps the biased.
        count = tf.cast(tf.size(x) // x.shape[-1] // self.groups, tf.float32)
        bias = (count - 1.0) / count
        self._move(self.moving_mean, [r.batch_mean for r in results])
        self._move(
            self.moving_variance, [bias * r.batch_variance for r in results]
        )
        return tf.concat([r.y for r in results], axis=0)

    def _fused(self, x, mean, variance, is_training):
        channels = x.shape[-1]
        scale = self.gamma if self.scale else tf.ones((channels,))
        offset = self.beta if self.center else tf.zeros((channels,))
        return tf.raw_ops.FusedBatchNormV3(
            x=x,
            scale=tf.cast(scale, tf.float32),
            offset=tf.cast(offset, tf.float32),
            mean=tf.cast(mean, tf.float32),
            variance=tf.cast(variance, tf.float32),
            epsilon=self.epsilon,
            is_training=is_training,
        )

    def _move(self, moving, values):
        value = tf.add_n(values) / len(values)
        momentum = self.momentum
        moving.assign(moving * momentum + value * (1.0 - momentum))

    def get_config(self):
        return {**super().get_config(), "groups": self.groups}


def swap_batch_norm(model, groups=1):
    """Copies a model with its batch normalisation made fast and in groups.

    Args:
        model: Functional or Sequential `keras.Model`, nested ones included.
        groups: Int >= 1.

    Returns:
        `keras.Model` with the same weights; a subclassed model, which Keras
        cannot take apart, is returned as it is.

    Example:
        >>> encoder = keras.applications.ResNet50(
        ...     include_top=False, weights=None, pooling="avg")
        >>> encoder = swap_batch_norm(encoder, groups=8)
    """
    if not isinstance(model, (Functional, keras.Sequential)):
        return model

    def swapped(layer):
        if isinstance(layer, keras.layers.BatchNormalization):
            config = {**layer.get_config(), "groups": groups}
            return BatchNormalization.from_config(config)
        return layer.__class__.from_config(layer.get_config())

    return rebuild(model, swapped)


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
    """Groups for a batch on one device: up to 8 of at least 16 samples."""
    for groups in (8, 4, 2):
        if batch_size % groups == 0 and batch_size // groups >= 16:
            return groups
    return 1


def rebuild(model, clone_function):
    """Copies a model layer by layer, nested models too, and its weights."""
    copy = keras.models.clone_model(
        model, clone_function=clone_function, recursive=True
    )
    copy.set_weights(model.get_weights())
    return copy


def in_groups(model):
    """Whether a model normalises by groups of the batch."""
    return any(getattr(layer, "groups", 1) > 1 for layer in norm_layers(model))


def norm_layers(model):
    """All batch normalisation of this package in a model."""
    layers = model._flatten_layers(include_self=False)
    return [layer for layer in layers if isinstance(layer, BatchNormalization)]
