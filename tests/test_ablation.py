"""The command: settings, seeds, what is reported and what goes on."""

import csv
import json
import pathlib
import sys

import pytest
from click.testing import CliRunner
from PIL import Image

from keras_moco.ablation.studies import STUDIES
from keras_moco.ablation.trial import Trial
from keras_moco.cli import main
from keras_moco.presets import parse_setting
from keras_moco.safety.lock import RunLock

SMALL = (
    "--width 2 --image-size 16 --batch-size 64 --epochs 1 --steps-per-epoch 2 "
    "--set head_output_dim=8"
).split()


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def ablation(*arguments):
    return CliRunner().invoke(main, ["ablation", *map(str, arguments)])


@pytest.fixture
def hollow(monkeypatch):
    """Runs that write their results at once; those in `failing` fail."""
    failing = set()
    code = (
        "import json, pathlib, sys\n"
        "folder, number, fails = pathlib.Path(sys.argv[1]), *sys.argv[2:]\n"
        "if fails == 'True':\n"
        "    sys.exit('Error: Out of memory. Halve --batch-size first.')\n"
        "folder.mkdir(parents=True)\n"
        "settings = {'queue_size': 64, 'batch_size': 8}\n"
        "files = {'run.json': {'settings': settings},\n"
        "    'linear.json': {'test_top1': 0.5 + int(number) / 100},\n"
        "    'metrics.jsonl': {'epoch': 1, 'loss': 3.0, 'seconds': 60.0},\n"
        "    'result.json': {'knn_top1': 0.4, 'knn_top1_untrained': 0.3,\n"
        "        'loss': 3.0, 'peak_memory_mb': 512, 'export': 'there'}}\n"
        "for name, content in files.items():\n"
        "    (folder / name).write_text(json.dumps(content) + '\\n')\n"
    )

    def next_command(self):
        if (self.run_dir / "result.json").exists():
            return None
        fails = str((self.setting, self.seed) in failing)
        words = [self.run_dir, str(self.seed), fails]
        return [sys.executable, "-c", code, *map(str, words)]

    monkeypatch.setattr(Trial, "next_command", next_command)
    return failing


def test_a_real_run_is_made_probed_and_reported(tmp_path):
    arguments = ["--vary", "queue_size=64", "--seeds", 1, *SMALL, "--to", "out"]
    result = ablation(*arguments)
    assert result.exit_code == 0, result.output
    assert all(len(line) <= 80 for line in result.output.splitlines())
    run = tmp_path / "out/runs/queue_size=64-seed-0"
    settings = json.loads((run / "run.json").read_text())["settings"]
    assert (settings["queue_size"], settings["width"]) == (64, 2)
    (row,) = csv.DictReader(open("out/runs.csv"))
    done = json.loads((run / "result.json").read_text())
    probe = json.loads((run / "linear.json").read_text())
    assert float(row["knn_top1"]) == done["knn_top1"]
    assert float(row["linear_top1"]) == probe["test_top1"]
    assert float(row["peak_memory_mb"]) == done["peak_memory_mb"] > 100
    for name in ("accuracy.png", "loss.png"):
        with Image.open(tmp_path / "out" / name) as picture:
            assert picture.size[0] > 300
    again = ablation(*arguments)
    assert "finished: 1;" in again.output and again.exit_code == 0


def test_a_failing_run_is_in_its_row_and_stops_no_other(hollow):
    hollow.add(("momentum=0.9", 1))
    arguments = ["--vary", "momentum=0.9,1", "--seeds", 3, "--to", "out"]
    result = ablation(*arguments, "--jobs", 2)
    assert result.exit_code == 1
    assert all(len(line) <= 80 for line in result.output.splitlines())
    assert "momentum=0.9 2/3 40.0 ± 0.0 51.0 ± 1.4" in result.output
    assert "momentum=1     3 40.0 ± 0.0 51.0 ± 1.0" in result.output
    line = "seed 1 failed: Out of memory. Halve --batch-size first."
    assert f"\n  {line}\n" in result.output
    assert (
        f"momentum=0.9, {line}" in pathlib.Path("out/ablation.md").read_text()
    )
    rows = list(csv.DictReader(open("out/runs.csv")))
    assert [row["error"][:13] for row in rows] == [
        "",
        "Out of memory",
        *[""] * 4,
    ]
    hollow.clear()
    again = ablation(*arguments)
    assert "Runs: 6 (settings: 2, seeds: 3); finished: 5" in again.output
    assert again.exit_code == 0
    assert "failed" not in pathlib.Path("out/ablation.md").read_text()


def test_more_values_and_seeds_join_those_there_are(hollow, monkeypatch):
    monkeypatch.setattr("keras_moco_apps.ablation.MINUTE", 0)
    ablation("--vary", "momentum=0.9", "--seeds", 1, "--to", "out")
    vary = ["--vary", "momentum=0.9,0.99"]
    result = ablation(*vary, "--seeds", 2, "--to", "out")
    assert "Runs: 4 (settings: 2, seeds: 2); finished: 1;" in result.output
    assert "\n1 of 4 runs, epoch 1 of 16\n" in result.output
    assert "72.1" in result.output  # The published figure.


def test_other_options_need_another_folder(hollow):
    assert ablation("--vary", "momentum=1", "--to", "out").exit_code == 0
    result = ablation("--vary", "momentum=1", "--to", "out", "--epochs", 9)
    assert result.exit_code == 2
    assert "holds an ablation of other options" in result.output
    assert len(result.output.splitlines()) == 1


def test_a_folder_of_other_files_is_left_alone():
    pathlib.Path("photos").mkdir()
    pathlib.Path("photos/1.jpg").write_bytes(b"x")
    result = ablation("--vary", "momentum=1", "--to", "photos")
    assert result.exit_code == 2
    assert "photos holds files that are no ablation" in result.output
    assert len(list(pathlib.Path("photos").iterdir())) == 1


def test_two_ablations_do_not_share_a_folder(hollow, monkeypatch):
    with RunLock("out"):
        monkeypatch.setattr("os.getpid", lambda: -1)
        result = ablation("--vary", "momentum=1", "--to", "out")
    assert result.exit_code == 2
    assert "Another ablation is at work in out" in result.output


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "one is needed"),
        (["--vary", "momentum=1", "--study", "momentum"], "not both"),
        (["--vary", "momentun=1"], "Did you mean momentum"),
        (["--study", "queues"], "Did you mean queue-size"),
        (["--vary", "momentum=fast"], "Received: 'fast'"),
        (["--vary", "momentum=2"], "`momentum` must be in [0, 1]"),
        (["--vary", "momentum="], "FIELD=VALUE,VALUE"),
        (["--vary", "momentum=1,1.0"], "a value is there twice"),
        (["--vary", "momentum=1", "--seeds", "0"], "--seeds must be >= 1"),
        (["--vary", "momentum=1", "--jobs", "0"], "--jobs must be >= 1"),
        (["--vary", "momentum=1", "--set", "momentum=0"], "Leave one"),
        (["--vary", "epochs=1", "--epochs", "2"], "epochs: set for all runs"),
        (["--vary", "momentum=1", "--preset", "moco"], "Did you mean moco_v"),
        (["--vary", "momentum=1", "--dataset", "stl1"], "Unknown dataset"),
        (["--vary", "encoder=resnet18,resnet19"], "Did you mean resnet18"),
        (
            ["--vary", "batch_size=64,5", "--set", "batch_norm_groups=4"],
            "4, ba",
        ),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(arguments, words):
    result = ablation(*arguments, "--to", "out")
    assert result.exit_code == 2
    assert words.lower() in result.output.lower()
    assert len(result.output.splitlines()) == 1
    assert not pathlib.Path("out").exists()


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_is_a_command_of_pretrain(name):
    folder = pathlib.Path("out")
    pretrain = main.get_command(None, "pretrain")
    for setting, fields in STUDIES[name].settings.items():
        trial = Trial(folder, setting, fields, 5, ["--epochs", "2"])
        words = trial.next_command()
        assert words[1:4] == ["-m", "keras_moco.cli", "pretrain"]
        options = pretrain.make_context("pretrain", words[4:]).params
        assert (options["seed"], options["epochs"]) == (5, 2)
        assert dict(map(parse_setting, options["settings"])) == fields
