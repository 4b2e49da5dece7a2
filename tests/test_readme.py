"""What the README promises to work is run as it stands there."""

import pathlib
import re
from functools import partial

import numpy as np
import tensorflow as tf

import keras_moco as km

README = pathlib.Path(__file__).parents[1] / "README.md"


def blocks(language):
    text = README.read_text()
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def test_the_users_code_runs(tmp_path, monkeypatch, two_replicas):
    """On a few built-in images: the data sets of the README are downloads."""
    monkeypatch.chdir(tmp_path)
    counts = {"pretrain": 64, "train": 64, "test": 32}
    monkeypatch.setattr("keras_moco.data.sources._SHAPES_COUNTS", counts)
    (code,) = [
        block for block in blocks("python") if "pretrain_dataset" in block
    ]
    for old, new in (
        ('"stl10"', '"shapes"'),
        ("image_size=96", "image_size=16"),
        ("batch_size=256", "batch_size=32"),
        ("queue_size=16384", "queue_size=64, head_hidden_dim=8"),
        ("image_size=16)", "image_size=16, width=2)"),
        ("200", "2"),
        ("every=10", "every=1"),
        ("tf.distribute.MirroredStrategy()", "two_replicas"),
    ):
        assert old in code, old
        code = code.replace(old, new)
    code = code.replace(", image_size=16, width=2)\n", ", image_size=16)\n", 2)
    exec(compile(code, "README.md", "exec"), {"two_replicas": two_replicas})
    served = tf.saved_model.load("saved_models/stl10_resnet18")
    assert served.serve(np.zeros((1, 16, 16, 3), "float32")).shape == (1, 16)


def test_every_option_and_preset_that_is_named_exists():
    from keras_moco.cli import main

    text = README.read_text()
    commands = main.list_commands(None)
    known = {
        option
        for command in map(partial(main.get_command, None), commands)
        for parameter in command.params
        for option in parameter.opts
    }
    for command in blocks("sh"):
        for line in command.replace("\\\n", " ").splitlines():
            if "keras-moco " in line:
                used = set(re.findall(r"--[a-z][a-z-]+", line))
                assert used <= known | {"--help"}, used - known
    for name in km.PRESETS:
        assert f"`{name}`" in text, name


def test_the_two_commands_are_the_first_ones():
    start = README.read_text()[:2000]
    commands = re.findall(r"^    (python3 -m venv .*)$", start, re.MULTILINE)
    assert len(commands) == 2
    assert commands[0].endswith("keras-moco pretrain")
    assert commands[1].endswith("pytest")
