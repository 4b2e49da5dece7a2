import json
import math
import pathlib

import numpy as np
import pytest

from keras_moco.ablation.studies import Study, parse_vary
from keras_moco.ablation.table import cells, summarize, table_lines
from keras_moco.ablation.trial import Trial, epochs, read_run, wobble
from keras_moco.safety.lock import RunLock


@pytest.fixture
def write_run(tmp_path):
    """A function that writes a run folder by hand."""

    def write(name="run", knn=0.5, losses=(3.0, 2.0), queue=255, **result):
        folder = tmp_path / name
        folder.mkdir()
        rows = [
            {"epoch": number + 1, "loss": loss, "seconds": 30.0}
            for number, loss in enumerate(losses)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "metrics.jsonl").write_text(text)
        settings = {"queue_size": queue, "batch_size": 64}
        files = {
            "run.json": {"settings": settings},
            "linear.json": {"test_top1": knn + 0.1},
            "result.json": {
                "knn_top1": knn,
                "loss": losses[-1],
                "peak_memory_mb": 2048,
                "export": "there",
                **result,
            },
        }
        for name, content in files.items():
            (folder / name).write_text(json.dumps(content))
        return folder

    return write


def test_wobble_is_the_deviation_of_noise_around_a_trend():
    assert wobble([5.0, 4.5, 4.0, 3.5]) == 0
    # Up and down by a: second differences of 4 a.
    swings = [1 + 0.1 * (-1) ** n for n in range(8)]
    assert math.isclose(wobble(swings), 0.4 / math.sqrt(6))
    noise = np.random.default_rng(0).normal(0, 0.3, 4000)
    trend = np.linspace(7, 5, 4000)
    assert abs(wobble(list(trend + noise)) - 0.3) < 0.02
    assert wobble([9.0, 0.0, 1.0, 2.0, 3.0, 4.0]) == 0  # The second half.
    assert wobble([1.0, 2.0]) is None


def test_a_finished_run_is_read(write_run):
    found = read_run(write_run(queue=255))
    assert found["knn_top1"] == 0.5 and found["linear_top1"] == 0.6
    assert math.isclose(found["chance_loss"], math.log(256))
    assert (found["seconds"], found["peak_memory_mb"]) == (60, 2048)
    assert "wobble" not in found  # Of two epochs there is none.
    in_batch = read_run(write_run("batch", queue=0))
    assert math.isclose(in_batch["chance_loss"], math.log(64))


@pytest.mark.parametrize("name", ["result.json", "run.json"])
def test_a_run_that_is_not_finished_has_no_figures(tmp_path, write_run, name):
    folder = write_run()
    (folder / name).unlink()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"epoch": 3, "lo')  # Broken off.
    assert read_run(folder) == {} and len(epochs(folder)) == 2
    assert read_run(tmp_path / "nowhere") == {}


def test_rows_are_means_and_deviations_over_seeds(write_run):
    study = parse_vary(["queue_size=255,511"])
    knn = {0: 0.40, 1: 0.43, 2: 0.47}
    runs = {
        ("queue_size=255", seed): write_run(f"{seed}", value)
        for seed, value in knn.items()
    }
    missing = pathlib.Path("nowhere")
    runs["queue_size=511", 0] = missing
    first, second = summarize(study, runs, {("queue_size=511", 0): "Why."})
    assert first["seeds"] == 3 and second["seeds"] == 0
    values = list(knn.values())
    assert math.isclose(first["knn_top1"], np.mean(values))
    assert math.isclose(first["knn_top1_std"], np.std(values, ddof=1))
    assert second["knn_top1"] is None and second["errors"] == {0: "Why."}
    head, one, two = cells([first, second], 3)
    assert one[:4] == ["queue_size=255", "3", "43.3 ± 3.5", "53.3 ± 3.5"]
    assert two[:4] == ["queue_size=511", "0/3", "-", "-"]
    assert "publ." not in head


def test_long_names_and_errors_stay_within_80_columns(write_run):
    names = ["encoder=" + 9 * "keras_cv/" + "x", "short"]
    study = Study({name: {} for name in names})
    runs = {(name, 0): write_run(str(n)) for n, name in enumerate(names)}
    errors = {("short", 1): "It " + 40 * "was " + "too large."}
    lines = table_lines(summarize(study, runs, errors), 2)
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("short") for line in lines)
    assert lines[-1].endswith("too large.")


def test_pretraining_comes_first_then_the_probe(tmp_path, write_run):
    trial = Trial(tmp_path, "+ blur", {"blur": (0.5, 0.5)}, 2, ["--width", "2"])
    assert trial.run_dir == tmp_path / "runs" / "+-blur-seed-2"
    command = " ".join(trial.next_command()[3:])
    assert command.startswith("pretrain --width 2 --set blur=0.5,0.5 --seed 2")
    trial.run_dir = write_run("run")
    assert trial.next_command() is None
    (trial.run_dir / "linear.json").unlink()
    command = " ".join(trial.next_command()[3:])
    assert command.startswith(f"linear-probe --encoder {trial.export} ")
    assert "--dataset shapes --seed 2" in command


def test_without_labels_there_is_no_probe(tmp_path, write_run):
    trial = Trial(tmp_path, "a", {}, 0, [])
    trial.run_dir = write_run("run", knn_top1=None)
    (trial.run_dir / "linear.json").unlink()
    assert trial.next_command() is None


def test_a_run_that_another_process_writes_is_busy(tmp_path, monkeypatch):
    trial = Trial(tmp_path, "a", {}, 0, [])
    assert not trial.is_busy()
    with RunLock(trial.run_dir):
        assert trial.is_busy()
    assert not trial.is_busy()
