"""The linear probe: how well classes can be read from frozen features."""

import math

import numpy as np
import tensorflow as tf

from keras_moco.evaluation.axes import CHUNK, Axes
from keras_moco.evaluation.extract import (
    Features,
    check_features,
    labeled_features,
    warn_if_constant,
)
from keras_moco.evaluation.scores import check_labels, score

LEARNING_RATES = (0.01, 0.03, 0.1, 0.3)
WEIGHT_DECAYS = (0.0, 1e-4, 1e-3, 1e-2, 0.1, 1.0)
RIDGE = 1e-3  # Of the variances; below it an axis is noise.
RANGES = {
    "learning_rates": (
        lambda v: len(v) > 0 and all(0 < x < math.inf for x in v),
        "> 0",
    ),
    "weight_decays": (
        lambda v: len(v) > 0 and all(0 <= x < math.inf for x in v),
        ">= 0",
    ),
    "epochs": (lambda v: v >= 1, ">= 1"),
    "batch_size": (lambda v: v >= 1, ">= 1"),
    "holdout": (lambda v: 0 < v < 1, "between 0 and 1"),
    "seed": (lambda v: 0 <= v < 2**32, "from 0 to 2**32 - 1"),
}


def linear_probe(encoder, bank, test, **options):
    """Accuracy of a linear classifier on an encoder's frozen features.

    The features are computed once, standardised and turned to their principal
    axes. All settings of learning rate and weight decay start at the linear
    discriminant and are trained at the same time, by SGD with a cosine, as one
    matrix product. The best one is chosen on a tenth of the training images,
    and of its epochs the last that none before it beats by more than chance.
    The test images are looked at once.

    Args:
        encoder: `keras.Model`, images -> (batch, features), run in inference
            mode, or a path that `load_encoder` takes. None takes raw pixels.
        bank: `tf.data.Dataset` of (images, labels) batches, to train on.
        test: `tf.data.Dataset` of (images, labels) batches.
        **options: See `probe_features`.

    Returns:
        Dict, see `probe_features`.

    Raises:
        ValueError: In one line: no labels, fewer than two classes, classes in
            the test images that the training images lack, or features that are
            not finite (the images are named). Classes that have names are
            matched by these.

    Example:
        >>> bank = labeled_dataset("cifar10", "train", image_size=32)
        >>> test = labeled_dataset("cifar10", "test", image_size=32)
        >>> linear_probe(model.encoder, bank, test)["test_top1"]

    Reference:
        Section 4.1 of He et al. 2019, arXiv:1911.05722, whose protocol trains
        on augmented images instead.
    """
    # Before the features, which take longer.
    _check_numbers(**{k: v for k, v in options.items() if k in RANGES})
    bank, test = labeled_features(encoder, bank, test)
    return probe_features(
        *bank[:2],
        *test[:2],
        names=bank.names,
        test_names=test.names,
        **options,
    )


def probe_features(
    features,
    labels,
    test_features,
    test_labels,
    *,
    learning_rates=LEARNING_RATES,
    weight_decays=WEIGHT_DECAYS,
    epochs=None,
    batch_size=2048,
    holdout=0.1,
    seed=0,
    names=None,
    test_names=None,
):
    """`linear_probe` of features that are already there.

    Beside them it holds those of the holdout once more, a sample to find the
    axes (ten images a feature, 8192 at least), and the weights of all settings
    three times. Batches are drawn once, and taken in another order in each
    epoch.

    Args:
        features: Float array (images, features).
        labels: Int array (images,) or (images, 1), from 0.
        test_features: Float array (test images, features).
        test_labels: Int array (test images,).
        learning_rates: Floats > 0. 1 would be about a Newton step.
        weight_decays: Floats >= 0, coupled, of the standardised features. All
            pairs with the learning rates are tried.
        epochs: Int >= 1. None takes as many as make 44 steps; 22 of features
            that vary about as much along all axes, 88 of more than 4096.
        batch_size: Int >= 1, at most that many images. Defaults to 2048.
        holdout: Float in (0, 1). Share of the training images that the choice
            is made on. Defaults to 0.1.
        seed: Int. Of the holdout and of the order. Defaults to 0.
        names: List of str. File names of the images, for errors.
        test_names: List of str. The same for the test images.

    Returns:
        Dict, see `keras_moco.evaluation.scores.score`. Its `setting` has
        `learning_rate`, `weight_decay` and `epoch`.
    """
    _check_numbers(
        learning_rates=learning_rates,
        weight_decays=weight_decays,
        epochs=epochs,
        batch_size=batch_size,
        holdout=holdout,
        seed=seed,
    )
    training = check_features(
        Features(np.asarray(features), labels, names), "training"
    )
    test = check_features(
        Features(np.asarray(test_features), test_labels, test_names), "test"
    )
    if training.features.shape[1] != test.features.shape[1]:
        raise ValueError(
            "Training and test features must be of one encoder. Received: "
            f"{training.features.shape[1]} and {test.features.shape[1]} numbers"
        )
    warn_if_constant(training)
    classes = check_labels(training.labels, test.labels)
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(training.labels))
    held = min(max(1, round(holdout * len(order))), len(order) - 1)
    held, kept = order[:held], order[held:]
    axes = Axes(training.features, order)
    rates, decays = (
        grid.ravel() for grid in np.meshgrid(learning_rates, weight_decays)
    )
    heads = _Heads(axes, classes, rates, decays)
    if axes.known:
        seen = training.labels.copy()
        seen[held] = -1  # Of no class.
        heads.start(axes.sums(training.features, seen, classes))
    chosen_by = training.features[held], training.labels[held]
    steps = math.ceil(len(kept) / batch_size)
    batches = np.array_split(kept, steps)
    peak = kept_top1 = np.zeros(len(rates))
    kept_epoch = np.zeros(len(rates), int)
    chance = 0.5 / math.sqrt(len(held))  # A standard error at most.
    if epochs is None:
        epochs = math.ceil(axes.steps / steps)
    for epoch in range(epochs):
        for step, batch in enumerate(draw.permutation(steps)):
            progress = (epoch * steps + step) / (epochs * steps)
            cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
            rows = axes.centre(training.features[batches[batch]])
            heads.train(rows, training.labels[batches[batch]], cosine)
        accuracy = heads.accuracy(*chosen_by)
        peak = np.maximum(peak, accuracy)
        good = accuracy >= peak - chance  # An earlier epoch must beat it.
        kept_top1 = np.where(good, accuracy, kept_top1)
        kept_epoch = np.where(good, epoch + 1, kept_epoch)
        heads.keep(good)
    if not kept_epoch.any():
        raise ValueError(
            "All settings diverged: the `learning_rates` are too high. "
            f"Received: {learning_rates}"
        )
    chosen = int(np.argmax(kept_top1))
    best, last = heads.of(chosen)
    ranking, answers = [], []
    for start in range(0, len(test.features), CHUNK):
        rows = test.features[start : start + CHUNK]
        logits = rows @ best[:-1] + best[-1]
        ranking.append(tf.math.top_k(logits, min(5, classes)).indices)
        answers.append(np.argmax(rows @ last[:-1] + last[-1], axis=1))
    return score(
        test.labels,
        np.concatenate(ranking),
        np.concatenate(answers),
        classes,
        holdout_top1=float(kept_top1[chosen]),
        setting={
            "learning_rate": float(rates[chosen]),
            "weight_decay": float(decays[chosen]),
            "epoch": int(kept_epoch[chosen]),
        },
    )


class _Heads:
    """One linear classifier a setting, side by side in one matrix.

    The gradient along an axis is divided by the variance there plus the decay,
    as a Newton step would: so all axes and all decays learn alike.

    Attributes:
        weights, velocity, best: (axes + 1, classes, settings) float32.
    """

    def __init__(self, axes, classes, rates, decays):
        self._axes = axes
        shape = (len(axes.variances) + 1, classes, len(rates))
        self.weights = tf.Variable(tf.zeros(shape))
        self.velocity = tf.Variable(tf.zeros(shape))
        self.best = tf.Variable(tf.zeros(shape))
        self.variances = np.append(axes.variances, 1.0).astype("float32")
        self.decays = np.tile(decays.astype("float32"), (shape[0], 1))
        pace = rates / (self.variances[:, None] + self.decays + RIDGE)
        self.pace = tf.constant(pace[:, None], tf.float32)
        self.decays[-1] = 0.0  # The bias, as usual, does not decay.
        rows = tf.TensorSpec((None, None), tf.float32)
        labels = tf.TensorSpec((None,), tf.int64)
        share = tf.TensorSpec((), tf.float32)
        # Op by op a step takes half as long again. It has no branches to
        # translate, and to look for them would take 0.2 s.
        self.train = tf.function(
            self._train, [rows, labels, share], autograph=False
        )

    def start(self, sums):
        """Begins with the linear discriminant, shrunk as each decay would.

        Of clouds of one shape it is the best answer already.

        Args:
            sums: Of rows by class, float32 (axes + 1, classes).
        """
        classes = sums.shape[1]
        counts = sums[-1]
        means = (sums / tf.maximum(counts, 1.0))[:, :, None]
        # The loss of `classes` classes curves 1 / classes as much at zero.
        spread = self.variances[:, None] + classes * self.decays + RIDGE
        weights = means / spread[:, None]
        priors = tf.math.log((counts + 1.0) / tf.reduce_sum(counts))
        bias = priors[:, None] - 0.5 * tf.reduce_sum(
            weights[:-1] * means[:-1], axis=0
        )
        self.weights.assign(tf.concat([weights[:-1], bias[None]], axis=0))

    def _train(self, rows, labels, cosine):
        """One step of SGD with momentum 0.9, at a share of the full rate."""
        logits = self._logits(rows)
        truth = tf.one_hot(labels, self.weights.shape[1])[:, :, None]
        odds = tf.exp(logits - tf.reduce_max(logits, axis=1, keepdims=True))
        error = odds / tf.reduce_sum(odds, axis=1, keepdims=True) - truth
        error = tf.reshape(error, (-1, math.prod(self.weights.shape[1:])))
        gradient = tf.matmul(rows, error, transpose_a=True)
        gradient = self._axes.to_axes(gradient)
        gradient /= tf.cast(tf.shape(rows)[0], tf.float32)
        gradient = tf.reshape(gradient, self.weights.shape)
        gradient += self.decays[:, None] * self.weights
        tf.raw_ops.ResourceApplyMomentum(
            var=self.weights.handle,
            accum=self.velocity.handle,
            lr=cosine,
            grad=self.pace * gradient,
            momentum=0.9,
        )

    def accuracy(self, features, labels):
        """Of each setting; -inf of one that has diverged."""
        right = 0.0
        for start in range(0, len(labels), CHUNK):
            rows = slice(start, start + CHUNK)
            logits = self._logits(self._axes.centre(features[rows]))
            answer = tf.argmax(logits, axis=1).numpy()
            right += (answer == labels[rows, None]).sum(axis=0)  # (settings,)
        finite = np.isfinite(tf.reduce_sum(self.weights, axis=(0, 1)))
        return np.where(finite, right / len(labels), -np.inf)

    def keep(self, which):
        """Remembers the weights of the settings that are marked."""
        self.best.assign(tf.where(which, self.weights, self.best))

    def of(self, setting):
        """Weights of the features of one setting: those kept, and the last.

        Two float32 arrays (features + 1, classes); the last row is the bias.
        """
        found = []
        for weights in (self.best, self.weights):
            weights = self._axes.to_features(weights[:, :, setting]).numpy()
            weights[-1] -= self._axes.mean @ weights[:-1]
            found.append(weights)
        return found

    def _logits(self, rows):
        """Float32 (images, classes, settings)."""
        axes, classes, settings = self.weights.shape
        weights = self._axes.to_features(tf.reshape(self.weights, (axes, -1)))
        logits = tf.matmul(rows, weights)
        return tf.reshape(logits, (-1, classes, settings))


def _check_numbers(**numbers):
    for name, value in numbers.items():
        holds, expected = RANGES[name]
        if value is not None and not holds(value):
            raise ValueError(f"`{name}` must be {expected}. Received: {value}")
