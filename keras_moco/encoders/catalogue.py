"""Every encoder that has a name: ours, Keras' and keras-cv's."""

import difflib
import inspect
import math

import keras

from keras_moco.encoders.resnet import RESNETS, resnet
from keras_moco.encoders.vit import VITS, vit

# keras-cv fetches the arguments of its named backbones from the network; these
# are the published ones.
_RESNET_BLOCKS = {
    18: ("basic_block", [2, 2, 2, 2]),
    34: ("basic_block", [3, 4, 6, 3]),
    50: ("block", [3, 4, 6, 3]),
    101: ("block", [3, 4, 23, 3]),
    152: ("block", [3, 8, 36, 3]),
}
_DENSENET_BLOCKS = {
    121: [6, 12, 24, 16],
    169: [6, 12, 32, 32],
    201: [6, 12, 48, 32],
}
KERAS_CV = {
    f"ResNet{depth}{version}Backbone": (
        f"ResNet{version}Backbone",
        {
            "stackwise_filters": [64, 128, 256, 512],
            "stackwise_blocks": blocks,
            "stackwise_strides": [1, 2, 2, 2],
            "block_type": kind,
        },
    )
    for version in ("", "V2")
    for depth, (kind, blocks) in _RESNET_BLOCKS.items()
}
KERAS_CV |= {
    f"DenseNet{depth}Backbone": (
        "DenseNetBackbone",
        {"stackwise_num_repeats": blocks},
    )
    for depth, blocks in _DENSENET_BLOCKS.items()
}
KERAS_CV["VGG16Backbone"] = ("VGG16Backbone", {"include_top": False})


def build_encoder(
    name,
    image_size=224,
    width=64,
    mean=(0.485, 0.456, 0.406),
    std=(0.229, 0.224, 0.225),
    zero_init_residual=False,
):
    """Builds an encoder by its name, untrained, with pooled features.

    Args:
        name: One of `encoder_names()`: "resnet50", "vit_small",
            "keras.applications/EfficientNetV2B0",
            "keras_cv/ResNet18Backbone", ...
        image_size: Int. Side of the images in pixels. Defaults to 224.
        width: Int. Of the "resnet..." only: channels of the first stage.
        mean: Three floats. Mean of the data, in [0, 1]. ImageNet's by default.
        std: Three floats. Deviation of the data.
        zero_init_residual: Bool. Of the "resnet..." only, see `resnet`.

    Returns:
        `keras.Model`: float (batch, image_size, image_size, 3) in [0, 1] ->
        (batch, features); the data are normalised inside.

    Raises:
        ValueError: Unknown name (with the nearest ones), or images too small
            for the network.

    Example:
        >>> build_encoder("keras.applications/MobileNetV2", 96).output_shape
        (None, 1280)
    """
    check_name(name)
    if name in RESNETS:
        return resnet(name, image_size, width, mean, std, zero_init_residual)
    if name in VITS:
        return vit(name, image_size, mean=mean, std=std)
    images = keras.Input((image_size, image_size, 3), name="images")
    x = keras.layers.Normalization(
        mean=mean, variance=[s * s for s in std], name="normalize_images"
    )(images)
    library, _, class_name = name.partition("/")
    try:
        if library == "keras_cv":
            features = _keras_cv(class_name, x)
        else:
            features = _application(class_name, x)
    except ValueError as error:
        raise ValueError(
            f"{name} cannot be built for images of {image_size} pixels; give "
            f"a larger `image_size`. ({' '.join(str(error).split())[:160]})"
        ) from error
    return keras.Model(images, features, name=class_name.lower())


def encoder_names():
    """The names that `build_encoder` knows, ours first.

    Example:
        >>> encoder_names()[0]
        'resnet18'
    """
    applications = [
        f"keras.applications/{name}"
        for name in dir(keras.applications)
        if name[0].isupper()
    ]
    keras_cv = [f"keras_cv/{name}" for name in KERAS_CV]
    return [*RESNETS, *VITS, *applications, *keras_cv]


def describe(name):
    """Parameters that are trained, and width of the features, at 224 pixels.

    No weight is made for it. That of a network as large as NASNetLarge still
    takes a second.

    Args:
        name: One of `encoder_names()`.

    Returns:
        Pair of ints.

    Example:
        >>> describe("resnet18")
        (11176512, 512)
    """
    with keras.StatelessScope():
        model = build_encoder(name)
        variables = model.trainable_variables
        return sum(math.prod(v.shape) for v in variables), model.output_shape[1]


def check_name(name):
    """Raises a ValueError, with the nearest names, unless there is such one."""
    names = encoder_names()
    if name in names:
        return
    short = {known.rpartition("/")[2].lower(): known for known in names}
    wanted = name.rpartition("/")[2].lower()
    close = difflib.get_close_matches(wanted, short, 3, 0.5)
    hint = " or ".join(short[word] for word in close)
    raise ValueError(
        f"There is no encoder {name!r}. "
        + (f"Did you mean {hint}? " if hint else "")
        + "All of them: keras-moco encoders"
    )


def _application(name, x):
    function = getattr(keras.applications, name)
    options = {
        "include_top": False,
        "weights": None,
        "input_shape": tuple(x.shape[1:]),
    }
    if "include_preprocessing" in inspect.signature(function).parameters:
        options["include_preprocessing"] = False
    elif name.startswith("EfficientNet"):
        x = keras.layers.Rescaling(255.0, name="undo_rescaling")(x)
    return function(input_tensor=x, pooling="avg", **options).output


def _keras_cv(name, x):
    import keras_cv

    class_name, options = KERAS_CV[name]
    backbone = getattr(keras_cv.models, class_name)(
        include_rescaling=False, input_shape=tuple(x.shape[1:]), **options
    )
    # An ordinary functional model in place of keras-cv's own class.
    x = keras.Model(backbone.input, backbone.output, name="backbone")(x)
    return keras.layers.GlobalAveragePooling2D(name="pool")(x)
