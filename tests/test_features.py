"""`keras-moco features`, through the command line."""

import csv
import json
import pathlib

import keras
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import keras_moco as km
from keras_moco.cli import main


@pytest.fixture
def photos(tmp_path, monkeypatch, tiny_encoder):
    """Two class folders of files, one of them broken; an encoder of 8 px."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        folder = tmp_path / "photos" / name
        folder.mkdir(parents=True)
        for number in range(3):
            pixels = draw.integers(0, 255, (12, 12, 3), "uint8")
            Image.fromarray(pixels).save(folder / f"{number}, {name}.png")
    broken = tmp_path / "photos" / "cat" / "broken.png"
    broken.write_bytes(b"no image")
    tiny_encoder().save("encoder.keras")


def run(*arguments):
    arguments = ["features", "--encoder", "encoder.keras", *arguments]
    return CliRunner().invoke(main, list(map(str, arguments)))


OPTIONS = ["--images", "photos", "--max-broken", 0.2]


def test_arrays_hold_what_the_library_gives(photos):
    result = run(*OPTIONS, "--to", "out/features.npz")
    assert result.exit_code == 0, result.output
    assert "12 x 12 px, resized to the 8 px" in result.output
    assert "1 broken image file left out" in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    images = km.load_images("photos", max_broken=0.2)
    expected = km.features("encoder.keras", images)
    with np.load("out/features.npz") as found:
        np.testing.assert_allclose(found["features"], expected.features)
        assert found["names"].tolist() == expected.names
        assert found["class_names"][found["labels"]].tolist() == (
            ["cat"] * 3 + ["dog"] * 3
        )
    assert [p.name for p in pathlib.Path("out").iterdir()] == ["features.npz"]


def test_table_gives_every_number_back(photos):
    result = run(*OPTIONS, "--to", "features.csv")
    assert result.exit_code == 0, result.output
    with open("features.csv", newline="") as file:
        head, *lines = csv.reader(file)
    assert head == ["name", "label", *(f"feature_{i}" for i in range(4))]
    assert lines[1][:2] == ["photos/cat/1, cat.png", "cat"]
    images = km.load_images("photos", max_broken=0.2)
    expected = km.features("encoder.keras", images).features
    numbers = np.array([line[2:] for line in lines]).astype("float32")
    np.testing.assert_allclose(numbers, expected, rtol=1e-6)


def test_images_without_labels_have_no_such_column(photos):
    result = run("--images", "photos/dog", "--to", "features.csv")
    assert result.exit_code == 0, result.output
    with open("features.csv") as file:
        assert file.readline().startswith("name,feature_0,")


def test_a_failure_leaves_no_file(photos, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    result = run(*OPTIONS, "--to", "out/features.npz")
    assert result.exit_code == 2 and "No space" in result.output
    assert list(pathlib.Path("out").iterdir()) == []


def test_bad_input_is_one_line_and_exit_code_2(photos):
    layers = [keras.Input((8, 8, 3)), keras.layers.Lambda(lambda x: x)]
    keras.Sequential([*layers, keras.layers.Flatten()]).save("code.keras")
    keras.Sequential([layers[0], keras.layers.ReLU()]).save("maps.keras")
    keras.Sequential([keras.Input((4,)), keras.layers.ReLU()]).save("v.keras")
    pathlib.Path("run").mkdir()
    pathlib.Path("run", "run.json").write_text(json.dumps({"settings": {}}))
    to = ["--to", "features.npz"]
    for arguments, words in (
        ([*OPTIONS, "--to", "features.txt"], "must end in .npz or .csv"),
        (["--images", "photos", *to], "1 of 7 image files are broken"),
        (["--images", "nowhere", *to], "Unknown dataset"),
        ([*OPTIONS, *to, "--encoder", "photos"], "no exported encoder"),
        ([*OPTIONS, *to, "--encoder", "code.keras"], "Python code"),
        ([*OPTIONS, *to, "--encoder", "maps.keras"], "one vector an image"),
        ([*OPTIONS, *to, "--encoder", "v.keras"], "takes (None, 4)"),
        ([*OPTIONS, *to, "--encoder", "run"], "has no checkpoint yet"),
        ([*OPTIONS, *to, "--image-size", 0], "--image-size must be from 1"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not pathlib.Path("features.npz").exists()
