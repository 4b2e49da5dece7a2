"""A look at machine, data and recipe before a run: `keras-moco doctor`."""

import importlib.metadata
import math
import pathlib
import platform
import shutil

import keras
import psutil
import tensorflow as tf

from keras_moco import distribute
from keras_moco.bench import seconds_per_step
from keras_moco.build import build_model, prepare
from keras_moco.checks import (
    OK,
    PROBLEM,
    Finding,
    Machine,
    Plan,
    check_machine,
    check_plan,
)
from keras_moco.data.pipeline import num_steps, threads
from keras_moco.terminal import duration


def doctor(
    dataset="shapes",
    preset=None,
    settings=(),
    *,
    devices="auto",
    precision="float32",
    jit="auto",
    run_dir=None,
    steps_per_epoch=None,
    timed_steps=5,
    **options,
):
    """Says what would go wrong with a run, before it starts.

    Args:
        dataset: As are the other arguments, but for the last two, as for
            `pretrain`.
        preset: Name or None.
        settings: "FIELD=VALUE" strings.
        devices: "auto", "cpu", "all" or how many.
        precision: Name of a dtype policy.
        jit: "on", "off" or "auto".
        run_dir: Folder of the run, or None; its disk is looked at.
        steps_per_epoch: Int or None.
        timed_steps: Int. Steps that are tried to foretell the time; 0: none.
        **options: Of `prepare`.

    Yields:
        `Finding`, as they come up. After a problem that stops everything
        there is no more to find.

    Example:
        >>> [f.text for f in doctor("photos/") if f.mark == "problem"]
    """
    if timed_steps < 0 or timed_steps == 1:
        raise ValueError(
            "`timed_steps` must be 0, or at least 2 as the first ones compile. "
            f"Received: {timed_steps}"
        )
    machine = look_at_machine(run_dir)
    yield from check_machine(machine)
    try:
        strategy = distribute.choose_strategy(devices)
        with strategy.scope():
            _, preset, images, _ = prepare(dataset, preset, settings, **options)
            size = f", {images.size[0]}x{images.size[1]}" if images.size else ""
            yield Finding(OK, f"{images.source}: {len(images):,} images{size}")
            steps = num_steps(images, preset.batch_size, steps_per_epoch)
            total_steps = steps * preset.epochs
            model = build_model(preset, None, total_steps, precision, jit)
            plan = look_at_plan(images, preset, model, steps, precision, jit)
    except (ValueError, OSError) as error:
        yield Finding(PROBLEM, " ".join(str(error).split()))
        return
    yield from check_plan(preset, plan, machine)
    if timed_steps:
        step = seconds_per_step(model, images, preset, timed_steps)
        yield Finding(
            OK,
            f"{preset.epochs} epochs of {steps:,} steps take about "
            f"{duration(step * total_steps)}, at "
            f"{preset.batch_size / step:,.0f} images/s without kNN",
        )


def look_at_machine(run_dir=None):
    """The `Machine` that this process runs on."""
    gpus = tf.config.list_physical_devices("GPU")
    capability = None
    if gpus:
        details = tf.config.experimental.get_device_details(gpus[0])
        capability = details.get("compute_capability")
    place = pathlib.Path(run_dir or ".").absolute()
    while not place.is_dir():
        place = place.parent
    return Machine(
        versions={
            "keras-moco": importlib.metadata.version("keras-moco"),
            "keras": keras.version(),
            "tensorflow": tf.version.VERSION,
            "python": platform.python_version(),
        },
        cores=threads(),
        gpus=len(gpus),
        compute_capability=capability,
        nvidia_driver=shutil.which("nvidia-smi") is not None,
        memory_bytes=psutil.virtual_memory().available,
        disk_bytes=shutil.disk_usage(place).free,
        image_data_format=keras.config.image_data_format(),
        floatx=keras.config.floatx(),
    )


def look_at_plan(images, preset, model, steps, precision, jit):
    """The `Plan` of a run whose model is built.

    Args:
        images: `Images`.
        preset: `Preset`, with every field filled in.
        model: `MoCo`.
        steps: Int. Steps an epoch.
        precision: Str.
        jit: Str.
    """
    return Plan(
        num_images=len(images),
        steps=steps,
        replicas=distribute.num_replicas(),
        parameters=model.encoder.count_params()
        + model.projector.count_params(),
        activations=num_activations(model.encoder, preset.image_size),
        precision=precision,
        jit=jit,
    )


def num_activations(encoder, image_size):
    """Numbers that the layers of an encoder give for one image.

    Args:
        encoder: `keras.Model`; 0 if it is no graph of layers.
        image_size: Int. Side in pixels.
    """
    encoder = getattr(encoder, "_functional", encoder)  # Of a Sequential.
    if not isinstance(encoder, keras.models.Model) or not hasattr(
        encoder, "_run_through_graph"
    ):
        return 0
    sizes = []

    def count(layer):
        def shapes(*inputs, **options):
            options.pop("training", None)
            if hasattr(layer, "_run_through_graph"):  # A model within.
                return layer._run_through_graph(inputs[0], operation_fn=count)
            outputs = layer.compute_output_spec(*inputs, **options)
            sizes.extend(
                math.prod(output.shape[1:])
                for output in keras.tree.flatten(outputs)
            )
            return outputs

        return shapes

    views = keras.KerasTensor((None, image_size, image_size, 3))
    encoder._run_through_graph(views, operation_fn=count)
    return sum(sizes)
