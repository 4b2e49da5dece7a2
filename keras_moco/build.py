"""From the names a user gives to images, a full preset and a model."""

import contextlib

import keras
import psutil

from keras_moco import distribute
from keras_moco.data.encoded import StreamedImages
from keras_moco.data.pipeline import natural_size
from keras_moco.data.sources import load_images
from keras_moco.encoders import build_encoder, check_name
from keras_moco.layers import (
    check_groups,
    default_groups,
    groups_per_replica,
)
from keras_moco.moco import MoCo
from keras_moco.optimizers import build_optimizer
from keras_moco.presets import find_preset, parse_setting

PRECISIONS = ("float32", "mixed_bfloat16", "mixed_float16")
JIT = {"auto": "auto", "on": True, "off": False}


def prepare(
    dataset="shapes",
    preset=None,
    settings=(),
    *,
    data_dir=None,
    max_broken=0.01,
    **changes,
):
    """Loads the images and fills in every field of the preset.

    Args:
        dataset: As for `pretrain`.
        preset: As for `pretrain`.
        settings: As for `pretrain`.
        data_dir: As for `pretrain`.
        max_broken: As for `pretrain`.
        **changes: Fields of the preset; None leaves a field as it is.

    Returns:
        Tuple of the preset's name, the `Preset`, the `Images` and the keyword
        arguments that `load_images` took.

    Example:
        >>> name, preset, images, _ = prepare("photos/", batch_size=64)
    """
    preset_name, preset = choose_preset(dataset, preset, settings, **changes)
    source = {
        "data_dir": data_dir,
        "max_broken": max_broken,
        "image_size": preset.image_size or 32,  # Only "shapes" has a choice.
    }
    images = load_images(dataset, "pretrain", **source)
    return preset_name, fill_in(preset, images), images, source


def choose_preset(dataset, preset, settings, **changes):
    """The name of a preset, and the `Preset` with the fields that were set.

    The arguments are those of `prepare`.
    """
    preset_name, preset = find_preset(preset, dataset)
    if isinstance(settings, str):
        settings = (settings,)
    fields = dict(parse_setting(text) for text in settings or ())
    fields |= {k: value for k, value in changes.items() if value is not None}
    preset = preset.replace(**fields)
    check_name(preset.encoder)
    if changes.get("width") and not preset.encoder.startswith("resnet"):
        raise ValueError(
            "`width` is of the encoders resnet18 to resnet152; "
            f"{preset.encoder} has one width only."
        )
    return preset_name, preset


def fill_in(preset, images):
    """The preset with the fields that follow from the images, checked."""
    if preset.memory_bank and isinstance(images, StreamedImages):
        raise ValueError(
            f"`memory_bank` needs images that fit into memory; {images.source} "
            "is read as a stream."
        )
    masked = preset.mask_same_image
    if masked is None:
        masked = preset.memory_bank or preset.queue_size > len(images) / 10
    preset = preset.replace(
        image_size=preset.image_size or natural_size(images),
        mask_same_image=masked,
        batch_norm_groups=preset.batch_norm_groups
        or (1 if preset.sync_batch_norm else default_groups(preset.batch_size)),
    )
    check_batch(preset)
    check_queue(preset)
    return preset


def check_batch(preset):
    """Raises unless a batch can be shared out to replicas and groups."""
    replicas = distribute.num_replicas()
    share = preset.batch_size // replicas
    if preset.batch_size % replicas or (replicas > 1 and share < 2):
        raise ValueError(
            f"`batch_size` must give each of the {replicas} replicas the same "
            "number of images, at least the 2 that batch normalisation needs. "
            f"Received: {preset.batch_size}"
        )
    check_groups(preset.batch_size, preset.batch_norm_groups)
    if preset.sync_batch_norm and preset.batch_norm_groups > 1:
        raise ValueError(
            "`sync_batch_norm` normalises by the whole batch: "
            "`batch_norm_groups` must be 1. Received: "
            f"{preset.batch_norm_groups}"
        )
    check_groups(share, groups_per_replica(preset))


def check_queue(preset):
    """Raises where the keys of the queue alone are more than the memory."""
    need = 4 * preset.queue_size * preset.head_output_dim
    total = psutil.virtual_memory().total
    if need > total:
        raise ValueError(
            f"A queue of {preset.queue_size:,} keys of "
            f"{preset.head_output_dim} numbers takes {need / 1e9:,.0f} GB; "
            f"this machine has {total / 1e9:,.0f} GB. Give a smaller "
            "`queue_size`."
        )


def check_choice(name, value, known):
    """Raises unless an argument is one of the values there are."""
    if value not in known:
        raise ValueError(
            f"`{name}` must be one of {', '.join(known)}. Received: {value!r}"
        )


def build_model(
    preset, encoder, total_steps, precision, jit="auto", num_images=None
):
    """The compiled `MoCo` of a preset, around its encoder or a given one.

    Args:
        preset: `Preset` with every field filled in.
        encoder: `keras.Model`, or None for the preset's.
        total_steps: Int. Steps of the run.
        precision: Name of a Keras dtype policy.
        jit: "on", "off" or "auto": compile the train step with XLA. "auto"
            does on one GPU, and not on a CPU, where convolutions are slower so,
            nor on several devices.
        num_images: Int. Training images; needed with a memory bank.
    """
    with _dtype_policy(precision):
        if not isinstance(encoder, keras.Model):
            encoder = build_encoder(
                preset.encoder,
                preset.image_size,
                preset.width,
                preset.mean,
                preset.std,
                preset.zero_init_residual,
            )
        _check_input(encoder, preset.image_size)
        model = MoCo.from_preset(preset, encoder, total_steps, num_images)
        optimizer = build_optimizer(preset, preset.batch_size, total_steps)
        alone = distribute.num_replicas() == 1
        compiled = JIT[jit] if alone or jit != "auto" else False
        model.compile(optimizer, jit_compile=compiled)
    return model


def _check_input(encoder, size):
    shape = getattr(encoder, "input_shape", None)
    views = (size, size, 3)
    if isinstance(shape, tuple) and any(
        wanted not in (None, have)
        for wanted, have in zip(shape[1:], views, strict=False)
    ):
        raise ValueError(
            f"`encoder` takes images of shape {shape[1:]}, but the views are "
            f"{views}. Give another `image_size`, or another encoder."
        )


@contextlib.contextmanager
def _dtype_policy(name):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
