import json
import math

import pytest

from keras_moco.ablation.plot import draw_ablation, draw_losses
from keras_moco.ablation.studies import STUDIES, parse_vary
from keras_moco.ablation.table import summarize


@pytest.fixture
def draw(tmp_path):
    """A function that draws a study of two seeds, 40 and 42 %, 41 and 43 %."""

    def draw(study, finished=True):
        runs = {}
        for number, name in enumerate(study.settings):
            for seed in range(2):
                folder = tmp_path / f"{number}-{seed}"
                runs[name, seed] = folder
                if not finished:
                    continue
                folder.mkdir()
                row = {"epoch": 1, "loss": 3.0 + number, "seconds": 9.0}
                settings = {"queue_size": 64, "batch_size": 8}
                result = {
                    "knn_top1": (40 + number + 2 * seed) / 100,
                    "loss": 3.0 + number,
                    "peak_memory_mb": 9,
                    "export": "there",
                }
                for file, content in (
                    ("run.json", {"settings": settings}),
                    ("result.json", result),
                    ("metrics.jsonl", row),
                ):
                    (folder / file).write_text(json.dumps(content))
        rows = summarize(study, runs, {})
        return draw_ablation(study, rows), draw_losses(study, runs)

    return draw


def line(axis, label):
    """Places and heights of a line by its name in the legend."""
    handles, labels = axis.get_legend_handles_labels()
    found = handles[labels.index(label)]
    found = found[0] if hasattr(found, "has_yerr") else found
    return [list(map(float, data)) for data in found.get_data()]


def labels(axis):
    return [text.get_text() for text in axis.get_xticklabels()]


def test_accuracy_is_against_log_2_of_the_queue(draw):
    figure, _ = draw(parse_vary(["queue_size=64,256"]))
    left, right = figure.axes
    assert left.get_xscale() == "log" and labels(left) == ["64", "256"]
    assert line(left, "kNN") == [[64, 256], pytest.approx([41, 42])]
    assert line(right, "last epoch") == [[64, 256], [3, 4]]
    assert line(right, "ln(K + 1)")[1] == pytest.approx([math.log(65)] * 2)
    ((_, _, (bars,)),) = left.containers
    (low, high), *_ = bars.get_segments()
    assert (low[1], high[1]) == pytest.approx((41 - 2**0.5, 41 + 2**0.5))


def test_momentum_is_on_a_logarithmic_axis_with_a_place_for_1(draw):
    figure, _ = draw(STUDIES["momentum"])
    places, _ = line(figure.axes[0], "kNN")
    assert places == pytest.approx([1, 0.1, 0.01, 1e-3, 1e-4, 1e-5])
    left, right = figure.axes[0].get_xlim()
    assert left > 1 and 0 < right < 1e-5  # Slower is to the right.
    assert labels(figure.axes[0])[-1] == "0\nm 1"


def test_other_settings_stand_side_by_side(draw):
    figure, losses = draw(STUDIES["v1-to-v2"])
    assert line(figure.axes[0], "kNN")[0] == [0, 1, 2, 3]
    assert labels(figure.axes[0]) == list(STUDIES["v1-to-v2"].settings)
    assert line(losses.axes[0], "+ MLP head") == [[1], [4]]


def test_a_grid_has_a_line_for_each_value_of_the_second_field(draw):
    study = parse_vary(["queue_size=64,256", "momentum=0.9,1"])
    left, _ = draw(study)[0].axes
    assert line(left, "momentum 0.9") == [[64, 256], pytest.approx([41, 43])]
    assert line(left, "momentum 1.0") == [[64, 256], pytest.approx([42, 44])]


def test_a_study_of_which_nothing_is_finished_is_drawn(draw, tmp_path):
    for figure in draw(STUDIES["momentum"], finished=False):
        figure.savefig(tmp_path / "empty.png")
