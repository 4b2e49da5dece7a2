"""SGD and LARS as the recipes mean them, and the optimizer of a preset."""

import keras
from keras import ops

from keras_moco.schedules import WarmupCosine, WarmupSteps

register = keras.saving.register_keras_serializable(package="keras_moco")


@register
class SGD(keras.optimizers.Optimizer):
    """SGD with momentum and coupled weight decay, as in PyTorch.

    `keras.optimizers.SGD` decays weights beside the momentum, which for the
    same number is about ten times weaker than what MoCo was tuned with. Here
    `gradient + weight_decay * weight` enters the momentum, and the learning
    rate of the moment scales the whole of it.

    Args:
        learning_rate: Float or schedule. Defaults to 0.03.
        momentum: Float in [0, 1]. Defaults to 0.9.
        nesterov: Bool. Defaults to False.
        weight_decay: Float >= 0. Defaults to 0.
        **kwargs: As for `keras.optimizers.Optimizer` (`clipnorm`, ...).

    Example:
        >>> SGD(0.03, momentum=0.9, weight_decay=1e-4)

    Reference:
        Sutskever et al. 2013; table of He et al. 2019, arXiv:1911.05722.
    """

    def __init__(
        self,
        learning_rate=0.03,
        momentum=0.9,
        nesterov=False,
        weight_decay=0.0,
        **kwargs,
    ):
        # Keras would apply `weight_decay` itself, decoupled: it is kept away.
        super().__init__(learning_rate=learning_rate, **kwargs)
        if not 0 <= momentum <= 1:
            raise ValueError(
                f"`momentum` must be in [0, 1]. Received: {momentum}"
            )
        if weight_decay < 0:
            raise ValueError(
                f"`weight_decay` must not be negative. Received: {weight_decay}"
            )
        self.momentum = momentum
        self.nesterov = nesterov
        self.coupled_weight_decay = weight_decay

    def build(self, variables):
        """Creates one momentum buffer per variable."""
        if self.built:
            return
        super().build(variables)
        self.momentums = self.add_optimizer_variables(variables, "momentum")

    def update_step(self, gradient, variable, learning_rate):
        """Moves one variable; called by Keras for each."""
        learning_rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        gradient = self.precondition(gradient, variable)
        buffer = self.momentums[self._get_variable_index(variable)]
        velocity = self.momentum * buffer + gradient
        self.assign(buffer, velocity)
        if self.nesterov:
            velocity = gradient + self.momentum * velocity
        self.assign_sub(variable, learning_rate * velocity)

    def precondition(self, gradient, variable):
        """Adds the weight decay."""
        if not (self.coupled_weight_decay and self._use_weight_decay(variable)):
            return gradient
        return gradient + self.coupled_weight_decay * variable

    def get_config(self):
        config = super().get_config()
        config.update(
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.coupled_weight_decay,
        )
        return config


@register
class LARS(SGD):
    """SGD whose step is scaled per layer by the norms of weight and gradient.

    Kernels (rank 2 and more) are decayed and scaled by
    `trust_coefficient * |weight| / |gradient|`; biases and normalisation
    scales follow plain SGD without decay.

    Args:
        learning_rate: Float or schedule. Defaults to 0.6.
        momentum: Float in [0, 1]. Defaults to 0.9.
        nesterov: Bool. Defaults to False.
        weight_decay: Float >= 0. Defaults to 1e-6.
        trust_coefficient: Float > 0. Defaults to 0.001.
        **kwargs: As for `keras.optimizers.Optimizer`.

    Example:
        >>> LARS(0.6 * 4096 / 256, weight_decay=1e-6)

    Reference:
        You et al. 2017, arXiv:1708.03888; as in MoCo v3, arXiv:2104.02057.
    """

    def __init__(
        self,
        learning_rate=0.6,
        momentum=0.9,
        nesterov=False,
        weight_decay=1e-6,
        trust_coefficient=0.001,
        **kwargs,
    ):
        super().__init__(
            learning_rate, momentum, nesterov, weight_decay, **kwargs
        )
        self.trust_coefficient = trust_coefficient

    def precondition(self, gradient, variable):
        """Adds the decay and scales by the trust ratio, kernels only."""
        if len(variable.shape) < 2:
            return gradient
        gradient = super().precondition(gradient, variable)
        weight_norm = ops.sqrt(ops.sum(ops.square(variable)))
        gradient_norm = ops.sqrt(ops.sum(ops.square(gradient)))
        ratio = ops.where(
            ops.logical_and(weight_norm > 0, gradient_norm > 0),
            self.trust_coefficient * weight_norm / (gradient_norm + 1e-38),
            1.0,
        )
        return ratio * gradient

    def get_config(self):
        config = super().get_config()
        config["trust_coefficient"] = self.trust_coefficient
        return config


def build_optimizer(preset, batch_size, total_steps):
    """Returns the optimizer of a preset for a run of `total_steps`.

    Args:
        preset: `Preset`.
        batch_size: Int. Images a step over all devices; the learning rate is
            `base_learning_rate * batch_size / 256`.
        total_steps: Int. Steps of the whole run; warm-up and drops keep their
            share of the preset's epochs.

    Returns:
        `SGD` or `LARS` with the preset's schedule.

    Example:
        >>> build_optimizer(PRESETS["moco_v2"], 256, total_steps=1000)
    """
    peak = preset.base_learning_rate * batch_size / 256
    warmup_steps = round(total_steps * preset.warmup_epochs / preset.epochs)
    if preset.decay_at:
        boundaries = [round(share * total_steps) for share in preset.decay_at]
        schedule = WarmupSteps(peak, boundaries, warmup_steps)
    else:
        schedule = WarmupCosine(peak, total_steps, warmup_steps)
    optimizer = {"sgd": SGD, "lars": LARS}[preset.optimizer]
    return optimizer(
        schedule,
        momentum=preset.sgd_momentum,
        weight_decay=preset.weight_decay,
    )
