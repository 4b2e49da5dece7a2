"""ResNets in torchvision's layout, and the heads of MoCo v1, v2 and v3."""

import keras

# Blocks per stage and whether they are bottlenecks (He et al. 2015, table 1).
RESNETS = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
}
SMALL_IMAGE = 64  # Up to this size the stem keeps the resolution.


def resnet(
    name,
    image_size=224,
    width=64,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
):
    """Builds a ResNet that maps images to pooled features.

    The layout is torchvision's: the stride of a bottleneck sits on its 3x3
    convolution, convolutions have no bias, batch normalisation has epsilon
    1e-5 and momentum 0.9, padding is symmetric. Images up to 64 pixels get
    the CIFAR stem: 3x3, stride 1, no max-pooling.

    Args:
        name: "resnet18", "resnet34" or "resnet50".
        image_size: Int. Size that the stem is chosen for; the network itself
            takes any. Defaults to 224.
        width: Int. Channels of the first stage. Defaults to 64.
        mean: Three floats. Mean of the data, in [0, 1]. ImageNet's by default.
        std: Three floats. Deviation of the data.

    Returns:
        `keras.Model`: float (batch, height, width, 3) in [0, 1] ->
        (batch, features); features are `8 * width`, for bottlenecks
        `32 * width`. Normalisation is its first layer.

    Raises:
        ValueError: Unknown name.

    Example:
        >>> resnet("resnet18", image_size=32, width=16).output_shape
        (None, 128)

    Reference:
        He et al. 2015, arXiv:1512.03385.
    """
    blocks, bottleneck = find_resnet(name)
    images = keras.Input((None, None, 3), name="images")
    x = keras.layers.Normalization(
        mean=mean, variance=[s * s for s in std], name="normalize"
    )(images)
    if image_size <= SMALL_IMAGE:
        x = _conv_norm(x, width, 3, 1, "stem")
        x = keras.layers.ReLU(name="stem_relu")(x)
    else:
        x = _conv_norm(x, width, 7, 2, "stem")
        x = keras.layers.ReLU(name="stem_relu")(x)
        # Zeros are as good as minus infinity behind a ReLU.
        x = keras.layers.ZeroPadding2D(1, name="stem_pool_pad")(x)
        x = keras.layers.MaxPooling2D(3, 2, name="stem_pool")(x)
    block = _bottleneck if bottleneck else _basic
    for stage, count in enumerate(blocks):
        for number in range(count):
            stride = 2 if stage > 0 and number == 0 else 1
            x = block(x, width * 2**stage, stride, f"stage{stage}_{number}")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(images, x, name=name)


def find_resnet(name):
    """Returns the blocks per stage and whether they are bottlenecks."""
    if name not in RESNETS:
        raise ValueError(
            f"`encoder` must be one of {', '.join(RESNETS)}. Received: {name!r}"
        )
    return RESNETS[name]


def _basic(x, width, stride, name):
    y = _conv_norm(x, width, 3, stride, f"{name}_a")
    y = keras.layers.ReLU(name=f"{name}_a_relu")(y)
    y = _conv_norm(y, width, 3, 1, f"{name}_b")
    return _add_shortcut(x, y, stride, name)


def _bottleneck(x, width, stride, name):
    y = _conv_norm(x, width, 1, 1, f"{name}_a")
    y = keras.layers.ReLU(name=f"{name}_a_relu")(y)
    y = _conv_norm(y, width, 3, stride, f"{name}_b")
    y = keras.layers.ReLU(name=f"{name}_b_relu")(y)
    y = _conv_norm(y, 4 * width, 1, 1, f"{name}_c")
    return _add_shortcut(x, y, stride, name)


def _add_shortcut(x, y, stride, name):
    if x.shape[-1] != y.shape[-1] or stride > 1:
        x = _conv_norm(x, y.shape[-1], 1, stride, f"{name}_shortcut")
    y = keras.layers.Add(name=f"{name}_add")([x, y])
    return keras.layers.ReLU(name=f"{name}_relu")(y)


def _conv_norm(x, filters, kernel_size, stride, name):
    if kernel_size > 1 and stride > 1:
        # "same" would pad the far sides only when the stride is 2.
        x = keras.layers.ZeroPadding2D(kernel_size // 2, name=f"{name}_pad")(x)
    x = keras.layers.Conv2D(
        filters,
        kernel_size,
        strides=stride,
        padding="same" if stride == 1 else "valid",
        use_bias=False,
        kernel_initializer=keras.initializers.VarianceScaling(
            2.0, "fan_out", "untruncated_normal"
        ),
        name=f"{name}_conv",
    )(x)
    return _batch_norm(name=f"{name}_bn")(x)


def _batch_norm(**kwargs):
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, **kwargs)


def projection_head(
    input_dim,
    output_dim=128,
    hidden_dim=None,
    layers=2,
    batch_norm=False,
    last_batch_norm=True,
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
            head.add(_batch_norm(center=not last, scale=not last))
        if not last:
            head.add(keras.layers.ReLU())
    return head


def frozen_copy(model):
    """Copies a model, weights too, and takes its variables out of training.

    The layers stay trainable: `layer.trainable = False` would put batch
    normalisation into inference mode.
    """
    copy = keras.models.clone_model(model)
    if not copy.built:
        copy.build_from_config(model.get_build_config())
    copy.set_weights(model.get_weights())
    for variable in copy.variables:
        variable.trainable = False
    return copy


def feature_dim(encoder):
    """Returns the width of an encoder's features, or raises what is wrong."""
    shape = getattr(encoder, "output_shape", None)
    if shape is None or not encoder.built:
        raise ValueError(
            "`encoder` must be a built Keras model that knows its output "
            "shape, such as a functional or Sequential model with an Input. "
            f"Received: {encoder}"
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
