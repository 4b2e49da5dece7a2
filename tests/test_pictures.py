import io
import math

import numpy as np
import pytest

from keras_moco import pictures


def svg(figure):
    content = io.BytesIO()
    figure.savefig(content, format="svg")
    return content.getvalue().decode()


def test_curves_differ_by_colour_line_and_marker():
    series = [(n, f"run {n}", [1, 2, 3], [3.0, 2.0, 1.0 + n]) for n in range(3)]
    figure = pictures.draw_curves(series, "loss", [("chance", math.log(5))])
    *lines, level = figure.axes[0].lines
    for look in ("color", "linestyle", "marker"):
        assert len({getattr(line, f"get_{look}")() for line in lines}) == 3
    assert level.get_ydata()[0] == math.log(5)
    np.testing.assert_array_equal(lines[2].get_ydata(), [3, 2, 3])


def test_verdicts_lie_on_the_time_axis():
    parts = [("filling", 1, 2), ("learning", 3, 5), ("unheard of", 6, 6)]
    series = [(0, "a", [1, 6], [2.0, math.nan])]
    spans = [(0, "a", parts)]
    figure = pictures.draw_curves(series, "loss", spans=spans)
    boxes = [c.get_paths()[0].get_extents() for c in figure.axes[1].collections]
    assert [(b.x0, b.x1) for b in boxes] == [(0, 2), (2, 5), (5, 6)]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["filling", "learning"]


@pytest.mark.parametrize("text", ["$x", "_hidden", "a $b$ c_d^e", "x" * 99])
def test_any_name_can_be_drawn_and_is_shown(text):
    series = [(0, text, [1], [1.0])]
    figure = pictures.draw_curves(series, "loss")
    (entry,) = figure.axes[0].get_legend().get_texts()
    assert entry.get_text() == pictures.plain(text)
    assert len(entry.get_text()) < 40
    assert "<svg" in svg(figure)


def test_the_map_shows_every_point_once():
    draw = np.random.default_rng(0)
    points, groups = draw.normal(size=(30, 2)), np.arange(30) % 12
    names = [f"class {n}" for n in range(12)]
    figure = pictures.draw_map(points, groups, names)
    drawn = figure.axes[0].collections
    offsets = np.concatenate([part.get_offsets() for part in drawn])
    assert sorted(map(tuple, offsets)) == sorted(map(tuple, points))
    looks = zip(
        [part.get_facecolor()[0].tobytes() for part in drawn],
        [part.get_paths()[0].vertices.tobytes() for part in drawn],
        strict=True,
    )
    assert len(set(looks)) == 12


def test_neighbours_are_drawn_in_their_order():
    images = np.random.default_rng(0).random((4, 8, 8, 3))
    nearest = np.array([[1, 3, 0]])
    figure = pictures.draw_neighbours(images, nearest, list("abcd"))
    for axis, index in zip(figure.axes, nearest[0], strict=True):
        np.testing.assert_array_equal(axis.images[0].get_array(), images[index])
    assert [a.get_xlabel() for a in figure.axes] == ["b", "d", "a"]


def test_confusion_is_in_shares_of_the_true_class():
    figure = pictures.draw_confusion([[3, 1], [0, 0]], ["a", "b"])
    shown = figure.axes[0].images[0].get_array()
    np.testing.assert_array_equal(shown, [[75, 25], [0, 0]])
