"""Recipes of classifiers on an encoder: one frozen `Recipe` each.

Pure Python, as the presets are. What trains them is `fit_classifier`.
"""

import dataclasses
import math

from keras_moco.kinds import check_kind


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Every number that a classifier is trained by.

    Args:
        name: Str. Of its run folders.
        frozen: Bool. Train the linear layer alone, on an encoder in inference
            mode.
        learning_rate: Float > 0. Of the linear layer, whatever the batch size.
        backbone_lr_scale: Float >= 0. The encoder's learning rate is so many
            times that of the linear layer.
        weight_decay: Float >= 0, coupled.
        decay_at: Floats in (0, 1). Where in the run the learning rate drops to
            a tenth; empty means a cosine to 0.
        epochs: Int >= 1.
        batch_size: Int >= 1. Over all devices; at most the images there are.
        labels: Float in (0, 1]. Share of the images of each class whose labels
            are used.
        holdout: Float in (0, 1). Share of these that the epoch is chosen on,
            one image of each class at least.
        seed: Int in 0..2**32 - 1. Of the labels, the holdout, the first
            weights, the order and the views.

    Raises:
        ValueError: A value is outside its range.

    Example:
        >>> FINETUNE.replace(labels=0.1, epochs=10).epochs
        10
    """

    name: str
    frozen: bool
    learning_rate: float
    epochs: int
    batch_size: int
    backbone_lr_scale: float = 1.0
    weight_decay: float = 0.0
    decay_at: tuple[float, ...] = ()
    labels: float = 1.0
    holdout: float = 0.1
    seed: int = 0

    def __post_init__(self):
        kinds = {field.name: field.type for field in dataclasses.fields(self)}
        for name, holds, expected in (
            ("learning_rate", lambda v: 0 < v < math.inf, "> 0"),
            ("backbone_lr_scale", lambda v: 0 <= v < math.inf, ">= 0"),
            ("weight_decay", lambda v: 0 <= v < math.inf, ">= 0"),
            ("epochs", lambda v: v >= 1, ">= 1"),
            ("batch_size", lambda v: v >= 1, ">= 1"),
            ("labels", lambda v: 0 < v <= 1, "in (0, 1], more than none"),
            ("holdout", lambda v: 0 < v < 1, "in (0, 1)"),
            ("seed", lambda v: 0 <= v < 2**32, "in 0..2**32 - 1"),
        ):
            value = getattr(self, name)
            check_kind(name, value, kinds[name])
            if not holds(value):
                raise ValueError(
                    f"`{name}` must be {expected}. Received: {value}"
                )

    @property
    def setting(self):
        """What a result says of how it was reached, a dict of floats."""
        names = ["learning_rate", "weight_decay"]
        if not self.frozen:
            names += ["backbone_lr_scale", "labels"]
        return {name: getattr(self, name) for name in names}

    def replace(self, **changes):
        """Returns a copy with some fields changed, checked again."""
        return dataclasses.replace(self, **changes)


# Section 4.1 of He et al. 2019, arXiv:1911.05722.
LINEAR_PROBE = Recipe(
    name="linear-probe",
    frozen=True,
    learning_rate=30.0,
    epochs=100,
    batch_size=256,
    decay_at=(0.6, 0.8),
)

FINETUNE = Recipe(
    name="finetune",
    frozen=False,
    learning_rate=0.1,
    backbone_lr_scale=0.1,
    weight_decay=1e-4,
    epochs=30,
    batch_size=64,
)


def parse_share(text):
    """A share of 1%, 10% or 100%, and what is between, as a float.

    Example:
        >>> parse_share("10%")
        0.1
    """
    try:
        share = float(text.removesuffix("%")) / 100
        if not text.endswith("%") or not 0 < share <= 1:
            raise ValueError
    except ValueError:
        raise ValueError(
            "A share of the labels is more than 0% and at most 100%, such as "
            f"1%, 10% or 100%. Received: {text!r}"
        ) from None
    return share
