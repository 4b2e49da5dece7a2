"""ResNets in torchvision's layout."""

import keras

# Blocks per stage and whether they are bottlenecks (He et al. 2015, table 1).
RESNETS = {
    "resnet18": ((2, 2, 2, 2), False),
    "resnet34": ((3, 4, 6, 3), False),
    "resnet50": ((3, 4, 6, 3), True),
    "resnet101": ((3, 4, 23, 3), True),
    "resnet152": ((3, 8, 36, 3), True),
}
SMALL_IMAGE = 64  # Up to this size the stem keeps the resolution.


def resnet(
    name,
    image_size=224,
    width=64,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    zero_init_residual=False,
):
    """Builds a ResNet that maps images to pooled features.

    The layout is torchvision's: the stride of a bottleneck sits on its 3x3
    convolution, convolutions have no bias, batch normalisation has epsilon
    1e-5 and momentum 0.9, padding is symmetric. Images up to 64 pixels get
    the CIFAR stem: 3x3, stride 1, no max-pooling.

    Args:
        name: "resnet18", "resnet34", "resnet50", "resnet101" or "resnet152".
        image_size: Int. Size that the stem is chosen for; the network itself
            takes any. Defaults to 224.
        width: Int. Channels of the first stage. Defaults to 64.
        mean: Three floats. Mean of the data, in [0, 1]. ImageNet's by default.
        std: Three floats. Deviation of the data.
        zero_init_residual: Bool. Let every residual branch start at zero: the
            scale of its last normalisation does. Defaults to False.

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
        He et al. 2015, arXiv:1512.03385; Goyal et al. 2017, arXiv:1706.02677
        (`zero_init_residual`).
    """
    if name not in RESNETS:
        raise ValueError(
            f"`name` must be one of {', '.join(RESNETS)}. Received: {name!r}"
        )
    blocks, bottleneck = RESNETS[name]
    last_scale = "zeros" if zero_init_residual else "ones"
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
            name_here = f"stage{stage}_{number}"
            x = block(x, width * 2**stage, stride, last_scale, name_here)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(images, x, name=name)


def _basic(x, width, stride, last_scale, name):
    y = _conv_norm(x, width, 3, stride, f"{name}_a")
    y = keras.layers.ReLU(name=f"{name}_a_relu")(y)
    y = _conv_norm(y, width, 3, 1, f"{name}_b", last_scale)
    return _add_shortcut(x, y, stride, name)


def _bottleneck(x, width, stride, last_scale, name):
    y = _conv_norm(x, width, 1, 1, f"{name}_a")
    y = keras.layers.ReLU(name=f"{name}_a_relu")(y)
    y = _conv_norm(y, width, 3, stride, f"{name}_b")
    y = keras.layers.ReLU(name=f"{name}_b_relu")(y)
    y = _conv_norm(y, 4 * width, 1, 1, f"{name}_c", last_scale)
    return _add_shortcut(x, y, stride, name)


def _add_shortcut(x, y, stride, name):
    if x.shape[-1] != y.shape[-1] or stride > 1:
        x = _conv_norm(x, y.shape[-1], 1, stride, f"{name}_shortcut")
    y = keras.layers.Add(name=f"{name}_add")([x, y])
    return keras.layers.ReLU(name=f"{name}_relu")(y)


def _conv_norm(x, filters, kernel_size, stride, name, scale="ones"):
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
    return keras.layers.BatchNormalization(
        momentum=0.9,
        epsilon=1e-5,
        gamma_initializer=scale,
        name=f"{name}_bn",
    )(x)
