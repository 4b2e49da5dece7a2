import shutil

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import (
    EventAccumulator,
)
from tensorboard.plugins.hparams import plugin_data_pb2
from tensorboard.util.tensor_util import make_ndarray

from keras_moco.monitoring.board import GROUPS, Board

SETTINGS = {"queue_size": 7, "batch_size": 4, "symmetric": False, "views": (1,)}


def rows(count, **figures):
    counts = [0] * 39 + [5]
    return [
        {
            "epoch": n,
            "step": 300 * n,
            "loss": 2.0 - n / 100,
            "learning_rate": 0.1,
            "positive_histogram": counts,
            **figures,
        }
        for n in range(1, count + 1)
    ]


def read(folder):
    events = EventAccumulator(str(folder), {"tensors": 0})
    events.Reload()
    return events


def curve(events, tag):
    return {
        event.step: make_ndarray(event.tensor_proto).tolist()
        for event in events.Tensors(tag)
    }


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    views = np.zeros((4, 6, 3), np.uint8)
    views[:, 3:] = 255
    board = Board(folder, SETTINGS, views)
    lines = rows(3)
    lines[2]["loss"] = float(np.log(8))
    for count in (1, 2, 3):
        board.write(lines[:count])
    return read(folder)


def test_scalars_are_grouped_and_chance_is_beside_the_loss(written):
    assert curve(written, "loss/loss") == pytest.approx(
        {1: 1.99, 2: 1.98, 3: np.log(8)}
    )
    chance = dict.fromkeys((1, 2, 3), np.log(8))
    assert curve(written, "loss/chance") == pytest.approx(chance)
    assert curve(written, "schedule/learning_rate")[1] == pytest.approx(0.1)
    layout = written.Tensors("custom_scalars__config__")[0]
    layout = layout.tensor_proto.string_val[0]
    assert b"loss/loss" in layout and b"loss/chance" in layout


def test_every_figure_of_a_run_has_its_group():
    named = [name for group in GROUPS.values() for name in group]
    assert len(named) == len(set(named))


def test_a_histogram_is_that_of_the_log(written):
    bins = np.array(curve(written, "contrast/positive_histogram")[1])
    assert bins.shape == (40, 3) and bins[:, 2].sum() == 5
    np.testing.assert_allclose(bins[39], [0.95, 1.0, 5])


def test_a_verdict_is_text_where_it_changes(written):
    told = curve(written, "verdict")
    assert {step: text.split(b":")[0] for step, text in told.items()} == {
        1: b"learning",
        3: b"at chance",
    }


def test_the_views_are_a_picture(written):
    width, height, png = written.Tensors("views")[0].tensor_proto.string_val
    assert (width, height) == (b"6", b"4") and png.startswith(b"\x89PNG")


def test_settings_are_hyperparameters(written):
    content = written.SummaryMetadata("_hparams_/session_start_info")
    content = content.plugin_data.content
    found = plugin_data_pb2.HParamsPluginData.FromString(content)
    values = found.session_start_info.hparams
    assert values["queue_size"].number_value == 7
    assert values["symmetric"].bool_value is False
    assert values["views"].string_value == "(1,)"


def test_a_run_that_goes_on_has_no_gap_and_no_epoch_twice(tmp_path):
    before = rows(4)
    first = Board(tmp_path, SETTINGS)
    first.write(before)
    # Its last two lines are done again by another process.
    second = Board(tmp_path, SETTINGS)
    again = [*before[:2], *rows(5, loss=0.5)[2:]]
    for count in (3, 4, 5):
        second.write(again[:count])
    steps = [event.step for event in read(tmp_path).Tensors("loss/loss")]
    assert steps == [1, 2, 3, 4, 5]
    losses = curve(read(tmp_path), "loss/loss")
    assert losses == pytest.approx({1: 1.99, 2: 1.98, 3: 0.5, 4: 0.5, 5: 0.5})


def test_a_folder_that_is_deleted_gets_all_of_it_again(tmp_path):
    board = Board(tmp_path / "run", SETTINGS)
    (tmp_path / "run").mkdir()
    board.write(rows(2))
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "run").mkdir()
    board.write(rows(3))
    assert list(curve(read(tmp_path / "run"), "loss/loss")) == [1, 2, 3]
