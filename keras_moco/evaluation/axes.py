"""The axes along which the heads of the linear probe learn."""

import numpy as np
import tensorflow as tf

MOST_AXES = 4096  # Of more features the axes would take longer than they save.
FLAT = 10  # The largest variance over the least, up to which axes may stay.
CHUNK = 8192  # Rows that are worked on at once.


class Axes:
    """The principal axes of standardised features, on which heads learn.

    Trained features vary ten thousand times more along some axes than along
    others, where SGD would take as many steps more. On these axes each can have
    a learning rate of its own. Features that vary about as much along all axes
    are standardised alone. Statistics are those of a sample.

    Only the mean is taken off the features themselves. The heads' weights and
    gradients, far fewer numbers, are what goes between the two spaces.

    Attributes:
        mean: Float array (features,).
        variances: Float array (axes,).
        known: Bool. Whether they are, or there were too many axes to look.
        steps: Int. Steps that heads need on these axes.
    """

    def __init__(self, features, order):
        width = features.shape[1]
        self.known, self.steps = width <= MOST_AXES, 88
        rows = order[: max(8192, 10 * width if self.known else 0)]
        sample = np.asarray(features[rows], "float32")
        first = sample[0].copy()
        sample -= first  # What is constant is 0 now, whatever a mean rounds to.
        mean = sample.mean(axis=0)
        squares = np.einsum("ij,ij->j", sample, sample) / len(sample)
        std = np.sqrt(np.maximum(squares - mean**2, 0.0))
        self.mean = first + mean
        varies = std > 1e-6 * np.abs(self.mean)
        scale = np.where(varies, 1 / np.where(varies, std, 1), 0)
        self.variances = varies.astype("float32")
        self._turned = False
        turn = scale[:, None]
        if self.known:
            covariance = sample.T @ sample / len(sample)
            covariance -= np.outer(mean, mean)
            covariance *= scale * turn
            values = np.linalg.eigvalsh(covariance)
            self.steps = 22
            if values[0] * FLAT < values[-1]:
                self.steps, self._turned = 44, True
                values, axes = np.linalg.eigh(covariance)
                self.variances = np.maximum(values, 0.0)
                turn = turn * axes
        turn = np.pad(turn, ((0, 1), (0, int(self._turned))))
        turn[-1, -1] = 1.0  # The bias stays as it is.
        self._turn = tf.constant(turn, tf.float32)

    def centre(self, features):
        """Float32 (images, features + 1); the last column is 1, for a bias."""
        rows = tf.subtract(np.asarray(features, "float32"), self.mean)
        return tf.pad(rows, ((0, 0), (0, 1)), constant_values=1.0)

    def to_features(self, weights):
        """Weights (axes + 1, any) as weights of centred features."""
        if self._turned:
            return tf.matmul(self._turn, weights)
        return self._turn * weights

    def to_axes(self, gradient):
        """A gradient (features + 1, any) by weights of centred features."""
        if self._turned:
            return tf.matmul(self._turn, gradient, transpose_a=True)
        return self._turn * gradient

    def sums(self, features, labels, classes):
        """Sums of each class, (axes + 1, classes); the last row counts them.

        A label of -1 is of no class.
        """
        one_hot = np.eye(classes + 1, classes, dtype="float32")
        counts = np.bincount(labels + 1, minlength=classes + 1)[1:]
        sums = -self.mean[:, None] * counts
        for start in range(0, len(labels), CHUNK):
            rows = slice(start, start + CHUNK)
            sums += features[rows].T @ one_hot[labels[rows]]
        sums = np.append(sums, counts[None], axis=0)
        return self.to_axes(tf.constant(sums, tf.float32))
