import numpy as np
import pytest

from keras_moco.evaluation.scores import check_labels, score, wilson_interval

LABELS = np.array([0, 0, 1, 1, 1, 2])
RANKING = np.array([[0, 1], [1, 0], [1, 2], [1, 0], [0, 2], [0, 1]])


def scored():
    last = np.array([0, 0, 0, 0, 0, 0])
    return score(LABELS, RANKING, last, 4, holdout_top1=0.5, setting={"a": 1})


def test_figures_are_counted_by_hand():
    found = scored()
    assert found["test_top1"] == 3 / 6
    assert found["test_top5"] == 4 / 6  # among the answers that there are
    assert found["test_top1_last"] == 2 / 6
    assert found["interval"] == wilson_interval(0.5, 6)
    assert found["holdout_top1"] == 0.5 and found["setting"] == {"a": 1}


def test_classes_are_counted_apart():
    found = scored()
    assert found["per_class"] == [1 / 2, 2 / 3, 0.0, None]
    expected = [[1, 1, 0, 0], [1, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert found["confusion"] == expected


def test_interval_is_wilsons():
    np.testing.assert_allclose(
        wilson_interval(0.5, 100), (0.40383, 0.59617), atol=1e-5
    )
    low, high = wilson_interval(1.0, 10)
    np.testing.assert_allclose((low, high), (10 / (10 + 1.959964**2), 1.0))


def test_labels_that_cannot_be_learnt_are_one_line():
    assert check_labels(LABELS, LABELS[:3]) == 3
    assert check_labels(999 * LABELS, LABELS[:2]) == 1999
    with pytest.raises(ValueError, match="below .* up to 2000000, of 3"):
        check_labels(10**6 * LABELS, LABELS[:2])
    with pytest.raises(ValueError, match="two classes.*class 1"):
        check_labels(np.ones(4, int), np.ones(4, int))
    with pytest.raises(ValueError, match="training images lack: 5, 7"):
        check_labels(LABELS, np.array([0, 7, 5]))
