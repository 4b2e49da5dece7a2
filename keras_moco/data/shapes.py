"""Built-in labelled images: ten classes of figures and textures.

Pixels say little about the class, because colour, polarity, place, size,
rotation, background and noise vary. All images share a few pale tints: if each
had colours of its own, instance discrimination could be solved from its colour
histogram without ever looking at the figure.
"""

import numpy as np

_CHUNK_PIXELS = 2**19  # drawn at once: bounds memory, does not change images
_TINTS = np.array(  # added to a grey level, (tint, RGB)
    [[0, 0, 0], [0.05, 0, -0.05], [-0.05, 0, 0.05], [-0.03, 0.05, -0.03]],
    np.float32,
)


def _wave(x):
    """Triangle wave of period 1 in [-.25, .25]; negative in half of it."""
    return np.abs(x - np.floor(x) - 0.5) - 0.25


def _ring(x, y):
    return np.abs(np.hypot(x, y) - 0.75) - 0.2


def _triangle(x, y):
    slanted = np.abs(x) * np.float32(0.75**0.5) + y / 2
    return np.maximum(slanted, -y) - 0.55


def _star(x, y):
    # Fold the plane into half a ray; its edge is then one straight line.
    half = np.pi / 5
    angle = np.arctan2(y, x) / (2 * half)
    angle = np.abs(angle - np.round(angle)) * (2 * half)
    radius = np.hypot(x, y)
    inner_x, inner_y = 0.4 * np.cos(half), 0.4 * np.sin(half)
    normal = np.array([inner_y, 1.05 - inner_x])
    normal /= np.linalg.norm(normal)
    along, across = radius * np.cos(angle), radius * np.sin(angle)
    return (along - 1.05) * normal[0] + across * normal[1]


def _cross(x, y):
    x, y = np.abs(x), np.abs(y)
    return np.maximum(np.maximum(x, y) - 0.95, np.minimum(x, y) - 0.27)


def _stripes(x, y):
    return _wave(1.3 * x) / 1.3


def _checks(x, y):
    a, b = _wave(0.85 * x), _wave(0.85 * y)
    return np.sign(a * b) * np.minimum(np.abs(a), np.abs(b)) / 0.85


def _patches(x, y):
    # Waves in three directions at odds: irregular patches.
    u, v = 0.5 * x + 0.87 * y, 0.5 * x - 0.87 * y
    waves = np.sin(4.1 * x + 1) + np.sin(5.3 * u + 2) + np.sin(4.7 * v)
    return waves / 7


def _dots(x, y):
    x, y = 1.2 * x, 1.2 * y
    return (np.hypot(x - np.round(x), y - np.round(y)) - 0.32) / 1.2


def _spiral(x, y):
    turn = np.arctan2(y, x) / (2 * np.pi)
    return _wave(1.4 * np.hypot(x, y) + turn) / 1.4


# Signed distances, negative inside, over coordinates in which a figure has
# radius 1. The last five have no border: they fill the picture.
_DISTANCES = {
    "disc": lambda x, y: np.hypot(x, y) - 0.9,
    "ring": _ring,
    "triangle": _triangle,
    "star": _star,
    "cross": _cross,
    "stripes": _stripes,
    "checks": _checks,
    "dots": _dots,
    "spiral": _spiral,
    "patches": _patches,
}
CLASS_NAMES = list(_DISTANCES)


def make_shapes(count, image_size=32, seed=0):
    """Draws labelled images of ten classes of figures and textures.

    Image `i` depends on `(seed, i)` only, so a smaller count is a prefix of a
    larger one. Its label is `i % 10`: shuffle before training.

    Args:
        count: Int. Number of images, at least 1.
        image_size: Int. Side in pixels, at least 8. Defaults to 32.
        seed: Int. Another seed gives other images. Defaults to 0.

    Returns:
        `(images, labels)`: uint8 `(count, image_size, image_size, 3)` RGB, and
        int64 `(count,)` indices into `CLASS_NAMES`.

    Raises:
        ValueError: If `count` or `image_size` is too small.

    Example:
    ```python
    images, labels = make_shapes(1000, image_size=32)
    print(CLASS_NAMES[labels[0]])  # disc
    ```
    """
    if count < 1 or image_size < 8:
        raise ValueError(
            "`count` must be at least 1 and `image_size` at least 8. "
            f"Received: count={count}, image_size={image_size}"
        )
    images = np.empty((count, image_size, image_size, 3), np.uint8)
    labels = np.arange(count) % len(CLASS_NAMES)
    num_chunk = max(1, _CHUNK_PIXELS // image_size**2)
    for label in range(len(CLASS_NAMES)):
        indices = np.arange(label, count, len(CLASS_NAMES))
        for start in range(0, len(indices), num_chunk):
            chunk = indices[start : start + num_chunk]
            images[chunk] = _draw(CLASS_NAMES[label], chunk, image_size, seed)
    return images, labels.astype(np.int64)


def _draw(name, indices, size, seed):
    """Images of one class, uint8 (len(indices), size, size, 3)."""
    draws = _uniform(seed, indices, 32 + size * size)
    columns = iter(draws.T[:32, :, None, None])

    def between(low, high):
        return low + (high - low) * next(columns)  # (images, 1, 1)

    # Pixel centres in [-1, 1] over the whole picture.
    grid = ((np.arange(size, dtype=np.float32) + 0.5) / size * 2 - 1)[None]
    grid_x, grid_y = grid[:, None, :], grid[:, :, None]

    radius = between(0.55, 0.9)
    angle = between(-np.pi, np.pi)
    room = 1.15 - radius  # most of the figure stays inside
    x = grid_x - room * between(-1, 1)
    y = grid_y - room * between(-1, 1)
    cos, sin = np.cos(angle), np.sin(angle)
    distance = radius * _DISTANCES[name](
        (cos * x + sin * y) / radius, (cos * y - sin * x) / radius
    )
    figure = np.clip(0.5 - distance * (size / 2), 0, 1)  # one soft pixel

    # Grey levels; which of figure and background is brighter is a coin toss.
    dark, bright = between(0.1, 0.35), between(0.65, 0.9)
    flip = between(0, 1) < 0.5
    inside, outside = np.where(flip, dark, bright), np.where(flip, bright, dark)
    slope = between(-0.12, 0.12) * grid_x + between(-0.12, 0.12) * grid_y
    outside = outside + slope
    for _ in range(3):  # clutter: faint blobs
        far = (grid_x - between(-1, 1)) ** 2 + (grid_y - between(-1, 1)) ** 2
        outside = outside + between(-0.2, 0.2) * np.exp(-far * 20)
    # Four tints each: (images, 1, 1, 3)
    inside_tint = _TINTS[np.int64(between(0, len(_TINTS)))]
    outside_tint = _TINTS[np.int64(between(0, len(_TINTS)))]
    noise = (draws[:, 32:].reshape(-1, size, size) - 0.5) * between(0.05, 0.4)

    grey = outside + figure * (inside - outside) + noise
    tint = outside_tint + figure[..., None] * (inside_tint - outside_tint)
    return np.uint8(np.clip(grey[..., None] + tint, 0, 1) * 255 + 0.5)


def _uniform(seed, indices, count):
    """Float32 in [0, 1), (len(indices), count): a hash of (seed, index, k).

    SplitMix64, written out because NumPy's generators neither take a vector of
    seeds nor promise the same stream in later versions.
    """
    step = np.uint64(0x9E3779B97F4A7C15)
    seed = np.uint64(seed % 2**64)
    key = _mix(_mix(seed + step) + np.asarray(indices, np.uint64) * step)
    bits = _mix(key[:, None] + np.arange(1, count + 1, dtype=np.uint64) * step)
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _mix(x):
    x = np.atleast_1d(x)  # arrays wrap around silently, scalars warn
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
