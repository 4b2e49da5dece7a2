"""The programs on top: through the command line, and as files."""

import json
import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import keras_moco as km
from keras_moco.cli import main

APPS = pathlib.Path(__file__).parents[1] / "apps"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def shades(tmp_path):
    """Class folders of dark and bright images, and an encoder's export."""
    draw = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 8)):
        for name, shade in (("bright", 180), ("dark", 20)):
            folder = tmp_path / "shades" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = shade + draw.integers(0, 60, (8, 8, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(
                    folder / f"{number}.png"
                )
    encoder = km.resnet("resnet18", 8, 2)
    km.export_encoder(encoder, "export", {"settings": {"image_size": 8}})


def run(*arguments):
    return CliRunner().invoke(main, ["linear-probe", *map(str, arguments)])


def test_linear_probe_from_the_shell(shades):
    result = run(
        "--encoder", "export", "--dataset", "shades", "--baselines",
        "--json", "probe.json", "--picture", "out/confusion.png",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for name in ("encoder", "untrained", "raw pixels"):
        assert f"{name:10} top-1" in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    found = json.loads(pathlib.Path("probe.json").read_text())
    assert set(found["per_class"]) == {"bright", "dark"}
    assert found["baselines"]["raw pixels"]["test_top1"] == 1.0
    assert 0 <= found["test_top1"] <= 1
    with Image.open("out/confusion.png") as picture:
        assert picture.size[0] > 100


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--encoder", "nowhere"], "no exported encoder"),
        (["--encoder", "export", "--dataset", "flat"], "no split 'test'"),
        (["--encoder", "export", "--dataset", "nosuch"], "Unknown dataset"),
        (
            ["--encoder", "export", "--dataset", "lone"],
            "Evaluation needs labels",
        ),
        (["--encoder", "export", "--dataset", "more"], "images lack: grey"),
        (["--encoder", "nan", "--dataset", "shades"], "train/bright/0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(shades, arguments, words):
    pathlib.Path("flat").mkdir()
    Image.new("RGB", (8, 8)).save("flat/a.png")
    shutil.copytree("shades", "more")
    shutil.copytree("more/test/dark", "more/test/grey")
    for split in ("train", "test"):  # One class only is no class.
        shutil.copytree(f"shades/{split}/dark", f"lone/{split}/dark")
    if "nan" in arguments:
        encoder = km.load_encoder("export")
        weights = encoder.get_weights()
        encoder.set_weights([np.nan * weight for weight in weights])
        km.export_encoder(encoder, "nan", {"settings": {"image_size": 8}})
    result = run(*arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.output.splitlines()) == 1


def test_apps_are_commands_and_files():
    listed = CliRunner().invoke(main, ["--help"]).output
    for path in APPS.glob("*.py"):
        if path.stem == "__init__":
            continue
        assert path.stem.replace("_", "-") in listed
        done = subprocess.run(
            [sys.executable, path, "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0 and "--encoder" in done.stdout
