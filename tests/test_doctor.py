import keras
import pytest
from click.testing import CliRunner

from keras_moco.cli import main
from keras_moco.doctor import look_at_machine, num_activations

SMALL = (
    "--width 2 --image-size 16 --batch-size 64 --steps-per-epoch 2 "
    "--set queue_size=64"
).split()


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def doctor(*arguments):
    return CliRunner().invoke(main, ["doctor", *map(str, arguments)])


def test_a_good_run_is_foretold_and_nothing_written(tmp_path, monkeypatch):
    half = "keras_moco.doctor.seconds_per_step"
    monkeypatch.setattr(half, lambda model, images, preset, steps: 0.5)
    result = doctor(*SMALL, "--run-dir", "not/yet/there")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert {line[:9].strip() for line in lines} == {"ok", "note", ""}
    assert "shapes: 8,000 images, 16x16" in result.output
    text = " ".join(result.output.split())
    assert "4 epochs of 2 steps take about 4 s, at 128 images/s" in text
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--batch-size", 9000], "batch_size=9000, images=8000"),
        (["--set", "batch_norm_groups=7"], "batch_norm_groups=7"),
        (["--dataset", "nowhere/photos"], "nowhere/photos"),
        (["--devices", 99], "`devices` must be"),
    ],
)
def test_what_would_fail_is_a_problem_and_exit_code_1(arguments, words):
    result = doctor(*SMALL, *arguments)
    assert result.exit_code == 1
    text = " ".join(result.output.split())
    assert "problem" in text and words in text


def test_activations_are_the_outputs_of_all_layers():
    inner = keras.Sequential([keras.Input((16,)), keras.layers.Dense(5)])
    images = keras.Input((None, None, 3))
    x = keras.layers.Conv2D(4, 3, padding="same")(images)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.layers.Dense(16)(x)
    encoder = keras.Model(images, inner(x))
    assert num_activations(encoder, 8) == 8 * 8 * 4 + 4 + 16 + 5
    assert num_activations(keras.layers.Dense(3), 8) == 0


def test_this_machine_is_looked_at(tmp_path):
    machine = look_at_machine(tmp_path / "a" / "b")
    assert machine.versions["keras"] == keras.__version__
    assert machine.cores >= 1 and machine.memory_bytes > 0
    assert machine.disk_bytes > 0


def test_one_timed_step_is_refused():
    result = doctor("--timed-steps", 1)
    assert result.exit_code == 2 and "at least 2" in result.output
