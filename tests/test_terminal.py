import pytest

import keras_moco as km
from keras_moco import terminal
from keras_moco.data.images import Images


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0.4, "0 s"),
        (59, "59 s"),
        (61, "1 min 1 s"),
        (3900, "1 h 5 min"),
        (200_000, "2 d 7 h"),
    ],
)
def test_durations(seconds, words):
    assert terminal.duration(seconds) == words


def test_the_line_of_an_epoch_fits_80_columns():
    row = {"epoch": 100, "loss": 11.0904, "knn_top1": 0.8123}
    row |= {"queue_fill": 0.5, "images_per_second": 12345.0}
    line = terminal.epoch_line(row, 1000, 3e6)
    assert len(line) <= 80, line
    for part in ("epoch 100/1000", "kNN 81.2 %", "queue 50 %", "34 d 17 h"):
        assert part in line


def plan(tiny_encoder, **changes):
    import numpy as np

    preset = km.PRESETS["moco_v2"].replace(
        queue_size=16,
        head_hidden_dim=4,
        image_size=8,
        batch_norm_groups=1,
        **changes,
    )
    model = km.MoCo.from_preset(preset, tiny_encoder())
    images = Images(np.zeros((20, 8, 8, 3), np.uint8))
    images.broken = [f"some/long/folder/name/{i:04}.jpg" for i in range(12)]
    return terminal.plan_lines(images, "moco_v2", preset, model, 5)


def test_the_plan_says_rate_chance_and_what_to_expect(tiny_encoder):
    text = plan(tiny_encoder, batch_size=4, mask_same_image=True)
    assert "0.03 x 4 / 256 = 0.00046875" in text
    assert "chance loss 2.83" in text  # ln 17
    assert "mask_same_image=true" in text
    assert "about 4 steps" in " ".join(text.split())
    assert "12 broken image files" in text and "0009.jpg" in text
    assert "0010.jpg" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_large_batches_with_sgd_are_questioned(tiny_encoder):
    assert "lars" in plan(tiny_encoder, batch_size=2048)
    assert "lars" not in plan(tiny_encoder, batch_size=512)


def test_a_queue_that_cannot_fill_is_said(tiny_encoder):
    text = " ".join(plan(tiny_encoder, batch_size=1, epochs=2).split())
    assert "will not fill: that takes 16 steps, and there are 10" in text
    assert "--set queue_size=64" in text
