"""The programs on top: through the command line, and as files."""

import json
import pathlib
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from click.testing import CliRunner
from PIL import Image

import keras_moco as km
from keras_moco.cli import main

APPS = pathlib.Path(__file__).parents[1] / "apps"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Class folders of dark and bright images, and an encoder's export."""
    made = tmp_path_factory.mktemp("made")
    draw = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 8)):
        for name, shade in (("bright", 180), ("dark", 20)):
            folder = made / "shades" / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = shade + draw.integers(0, 60, (8, 8, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(
                    folder / f"{number}.png"
                )
    encoder = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )
    card = {"settings": {"image_size": 8}}
    km.export_encoder(encoder, made / "export", card)
    return made


@pytest.fixture
def shades(made, tmp_path):
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)


def run(*arguments, command="linear-probe"):
    return CliRunner().invoke(main, [command, *map(str, arguments)])


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
    assert not pathlib.Path("runs").exists()


@pytest.mark.parametrize("command", ["knn", "linear-probe", "finetune"])
def test_broken_images_are_left_out_up_to_a_share(shades, command):
    pathlib.Path("shades/train/dark/3.png").write_bytes(b"no image")
    usual = ["--encoder", "export", "--dataset", "shades"]
    if command == "finetune":
        usual += ["--epochs", 1, "--batch-size", 16]
    refused = run(*usual, command=command)
    assert refused.exit_code == 2
    assert "1 of 40 image files are broken" in refused.output
    found = run(*usual, "--max-broken", 0.03, command=command)
    assert found.exit_code == 0, found.output
    assert "top-1" in found.output


@pytest.mark.filterwarnings("default")  # It does not train for long.
def test_augmented_probe_from_the_shell(shades):
    arguments = (
        "--encoder", "export", "--dataset", "shades", "--protocol",
        "augmented", "--epochs", 1, "--batch-size", 16, "--baselines",
        "--json", "probe.json", "--run-dir", "my runs/probe",
    )  # fmt: skip
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "epoch 1/1" in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    found = json.loads(pathlib.Path("probe.json").read_text())
    assert found["setting"]["learning_rate"] == 30.0
    assert set(found["baselines"]) == {"untrained", "raw pixels"}
    for folder in ("probe", "probe-untrained", "probe-raw-pixels"):
        assert pathlib.Path("my runs", folder, "result.json").is_file()
    assert list(pathlib.Path("my runs/probe/encoder").glob("events*"))
    again = run(*arguments)
    assert again.exit_code == 0, again.output
    assert again.output.count("finished already") == 3
    assert json.loads(pathlib.Path("probe.json").read_text()) == found


def test_finetuning_from_the_shell(shades):
    result = run(
        "--encoder", "export", "--dataset", "shades", "--labels", "50%",
        "--epochs", 1, "--json", "out.json", "--export-to", "classifier",
        command="finetune",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "18 images to train on, 2 to choose by" in result.output
    assert "Classifier classifier" in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    found = json.loads(pathlib.Path("out.json").read_text())
    assert found["setting"]["labels"] == 0.5
    assert set(found["per_class"]) == {"bright", "dark"}
    served = tf.saved_model.load("classifier")
    assert served.class_names().numpy().tolist() == [b"bright", b"dark"]
    assert served.serve(np.zeros((1, 8, 8, 3), "float32")).shape == (1, 2)


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
        (["--encoder", "export", "--devices", "7"], "--devices is of"),
        (["--encoder", "export", "--run-dir", "x"], "--run-dir is of"),
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


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("protocol", ["features", "augmented"])
def test_constant_encoder_is_warned_of_in_one_line(shades, protocol):
    flat = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(4, kernel_initializer="zeros"),
        ]
    )
    flat.save("flat.keras")
    result = run(
        "--encoder", "flat.keras", "--dataset", "shades", "--epochs", 1,
        "--protocol", protocol,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "top-1 50.00 %" in result.output
    (line,) = [x for x in result.output.splitlines() if "onstant" in x]
    assert line == (
        "Warning: All features are constant: the encoder tells nothing apart."
    )


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--labels", "0%"], "more than 0%"),
        (["--labels", "101%"], "at most 100%"),
        (["--labels", "abc"], "Received: 'abc'"),
        (["--labels", "1%"], "each class needs two"),
        (["--learning-rate", "-1"], "learning_rate"),
        (["--image-size", "0"], "image_size"),
        (["--picture", "out.xyz"], "--picture must end in .png"),
        (["--json", "shades"], "--json must be a file"),
        (["--tensorboard", "shades/test/dark/0.png"], "0.png is a file"),
        (["--dataset", "flat"], "needs labels"),
        (["--dataset", "strange"], "training images lack: grey"),
        (["--encoder", "served"], "inference only"),
        (["--export-to", "export"], "no exported classifier"),
        (["--devices", "9"], "`devices` must be"),
    ],
)
def test_what_cannot_be_finetuned_is_one_line(shades, arguments, words):
    for name in ("flat/train/a.png", "flat/test/a.png"):
        pathlib.Path(name).parent.mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(name)
    shutil.copytree("shades", "strange")
    shutil.copytree("strange/test/dark", "strange/test/grey")
    shutil.copytree("export", "served")
    pathlib.Path("served/encoder.keras").unlink()
    usual = ["--encoder", "export", "--dataset", "shades"]
    result = run(*usual, *arguments, command="finetune")
    assert result.exit_code == 2, result.output
    assert words in result.output
    assert len(result.output.splitlines()) == 1
    assert not pathlib.Path("runs").exists()


def test_apps_are_commands_and_files():
    listed = CliRunner().invoke(main, ["--help"]).output
    for path in APPS.glob("*.py"):
        if path.stem == "__init__":
            continue
        assert path.stem.replace("_", "-") in listed
        done = subprocess.run(
            [sys.executable, path, "--help"], capture_output=True, text=True
        )
        assert done.returncode == 0
        assert done.stdout.startswith(f"Usage: {path.name} [OPTIONS]")
