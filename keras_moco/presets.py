"""Recipes of momentum contrast: one frozen `Preset` each, every number in it.

Pure Python, so that the command line can list presets without importing
TensorFlow. A preset is read by `MoCo.from_preset`, `build_optimizer`,
`pretrain_dataset` and the command line; nothing below them knows it.
"""

import dataclasses
import difflib
import math
import typing

from keras_moco.kinds import check_kind, kind_name, parse

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclasses.dataclass(frozen=True)
class View:
    """What may be done to an image to make one view of it.

    Args:
        crop_scale: Pair of floats in (0, 1]. Share of the area that the random
            resized crop keeps; its aspect ratio is log-uniform in 3/4..4/3.
        flip: Float in [0, 1]. Probability of a horizontal flip.
        jitter: Strengths of brightness, contrast, saturation and hue; the
            factors are uniform in [max(0, 1 - s), 1 + s], the hue shift in
            [-s, s] of the circle. The four are applied in random order.
        jitter_probability: Float in [0, 1].
        grayscale: Float in [0, 1]. Probability of removing the colour.
        grayscale_first: Bool. Grey before the jitter, as MoCo v1 does.
        blur: Float in [0, 1]. Probability of a Gaussian blur.
        blur_sigma: Pair of floats, in pixels.
        solarize: Float in [0, 1]. Probability of inverting bright pixels.
    """

    crop_scale: tuple[float, float] = (0.2, 1.0)
    flip: float = 0.5
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    jitter_probability: float = 0.8
    grayscale: float = 0.2
    grayscale_first: bool = False
    blur: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarize: float = 0.0


@dataclasses.dataclass(frozen=True)
class Preset:
    """Every number of one recipe; `replace` gives a changed copy.

    Args:
        summary: Paper, data and the result to expect.
        queue_size: Int. Past keys kept as negatives; 0 takes the other images
            of the batch.
        temperature: Float > 0.
        momentum: Float in [0, 1]. Of the key encoder.
        final_momentum: Float in [0, 1] or None. Where a cosine takes
            `momentum` to by the last step; None keeps it constant.
        symmetric: Bool. Use each view as query and as key.
        v3_loss: Bool. MoCo v3's loss: the sum of both directions, each times
            2 * temperature, instead of the mean.
        mask_same_image: Bool or None. Leave keys of the query's own image out
            of the negatives. They are frequent once the queue is a tenth of
            the data; None masks from there on (in `pretrain`).
        memory_bank: Bool. Draw the negatives, `queue_size` of them, from a
            memory bank of one key for each training image instead of a queue.
        head_layers: Int >= 1. Dense layers of the projector; 1 is linear (v1).
        head_hidden_dim: Int or None. None is the width of the features.
        head_output_dim: Int.
        head_batch_norm: Bool. Batch normalisation after every head layer (v3).
        predictor_layers: Int. Layers of a predictor on the query side; 0 is
            none (v1, v2).
        batch_norm_groups: Int or None. Parts of the batch that batch
            normalisation of the encoder treats apart, over all devices (each
            of which is one part at least); None takes 8, with at least 16
            samples each.
        sync_batch_norm: Bool. Normalise by the whole batch, over all devices,
            instead.
        optimizer: "sgd" or "lars".
        base_learning_rate: Float. For 256 images a batch: the learning rate is
            `base_learning_rate * batch_size / 256`.
        sgd_momentum: Float in [0, 1].
        weight_decay: Float. Added to the gradient (coupled), as in PyTorch.
        warmup_epochs: Float. Epochs of linear warm-up.
        decay_at: Floats in (0, 1). Where in the run the learning rate drops to
            a tenth; empty means a cosine to 0.
        crop_scale: As in `View`, as are `jitter`, `jitter_probability`,
            `grayscale`, `grayscale_first` and `blur_sigma`.
        blur: Pair of probabilities, of the first and of the second view.
        solarize: Pair of probabilities, of the first and of the second view.
        mean: Three floats, of the data in [0, 1]; the encoder normalises.
        std: Three floats.
        encoder: Name of the encoder.
        width: Int. Channels of the first stage of a ResNet.
        zero_init_residual: Bool. Start the residual branches of a ResNet at
            zero.
        image_size: Int or None. Side of the views in pixels; None is the size
            of the data, at most 224.
        batch_size: Int. Images a step, over all devices.
        epochs: Int.

    Raises:
        ValueError: A value is outside its range.

    Example:
        >>> PRESETS["moco_v2"].replace(queue_size=16384).queue_size
        16384
    """

    summary: str
    queue_size: int = 65536
    temperature: float = 0.2
    momentum: float = 0.999
    final_momentum: float | None = None
    symmetric: bool = False
    v3_loss: bool = False
    mask_same_image: bool | None = None
    memory_bank: bool = False
    head_layers: int = 2
    head_hidden_dim: int | None = None
    head_output_dim: int = 128
    head_batch_norm: bool = False
    predictor_layers: int = 0
    batch_norm_groups: int | None = None
    sync_batch_norm: bool = False
    optimizer: str = "sgd"
    base_learning_rate: float = 0.03
    sgd_momentum: float = 0.9
    weight_decay: float = 1e-4
    warmup_epochs: float = 0.0
    decay_at: tuple[float, ...] = ()
    crop_scale: tuple[float, float] = (0.2, 1.0)
    jitter: tuple[float, float, float, float] = (0.4, 0.4, 0.4, 0.1)
    jitter_probability: float = 0.8
    grayscale: float = 0.2
    grayscale_first: bool = False
    blur: tuple[float, float] = (0.5, 0.5)
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarize: tuple[float, float] = (0.0, 0.0)
    mean: tuple[float, float, float] = IMAGENET_MEAN
    std: tuple[float, float, float] = IMAGENET_STD
    encoder: str = "resnet50"
    width: int = 64
    zero_init_residual: bool = False
    image_size: int | None = None
    batch_size: int = 256
    epochs: int = 200

    def __post_init__(self):
        for name, kind in typing.get_type_hints(Preset).items():
            value = getattr(self, name)
            if isinstance(value, list):  # As JSON has tuples.
                object.__setattr__(self, name, tuple(value))
            check_kind(name, getattr(self, name), kind)
            _check(self, name, _is_finite, "finite")
        at_least = {
            "queue_size": 0,
            "head_layers": 1,
            "head_output_dim": 1,
            "predictor_layers": 0,
            "base_learning_rate": 0,
            "weight_decay": 0,
            "warmup_epochs": 0,
            "width": 1,
            "batch_size": 2,  # TensorFlow's own step crashes on one image.
            "epochs": 1,
        }
        for name, low in at_least.items():
            _check(self, name, lambda value, low=low: value >= low, f">= {low}")
        # Beyond these no machine answers, not even with an error.
        at_most = {"image_size": 8192, "width": 8192, "head_output_dim": 65536}
        for name, top in at_most.items():
            _check(self, name, lambda v, top=top: (v or 0) <= top, f"<= {top}")
        for name in ("image_size", "head_hidden_dim", "batch_norm_groups"):
            _check(self, name, lambda v: v is None or v >= 1, ">= 1")
        for name in (
            "momentum",
            "final_momentum",
            "sgd_momentum",
            "jitter_probability",
            "grayscale",
            "blur",
            "solarize",
        ):
            _check(self, name, _in_unit_interval, "in [0, 1]")
        _check(self, "temperature", lambda v: v > 0, "> 0")
        if self.memory_bank:
            _check(self, "queue_size", bool, ">= 1 with `memory_bank`")
            _check(
                self,
                "mask_same_image",
                lambda v: v is not False,
                "true or none with `memory_bank`",
            )
        _check(self, "jitter", lambda v: min(v) >= 0, ">= 0")
        _check(self, "jitter", lambda v: v[3] <= 0.5, "at most 0.5 for hue")
        _check(self, "std", lambda v: min(v) > 0, "> 0")
        _check(self, "decay_at", lambda v: all(0 < x < 1 for x in v), "in 0..1")
        _check(self, "optimizer", ("sgd", "lars").__contains__, "sgd or lars")
        for name, top in (("crop_scale", 1.0), ("blur_sigma", float("inf"))):
            _check(
                self,
                name,
                lambda v, top=top: 0 < v[0] <= v[1] <= top,
                f"rising, above 0 and at most {top}",
            )

    def replace(self, **changes):
        """Returns a copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)

    @property
    def views(self):
        """The two `View`s, of the query and of the key."""
        common = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(View)
            if field.name not in ("flip", "blur", "solarize")
        }
        return tuple(
            View(blur=blur, solarize=solarize, **common)
            for blur, solarize in zip(self.blur, self.solarize, strict=True)
        )


def _is_finite(value):
    values = value if isinstance(value, tuple) else (value,)
    return all(math.isfinite(v) for v in values if isinstance(v, float))


def _in_unit_interval(value):
    values = value if isinstance(value, tuple) else (value,)
    return all(v is None or 0 <= v <= 1 for v in values)


def _check(preset, name, holds, expected):
    value = getattr(preset, name)
    if not holds(value):
        raise ValueError(f"`{name}` must be {expected}. Received: {value}")


PRESETS = {
    "demo": Preset(
        summary="For the built-in shapes: a small ResNet on two CPU cores in "
        "minutes. Command: keras-moco pretrain",
        queue_size=1024,
        temperature=0.1,
        momentum=0.99,
        base_learning_rate=0.12,
        weight_decay=5e-4,
        # Without it the encoder collapses before the queue holds real keys.
        warmup_epochs=0.4,
        # Smaller crops cut the figures, which fill a part of the image.
        crop_scale=(0.4, 1.0),
        jitter=(0.4, 0.4, 0.4, 0.4),
        blur=(0.0, 0.0),
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        encoder="resnet18",
        width=16,
        batch_size=128,
        epochs=4,
    ),
    "cifar10": Preset(
        summary="CIFAR-10, the authors' demo: kNN 82.6 / 86.3 / 88.7 % after "
        "200 / 400 / 800 epochs of ResNet-18 at batch 512. Command: keras-moco "
        "pretrain --dataset cifar10",
        queue_size=4096,
        temperature=0.1,
        momentum=0.99,
        head_layers=1,
        weight_decay=5e-4,
        crop_scale=(0.08, 1.0),
        blur=(0.0, 0.0),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        encoder="resnet18",
        batch_size=512,
    ),
    "stl10": Preset(
        summary="STL-10's 100,000 unlabelled images, MoCo v2 at 96 px with a "
        "smaller queue; no published figure. Command: keras-moco pretrain "
        "--dataset stl10",
        queue_size=16384,
        momentum=0.99,
        weight_decay=5e-4,
        mean=(0.4914, 0.4823, 0.4466),
        std=(0.247, 0.243, 0.261),
        encoder="resnet18",
    ),
    "moco_v1": Preset(
        summary="He et al. 2019, arXiv:1911.05722: linear 60.6 % (60.8 +- .2 "
        "with the authors' code) on ImageNet, ResNet-50, 200 epochs. Command: "
        "keras-moco pretrain --dataset DIR --preset moco_v1",
        temperature=0.07,
        head_layers=1,
        decay_at=(0.6, 0.8),
        jitter=(0.4, 0.4, 0.4, 0.4),
        jitter_probability=1.0,
        grayscale_first=True,
        blur=(0.0, 0.0),
    ),
    "moco_v2": Preset(
        summary="Chen et al. 2020, arXiv:2003.04297: linear 67.5 +- .1 % on "
        "ImageNet, ResNet-50, 200 epochs; 71.1 % after 800. Command: "
        "keras-moco pretrain --dataset DIR",
        head_hidden_dim=2048,
    ),
    "moco_v3": Preset(
        summary="Chen et al. 2021, arXiv:2104.02057: linear 68.9 % on "
        "ImageNet, ResNet-50, 100 epochs at batch 4096. Command: keras-moco "
        "pretrain --dataset DIR --preset moco_v3",
        queue_size=0,
        temperature=1.0,
        momentum=0.99,
        final_momentum=1.0,
        symmetric=True,
        v3_loss=True,
        zero_init_residual=True,
        head_hidden_dim=4096,
        head_output_dim=256,
        head_batch_norm=True,
        predictor_layers=2,
        sync_batch_norm=True,
        optimizer="lars",
        base_learning_rate=0.6,
        weight_decay=1e-6,
        warmup_epochs=10,
        jitter=(0.4, 0.4, 0.2, 0.1),
        blur=(1.0, 0.1),
        solarize=(0.0, 0.2),
        batch_size=4096,
        epochs=100,
    ),
}


def find_preset(name, dataset):
    """Returns the name of a preset and the preset.

    Args:
        name: Str, `Preset` (it is called "own"), or None for the one that
            suits the dataset.
        dataset: What `pretrain` takes; "shapes", "cifar10" and "stl10" have
            presets of their own, the rest gets MoCo v2.

    Raises:
        ValueError: No preset of that name, with the nearest ones.
    """
    if name is None:
        own = {"shapes": "demo", "cifar10": "cifar10", "stl10": "stl10"}
        name = (
            own.get(dataset, "moco_v2") if type(dataset) is str else "moco_v2"
        )
    if isinstance(name, Preset):
        return "own", name
    check_kind("preset", name, str)
    if name not in PRESETS:
        raise ValueError(
            f"There is no preset {name!r}. {nearest(name, PRESETS)}"
        )
    return name, PRESETS[name]


def nearest(name, names):
    """Returns a sentence with the names most like `name`."""
    close = difflib.get_close_matches(name, list(names), 3, 0.5)
    if close:
        return "Did you mean " + " or ".join(close) + "?"
    return "There are: " + ", ".join(names) + "."


def parse_setting(text):
    """Reads `FIELD=VALUE` of any preset field, checked for its type.

    Args:
        text: Str, such as "queue_size=4096", "crop_scale=0.2,1",
            "head_hidden_dim=none" or "symmetric=true".

    Returns:
        Pair of the field's name and its value.

    Raises:
        ValueError: No such field (with the nearest), or not of its type.

    Example:
        >>> parse_setting("crop_scale=0.2,1")
        ('crop_scale', (0.2, 1.0))
    """
    check_kind("settings", text, str)
    name, equals, value = text.partition("=")
    name, value = name.strip(), value.strip()
    if not equals:
        raise ValueError(f"A setting is FIELD=VALUE. Received: {text!r}")
    types = typing.get_type_hints(Preset)
    if name not in types or name == "summary":
        fields = [field for field in types if field != "summary"]
        raise ValueError(
            f"A preset has no field {name!r}. {nearest(name, fields)}"
        )
    try:
        return name, parse(value, types[name])
    except ValueError as error:
        raise ValueError(
            f"`{name}` is of type {kind_name(types[name])}. Received: {value!r}"
        ) from error
