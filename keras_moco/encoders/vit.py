"""Vision transformers as MoCo v3 trains them."""

import math

import keras
import numpy as np

# Width, blocks, heads (table 4 of arXiv:2104.02057; tiny as in DeiT).
VITS = {
    "vit_tiny": (192, 12, 3),
    "vit_small": (384, 12, 12),
    "vit_base": (768, 12, 12),
}
SMALL_IMAGE = 64  # Up to this size a patch has 4 pixels a side, else 16.


def vit(
    name,
    image_size=224,
    patch_size=None,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    freeze_patch_embedding=True,
):
    """Builds a vision transformer that maps images to pooled features.

    Positions are fixed sines and cosines in two dimensions. Instead of a class
    token the patches are averaged at the end. Made of Keras' own layers.

    Args:
        name: "vit_tiny", "vit_small" or "vit_base".
        image_size: Int. Height and width of the images, a multiple of the
            patch size. Defaults to 224.
        patch_size: Int. None takes 16, and 4 for images up to 64 pixels.
        mean: Three floats. Mean of the data, in [0, 1]. ImageNet's by default.
        std: Three floats. Deviation of the data.
        freeze_patch_embedding: Bool. Leave the first layer as it was drawn,
            which keeps the training stable. Defaults to True.

    Returns:
        `keras.Model`: float (batch, image_size, image_size, 3) in [0, 1] ->
        (batch, features).

    Raises:
        ValueError: Unknown name, or images that patches do not divide.

    Example:
        >>> vit("vit_small", image_size=96).output_shape
        (None, 384)

    Reference:
        Chen et al. 2021, arXiv:2104.02057, sections 4 and 5.
    """
    if name not in VITS:
        raise ValueError(
            f"`name` must be one of {', '.join(VITS)}. Received: {name!r}"
        )
    width, blocks, heads = VITS[name]
    patch_size = patch_size or (16 if image_size > SMALL_IMAGE else 4)
    if image_size < patch_size or image_size % patch_size:
        raise ValueError(
            f"{name} cuts images into patches of {patch_size} pixels: "
            f"`image_size` must be a multiple. Received: {image_size}. "
            f"Nearest: {max(1, round(image_size / patch_size)) * patch_size}"
        )
    side = image_size // patch_size
    images = keras.Input((image_size, image_size, 3), name="images")
    x = keras.layers.Normalization(
        mean=mean, variance=[s * s for s in std], name="normalize"
    )(images)
    x = keras.layers.Conv2D(
        width,
        patch_size,
        strides=patch_size,
        kernel_initializer=_uniform(3 * patch_size**2, width),
        trainable=not freeze_patch_embedding,
        name="patches",
    )(x)  # (batch, side, side, width)
    # Keras has no layer that adds a constant but the one that subtracts a mean.
    x = keras.layers.Normalization(
        axis=(1, 2, 3),
        mean=(-positions(side, width)).tolist(),
        variance=np.ones((side, side, width)).tolist(),
        name="positions",
    )(x)
    x = keras.layers.Reshape((side * side, width), name="tokens")(x)
    for number in range(blocks):
        x = _block(x, width, heads, f"block{number}")
    x = keras.layers.LayerNormalization(epsilon=1e-6, name="norm")(x)
    x = keras.layers.GlobalAveragePooling1D(name="pool")(x)
    return keras.Model(images, x, name=name)


def positions(side, width):
    """Sines and cosines of rows and columns, float64 (side, side, width).

    A quarter of the width each: sines of the columns, cosines of the columns,
    sines of the rows, cosines of the rows; frequencies 1 to 1 / 10000.
    """
    quarter = width // 4
    frequencies = 1.0 / 10000 ** (np.arange(quarter) / quarter)
    angles = np.arange(side)[:, None] * frequencies  # (side, quarter)
    waves = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)
    shape = (side, side, 2 * quarter)
    columns = np.broadcast_to(waves[None, :], shape)
    rows = np.broadcast_to(waves[:, None], shape)
    return np.concatenate([columns, rows], axis=2)


def _block(x, width, heads, name):
    y = keras.layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm1")(x)
    y = keras.layers.MultiHeadAttention(
        heads,
        width // heads,
        # Keras' own default misreads the three-dimensional kernels.
        kernel_initializer=_uniform(width, width),
        name=f"{name}_attention",
    )(y, y)
    x = keras.layers.Add(name=f"{name}_add1")([x, y])
    y = keras.layers.LayerNormalization(epsilon=1e-6, name=f"{name}_norm2")(x)
    y = keras.layers.Dense(
        4 * width,
        activation="gelu",
        kernel_initializer=_uniform(width, 4 * width),
        name=f"{name}_mlp1",
    )(y)
    y = keras.layers.Dense(
        width,
        kernel_initializer=_uniform(4 * width, width),
        name=f"{name}_mlp2",
    )(y)
    return keras.layers.Add(name=f"{name}_add2")([x, y])


def _uniform(inputs, outputs):
    """Xavier's uniform distribution."""
    bound = math.sqrt(6 / (inputs + outputs))
    return keras.initializers.RandomUniform(-bound, bound)
