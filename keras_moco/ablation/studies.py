"""What an ablation varies: the settings of a study, as plain data.

Pure Python, as the presets are.
"""

import dataclasses
import itertools
import typing

from keras_moco.kinds import to_text
from keras_moco.presets import Preset, nearest, parse_setting


@dataclasses.dataclass(frozen=True)
class Study:
    """The settings that are compared, each a few fields of a preset.

    Args:
        settings: Dict from the name of a setting to its fields, a dict.
        axes: Tuple of the fields, one or two, whose values the settings are a
            grid of; () where each setting is a thing of its own.

    Example:
        >>> Study({"constant": {"final_momentum": None}, "cosine": {...}})
    """

    settings: dict
    axes: tuple = ()

    @property
    def fields(self):
        """Names of the fields that every setting has a value for."""
        return set.intersection(*map(set, self.settings.values()))


def grid(axes, **others):
    """The study of all combinations of the values of one or two fields.

    Args:
        axes: Dict from a field to its values.
        **others: Fields that all settings have in common.

    Example:
        >>> list(grid({"momentum": (0.9, 0.99)}).settings)
        ['momentum=0.9', 'momentum=0.99']
    """
    settings = {}
    for values in itertools.product(*axes.values()):
        fields = dict(zip(axes, values, strict=True))
        settings[name_of(fields)] = {**fields, **others}
    return Study(settings, tuple(axes))


def name_of(fields):
    """The name of a setting, such as "queue_size=256 momentum=0.9"."""
    return " ".join(as_settings(fields))


def as_settings(fields):
    """Fields as `--set` takes them, such as ["momentum=0.9"]."""
    return [f"{name}={to_text(value)}" for name, value in fields.items()]


def parse_vary(texts):
    """The study of `FIELD=VALUE,VALUE,...`, one text or two for a grid.

    Args:
        texts: Sequence of str. Values that hold commas themselves, such as
            "blur=0,0; 0.5,0.5", are set apart by semicolons.

    Returns:
        `Study`.

    Raises:
        ValueError: No such field, a value that is none of its kind, no value,
            a value or field twice, more than two fields.

    Example:
        >>> parse_vary(["queue_size=256,1024"]).axes
        ('queue_size',)
    """
    axes = {}
    for text in texts:
        name, _, values = text.partition("=")
        apart = ";" if ";" in values or _takes_several(name) else ","
        parts = [part for part in values.split(apart) if part.strip()]
        if not parts:
            raise ValueError(
                "What varies is FIELD=VALUE,VALUE,... such as "
                f"momentum=0.9,0.99. Received: {text!r}"
            )
        parsed = [parse_setting(f"{name}={part}") for part in parts]
        field, values = parsed[0][0], tuple(value for _, value in parsed)
        if len(set(values)) < len(values):
            raise ValueError(f"A value is there twice. Received: {text!r}")
        if field in axes:
            raise ValueError(
                f"{field} varies twice: give all of its values at once."
            )
        axes[field] = values
    if len(axes) > 2:
        raise ValueError(
            "One field or two may vary, the second for a grid. Received: "
            f"{', '.join(axes)}"
        )
    return grid(axes)


def _takes_several(name):
    """Whether the values of a field have commas in them."""
    kind = typing.get_type_hints(Preset).get(name.strip())
    return typing.get_origin(kind) is tuple


def find_study(name):
    """The study of a name in `STUDIES`; a ValueError with the nearest else."""
    if name not in STUDIES:
        raise ValueError(
            f"There is no study {name!r}. {nearest(name, STUDIES)}"
        )
    return STUDIES[name]


V1 = {
    "head_layers": 1,
    "blur": (0.0, 0.0),
    "jitter": (0.4, 0.4, 0.4, 0.4),
    "jitter_probability": 1.0,
    "grayscale_first": True,
    "decay_at": (0.6, 0.8),
}
MLP_HEAD = {"head_layers": 2}
BLUR = {
    "blur": (0.5, 0.5),
    "jitter": (0.4, 0.4, 0.4, 0.1),
    "jitter_probability": 0.8,
    "grayscale_first": False,
}
COSINE = {"decay_at": ()}

STUDIES = {
    # Figure 3 of He et al. 2019, arXiv:1911.05722. A large queue meets the
    # query's own image more often: masked, K is all that varies.
    "queue-size": grid(
        {"queue_size": (256, 1024, 4096, 16384)}, mask_same_image=True
    ),
    # Its table in section 4.1, and the two ends: copied keys, frozen keys.
    "momentum": grid(
        {"momentum": (0.0, 0.9, 0.99, 0.999, 0.9999, 1.0)}, final_momentum=None
    ),
    # Table 1 of Chen et al. 2020, arXiv:2003.04297, one change after another;
    # the temperature stays the preset's.
    "v1-to-v2": Study(
        {
            "v1": V1,
            "+ MLP head": V1 | MLP_HEAD,
            "+ blur": V1 | MLP_HEAD | BLUR,
            "+ cosine = v2": V1 | MLP_HEAD | BLUR | COSINE,
        }
    ),
    # Section 3.1 of Grill et al. 2020, arXiv:2006.07733, as MoCo v3 does.
    "momentum-schedule": Study(
        {
            "constant .99": {"momentum": 0.99, "final_momentum": None},
            "cosine .99 to 1": {"momentum": 0.99, "final_momentum": 1.0},
        }
    ),
    # Figure 2 of He et al. 2019: where the other keys come from.
    "dictionary": Study(
        {
            "keys of the batch": {"queue_size": 0, "memory_bank": False},
            "memory bank": {"memory_bank": True, "momentum": 0.0},
            "queue": {"memory_bank": False},
        }
    ),
}

# Linear accuracy on CIFAR-10 in %, of a public reproduction at batch 256; K
# at m .999, m at K 16384.
PUBLISHED = {
    "queue_size=256": 74.2,
    "queue_size=1024": 77.8,
    "queue_size=4096": 80.5,
    "queue_size=16384": 82.1,
    "queue_size=65536": 82.7,
    "momentum=0.9": 72.1,
    "momentum=0.99": 78.3,
    "momentum=0.999": 82.1,
    "momentum=0.9999": 82.4,
    "momentum=0.99999": 81.9,
    "v1": 82.7,
    "+ cosine = v2": 85.3,
}
