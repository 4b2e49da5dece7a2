"""Gaussian blur on planar images, (batch, 3, height, width)."""

import numpy as np
import tensorflow as tf

from keras_moco.augment.barrier import materialize_before


def gaussian_blur(images, sigma, kernel_size):
    """Blurs like torchvision's `gaussian_blur`: the border is reflected.

    With a kernel of 6 sigma it also stands for Pillow's `GaussianBlur(sigma)`,
    three box filters: less than 1 of 255 levels apart in the mean.

    Args:
        images: float32 (batch, 3, height, width).
        sigma: float32 (batch,). Standard deviation in pixels.
        kernel_size: Int, odd, less than twice the height and the width.

    Returns:
        float32 (batch, 3, height, width).
    """
    height, width = images.shape[2:]
    radius = kernel_size // 2
    distance = tf.range(-radius, radius + 1, dtype=tf.float32)
    kernel = tf.exp(-0.5 * tf.square(distance / sigma[:, None]))
    kernel /= tf.reduce_sum(kernel, axis=1, keepdims=True)

    # For each row the rows around it; those above and below are mirrored.
    rows = np.abs(np.arange(height)[:, None] + np.arange(-radius, radius + 1))
    rows = np.minimum(rows, 2 * (height - 1) - rows)

    def blur_columns(images):
        around = tf.gather(images, rows, axis=2)
        return tf.reduce_sum(kernel[:, None, None, :, None] * around, axis=3)

    def pad_rows(images):
        edges = ((0, 0), (0, 0), (0, 0), (radius, radius))
        return tf.pad(images, edges, "REFLECT")

    def blur_rows(images):
        # Shifted images, as XLA does not use vector loads in a gather here.
        return sum(
            kernel[:, tap, None, None, None] * images[..., tap : tap + width]
            for tap in range(kernel_size)
        )

    for step in (blur_columns, pad_rows, blur_rows):
        images = materialize_before(step, images, tf.math.is_finite(sigma[0]))
    return images
