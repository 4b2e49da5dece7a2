"""What would go wrong with a run, told before it starts.

Each check is a pure function of what is known to a list of findings, so each
can be tested by itself. What cannot run at all is refused where it is used, by
a ValueError; `doctor` shows these as problems too.
"""

import dataclasses
import math
import typing

OK, NOTE, PROBLEM = "ok", "note", "problem"
# Of a process that has compiled views and step, besides what they hold. It and
# one copy of the layers' outputs were within 20 % of the peak of a ResNet-18 at
# batch 256 and 1024, in float32 and mixed_bfloat16, on a CPU.
PROCESS_BYTES = 900e6
# Checkpoints that a run keeps (three, and the next one while it is written)
# and its two exports, in copies of the weights.
CHECKPOINT_COPIES = 4


class Finding(typing.NamedTuple):
    """One thing that was looked at.

    Attributes:
        mark: "ok", "note" (the run works, but read this) or "problem" (it
            would fail).
        text: Str. One or two sentences.
    """

    mark: str
    text: str


@dataclasses.dataclass(frozen=True)
class Machine:
    """What a machine offers.

    Args:
        versions: Dict of str, such as {"tensorflow": "2.21.0"}.
        cores: Int. CPU cores that this process may use.
        gpus: Int. GPUs that TensorFlow sees.
        compute_capability: Pair of ints of the first GPU, or None.
        nvidia_driver: Bool. Whether a driver of NVIDIA is installed.
        memory_bytes: Int. Main memory that is free.
        disk_bytes: Int. Free where the run is written.
        image_data_format: Str. Of Keras' configuration.
        floatx: Str. Of Keras' configuration.
    """

    versions: dict
    cores: int
    gpus: int
    compute_capability: tuple[int, int] | None
    nvidia_driver: bool
    memory_bytes: float
    disk_bytes: float
    image_data_format: str = "channels_last"
    floatx: str = "float32"


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is known of a run besides its preset.

    Args:
        num_images: Int.
        steps: Int. Steps an epoch.
        replicas: Int. Devices that share a batch.
        parameters: Int. Of the encoder and its head, once.
        activations: Int. Numbers that the layers give for one image.
        precision: Str. Keras' dtype policy.
        jit: "on", "off" or "auto".
    """

    num_images: int
    steps: int
    replicas: int = 1
    parameters: int = 0
    activations: int = 0
    precision: str = "float32"
    jit: str = "auto"


def versions(machine):
    """Versions, and Keras settings of the user's that break the run."""
    there = machine.versions
    found = [
        Finding(
            OK,
            ", ".join(f"{name} {number}" for name, number in there.items()),
        )
    ]
    for name, least in (("keras", (3, 8)), ("tensorflow", (2, 18))):
        if _version(there.get(name, "0")) < least:
            found.append(
                Finding(
                    PROBLEM,
                    f"{name} {there.get(name)} is too old: at least "
                    f"{'.'.join(map(str, least))} is needed. pip install -U "
                    f"{name}",
                )
            )
    for name, wanted in (
        ("image_data_format", "channels_last"),
        ("floatx", "float32"),
    ):
        if getattr(machine, name) != wanted:
            found.append(
                Finding(
                    PROBLEM,
                    f"Keras is set to {name}={getattr(machine, name)}, and "
                    f"{wanted} is needed: change it in ~/.keras/keras.json.",
                )
            )
    return found


def devices(machine):
    """GPUs and cores; a GPU that TensorFlow does not see."""
    gpus = f"{machine.gpus} GPU" + ("s" if machine.gpus > 1 else "")
    cores = f"{machine.cores} CPU core" + ("s" if machine.cores > 1 else "")
    found = [Finding(OK, f"{gpus if machine.gpus else 'No GPU'}, {cores}")]
    if machine.nvidia_driver and not machine.gpus:
        found.append(
            Finding(
                NOTE,
                "This machine has NVIDIA's driver, but TensorFlow sees no GPU: "
                "it may lack the CUDA libraries (pip install "
                "'tensorflow[and-cuda]'), or CUDA_VISIBLE_DEVICES hides it.",
            )
        )
    return found


def precision(machine, plan):
    """Precisions that the device does not have, XLA where it breaks."""
    found = []
    if plan.precision == "mixed_float16" and not machine.gpus:
        found.append(
            Finding(
                NOTE,
                "mixed_float16 is slow on a CPU: take mixed_bfloat16 or "
                "float32.",
            )
        )
    capability = machine.compute_capability
    if plan.precision == "mixed_bfloat16" and capability and capability < (8,):
        found.append(
            Finding(
                NOTE,
                f"A GPU of compute capability {capability[0]}.{capability[1]} "
                "has no fast bfloat16: take mixed_float16.",
            )
        )
    if plan.jit == "on" and plan.replicas > 1:
        found.append(
            Finding(
                NOTE,
                f"XLA on {plan.replicas} devices has been seen to crash or to "
                "hang: leave --jit at auto.",
            )
        )
    if plan.jit == "on" and not machine.gpus:
        found.append(
            Finding(NOTE, "XLA makes convolutions slower on a CPU: --jit auto.")
        )
    return found


def batch(preset, plan):
    """How a batch falls to devices and groups of batch normalisation."""
    share = preset.batch_size // plan.replicas
    if preset.sync_batch_norm:
        return [Finding(OK, f"Batch normalisation over {preset.batch_size}")]
    groups = max(1, (preset.batch_norm_groups or 1) // plan.replicas)
    size = share // groups
    text = (
        f"{share} images a device and step, normalised in {groups} "
        f"group{'s' if groups > 1 else ''} of {size}"
    )
    if size < 8:
        return [
            Finding(
                NOTE,
                f"{text}: statistics of so few are noisy. Take a larger batch "
                "or --set batch_norm_groups=1.",
            )
        ]
    found = [Finding(OK, text)]
    if groups * plan.replicas == 1 and preset.queue_size:
        found.append(
            Finding(
                NOTE,
                "Batch normalisation over the whole batch on one device can "
                "tell the right key: watch kNN, not the loss, or take a batch "
                "that falls into groups (batch_norm_groups).",
            )
        )
    return found


def learning_rate(preset, plan):
    """The learning rate for this batch."""
    base, size = preset.base_learning_rate, preset.batch_size
    rate = f"Learning rate {base:g} x {size} / 256 = {base * size / 256:g}"
    if size > 1024 and preset.optimizer == "sgd":
        return [
            Finding(
                NOTE,
                "Batches above 1,024 train poorly with SGD: consider "
                "--set optimizer=lars.",
            )
        ]
    return [Finding(OK, f"{rate}, {preset.optimizer}")]


def queue_against_data(preset, plan):
    """Whether the queue is small beside the data."""
    size = preset.queue_size
    if not size:
        return [Finding(OK, "Negatives are the other images of the batch")]
    if preset.memory_bank:
        return [Finding(OK, "Negatives are drawn from keys of all images")]
    share = size / plan.num_images
    if share <= 0.1:
        return [
            Finding(OK, f"The queue of {size:,} is {share:.1%} of the data")
        ]
    masked = "left out of" if preset.mask_same_image else "among"
    return [
        Finding(
            NOTE,
            "The queue is more than a tenth of the data: keys of the query's "
            f"own image come up often and are {masked} its negatives "
            f"(mask_same_image={str(bool(preset.mask_same_image)).lower()}).",
        )
    ]


def queue_turnovers(preset, plan):
    """Whether the run is long enough for its queue."""
    if not preset.queue_size:
        return []
    if preset.memory_bank:
        return [
            Finding(
                NOTE,
                "The loss rises until the memory bank holds real keys, for "
                f"about {plan.steps:,} steps: that is expected.",
            )
        ]
    to_fill = preset.queue_size / preset.batch_size / (1 + preset.symmetric)
    total = plan.steps * preset.epochs
    turnovers = total / to_fill
    keys = turnovers * preset.queue_size
    least = min(plan.num_images / 4, keys / 10)
    smaller = max(64, 2 ** int(math.log2(max(least, 1))))
    advice = "Take more epochs"
    if smaller < preset.queue_size:
        advice += f", or --set queue_size={smaller}"
    if turnovers < 1:
        return [
            Finding(
                NOTE,
                "The queue will not fill: that takes "
                f"{math.ceil(to_fill):,} steps, and there are {total:,}. Until "
                f"then the loss looks better than it is. {advice}.",
            )
        ]
    if turnovers < 10:
        return [
            Finding(
                NOTE,
                f"The queue turns over {turnovers:.1f} times in the whole run; "
                f"below 10 there is little to see. {advice}.",
            )
        ]
    if to_fill <= 1:
        return [Finding(OK, f"The queue turns over {turnovers:,.0f} times")]
    return [
        Finding(
            NOTE,
            "The loss rises until the queue holds real keys, for about "
            f"{math.ceil(to_fill):,} steps: that is expected.",
        )
    ]


def memory(preset, plan, machine):
    """Memory of a device, from shapes: a guide, not a measurement."""
    need = training_bytes(preset, plan)
    text = (
        f"About {_size(need)} of memory a device: {_size(16 * plan.parameters)}"
        f" of weights, {_size(8 * preset.queue_size * preset.head_output_dim)} "
        f"of queue, the rest for {preset.batch_size // plan.replicas} images"
    )
    if machine.gpus:
        return [Finding(OK, f"{text}. Compare it with your GPU's.")]
    need = plan.replicas * need + PROCESS_BYTES
    if need <= machine.memory_bytes:
        return [Finding(OK, f"{text}; {_size(machine.memory_bytes)} are free")]
    return [
        Finding(
            PROBLEM,
            f"{text}. With TensorFlow that is {_size(need)}, and "
            f"{_size(machine.memory_bytes)} are free: halve --batch-size.",
        )
    ]


def training_bytes(preset, plan):
    """Bytes that the train step takes on one device, from shapes.

    Weights count four times (query and key encoder, gradients, the
    optimizer's momentum), the queue twice (a step reads a copy), and there are
    the layers' outputs for the share of the batch.
    """
    share = preset.batch_size / plan.replicas
    item = 4 if plan.precision == "float32" else 2
    views = 2 * (preset.image_size or 224) ** 2 * 3 * 4
    return (
        16 * plan.parameters
        + 8 * preset.queue_size * preset.head_output_dim
        + share * (item * plan.activations + 4 * views)
    )


def disk(preset, plan, machine):
    """Room for checkpoints and exports."""
    # Query and key encoder and the momentum; twice the encoder to export.
    checkpoint = 12 * plan.parameters
    checkpoint += 4 * preset.queue_size * preset.head_output_dim
    need = CHECKPOINT_COPIES * checkpoint + 8 * plan.parameters
    free = machine.disk_bytes
    text = f"Checkpoints and export take {_size(need)} on disk"
    if need > free:
        return [
            Finding(
                PROBLEM,
                f"{text}, and {_size(free)} are free: give a --run-dir on "
                "another disk.",
            )
        ]
    return [Finding(OK, f"{text}, of {_size(free)} that are free")]


def check_machine(machine):
    """Findings about the machine alone."""
    return versions(machine) + devices(machine)


def check_plan(preset, plan, machine):
    """Findings about a run on a machine.

    Args:
        preset: `Preset`, with every field filled in.
        plan: `Plan`.
        machine: `Machine`.

    Returns:
        List of `Finding`.
    """
    return [
        *precision(machine, plan),
        *batch(preset, plan),
        *learning_rate(preset, plan),
        *queue_against_data(preset, plan),
        *queue_turnovers(preset, plan),
        *memory(preset, plan, machine),
        *disk(preset, plan, machine),
    ]


def _version(text):
    """The first two numbers of a version."""
    parts = (text + ".0").split(".")[:2]
    return tuple(
        int("".join(c for c in part if c.isdigit()) or 0) for part in parts
    )


def _size(count):
    """Bytes in words."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
