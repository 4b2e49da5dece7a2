import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import keras_moco as km
from keras_moco.augment import device_views
from keras_moco.data import pipeline
from keras_moco.data.encoded import StreamedImages
from keras_moco.data.images import Images
from keras_moco.data.pipeline import natural_size

PRESET = km.PRESETS["demo"]


def pictures(count=12, size=16):
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (count, size, size, 3), np.uint8)


def as_numpy(dataset):
    return [tuple(part.numpy() for part in batch) for batch in dataset]


def by_image(batches):
    """The views of each image, in the order of the images."""
    query, key, index = (
        np.concatenate(parts) for parts in zip(*batches, strict=True)
    )
    order = np.argsort(index)
    return query[order], key[order], index[order]


def test_batches_are_two_views_and_the_index():
    pairs = km.pretrain_dataset(pictures(), PRESET, batch_size=5)
    assert len(pairs) == 2
    query, key, index = as_numpy(pairs)[0]
    assert query.shape == key.shape == (5, 16, 16, 3)
    assert query.dtype == np.float32
    assert 0 <= min(query.min(), key.min()) <= max(query.max(), key.max()) <= 1
    assert np.abs(query - key).max() > 0.05
    assert len(set(index)) == 5


def test_every_image_comes_once_an_epoch():
    pairs = km.pretrain_dataset(pictures(), PRESET, batch_size=4)
    index = np.concatenate([batch[2] for batch in as_numpy(pairs)])
    assert sorted(index) == list(range(12))


def test_epochs_differ_in_order_and_views_and_seeds_repeat_both():
    options = {"batch_size": 4, "seed": 3}
    pairs = km.pretrain_dataset(pictures(), PRESET, **options)
    first, second = as_numpy(pairs), as_numpy(pairs)
    again = as_numpy(km.pretrain_dataset(pictures(), PRESET, **options))
    for a, b in zip(first, again, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)
    assert any((a[2] != b[2]).any() for a, b in zip(first, second, strict=True))
    difference = by_image(first)[0] - by_image(second)[0]
    assert (np.abs(difference).max(axis=(1, 2, 3)) > 0.01).mean() > 0.9


def test_a_pass_can_start_at_any_epoch():
    pairs = km.pretrain_dataset(pictures(), PRESET, batch_size=4)
    as_numpy(pairs)
    second = as_numpy(pairs)
    later = km.pretrain_dataset(pictures(), PRESET, batch_size=4, first_epoch=1)
    for a, b in zip(second, as_numpy(later), strict=True):
        np.testing.assert_array_equal(a[0], b[0])


def test_views_do_not_depend_on_the_batch():
    small = km.pretrain_dataset(pictures(), PRESET, batch_size=3)
    large = km.pretrain_dataset(pictures(), PRESET, batch_size=12)
    for a, b in zip(
        by_image(as_numpy(small)), by_image(as_numpy(large)), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.fixture
def photographs(tmp_path):
    """Twelve images of different sizes in two class folders."""
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for label, name in enumerate(("cat", "dog")):
            folder = tmp_path / split / name
            folder.mkdir(parents=True)
            for number in range(6):
                shape = (40 + 3 * number, 60 - 2 * number, 3)
                noise = draw.integers(0, 60, shape) + 120 * label
                Image.fromarray(noise.astype(np.uint8)).save(
                    folder / f"{number}.png"
                )
    return tmp_path


def test_images_of_different_sizes_are_cropped_one_by_one(photographs):
    images = km.load_images(photographs, "pretrain")
    assert images.array is None
    pairs = km.pretrain_dataset(images, PRESET, image_size=24, batch_size=4)
    batches = as_numpy(pairs)
    assert len(batches) == len(pairs) == 3
    assert batches[0][0].shape == (4, 24, 24, 3)
    again = km.pretrain_dataset(images, PRESET, image_size=24, batch_size=6)
    for a, b in zip(by_image(batches), by_image(as_numpy(again)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_files_of_one_size_give_the_views_of_the_array(tmp_path, monkeypatch):
    array = pictures()
    for number, image in enumerate(array):
        Image.fromarray(image).save(tmp_path / f"{number:02}.png")
    monkeypatch.setattr(
        "keras_moco.data.folder.fits_in_memory", lambda size: False
    )
    files = km.load_images(tmp_path, "pretrain")
    assert files.array is None
    options = {"image_size": 16, "batch_size": 12}
    a = by_image(as_numpy(km.pretrain_dataset(files, PRESET, **options)))
    b = by_image(as_numpy(km.pretrain_dataset(array, PRESET, **options)))
    for x, y in zip(a, b, strict=True):
        # Crops of files are rounded to bytes, as PIL does.
        np.testing.assert_allclose(x, y, atol=0.02)
        assert np.abs(x - y).mean() < 0.003


def test_labels_never_reach_training(photographs):
    images = km.load_images(photographs, "pretrain")
    spec = km.pretrain_dataset(images, PRESET, 24, 4).element_spec
    assert len(spec) == 3  # Two views and the number of the image.


@pytest.mark.parametrize("kind", ["array", "files", "stream"])
def test_shares_of_a_batch_are_its_parts(photographs, kind):
    if kind == "array":
        images = Images(pictures())
    else:
        images = km.load_images(photographs, "pretrain")
    if kind == "stream":
        contents = [images.read(index) for index in range(12)]
        images = StreamedImages(lambda *_: enumerate(contents), 12, 12)
    options = {"image_size": 8, "batch_size": 6}
    whole, first, second = (
        as_numpy(km.pretrain_dataset(images, PRESET, **options, share=share))
        for share in ((0, 1), (0, 2), (1, 2))
    )
    assert len(whole) == len(first) == len(second) == 2
    for parts in zip(whole, first, second, strict=True):
        for a, b, c in zip(*parts, strict=True):
            np.testing.assert_array_equal(a, np.concatenate([b, c]))
    with pytest.raises(ValueError, match="multiple of the 4 shares"):
        km.pretrain_dataset(images, PRESET, **options, share=(0, 4))


@pytest.mark.parametrize("batch_size", [0, -1, 13])
def test_batch_must_fit_the_data(batch_size):
    with pytest.raises(ValueError, match=f"batch_size={batch_size}, images=12"):
        km.pretrain_dataset(pictures(), PRESET, batch_size=batch_size)


def test_small_images_are_evaluated_as_they_are():
    images = Images(pictures(), labels=np.arange(12) % 3)
    batches = as_numpy(km.labeled_dataset(images, batch_size=8))
    whole = np.concatenate([batch[0] for batch in batches])
    np.testing.assert_allclose(whole, pictures() / 255, atol=1e-6)
    labels = np.concatenate([batch[1] for batch in batches])
    np.testing.assert_array_equal(labels, np.arange(12) % 3)


def test_large_images_are_cut_to_their_centre():
    # White inside 7/8 of the side, black around: only white is seen.
    image = np.zeros((1, 256, 320, 3), np.uint8)
    image[:, 16:240, 48:272] = 255
    images = Images(image, labels=np.zeros(1, int))
    ((seen, _),) = as_numpy(km.labeled_dataset(images, image_size=224))
    assert seen.shape == (1, 224, 224, 3)
    np.testing.assert_allclose(seen, 1.0, atol=1e-5)


def test_labelled_files_of_different_sizes(photographs):
    data = km.labeled_dataset(photographs, "test", image_size=24)
    ((images, labels),) = as_numpy(data)
    assert images.shape == (12, 24, 24, 3)
    # The dogs are the brighter ones.
    assert (images.mean(axis=(1, 2, 3))[labels == 1] > 0.4).all()
    assert (images.mean(axis=(1, 2, 3))[labels == 0] < 0.3).all()


def test_evaluation_needs_images_in_memory():
    stream = StreamedImages(lambda *_: iter(()), 12, 12, source="web")
    with pytest.raises(ValueError, match="web does not fit"):
        km.labeled_dataset(stream)


def test_evaluation_needs_labels():
    with pytest.raises(ValueError, match="Evaluation needs labels"):
        km.labeled_dataset(Images(pictures()))


def test_natural_size_is_the_images_own_at_most_224():
    assert natural_size(Images(pictures(2, 28))) == 28
    assert natural_size(Images(np.zeros((1, 500, 300, 3), np.uint8))) == 224


def test_views_on_the_device_are_those_of_the_cpu():
    options = {"batch_size": 6, "seed": 5}
    preset = PRESET.replace(image_size=16)
    cpu = km.pretrain_dataset(pictures(), preset, **options)
    device = km.pretrain_dataset(
        pictures(), preset, augment="device", **options
    )
    make_views = device_views(preset, seed=5)
    for (query, key, index), batch in zip(cpu, device, strict=True):
        images, epoch, same_index = batch
        assert images.dtype == np.uint8
        np.testing.assert_array_equal(index, same_index)
        views = make_views(images, index, epoch[0])
        np.testing.assert_allclose(query, views[0], atol=1e-4)
        np.testing.assert_allclose(key, views[1], atol=1e-4)


@pytest.mark.parametrize("jit", [False, True], ids=["graph", "xla"])
def test_a_model_may_make_the_views_inside_its_step(jit):
    preset = PRESET.replace(
        image_size=16, queue_size=16, head_hidden_dim=4, batch_norm_groups=1
    )
    encoder = keras.Sequential(
        [
            keras.Input((16, 16, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )
    losses = []
    for augment in (None, "device"):
        keras.utils.set_random_seed(0)
        copy = keras.models.clone_model(encoder)
        model = km.MoCo.from_preset(preset, copy)
        model.compile(km.SGD(0.01), jit_compile=jit)
        if augment:
            model.make_views = device_views(preset, seed=0)
        pairs = km.pretrain_dataset(
            pictures(), preset, batch_size=6, augment=augment
        )
        losses.append(model.fit(pairs, epochs=2, verbose=0).history["loss"])
    np.testing.assert_allclose(*losses, atol=1e-4)


def test_views_on_the_device_need_images_in_memory(photographs):
    images = km.load_images(photographs, "pretrain")
    with pytest.raises(ValueError, match="one size that fit into memory"):
        km.pretrain_dataset(images, PRESET, 24, 4, augment="device")


def test_a_function_of_the_users_own_makes_the_views(photographs):
    def invert_and_shrink(images):
        return 1.0 - tf.image.resize(images, (10, 10))

    pairs = km.pretrain_dataset(
        pictures(), PRESET, batch_size=6, augment=invert_and_shrink
    )
    query, key, index = as_numpy(pairs)[0]
    expected = 1 - tf.image.resize(
        pictures()[index] / np.float32(255), (10, 10)
    )
    np.testing.assert_allclose(query, expected, atol=1e-5)
    np.testing.assert_array_equal(query, key)
    files = km.load_images(photographs, "pretrain")
    pairs = km.pretrain_dataset(
        files, PRESET, batch_size=6, augment=invert_and_shrink
    )
    assert as_numpy(pairs)[0][0].shape == (6, 10, 10, 3)


@pytest.mark.slow
def test_a_keras_cv_augmenter_makes_the_views():
    import keras_cv

    augmenter = keras_cv.layers.Augmenter(
        [
            keras_cv.layers.RandomFlip(),
            keras_cv.layers.RandomCropAndResize(
                (16, 16),
                crop_area_factor=(0.2, 1.0),
                aspect_ratio_factor=(0.75, 1.33),
            ),
        ]
    )
    pairs = km.pretrain_dataset(
        pictures(), PRESET, batch_size=6, augment=augmenter
    )
    query, key, _ = as_numpy(pairs)[0]
    assert query.shape == key.shape == (6, 16, 16, 3)
    assert np.abs(query - key).max() > 0.01


def test_passes_left_unfinished_are_ended_with_the_program():
    # Their threads and Python could wait for each other (seen in one of two).
    passing = iter(km.pretrain_dataset(pictures(), PRESET, 8, batch_size=4))
    next(passing)
    pipeline._end_passes()
    assert not vars(passing)
