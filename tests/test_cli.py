import json
import pathlib
import shlex
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from keras_moco.cli import main

SMALL = (
    "--width 2 --image-size 16 --batch-size 64 --epochs 2 --steps-per-epoch 2 "
    "--set queue_size=64"
).split()


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def invoke(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def keras_moco(*arguments, **options):
    command = [sys.executable, "-m", "keras_moco.cli", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, **options
    )


def assert_refused(result, *words):
    """One line on standard error, exit code 2, no traceback."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.output
    for word in words:
        assert word in lines[0]


@pytest.mark.parametrize(
    "arguments",
    [[], *([name] for name in sorted(main.commands))],
    ids=lambda a: a[0] if a else "group",
)
def test_every_help_answers(arguments):
    result = invoke(*arguments, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())


def test_presets_are_listed_and_shown():
    listed = invoke("presets").output
    for name in ("moco_v1", "moco_v2", "cifar10", "stl10", "demo"):
        assert f"\n{name}\n" in f"\n{listed}"
    assert all(len(line) <= 80 for line in listed.splitlines())
    shown = invoke("presets", "moco_v2").output
    assert "queue_size           65536" in shown
    assert "crop_scale           0.2,1" in shown
    assert_refused(invoke("presets", "moco_v4"), "Did you mean moco_v")


def test_pretrain_knn_and_export_from_the_shell(tmp_path):
    """The whole way, as separate processes, quietly."""
    done = keras_moco("pretrain", *SMALL)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "Next     keras-moco knn" in done.stdout
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    result = json.loads((tmp_path / "runs/shapes-demo/result.json").read_text())
    next_command = done.stdout.split("keras-moco ")[-1].split()
    done = keras_moco(*next_command, "--json", "knn.json")
    assert done.returncode == 0, done.stderr
    measured = json.loads((tmp_path / "knn.json").read_text())["knn_top1"]
    assert measured == pytest.approx(result["knn_top1"], abs=0.002)
    again = keras_moco("pretrain", *SMALL, "--quiet")
    assert (again.returncode, again.stdout + again.stderr) == (0, "")
    done = keras_moco("export", "runs/shapes-demo", "--to", "out")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "saved_model.pb").is_file()
    assert (
        json.loads((tmp_path / "out" / "card.json").read_text())["steps"] == 4
    )


def test_interrupt_leaves_a_run_that_goes_on(tmp_path):
    options = [*SMALL, "--epochs", 40, "--knn-every", 0, "--fresh"]
    command = [sys.executable, "-m", "keras_moco.cli", "pretrain", *options]
    with subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        metrics = tmp_path / "runs" / "shapes-demo" / "metrics.jsonl"
        deadline = time.time() + 120
        while time.time() < deadline and process.poll() is None:
            if metrics.exists() and metrics.read_text().count("\n") >= 2:
                break
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "SIGINT: stopping after this step" in output
    assert "Traceback" not in output
    *_, command = output.strip().partition("Go on    keras-moco ")
    assert "--fresh" not in command
    assert command.endswith("--run-dir runs/shapes-demo")
    again = keras_moco(*shlex.split(command))
    assert again.returncode == 0, again.stderr
    assert "Going on after" in again.stdout
    epochs = [json.loads(row)["epoch"] for row in metrics.open()]
    assert epochs == list(range(1, 41))


def photographs(folder, count=20):
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for number in range(count):
        pixels = draw.integers(0, 255, (20, 20, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02}.png")


def test_broken_images_are_named_counted_and_refused_beyond_the_share(
    tmp_path,
):
    photographs(tmp_path / "photos")
    (tmp_path / "photos" / "broken.jpg").write_bytes(b"no image")
    options = "--dataset photos --encoder resnet18 --batch-size 4".split()
    options += ["--epochs", 1, *SMALL[:2], "--set", "queue_size=8"]
    result = invoke("pretrain", *options)
    assert_refused(result, "1 of 21", "broken.jpg", "--max-broken")
    assert not pathlib.Path("runs").exists()
    result = invoke("pretrain", *options, "--max-broken", 0.1)
    assert result.exit_code == 0, result.output
    assert "1 broken image file" in result.output
    assert "broken.jpg" in result.output


def test_images_that_break_off_are_found_while_training(tmp_path):
    # Of different sizes, so that only headers are read before the first step.
    draw = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(12):
        pixels = draw.integers(0, 255, (30 + number, 40, 3)).astype(np.uint8)
        file = tmp_path / "photos" / f"{number:02}.png"
        Image.fromarray(pixels).save(file)
        if number in (3, 7):
            file.write_bytes(file.read_bytes()[:700])
    options = "--dataset photos --encoder resnet18 --batch-size 4".split()
    options += ["--epochs", 1, *SMALL[:4], "--set", "queue_size=8"]
    result = invoke("pretrain", *options, "--run-dir", "strict")
    assert_refused(result, "of 12 image files are broken", ".png")
    result = invoke("pretrain", *options, "--max-broken", 0.2)
    assert result.exit_code == 0, result.output
    assert "2 broken image files left out" in result.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--dataset", "stl"], ["stl", "stl10"]),
        (["--dataset", "nowhere/photos"], ["nowhere/photos"]),
        (["--preset", "mocov2"], ["Did you mean moco_v2"]),
        (["--set", "queuesize=1"], ["Did you mean queue_size"]),
        (["--set", "momentum=2"], ["`momentum` must be in [0, 1]"]),
        (["--set", "temperature=-1"], ["`temperature` must be > 0"]),
        (["--batch-size", "9000"], ["batch_size=9000"]),
        (["--epochs", "0"], ["`epochs` must be >= 1"]),
        (["--encoder", "resnet19"], ["Did you mean resnet18"]),
        (["--encoder", "vgg"], ["keras.applications/VGG16"]),
        (["--encoder", "vit_tiny", "--width", "8"], ["`width`", "vit_tiny"]),
        (["--encoder", "vit_tiny", "--image-size", "30"], ["Nearest: 32"]),
        (
            ["--encoder", "keras.applications/Xception"],
            ["32 pixels", "`image_size`", "71"],
        ),
        (["--jit", "maybe"], ["auto, on, off"]),
        (["--batch-size", "100", "--set", "batch_norm_groups=8"], ["100"]),
        (["--batch-size", "8", "--set", "batch_norm_groups=8"], ["2 samples"]),
        (["--run-dir", "file/run"], ["folder"]),
        (["--dataset", "cifar10", "--data-dir", "tfds"], ["--data-dir"]),
    ],
    ids=lambda value: " ".join(value) if value[0].startswith("--") else "",
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, arguments, words):
    pathlib.Path("file").write_text("x")
    assert_refused(invoke("pretrain", *arguments), *words)
    assert not pathlib.Path("runs").exists()
    assert not pathlib.Path("saved_models").exists()


def test_knn_and_export_refuse_what_they_cannot_use(tmp_path):
    (tmp_path / "empty").mkdir()
    assert_refused(invoke("knn", "--encoder", "empty"), "no exported encoder")
    assert_refused(invoke("export", "empty", "--to", "out"), "no run folder")


def test_a_full_disk_is_one_line(monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("keras_moco.monitoring.run.RunFolder.write", full)
    assert_refused(invoke("pretrain", *SMALL, "--knn-every", 0), "No space")


@pytest.mark.slow
def test_a_tfds_dataset_by_its_name(fashion_dir, tmp_path):
    options = ["--encoder", "resnet18", "--data-dir", fashion_dir, *SMALL]
    options += ["--epochs", 1, "--knn-every", 0, "--image-size", 28]
    result = invoke("pretrain", "--dataset", "fashion_mnist", *options)
    assert result.exit_code == 0, result.output
    assert (
        "fashion_mnist: 60,000 images, 28x28; preset moco_v2" in result.output
    )
    folder = tmp_path / "runs" / "fashion_mnist-moco_v2"
    run = json.loads((folder / "run.json").read_text())
    assert run["settings"]["data"].startswith("fashion_mnist, 60000 images")


def test_preview_draws_the_views(tmp_path):
    result = invoke("preview", "--image-size", 16, "--rows", 1, "--pairs", 1)
    assert result.exit_code == 0, result.output
    assert (tmp_path / "views.png").read_bytes()[:4] == b"\x89PNG"
    assert_refused(invoke("preview", "--rows", 0), "rows=0")


def test_bench_prints_and_writes_its_figures(tmp_path):
    options = [*SMALL[:6], "--steps", 2, "--json", "bench.json"]
    result = invoke("bench", "--data-only", *options)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "bench.json").read_text())
    assert figures["data_images_per_second"] > 0
    assert figures["settings"]["batch_size"] == 64
    assert "data_images_per_second" in result.output
    nothing = invoke("bench", "--data-only", "--step-only")
    assert_refused(nothing, "nothing to measure")
    assert_refused(invoke("bench", "--threads", 0), "--threads must be")
