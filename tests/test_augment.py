"""Augmentation against golden torchvision outputs and closed forms."""

import collections
import dataclasses
import math
import pathlib

import numpy as np
import pytest
import tensorflow as tf

from keras_moco import augment
from keras_moco.augment.random import threefry
from keras_moco.presets import View

GOLDEN = np.load(pathlib.Path(__file__).parent / "golden" / "image_ops.npz")
V2 = View()
V3_KEY = View(jitter=(0.4, 0.4, 0.2, 0.1), blur=0.1, solarize=0.2)
DRAWS = 20_000


def planar(images):
    return tf.transpose(tf.cast(images, tf.float32), (0, 3, 1, 2))


def unplanar(images):
    return np.transpose(images, (0, 2, 3, 1))


def each(value):
    return tf.fill((4,), float(value))


def photographs(batch=6, size=24, seed=0):
    """Smooth random uint8 images, so that a resampling error is visible."""
    coarse = np.random.default_rng(seed).integers(0, 256, (batch, 8, 8, 3))
    return tf.cast(tf.image.resize(coarse, (size, size)), tf.uint8)


def views_of(images, epoch=0, index=None, **options):
    if index is None:
        index = tf.range(len(images), dtype=tf.int64)
    options = {"seed": 1, "image_size": 16, "views": (V2, V2)} | options
    options["seed"] = tf.constant(options["seed"])  # no compilation per seed
    pair = augment.two_views(images, index, tf.constant(epoch), **options)
    return [view.numpy() for view in pair]


def fixed(view, batch, **changes):
    """Drawn parameters with some of them replaced."""
    index = tf.range(batch, dtype=tf.int64)
    drawn = augment.draw_parameters(view, 24, 24, 0, 0, index, 0)
    return drawn | {key: tf.constant(value) for key, value in changes.items()}


@pytest.fixture(scope="module")
def drawn():
    index = tf.range(DRAWS, dtype=tf.int64)
    drawn = augment.draw_parameters(V3_KEY, 2000, 2000, 5, 3, index, 1)
    return {key: value.numpy() for key, value in drawn.items()}


def assert_uniform(sample, low, high):
    """Kolmogorov-Smirnov against U[low, high], p = 0.001."""
    assert sample.min() >= low and sample.max() <= high
    expected = (np.sort(sample) - low) / (high - low)
    step = np.arange(len(sample)) / len(sample)
    assert np.abs(expected - step).max() < 1.95 / math.sqrt(len(sample))


# Operations for given parameters


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in GOLDEN.files
        if name.split("_")[0] in ("brightness", "contrast", "saturation", "hue")
    ],
)
def test_color_operation_equals_torchvision(name):
    operation, factor = name.split("_")
    function = getattr(augment, f"adjust_{operation}")
    result = function(planar(GOLDEN["images"]), each(factor))
    np.testing.assert_allclose(unplanar(result), GOLDEN[name], atol=1e-4)


@pytest.mark.parametrize(
    "function, name",
    [
        (augment.to_grayscale, "grayscale"),
        (augment.solarize, "solarize_0.5"),
    ],
)
def test_plain_operation_equals_torchvision(function, name):
    result = function(planar(GOLDEN["images"]))
    np.testing.assert_allclose(unplanar(result), GOLDEN[name], atol=1e-4)


@pytest.mark.parametrize(
    "name, order",
    [
        ("jitter_b1.3_c0.7_s1.4_h0.08", (0, 1, 2, 3)),
        ("jitter_h0.08_s1.4_c0.7_b1.3", (3, 2, 1, 0)),
    ],
)
def test_jitter_keeps_the_given_order(name, order):
    result = augment.jitter(
        planar(GOLDEN["images"]),
        tf.fill((4,), True),
        tf.constant([order] * 4),
        tf.constant([[1.3, 0.7, 1.4, 0.08]] * 4),
    )
    np.testing.assert_allclose(unplanar(result), GOLDEN[name], atol=1e-4)


def test_jitter_orders_differ_within_a_batch():
    names = ("jitter_b1.3_c0.7_s1.4_h0.08", "jitter_h0.08_s1.4_c0.7_b1.3")
    images = GOLDEN["images"]
    result = augment.jitter(
        planar(images),
        tf.constant([True, True, False, True]),
        tf.constant([(0, 1, 2, 3), (3, 2, 1, 0), (0, 1, 2, 3), (3, 2, 1, 0)]),
        tf.constant([[1.3, 0.7, 1.4, 0.08]] * 4),
    )
    first, second = GOLDEN[names[0]], GOLDEN[names[1]]
    expected = [first[0], second[1], images[2], second[3]]
    np.testing.assert_allclose(unplanar(result), expected, atol=1e-4)


@pytest.mark.parametrize(
    "name", [name for name in GOLDEN.files if name.startswith("blur")]
)
def test_blur_equals_torchvision(name):
    _, kernel_size, sigma = name.split("_")
    result = augment.gaussian_blur(
        planar(GOLDEN["images"]), each(sigma[1:]), int(kernel_size[1:])
    )
    np.testing.assert_allclose(unplanar(result), GOLDEN[name], atol=1e-4)


@pytest.mark.parametrize("sigma", ["0.1", "0.5", "1.0", "2.0"])
def test_recipe_blur_is_close_to_pillow(sigma):
    parameters = fixed(
        V2,
        4,
        jitter=[False] * 4,
        grayscale=[False] * 4,
        blur=[True] * 4,
        sigma=[float(sigma)] * 4,
    )
    images = tf.cast(GOLDEN["images_uint8"], tf.float32) / 255.0
    result = 255.0 * augment.recolor(images, parameters, V2)
    error = np.abs(result - GOLDEN[f"pil_blur_s{sigma}"])
    assert error.mean() <= 2.5


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("antialias", [0, 1])
@pytest.mark.parametrize("size", [16, 32, 64])
def test_crop_equals_torchvision(size, antialias, flip, compiled):
    parameters = {
        "box": tf.constant(GOLDEN["boxes"], tf.int32),
        "flip": tf.fill((4,), flip),
    }
    crop = tf.function(augment.crop, jit_compile=compiled)
    result = crop(GOLDEN["images"], parameters, size, bool(antialias))
    expected = GOLDEN[f"crop_{size}_antialias_{antialias}"]
    expected = expected[:, :, ::-1] if flip else expected
    np.testing.assert_allclose(result, expected, atol=1e-4)


def test_crop_takes_single_images_of_any_size():
    crops = (
        tf.data.Dataset.from_generator(
            lambda: (
                {"image": image[: box[2] + box[0]], "box": box}
                for image, box in zip(
                    GOLDEN["images"], GOLDEN["boxes"], strict=True
                )
            ),
            output_signature={
                "image": tf.TensorSpec((None, None, 3)),
                "box": tf.TensorSpec((4,), tf.int32),
            },
        )
        .map(
            lambda row: augment.crop(
                row["image"][None],
                {"box": row["box"][None], "flip": tf.constant([False])},
                16,
            )[0]
        )
        .batch(4)
    )
    result = next(iter(crops))
    np.testing.assert_allclose(result, GOLDEN["crop_16_antialias_1"], atol=1e-4)


def test_crop_scales_uint8_to_one():
    parameters = {
        "box": tf.constant([[0, 0, 24, 24]] * 6),
        "flip": tf.fill((6,), False),
    }
    images = photographs()
    result = augment.crop(images, parameters, 24)
    np.testing.assert_allclose(result, images.numpy() / 255.0, atol=1e-6)


def test_crop_of_a_smaller_image_upsamples():
    images = np.zeros((1, 1, 2, 3), np.float32)
    images[0, 0, 1] = 1.0
    parameters = {
        "box": tf.constant([[0, 0, 1, 2]]),
        "flip": tf.constant([False]),
    }
    result = augment.crop(images, parameters, 4)
    expected = np.broadcast_to([0.0, 0.25, 0.75, 1.0], (4, 4))
    np.testing.assert_allclose(result[0, :, :, 0], expected, atol=1e-6)


# Draws


@pytest.mark.parametrize(
    "key, counter, expected",
    [  # the known answers published with Random123
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((2**32 - 1,) * 2, (2**32 - 1,) * 2, (0x1CB996FC, 0xBB002BE7)),
        (
            (0x13198A2E, 0x03707344),
            (0x243F6A88, 0x85A308D3),
            (0xC4923A9C, 0x483DF7A0),
        ),
    ],
)
def test_threefry_gives_the_published_answers(key, counter, expected):
    key, counter = (
        [tf.constant(word, tf.uint32) for word in words]
        for words in (key, counter)
    )
    assert tuple(int(word) for word in threefry(key, counter)) == expected


def test_crop_shares_and_ratios_follow_torchvision(drawn):
    _, _, height, width = drawn["box"].T.astype(float)
    share, ratio = height * width / 2000**2, np.log(width / height)
    # A box that does not fit is drawn again: conditioned on fitting, as
    # log(share) + |log(ratio)| <= 0, which removes little but not nothing.
    random = np.random.default_rng(0)
    shares = random.uniform(0.2, 1.0, 10**6)
    ratios = random.uniform(-math.log(4 / 3), math.log(4 / 3), 10**6)
    fits = np.log(shares) + np.abs(ratios) <= 0
    for sample, expected in ((share, shares[fits]), (ratio, ratios[fits])):
        points = np.linspace(0.05, 0.95, 19)
        at = np.searchsorted(np.sort(sample), np.quantile(expected, points))
        assert np.abs(at / DRAWS - points).max() < 0.014  # KS, p = 0.001


def test_crop_shares_and_ratios_are_uniform_when_all_fit():
    view = dataclasses.replace(V2, crop_scale=(0.1, 0.7))  # 0.7 * 4/3 < 1
    index = tf.range(DRAWS, dtype=tf.int64)
    boxes = augment.draw_parameters(view, 4000, 4000, 0, 0, index, 0)["box"]
    _, _, height, width = boxes.numpy().T.astype(float)
    assert_uniform(height * width / 4000**2, 0.0999, 0.7001)
    limit = math.log(4 / 3) + 1e-3
    assert_uniform(np.log(width / height), -limit, limit)


def test_crop_corners_are_uniform_and_inside(drawn):
    top, left, height, width = drawn["box"].T
    for start, length in ((top, height), (left, width)):
        assert start.min() >= 0 and (start + length).max() <= 2000
        room = 2000 - length
        wide = room > 200  # a rounded corner is uniform enough
        assert_uniform(((start + 0.5) / (room + 1))[wide], 0.0, 1.0)


def test_crop_falls_back_to_the_centre():
    index = tf.range(4, dtype=tf.int64)
    view = dataclasses.replace(V2, crop_scale=(1.0, 1.0))
    height, width = tf.constant([1, 10, 300, 1]), tf.constant([1, 900, 10, 8])
    boxes = augment.draw_parameters(view, height, width, 0, 0, index, 0)["box"]
    expected = [[0, 0, 1, 1], [0, 443, 10, 13], [143, 0, 13, 10], [0, 3, 1, 1]]
    np.testing.assert_array_equal(boxes, expected)


def test_factors_are_uniform(drawn):
    brightness, contrast, saturation, hue = drawn["factors"].T
    assert_uniform(brightness, 0.6, 1.4)
    assert_uniform(contrast, 0.6, 1.4)
    assert_uniform(saturation, 0.8, 1.2)
    assert_uniform(hue, -0.1, 0.1)
    assert_uniform(drawn["sigma"], 0.1, 2.0)


def test_factors_are_never_negative():
    view = dataclasses.replace(V2, jitter=(1.5, 0.0, 0.0, 0.0))
    index = tf.range(DRAWS, dtype=tf.int64)
    factors = augment.draw_parameters(view, 8, 8, 0, 0, index, 0)["factors"]
    assert_uniform(factors[:, 0].numpy(), 0.0, 2.5)
    assert np.all(factors[:, 1:].numpy() == [1.0, 1.0, 0.0])


@pytest.mark.parametrize(
    "name, probability",
    [
        ("flip", 0.5),
        ("jitter", 0.8),
        ("grayscale", 0.2),
        ("blur", 0.1),
        ("solarize", 0.2),
    ],
)
def test_chances_match_their_probability(drawn, name, probability):
    error = 3.3 * math.sqrt(probability * (1 - probability) / DRAWS)
    assert abs(drawn[name].mean() - probability) < error


def test_all_orders_are_equally_likely(drawn):
    counts = collections.Counter(map(tuple, drawn["order"]))
    assert all(sorted(order) == [0, 1, 2, 3] for order in counts)
    expected = DRAWS / 24
    counts = np.array([*counts.values(), *[0] * (24 - len(counts))])
    assert np.sum((counts - expected) ** 2 / expected) < 49.7  # p = 0.001


def test_draws_are_independent_of_each_other(drawn):
    columns = np.stack(
        [
            *drawn["factors"].T,
            drawn["sigma"],
            *(drawn[name] for name in ("flip", "jitter", "grayscale", "blur")),
        ]
    )
    correlation = np.corrcoef(columns) - np.eye(len(columns))
    assert np.abs(correlation).max() < 4 / math.sqrt(DRAWS)


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"epoch": 1},
        {"view_number": 1},
        {"index": tf.range(100, 200, dtype=tf.int64)},
        {"index": tf.range(100, dtype=tf.int64) + 2**32},
    ],
)
def test_draws_differ_with_each_part_of_the_key(changes):
    key = {"seed": 0, "epoch": 0, "view_number": 0}
    key["index"] = tf.range(100, dtype=tf.int64)
    first = augment.draw_parameters(V2, 32, 32, **key)["factors"].numpy()
    second = augment.draw_parameters(V2, 32, 32, **key | changes)["factors"]
    assert not np.any(np.all(first == second.numpy(), axis=1))
    correlation = np.corrcoef(first[:, 0], second[:, 0])[0, 1]
    assert abs(correlation) < 0.4


def test_compiled_draws_equal_eager_ones():
    index = tf.range(2000, dtype=tf.int64)
    size = tf.constant(500), tf.constant(333)
    eager = augment.draw_parameters(V2, *size, 7, 2, index, 1)
    compiled = augment.draw_views(
        index, tf.constant(2), *size, seed=7, views=(V2, V2)
    )[1]
    for key in ("box", "flip", "jitter", "order", "grayscale", "blur"):
        np.testing.assert_array_equal(eager[key], compiled[key])
    for key in ("factors", "sigma"):
        # Fused multiply-add: apart in the last bit.
        np.testing.assert_allclose(eager[key], compiled[key], atol=1e-6)


# Views


def test_same_seed_and_epoch_give_the_same_views():
    images = photographs()
    np.testing.assert_array_equal(views_of(images), views_of(images))


def test_epochs_seeds_and_views_differ():
    images = photographs()
    query, key = views_of(images)
    others = key, views_of(images, epoch=1)[0], views_of(images, seed=2)[0]
    for other in others:
        assert np.abs(query - other).mean(axis=(1, 2, 3)).min() > 1e-3


def test_views_are_float32_in_the_unit_range():
    for view in views_of(photographs()):
        assert view.dtype == np.float32 and view.shape == (6, 16, 16, 3)
        assert view.min() >= 0.0 and view.max() <= 1.0


@pytest.mark.parametrize("loop", [True, False])
def test_views_do_not_depend_on_order_of_the_batch(loop):
    images = photographs()
    order = np.array([3, 0, 5, 1, 4, 2])
    shuffled = views_of(
        tf.gather(images, order),
        index=tf.constant(order, tf.int64),
        loop=loop,
    )
    for view, other in zip(views_of(images, loop=loop), shuffled, strict=True):
        np.testing.assert_allclose(view[order], other, atol=1e-6)


def test_views_do_not_depend_on_size_of_the_batch():
    images = photographs()
    whole = views_of(images)
    half = views_of(images[3:], index=tf.range(3, 6, dtype=tf.int64))
    for view, other in zip(whole, half, strict=True):
        np.testing.assert_allclose(view[3:], other, atol=1e-6)


@pytest.mark.parametrize("workers", [1, 3])
def test_views_inside_tf_data_equal_eager_ones(workers):
    images = photographs()
    dataset = (
        tf.data.Dataset.from_tensor_slices((images, np.arange(6)))
        .batch(2, drop_remainder=True)
        .map(
            lambda images, index: augment.two_views(
                images,
                index,
                tf.constant(0),
                seed=1,
                image_size=16,
                views=(V2, V2),
            ),
            num_parallel_calls=workers,
        )
    )
    batches = list(dataset.as_numpy_iterator())
    result = np.concatenate(batches, axis=1)
    np.testing.assert_allclose(result, views_of(images), atol=1e-6)


@pytest.mark.parametrize("loop", [True, False])
@pytest.mark.parametrize("other", [V2, V3_KEY, View(grayscale_first=True)])
def test_compiled_views_equal_eager_ones(other, loop):
    images = photographs(batch=16)
    index = tf.range(16, dtype=tf.int64)
    views = (V2, other)
    compiled = views_of(images, loop=loop, views=views)
    for number, view in enumerate(views):
        drawn = augment.draw_parameters(view, 24, 24, 1, 0, index, number)
        eager = augment.recolor(augment.crop(images, drawn, 16), drawn, view)
        np.testing.assert_allclose(compiled[number], eager, atol=1e-4)


@pytest.mark.slow
def test_views_of_ready_crops_equal_views_of_images():
    images = photographs()
    drawn = augment.draw_views(
        tf.range(6, dtype=tf.int64),
        tf.constant(0),
        *tf.constant([24, 24]),
        seed=1,
        views=(V2, V3_KEY),
    )
    crops = tuple(augment.crop(images, one, 16) for one in drawn)
    result = augment.recolor_views(crops, drawn, views=(V2, V3_KEY))
    expected = views_of(images, views=(V2, V3_KEY))
    np.testing.assert_allclose(result, expected, atol=1e-5)


def test_v1_turns_grey_before_the_jitter_and_v2_after():
    contrast_first = {
        "order": [[1, 0, 2, 3]] * 6,
        "factors": [[1.0, 1.4, 1.4, 0.1]] * 6,
        "jitter": [True] * 6,
        "grayscale": [True] * 6,
        "blur": [False] * 6,
    }
    images = tf.cast(photographs(), tf.float32) / 255.0
    weights = np.array([0.2989, 0.587, 0.114], np.float32)
    grey = np.repeat((images.numpy() @ weights)[..., None], 3, axis=-1)
    mean = grey.mean(axis=(1, 2, 3), keepdims=True) * weights.sum()
    first = np.clip(1.4 * grey - 0.4 * mean, 0.0, 1.0)
    first = np.clip((1.4 - 0.4 * weights.sum()) * first, 0.0, 1.0)
    view = View(grayscale_first=True)
    parameters = fixed(view, 6, **contrast_first)
    result = augment.recolor(images, parameters, view)
    np.testing.assert_allclose(result, first, atol=1e-4)
    after = augment.recolor(images, parameters, V2).numpy()
    assert np.ptp(after, axis=-1).max() < 1e-6
    assert np.abs(after - first).max() > 0.01


def test_v3_solarizes_last():
    drawn = fixed(
        V3_KEY,
        4,
        jitter=[False] * 4,
        grayscale=[False] * 4,
        blur=[True, True, False, False],
        sigma=[2.0] * 4,
        solarize=[True, False, True, False],
    )
    images = GOLDEN["images"]
    result = augment.recolor(tf.constant(images), drawn, V3_KEY)
    blurred = unplanar(
        augment.gaussian_blur(planar(images), each(2.0), kernel_size=13)
    )
    both = np.where(blurred >= 0.5, 1.0 - blurred, blurred)
    expected = both[0], blurred[1], GOLDEN["solarize_0.5"][2], images[3]
    np.testing.assert_allclose(result, np.stack(expected), atol=1e-4)


def test_nothing_drawn_changes_nothing():
    drawn = fixed(
        V3_KEY,
        4,
        **{
            key: [False] * 4
            for key in ("jitter", "grayscale", "blur", "solarize")
        },
    )
    images = tf.constant(GOLDEN["images"])
    result = augment.recolor(images, drawn, V3_KEY)
    np.testing.assert_array_equal(result, images)
