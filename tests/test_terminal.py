import json

import pytest

import keras_moco as km
from keras_moco import terminal
from keras_moco.checks import Finding
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


def test_waiting_for_data_is_said_where_it_matters():
    row = {"epoch": 1, "loss": 1.0, "images_per_second": 9.0}
    assert "wait 12 %" in terminal.epoch_line({**row, "data_wait": 0.12}, 2, 3)
    assert "wait" not in terminal.epoch_line({**row, "data_wait": 0.04}, 2, 3)


def test_lines_for_programs_are_json_with_their_figures(capsys):
    terminal.say_json("epoch 1/2\n  loss 0.5", epoch=1, loss=0.5)
    terminal.say_text("epoch 1/2", epoch=1)
    terminal.say_nothing("epoch 1/2", epoch=1)
    first, second = capsys.readouterr().out.splitlines()
    assert json.loads(first) == {
        "text": "epoch 1/2 loss 0.5",
        "epoch": 1,
        "loss": 0.5,
    }
    assert second == "epoch 1/2"


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


def test_the_plan_says_rate_chance_and_broken_files(tiny_encoder):
    text = plan(tiny_encoder, batch_size=4)
    assert "0.03 x 4 / 256 = 0.00046875" in text
    assert "chance loss 2.83" in text  # ln 17
    assert "12 broken image files" in text and "0009.jpg" in text
    assert "0010.jpg" not in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_finding_hangs_behind_its_mark():
    text = terminal.finding_line(Finding("note", "word " * 30))
    first, *others = text.splitlines()
    assert first.startswith("note     word")
    assert all(line.startswith(" " * 9 + "word") for line in others)
    assert len(first) <= 80


def test_the_time_left_leaves_out_the_epoch_that_compiles():
    assert terminal.seconds_left([0.0, 60.0], 3) == 180.0
    assert terminal.seconds_left([0.0, 60.0, 65.0, 72.0], 3) == 18.0
    assert terminal.seconds_left([0.0, 60.0], 0) == 0.0


def test_a_result_is_said_as_far_as_it_is_there():
    text = terminal.result_lines({"export": "e", "knn_top1": 0.5})
    assert text == "kNN top-1 50.0 %\nEncoder  e"
    text = terminal.result_lines({"export": "e", "run": "runs/my photos"})
    assert "tensorboard --logdir 'runs/my photos'" in text
