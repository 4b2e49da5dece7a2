"""Random parameters of a view, drawn by counter: no state, no position.

Each number is a pure function of (seed, epoch, example index, view number),
so an image gets the same view in any batch, thread, process or device.
"""

import math

import tensorflow as tf

LOG_RATIO = math.log(4 / 3)  # aspect ratios from 3/4 to 4/3, log-uniform
CROP_TRIES = 10
# The 24 orders of brightness 0, contrast 1, saturation 2 and hue 3.
ORDERS = [
    (a, b, c, 6 - a - b - c)
    for a in range(4)
    for b in range(4)
    for c in range(4)
    if len({a, b, c}) == 3
]


def threefry(key, counter):
    """Encrypts a counter: the Threefry-2x32 generator with 20 rounds.

    Args:
        key: Pair of uint32 tensors.
        counter: Pair of uint32 tensors; all four broadcast together.

    Returns:
        Pair of uint32 tensors of independent uniform bits.

    Reference:
        Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.
    """
    keys = [
        *key,
        tf.bitwise.bitwise_xor(*key) ^ tf.constant(0x1BD11BDA, tf.uint32),
    ]
    left, right = counter[0] + keys[0], counter[1] + keys[1]
    rotations = (13, 15, 26, 6), (17, 29, 16, 24)
    for group in range(5):
        for rotation in rotations[group % 2]:
            left += right
            right = left ^ (
                tf.bitwise.left_shift(right, tf.constant(rotation, tf.uint32))
                | tf.bitwise.right_shift(
                    right, tf.constant(32 - rotation, tf.uint32)
                )
            )
        left += keys[(group + 1) % 3]
        right += keys[(group + 2) % 3] + tf.constant(group + 1, tf.uint32)
    return left, right


def uniforms(seed, epoch, index, view_number, count):
    """Uniform numbers in [0, 1) for each example.

    Args:
        seed: Int, Python or scalar tensor.
        epoch: Int, Python or scalar tensor.
        index: Int tensor (batch,). Number of the example in the data.
        view_number: Int, Python or scalar tensor.
        count: Int. Numbers per example.

    Returns:
        float32 (batch, count), multiples of 2**-24.
    """
    seed, epoch, index, view_number = (
        tf.cast(number, tf.int64)
        for number in (seed, epoch, index, view_number)
    )
    high = tf.bitwise.right_shift(index, tf.constant(32, tf.int64))
    # The key of the example, then its numbers: counters stay 64 bits.
    key = threefry(
        (tf.cast(seed, tf.uint32), tf.cast(epoch, tf.uint32)),
        (tf.cast(index, tf.uint32), tf.cast(high, tf.uint32)),
    )
    blocks = tf.cast(tf.range((count + 1) // 2), tf.uint32)
    words = threefry(
        [word[:, None] for word in key],
        (tf.cast(view_number, tf.uint32), blocks),
    )
    bits = tf.concat(words, axis=1)[:, :count]
    bits = tf.bitwise.right_shift(bits, tf.constant(8, tf.uint32))
    return tf.cast(bits, tf.float32) * 2.0**-24


def draw_boxes(scale, height, width, numbers):
    """Boxes of torchvision's `RandomResizedCrop`.

    Ten tries of a log-uniform aspect ratio and a uniform share of the area;
    if none fits, the largest centred box whose ratio is allowed.

    Args:
        scale: Pair of floats. Smallest and largest share of the area.
        height: Int tensor, scalar or (batch,). Height of the image.
        width: Int tensor, scalar or (batch,). Width of the image.
        numbers: float32 (batch, 22) in [0, 1).

    Returns:
        int32 (batch, 4): top, left, height, width.
    """
    # In float64 a last-bit difference between the exp of two devices
    # practically never rounds a box to another pixel.
    numbers = tf.cast(numbers, tf.float64)
    ones = tf.ones_like(numbers[:, :1])
    height = tf.reshape(tf.cast(height, tf.float64), (-1, 1)) * ones
    width = tf.reshape(tf.cast(width, tf.float64), (-1, 1)) * ones
    shares, ratios, corner = tf.split(numbers, (CROP_TRIES, CROP_TRIES, 2), 1)
    area = height * width * (scale[0] + (scale[1] - scale[0]) * shares)
    ratio = tf.exp(LOG_RATIO * (2.0 * ratios - 1.0))
    tried_height = tf.round(tf.sqrt(area / ratio))  # (batch, 10)
    tried_width = tf.round(tf.sqrt(area * ratio))
    fits = (
        (0 < tried_height)
        & (tried_height <= height)
        & (0 < tried_width)
        & (tried_width <= width)
    )
    fallback_height = tf.minimum(height, tf.round(width / 0.75))
    fallback_width = tf.minimum(width, tf.round(height * (4 / 3)))
    fits = tf.concat([fits, tf.ones_like(fits[:, :1])], axis=1)
    chosen = tf.argmax(tf.cast(fits, tf.int32), axis=1)  # the first that fits
    chosen = tf.one_hot(chosen, CROP_TRIES + 1, dtype=tf.float64)

    def choose(tried, fallback):
        tried = tf.concat([tried, fallback], axis=1)
        return tf.reduce_sum(chosen * tried, axis=1, keepdims=True)

    box_height = choose(tried_height, fallback_height)
    box_width = choose(tried_width, fallback_width)
    room = tf.concat([height - box_height, width - box_width], axis=1)
    corner = tf.where(
        chosen[:, -1:] > 0,
        tf.floor(room / 2),
        tf.floor(corner * (room + 1)),
    )
    return tf.cast(tf.concat([corner, box_height, box_width], 1), tf.int32)


def draw_parameters(view, height, width, seed, epoch, index, view_number):
    """Draws what happens to each image in one view.

    Args:
        view: `View`. Ranges and probabilities.
        height: Int, scalar or (batch,). Height of the images in pixels.
        width: Int, scalar or (batch,). Width of the images in pixels.
        seed: Int. Seed of the run.
        epoch: Int. Number of the epoch.
        index: Int tensor (batch,). Number of each example in the data.
        view_number: Int. 0 for the query, 1 for the key.

    Returns:
        Dictionary of tensors, one row per image: `box` int32 (batch, 4) with
        top, left, height and width; bool (batch,) `flip`, `jitter`,
        `grayscale`, `blur` and `solarize`; `order` int32 (batch, 4), the
        order of brightness 0, contrast 1, saturation 2 and hue 3; `factors`
        float32 (batch, 4), their strengths by that number, hue in turns;
        `sigma` float32 (batch,), the blur in pixels.
    """
    numbers = uniforms(seed, epoch, index, view_number, 34)
    crop, chances, factors, rest = tf.split(numbers, (22, 5, 4, 3), axis=1)
    probabilities = (
        view.flip,
        view.jitter_probability,
        view.grayscale,
        view.blur,
        view.solarize,
    )
    flip, jitter, grayscale, blur, solarize = tf.unstack(
        chances < tf.constant(probabilities), axis=1
    )
    low = [max(0.0, 1.0 - strength) for strength in view.jitter[:3]]
    high = [1.0 + strength for strength in view.jitter[:3]]
    low, high = [*low, -view.jitter[3]], [*high, view.jitter[3]]
    order = tf.cast(rest[:, 0] * len(ORDERS), tf.int32)
    sigma_low, sigma_high = view.blur_sigma
    return {
        "box": draw_boxes(view.crop_scale, height, width, crop),
        "flip": flip,
        "jitter": jitter,
        "order": tf.gather(tf.constant(ORDERS), order),
        "factors": tf.constant(low)
        + (tf.constant(high) - tf.constant(low)) * factors,
        "grayscale": grayscale,
        "blur": blur,
        "sigma": sigma_low + (sigma_high - sigma_low) * rest[:, 1],
        "solarize": solarize,
    }
