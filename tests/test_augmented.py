import numpy as np
import pytest
from PIL import Image

from keras_moco.augment import crop, draw_parameters
from keras_moco.data.augmented import CROP_AND_FLIP, augmented_dataset
from keras_moco.data.images import Images
from keras_moco.data.sources import load_images

ROWS = np.array([1, 2, 4, 5, 7, 8, 9])


def numbered(count=12):
    pixels = np.random.default_rng(0).integers(0, 256, (count, 10, 8, 3))
    return Images(pixels.astype("uint8"), np.arange(count))


def test_views_are_the_crops_drawn_for_seed_epoch_and_image():
    images = numbered()
    data = augmented_dataset(images, ROWS, 6, 3, seed=5, first_epoch=2)
    assert len(data) == 2
    views, numbers = map(np.concatenate, zip(*data.as_numpy_iterator()))  # noqa: B905
    assert len(set(numbers)) == 6 and set(numbers) <= set(ROWS)
    drawn = draw_parameters(CROP_AND_FLIP, 10, 8, 5, 2, numbers, 0)
    assert not drawn["jitter"].numpy().any()
    expected = crop(images.array[numbers], drawn, 6)
    np.testing.assert_allclose(views, expected, atol=1e-5)
    # The next pass is the next epoch.
    _, again = map(np.concatenate, zip(*data.as_numpy_iterator()))  # noqa: B905
    assert again.tolist() != numbers.tolist()


def test_files_of_several_sizes_give_the_same_crops(tmp_path):
    draw = np.random.default_rng(0)
    pixels = [
        draw.integers(0, 256, (height, 12, 3)).astype("uint8")
        for height in (10, 14, 18, 11)
    ]
    for number, image in enumerate(pixels):
        folder = tmp_path / str(number % 2)
        folder.mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    images = load_images(tmp_path)
    assert images.array is None
    data = augmented_dataset(images, np.arange(4), 6, 4, seed=1)
    ((views, labels),) = data.as_numpy_iterator()
    assert sorted(labels) == [0, 0, 1, 1]
    order = np.random.default_rng([1, 0]).permutation(np.arange(4))
    for view, index in zip(views, order, strict=True):
        image = images.decode(index)
        drawn = draw_parameters(
            CROP_AND_FLIP, *image.shape[:2], 1, 0, np.array([index]), 0
        )
        # Files are resampled in whole steps of 1 / 255.
        expected = crop(image[None], drawn, 6)[0]
        np.testing.assert_allclose(view, expected, atol=1.01 / 255)


@pytest.mark.parametrize("epoch", [0, 3])
def test_the_order_of_an_epoch_does_not_depend_on_those_before(epoch):
    def labels(first):
        data = augmented_dataset(numbered(), ROWS, 6, 3, first_epoch=first)
        for _ in range(epoch - first):
            list(data)
        return np.concatenate([batch[1] for batch in data])

    np.testing.assert_array_equal(labels(0), labels(epoch))
