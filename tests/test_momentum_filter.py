"""`keras-moco momentum-filter`, through the command line."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import keras_moco as km
from keras_moco.cli import main


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    return CliRunner().invoke(main, ["momentum-filter", *map(str, arguments)])


def numbers(line):
    return [float(part.replace(",", "")) for part in line.split()]


def ramp_rows(output):
    """Momentum, time constant, lag, closed form, noise, closed form."""
    lines = output.split("(1+m)\n", 1)[1].splitlines()
    return [numbers(line) for line in lines if re.match(r" +[0-9.]+ ", line)]


def test_ramp_is_measured_and_drawn_at_once_without_tensorflow():
    code = (
        "import sys; from keras_moco.cli import main; "
        "main(['momentum-filter', '--momentum', '0.9,0', '--to', "
        "'out/filter.png'], standalone_mode=False); "
        "print({'keras', 'tensorflow'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    *output, heavy = done.stdout.splitlines()
    assert heavy == "set()"
    assert all(len(line) <= 80 for line in output)
    none, nine = ramp_rows("\n".join(output[:-1]) + "\n")
    assert none == [0, 1, 0, 0, 1, 1]
    assert nine == pytest.approx([0.9, 10, 9, 9, 1 / 19, 1 / 19], rel=0.05)
    assert len(list(pathlib.Path("out").iterdir())) == 1
    with Image.open("out/filter.png") as picture:
        assert picture.size[0] > 1000
        colours = picture.convert("RGB").getcolors(2**24)
    # The key at 0.9 in its blue; the one at 0 is the grey query.
    assert {(0, 0x72, 0xB2), (0x99,) * 3} <= {colour for _, colour in colours}


def test_seed_decides_the_noise():
    arguments = ("--momentum", 0.9, "--steps", 100, "--seed")
    first, again, other = (run(*arguments, seed) for seed in (0, 0, 1))
    assert first.exit_code == 0, first.output
    assert first.output == again.output != other.output


@pytest.mark.slow
def test_a_run_is_trained_recorded_and_measured(tiny_encoder, monkeypatch):
    monkeypatch.setattr(km, "resnet", lambda *_, **_size: tiny_encoder(16))
    arguments = ("--momentum", 0.5, "--steps", 40, "--to", "f.png")
    result = run(*arguments, "--train", 0.5)
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    text = " ".join(result.output.split())
    assert "100 recorded weights, 40 steps at momentum 0.5" in text
    different, apart = map(
        float, re.search(r"at most (\S+) \(.*? up to (\S+)\.", text).groups()
    )
    assert different < 1e-6 < 1e-5 < apart
    assert "0.333333 if their steps are" in text
    with Image.open("f.png") as picture:
        assert picture.size[1] > 1000  # Two rows.
    again = run(*arguments, "--trace", "f.npz")
    assert again.exit_code == 0, again.output
    measured = again.output[again.output.index("100 recorded") :]
    assert (
        measured.splitlines()[:-1]
        == (
            result.output[result.output.index("100 recorded") :].splitlines()[
                :-2
            ]
        )
    )


def test_bad_input_is_one_line_and_exit_code_2():
    still = np.zeros((41, 3), "float32")
    half = np.full(40, 0.5)
    moving = np.random.default_rng(0).random((41, 3), "float32")
    for name, query, momenta in (
        ("still", still, half),
        ("short", moving[:10], half[:9]),
        ("ragged", moving, half[:9]),
        ("nan", moving * np.nan, half),
        ("frozen", moving, half * 2),
        ("rising", moving, np.linspace(0.5, 0.9, 40)),
    ):
        np.savez(f"{name}.npz", query=query, key=query, momentum=momenta)
    np.savez("other.npz", features=still)
    np.save("array.npy", still)
    pathlib.Path("text.npz").write_text("no trace")
    pathlib.Path("empty.npz").touch()
    own = "must be a file by keras_moco.WeightTrace"
    for arguments, words in (
        (["--momentum", "0.9,1"], "in [0, 1)"),
        (["--momentum", "nan"], "in [0, 1)"),
        (["--momentum", "a"], "Received: a"),
        (["--momentum", "0,.1,.2,.3,.4,.5,.6"], "at most 6"),
        (["--steps", 9999], "--steps must be at least 10,000"),
        (["--momentum", "0.99999"], "at most 100,000"),
        (["--seed", -1], "--seed must be >= 0"),
        (["--train", 1], "in [0, 1)"),
        (["--train", 0.5, "--trace", "still.npz"], "leave out --trace"),
        (["--to", "x.txt"], "must end in .png"),
        (["--to", "empty.npz/x.png"], "empty.npz is a file"),
        (["--to", "folder.png"], "is a folder"),
        (["--trace", "nowhere.npz"], own),
        (["--trace", "other.npz"], own),
        (["--trace", "array.npy"], own),
        (["--trace", "text.npz"], own),
        (["--trace", "empty.npz"], own),
        (["--trace", "ragged.npz"], own),
        (["--trace", "still.npz"], "do not move"),
        (["--trace", "nan.npz"], "not finite"),
        (["--trace", "short.npz"], "at least 20"),
        (["--trace", "rising.npz"], "constant momentum; that of the trace"),
        (["--trace", "frozen.npz"], "in [0, 1). Received: 1"),
    ):
        pathlib.Path("folder.png").mkdir(exist_ok=True)
        result = run(*arguments)
        assert result.exit_code == 2, (arguments, result.output)
        assert words in result.stderr, result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not list(pathlib.Path().glob("momentum_filter*"))
