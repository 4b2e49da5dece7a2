"""The linear probe: how well classes can be read from frozen features."""

import math
import warnings

import numpy as np
import tensorflow as tf

from keras_moco.evaluate import embed

LEARNING_RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
WEIGHT_DECAYS = (0.0, 1e-4, 1e-3, 1e-2)
CHUNK = 8192  # Rows whose logits are held at once.


def linear_probe(encoder, bank, test, **options):
    """Accuracy of a linear classifier on an encoder's frozen features.

    The features are computed once and standardised. All settings of learning
    rate and weight decay are then trained at the same time, by SGD with a
    cosine, as one matrix product; the best one, and its best epoch, are chosen
    on a tenth of the training images. The test images are looked at once.

    Args:
        encoder: `keras.Model`, images -> (batch, features), run in inference
            mode. None takes raw pixels.
        bank: `tf.data.Dataset` of (images, labels) batches, to train on.
        test: `tf.data.Dataset` of (images, labels) batches.
        **options: See `probe_features`.

    Returns:
        Dict, see `probe_features`.

    Raises:
        ValueError: In one line: fewer than two classes, classes in the test
            images that the training images lack, or features that are not
            finite.

    Example:
        >>> bank = labeled_dataset("cifar10", "train", image_size=32)
        >>> test = labeled_dataset("cifar10", "test", image_size=32)
        >>> linear_probe(model.encoder, bank, test)["test_top1"]

    Reference:
        Section 4.1 of He et al. 2019, arXiv:1911.05722, whose protocol trains
        on augmented images instead.
    """
    return probe_features(
        *embed(encoder, bank), *embed(encoder, test), **options
    )


def probe_features(
    features,
    labels,
    test_features,
    test_labels,
    *,
    learning_rates=LEARNING_RATES,
    weight_decays=WEIGHT_DECAYS,
    epochs=30,
    batch_size=512,
    holdout=0.1,
    seed=0,
):
    """`linear_probe` of features that are already there.

    Args:
        features: Float array (images, features).
        labels: Int array (images,), from 0.
        test_features: Float array (test images, features).
        test_labels: Int array (test images,).
        learning_rates: Floats > 0.
        weight_decays: Floats >= 0, coupled. All pairs with the learning rates
            are tried.
        epochs: Int >= 1. Defaults to 30.
        batch_size: Int >= 1. Defaults to 512.
        holdout: Float in (0, 1). Share of the training images that the choice
            is made on. Defaults to 0.1.
        seed: Int. Of the holdout and of the order. Defaults to 0.

    Returns:
        Dict of `test_top1`, `test_top5`, `test_top1_last` (the same setting
        after its last epoch), `interval` (of 95 %, Wilson's, for `test_top1`),
        `holdout_top1`, `setting` (`learning_rate`, `weight_decay`, `epoch`),
        `per_class` (accuracy of each class; None where the test images have
        none) and `confusion` (counts, true class by answer).
    """
    classes = _check(features, labels, test_features, test_labels)
    mean, std = features.mean(axis=0), features.std(axis=0)
    if not (std > 1e-6 * np.abs(mean).max()).any():
        warnings.warn(
            "All features are constant: the encoder tells nothing apart.",
            stacklevel=2,
        )
        std = np.zeros_like(std)
    std = np.where(std > 0, std, np.inf)
    draw = np.random.default_rng(seed)
    order = draw.permutation(len(features))
    held = max(1, round(holdout * len(features)))
    x = tf.constant((features - mean) / std, tf.float32)
    y = tf.constant(labels, tf.int32)
    held, kept = order[:held], order[held:]
    rates, decays = (
        grid.ravel() for grid in np.meshgrid(learning_rates, weight_decays)
    )
    heads = _Heads(x.shape[1], classes, rates, decays)
    best = np.full(len(rates), -1.0)
    best_epoch = np.zeros(len(rates), int)
    batch_size = min(batch_size, len(kept))
    steps = len(kept) // batch_size
    for epoch in range(epochs):
        shuffled = draw.permutation(kept)[: steps * batch_size]
        batches = tf.constant(shuffled.reshape(steps, batch_size))
        first = tf.constant(epoch * steps, tf.float32)
        heads.train(x, y, batches, first, float(epochs * steps))
        accuracy = heads.accuracy(tf.gather(x, held), tf.gather(y, held))
        better = accuracy > best
        best[better], best_epoch[better] = accuracy[better], epoch + 1
        heads.keep(better)
    chosen = int(np.argmax(best))
    test = tf.constant((test_features - mean) / std, tf.float32)
    top = heads.ranking(test, chosen, kept=True)
    last = heads.ranking(test, chosen, kept=False)[:, 0]
    confusion = np.zeros((classes, classes), int)
    np.add.at(confusion, (test_labels, top[:, 0]), 1)
    counts = confusion.sum(axis=1)
    top1 = float(np.mean(top[:, 0] == test_labels))
    return {
        "test_top1": top1,
        "test_top5": float(np.mean((top == test_labels[:, None]).any(axis=1))),
        "test_top1_last": float(np.mean(last == test_labels)),
        "interval": wilson_interval(top1, len(test_labels)),
        "holdout_top1": float(best[chosen]),
        "setting": {
            "learning_rate": float(rates[chosen]),
            "weight_decay": float(decays[chosen]),
            "epoch": int(best_epoch[chosen]),
        },
        "per_class": [
            float(right / count) if count else None
            for right, count in zip(np.diag(confusion), counts, strict=True)
        ],
        "confusion": confusion.tolist(),
    }


def wilson_interval(share, count, z=1.959964):
    """The 95 % interval of a share that was counted.

    Args:
        share: Float in [0, 1].
        count: Int >= 1.
        z: Float. Quantile of the normal distribution.

    Returns:
        Pair of floats.
    """
    spread = z * math.sqrt(
        share * (1 - share) / count + z * z / (4 * count * count)
    )
    middle = share + z * z / (2 * count)
    scale = 1 + z * z / count
    return [(middle - spread) / scale, (middle + spread) / scale]


class _Heads:
    """One linear classifier a setting, side by side in one matrix."""

    def __init__(self, features, classes, rates, decays):
        shape = (features + 1, len(rates) * classes)  # the last row is a bias
        self.weights = tf.Variable(tf.zeros(shape))
        self.velocity = tf.Variable(tf.zeros(shape))
        self.best = tf.Variable(tf.zeros(shape))
        self.classes = classes
        self.rates = tf.constant(np.repeat(rates, classes), tf.float32)
        self.decays = tf.constant(np.repeat(decays, classes), tf.float32)

    @tf.function(reduce_retracing=True)
    def train(self, x, y, batches, first_step, total_steps):
        for number in tf.range(tf.shape(batches)[0]):
            rows = _with_bias(tf.gather(x, batches[number]))
            labels = tf.one_hot(tf.gather(y, batches[number]), self.classes)
            logits = self._logits(rows, self.weights)
            error = tf.nn.softmax(logits) - labels[:, None]
            error = tf.reshape(error, (-1, self.weights.shape[1]))
            gradient = tf.matmul(rows, error, transpose_a=True)
            gradient /= tf.cast(tf.shape(rows)[0], tf.float32)
            gradient += self.decays * self.weights
            self.velocity.assign(0.9 * self.velocity + gradient)
            progress = (first_step + tf.cast(number, tf.float32)) / total_steps
            cosine = 0.5 * (1.0 + tf.cos(math.pi * progress))
            self.weights.assign_sub(self.rates * cosine * self.velocity)

    def accuracy(self, x, y):
        """Of each setting; one that has diverged counts for nothing."""
        right = np.zeros(self.weights.shape[1] // self.classes)
        for start in range(0, len(x), CHUNK):
            rows = _with_bias(x[start : start + CHUNK])
            logits = self._logits(rows, self.weights)
            answer = tf.argmax(logits, axis=2, output_type=tf.int32)
            same = answer == y[start : start + CHUNK, None]
            finite = tf.reduce_all(tf.math.is_finite(logits), axis=2)
            right += tf.reduce_sum(tf.cast(same & finite, tf.float32), axis=0)
        return np.asarray(right) / len(x)

    def keep(self, which):
        """Remembers the weights of the settings that are marked."""
        mask = tf.constant(np.repeat(which, self.classes))
        self.best.assign(tf.where(mask, self.weights, self.best))

    def ranking(self, x, setting, kept):
        """The five best answers of one setting, int (images, 5 or fewer)."""
        own = slice(setting * self.classes, (setting + 1) * self.classes)
        weights = (self.best if kept else self.weights)[:, own]
        logits = tf.matmul(_with_bias(x), weights)
        return tf.math.top_k(logits, min(5, self.classes)).indices.numpy()

    def _logits(self, rows, weights):
        logits = tf.matmul(rows, weights)
        return tf.reshape(logits, (tf.shape(rows)[0], -1, self.classes))


def _with_bias(rows):
    return tf.concat([rows, tf.ones((tf.shape(rows)[0], 1))], axis=1)


def _check(features, labels, test_features, test_labels):
    """Returns the number of classes, or raises what is wrong."""
    for name, array in (("training", features), ("test", test_features)):
        if not len(array):
            raise ValueError(f"The probe needs {name} images; there are none.")
        bad = np.flatnonzero(~np.isfinite(array).all(axis=1))
        if len(bad):
            shown = ", ".join(map(str, bad[:10]))
            raise ValueError(
                f"The features of {len(bad)} {name} images are not finite "
                f"(numbers {shown}): the encoder has diverged."
            )
    if len(np.unique(labels)) < 2:
        raise ValueError(
            "The probe needs images of two classes at least; all training "
            f"images are of class {labels[0]}."
        )
    unknown = sorted(set(test_labels.tolist()) - set(labels.tolist()))
    if unknown:
        raise ValueError(
            "The test images have classes that the training images lack: "
            f"{', '.join(map(str, unknown[:10]))}"
        )
    return int(labels.max()) + 1
