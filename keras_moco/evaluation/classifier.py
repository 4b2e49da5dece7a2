"""A classifier: an encoder with a linear layer, and what trains it."""

import keras
import numpy as np
import tensorflow as tf

from keras_moco import distribute
from keras_moco.optimizers import SGD
from keras_moco.schedules import WarmupCosine, WarmupSteps


class Classifier(keras.Model):
    """An encoder with a linear layer on its features: images -> logits.

    Args:
        encoder: `keras.Model`, images -> (batch, features).
        num_classes: Int >= 2.
        frozen: Bool. Run the encoder in inference mode and train only the
            linear layer.
        seed: Int. Of the first weights, N(0, 0.01) as published.

    Example:
        >>> model = Classifier(encoder, 10, frozen=True)
        >>> model.compile(SGD(30.0))
        >>> model.fit(batches)  # of (images, labels)
    """

    def __init__(self, encoder, num_classes, frozen, seed=0):
        super().__init__()
        self.encoder = encoder
        self.frozen = frozen
        if frozen:
            encoder.trainable = False
        self.head = keras.layers.Dense(
            num_classes,
            kernel_initializer=keras.initializers.RandomNormal(0, 0.01, seed),
            dtype="float32",
            name="head",
        )
        self.head.build(encoder.output_shape)
        self.mean_loss = keras.metrics.Mean(name="loss")
        self.built = True

    @property
    def metrics(self):
        return [self.mean_loss]

    def call(self, images, training=False):
        trained = bool(training) and not self.frozen
        return self.head(self.encoder(images, training=trained))

    def train_step(self, data):
        """One step of cross-entropy."""
        images, labels, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            logits = self(images, training=True)
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            )
            penalty = tf.add_n([0.0, *self.encoder.losses])
            # Gradients are summed over replicas.
            scaled = (loss + penalty) / distribute.num_replicas()
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(scaled, variables), variables)
        self.mean_loss.update_state(loss)
        return {"loss": self.mean_loss.result()}

    def plain(self):
        """A functional copy, images -> probabilities."""
        images = keras.Input(self.encoder.input_shape[1:])
        softmax = keras.layers.Dense(
            self.head.units, activation="softmax", name="probabilities"
        )
        classifier = keras.Model(images, softmax(self.encoder(images)))
        softmax.set_weights(self.head.get_weights())
        return classifier

    def _maybe_symbolic_build(self, iterator=None, data_batch=None):
        # All is built but the optimizer. Keras would take a batch from the
        # data to build by, and so begin with another epoch's.
        with self.distribute_strategy.scope():
            self.optimizer.build(self.trainable_variables)


class LayerwiseSGD(SGD):
    """`SGD` at a learning rate of its own for each variable.

    Args:
        scales: List of floats, one for each variable that is trained: its
            share of the learning rate.
        **kwargs: As for `SGD`.
    """

    def __init__(self, scales, **kwargs):
        super().__init__(**kwargs)
        self.scales = scales

    def update_step(self, gradient, variable, learning_rate):
        scale = self.scales[self._get_variable_index(variable)]
        super().update_step(gradient, variable, scale * learning_rate)


def build_classifier_optimizer(recipe, model, steps):
    """Returns the optimizer of a recipe.

    Args:
        recipe: `Recipe`.
        model: `Classifier`.
        steps: Int. Steps an epoch.
    """
    total_steps = steps * recipe.epochs
    if recipe.decay_at:
        drops = [round(share * recipe.epochs) for share in recipe.decay_at]
        schedule = WarmupSteps(
            recipe.learning_rate, [steps * epochs for epochs in drops]
        )
    else:
        schedule = WarmupCosine(recipe.learning_rate, total_steps)
    own = {id(variable) for variable in model.head.trainable_variables}
    return LayerwiseSGD(
        [
            1.0 if id(variable) in own else recipe.backbone_lr_scale
            for variable in model.trainable_variables
        ],
        learning_rate=schedule,
        weight_decay=recipe.weight_decay,
    )


def check_frozen(before, encoder):
    """Raises unless an encoder is, to the bit, the one that it was before."""
    for variable, value in zip(
        encoder.weights, before.get_weights(), strict=True
    ):
        if not np.array_equal(variable.numpy(), value):
            raise RuntimeError(
                f"{variable.path} of the frozen encoder has changed: the "
                "accuracy is not that of the encoder it was to be."
            )
