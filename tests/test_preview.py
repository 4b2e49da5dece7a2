import numpy as np
import pytest
from matplotlib.image import imread

import keras_moco as km
from keras_moco.data.images import Images
from keras_moco.preview import caption, preview


@pytest.fixture
def images():
    draw = np.random.default_rng(0)
    return Images(draw.integers(0, 256, (5, 16, 16, 3), np.uint8))


def test_picture_has_a_row_an_image_and_two_views_an_epoch(tmp_path, images):
    path = tmp_path / "views.png"
    preview(images, km.PRESETS["moco_v2"], path, rows=2, pairs=1)
    picture = imread(path)[..., :3]
    assert picture.shape[:2] == (int(1.95 * 2 * 110), int(1.6 * 3 * 110))
    colours = np.unique(picture.reshape(-1, 3), axis=0)
    assert len(colours) > 500  # The random pixels are in it.


def test_caption_says_what_was_drawn():
    drawn = {
        "box": np.array([0, 0, 8, 8]),
        "flip": True,
        "jitter": True,
        "order": np.array([3, 0, 2, 1]),
        "factors": np.array([1.2, 0.8, 1.0, -0.1]),
        "grayscale": False,
        "blur": True,
        "solarize": False,
    }
    assert caption(drawn, (16, 16, 3)) == "25 % flip blur\nh-0.1 b1.2 s1.0 c0.8"
    plain = {**drawn, "jitter": False, "grayscale": True, "blur": False}
    assert caption(plain, (16, 16, 3)) == "25 % flip grey\n"


def test_nothing_to_show_is_refused(tmp_path, images):
    with pytest.raises(ValueError, match="rows=0"):
        preview(images, km.PRESETS["demo"], tmp_path / "x.png", rows=0)
    with pytest.raises(ValueError, match="must end in .png"):
        preview(images, km.PRESETS["demo"], tmp_path / "x.xyz")
