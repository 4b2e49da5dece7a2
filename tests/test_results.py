import json

import numpy as np
import pytest
import tensorflow as tf
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import (
    EventAccumulator,
)

from keras_moco.evaluation.results import result_lines, save_results
from keras_moco.evaluation.scores import score
from keras_moco.pictures import draw_confusion

NAMES = ["cat", "dog"]


def result(right=7):
    labels = np.repeat([0, 1], 5)
    answers = np.where(np.arange(10) < right, labels, 1 - labels)
    ranking = np.stack([answers, 1 - answers], axis=1)
    setting = {"learning_rate": 0.1, "backbone_lr_scale": 0.01, "epoch": 3}
    return score(labels, ranking, labels, 2, holdout_top1=0.25, setting=setting)


def test_lines_say_the_figures_within_80_columns():
    text = result_lines("encoder", result(), NAMES)
    assert text.startswith("encoder    top-1 70.00 % (39.7 to 89.2)\n")
    assert "by class: cat 100.0 %, dog 40.0 %" in text
    assert "epoch 3, with 25.00 % on the holdout; last epoch 100.00" in text
    assert "backbone lr scale 0.01" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_figure_and_its_percent_sign_stay_together():
    setting = {"learning_rate": 0.1, "epoch": 3}
    labels = np.arange(20)
    ranking = np.stack([labels, np.roll(labels, 1)], axis=1)
    found = score(labels, ranking, labels, 20, holdout_top1=1, setting=setting)
    for length in range(1, 9):
        names = [chr(97 + i) * length for i in range(20)]
        lines = result_lines("encoder", found, names).splitlines()
        assert max(map(len, lines)) <= 80
        assert not any(line.strip().startswith("%") for line in lines)
        assert " ".join(" ".join(lines).split()).count("100.0 %") == 20


def test_json_has_classes_by_name_and_the_baselines(tmp_path):
    path = tmp_path / "new" / "probe.json"
    save_results(
        {"encoder": result(), "raw pixels": result(4)}, NAMES, json=path
    )
    found = json.loads(path.read_text())
    assert found["per_class"] == {"cat": 1.0, "dog": 0.4}
    assert found["setting"]["epoch"] == 3
    assert found["baselines"]["raw pixels"]["test_top1"] == 0.4


def test_picture_is_written_and_has_the_shares(tmp_path):
    save_results({"encoder": result()}, NAMES, picture=tmp_path / "a" / "c.png")
    with Image.open(tmp_path / "a" / "c.png") as picture:
        assert picture.size[0] > 100
    figure = draw_confusion(result()["confusion"], NAMES)
    shares = [text.get_text() for text in figure.axes[0].texts]
    assert shares == ["100", "0", "60", "40"]
    with pytest.raises(ValueError, match="png.*c.docx"):
        save_results({"encoder": result()}, NAMES, picture="c.docx")


def test_tensorboard_gets_scalars_picture_and_setting(tmp_path):
    save_results({"raw pixels": result()}, NAMES, tensorboard=tmp_path)
    events = EventAccumulator(str(tmp_path / "raw_pixels"))
    events.Reload()
    tags = events.Tags()["tensors"]
    assert {"test_top1", "test_top1_last", "confusion"} <= set(tags)
    (event,) = events.Tensors("test_top1")
    assert event.step == 3
    np.testing.assert_allclose(tf.make_ndarray(event.tensor_proto), 0.7)
    assert "hparams" in events.PluginTagToContent("hparams").__str__()
