"""The heads of MoCo v1, v2 and v3, and what a network must be for them."""

import keras

from keras_moco.layers import copy_weights


def projection_head(
    input_dim,
    output_dim=128,
    hidden_dim=None,
    layers=2,
    batch_norm=False,
    last_batch_norm=True,
    sync_batch_norm=False,
    name="projector",
):
    """Builds the head that the contrast is made on, thrown away afterwards.

    One layer is MoCo v1's, two with ReLU are v2's; with batch normalisation it
    is the projector of v3 (and its predictor, `last_batch_norm=False`).

    Args:
        input_dim: Int. Width of the features.
        output_dim: Int. Defaults to 128.
        hidden_dim: Int. None takes `input_dim`.
        layers: Int >= 1. Dense layers. Defaults to 2.
        batch_norm: Bool. Normalise after every layer, without biases; the last
            one is not scaled or shifted. Defaults to False.
        last_batch_norm: Bool. Whether the last layer is normalised too.
        sync_batch_norm: Bool. Take the statistics over all replicas.
        name: Str.

    Returns:
        `keras.Sequential`: (batch, input_dim) -> (batch, output_dim), not yet
        of unit length.

    Example:
        >>> projection_head(2048, hidden_dim=2048).output_shape
        (None, 128)

    Reference:
        arXiv:1911.05722, arXiv:2003.04297, arXiv:2104.02057.
    """
    if layers < 1:
        raise ValueError(f"`layers` must be at least 1. Received: {layers}")
    head = keras.Sequential([keras.Input((input_dim,))], name=name)
    for number in range(layers):
        last = number == layers - 1
        head.add(
            keras.layers.Dense(
                output_dim if last else hidden_dim or input_dim,
                use_bias=not batch_norm,
                # U(-1/sqrt(inputs), 1/sqrt(inputs)), the published code's.
                kernel_initializer=keras.initializers.VarianceScaling(
                    1 / 3, "fan_in", "uniform"
                ),
            )
        )
        if batch_norm and (last_batch_norm or not last):
            head.add(
                keras.layers.BatchNormalization(
                    momentum=0.9,
                    epsilon=1e-5,
                    center=not last,
                    scale=not last,
                    synchronized=sync_batch_norm,
                )
            )
        if not last:
            head.add(keras.layers.ReLU())
    return head


def frozen_copy(model):
    """Copies a model, weights too, and takes its variables out of training.

    The layers stay trainable: `layer.trainable = False` would put batch
    normalisation into inference mode. Layers that draw, as dropout does, draw
    otherwise than the model's.
    """
    copy = keras.models.clone_model(model)
    if not copy.built:
        copy.build_from_config(model.get_build_config())
    copy_weights(model, copy)
    for variable in copy.variables:
        variable.trainable = False
        if variable.name == "seed_generator_state":
            # The same draws as for the query would give its key away.
            seed = keras.ops.convert_to_numpy(variable).copy()
            seed[0] ^= 1 << 20
            variable.assign(seed)
    return copy


def feature_dim(encoder):
    """Returns the width of an encoder's features.

    Args:
        encoder: What is to be an encoder.

    Raises:
        ValueError: It is not built, takes several inputs, does not give one
            vector an image, or holds a layer that cannot be copied.
    """
    shape = getattr(encoder, "output_shape", None)
    if shape is None or not encoder.built:
        raise ValueError(
            "`encoder` must be a built Keras model that knows its output "
            "shape, such as a functional or Sequential model with an Input. "
            f"Received: {encoder}"
        )
    inputs = getattr(encoder, "inputs", None) or [None]
    if len(inputs) != 1:
        raise ValueError(
            "`encoder` must take one input, the images. It takes "
            f"{len(inputs)}: {', '.join(tensor.name for tensor in inputs)}."
        )
    for layer in encoder._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.Lambda):
            raise ValueError(
                f"`encoder` has a Lambda layer, {layer.name!r}, which Keras "
                "can neither copy nor load again safely: make it a subclass "
                "of keras.layers.Layer, or a built-in layer such as Rescaling."
            )
    if isinstance(shape, tuple) and len(shape) == 2 and shape[1] is not None:
        return shape[1]
    hint = ""
    if isinstance(shape, tuple) and len(shape) == 4:
        hint = (
            " This is a feature map: add keras.layers.GlobalAveragePooling2D()"
            ' behind it, or build it with pooling="avg".'
        )
    raise ValueError(
        "`encoder` must map images to one vector each, (batch, features). "
        f"Its output shape is {shape}.{hint}"
    )
