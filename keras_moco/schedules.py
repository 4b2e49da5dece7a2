"""What changes over a run: the learning rate and the key encoder's momentum.

All are functions of the optimizer's step alone, so that a resumed run
continues where it stopped.
"""

import math

import keras
from keras import ops

register = keras.saving.register_keras_serializable(package="keras_moco")


@register
class CosineMomentum(keras.optimizers.schedules.LearningRateSchedule):
    """Momentum that rises from `initial` to `final` by half a cosine.

    Args:
        initial: Float in [0, 1]. Momentum at step 0.
        final: Float in [0, 1]. Momentum from `total_steps` on.
        total_steps: Int >= 1.

    Example:
        >>> float(CosineMomentum(0.99, 1.0, total_steps=100)(50))
        0.995

    Reference:
        Grill et al. 2020, arXiv:2006.07733; used by MoCo v3,
        arXiv:2104.02057.
    """

    def __init__(self, initial, final, total_steps):
        self.initial = initial
        self.final = final
        self.total_steps = total_steps

    def __call__(self, step):
        progress = _progress(step, self.total_steps)
        return self.final - (self.final - self.initial) * _half_cosine(progress)

    def get_config(self):
        return {
            "initial": self.initial,
            "final": self.final,
            "total_steps": self.total_steps,
        }


@register
class WarmupCosine(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up, then half a cosine down to 0.

    Args:
        learning_rate: Float. The peak.
        total_steps: Int >= 1. Steps of the whole run, warm-up included.
        warmup_steps: Int. Defaults to 0.

    Example:
        >>> float(WarmupCosine(0.3, total_steps=100, warmup_steps=10)(55))
        0.15

    Reference:
        Loshchilov and Hutter 2016, arXiv:1608.03983. The authors' MoCo v2
        steps the cosine once an epoch; here it moves every step, as in v3.
    """

    def __init__(self, learning_rate, total_steps, warmup_steps=0):
        self.learning_rate = learning_rate
        self.total_steps = total_steps
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        step = ops.cast(step, "float32")
        progress = _progress(
            step - self.warmup_steps, self.total_steps - self.warmup_steps
        )
        return self.learning_rate * ops.minimum(
            _warmup(step, self.warmup_steps), _half_cosine(progress)
        )

    def get_config(self):
        return {
            "learning_rate": self.learning_rate,
            "total_steps": self.total_steps,
            "warmup_steps": self.warmup_steps,
        }


@register
class WarmupSteps(keras.optimizers.schedules.LearningRateSchedule):
    """Linear warm-up, then a drop to a tenth at each boundary.

    Args:
        learning_rate: Float. The peak.
        boundaries: Ints. Steps at which the rate is multiplied by 0.1.
        warmup_steps: Int. Defaults to 0.

    Example:
        >>> float(WarmupSteps(1.0, boundaries=[60, 80])(70))
        0.1

    Reference:
        He et al. 2019, arXiv:1911.05722 (epochs 120 and 160 of 200).
    """

    def __init__(self, learning_rate, boundaries, warmup_steps=0):
        self.learning_rate = learning_rate
        self.boundaries = list(boundaries)
        self.warmup_steps = warmup_steps

    def __call__(self, step):
        step = ops.cast(step, "float32")
        rate = self.learning_rate * _warmup(step, self.warmup_steps)
        for boundary in self.boundaries:
            rate = rate * ops.where(step >= boundary, 0.1, 1.0)
        return rate

    def get_config(self):
        return {
            "learning_rate": self.learning_rate,
            "boundaries": self.boundaries,
            "warmup_steps": self.warmup_steps,
        }


def _progress(step, total_steps):
    share = ops.cast(step, "float32") / max(total_steps, 1)
    return ops.clip(share, 0.0, 1.0)


def _half_cosine(progress):
    return 0.5 * (1.0 + ops.cos(math.pi * progress))


def _warmup(step, warmup_steps):
    return ops.minimum(1.0, (step + 1.0) / max(warmup_steps, 1))
