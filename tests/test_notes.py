import pytest

from keras_moco.notes import read_json


def test_what_we_write_is_read(tmp_path):
    path = tmp_path / "run.json"
    path.write_text('{"settings": {"image_size": null, "own": [1]}, "loss": 2}')
    found = read_json(path)
    assert found["settings"] == {"image_size": None, "own": [1]}
    assert found["loss"] == 2


@pytest.mark.parametrize(
    "text, words",
    [
        ("[1]", "no JSON object"),
        ("{", "Expecting"),
        ('{"settings": null}', "settings is None"),
        ('{"settings": {"queue_size": "many"}}', "queue_size is 'many'"),
        ('{"epochs": true}', "epochs is True"),
        ('{"baselines": {"knn_top1_pixels": null}}', "knn_top1_pixels is None"),
        ('{"export": 5}', "export is 5"),
    ],
)
def test_values_of_another_kind_are_named(tmp_path, text, words):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read_json(path)
