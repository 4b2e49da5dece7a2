import json
import math
import os
import pathlib
import shutil
import signal
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import keras_moco as km
from keras_moco.pretraining import export_run

SMALL = {
    "settings": ("queue_size=64", "head_output_dim=8"),
    "width": 2,
    "image_size": 16,
    "batch_size": 64,
    "epochs": 2,
    "steps_per_epoch": 2,
    "verbose": False,
}

QUICK = {**SMALL, "knn_every": 0}  # Where accuracy is beside the point.


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def small_shapes(monkeypatch):
    """The built-in data, a few hundred of them."""
    counts = {"pretrain": 256, "train": 256, "test": 64}
    monkeypatch.setattr("keras_moco.data.sources._SHAPES_COUNTS", counts)


def files(folder):
    return {str(p.relative_to(folder)) for p in folder.rglob("*")}


def test_a_run_leaves_its_folder_and_an_export(tmp_path, small_shapes, capsys):
    result = km.pretrain(**{**SMALL, "verbose": True}, log_format="json")
    lines = list(map(json.loads, capsys.readouterr().out.splitlines()))
    assert [line["epoch"] for line in lines if "epoch" in line] == [1, 2]
    assert lines[-1]["export"] == result["export"]
    assert all(line["text"] for line in lines)
    run = tmp_path / "runs" / "shapes-demo"
    names = {path.name for path in run.iterdir()}
    assert {"run.json", "metrics.jsonl", "result.json"} <= names
    assert any(name.startswith("events") for name in names)
    assert json.loads((run / "result.json").read_text()) == result
    assert set(result) == {
        "knn_top1",
        "knn_top1_untrained",
        "knn_top1_pixels",
        "loss",
        "images_per_second",
        "seconds",
        "peak_memory_mb",
        "run",
        "export",
    }
    about = json.loads((run / "run.json").read_text())
    assert about["settings"]["queue_size"] == 64
    assert about["settings"]["width"] == 2
    assert about["versions"]["keras"] == keras.__version__
    rows = (run / "metrics.jsonl").read_text().splitlines()
    last = json.loads(rows[-1])
    assert (last["epoch"], last["knn_top1"]) == (2, result["knn_top1"])
    assert {"alignment", "positive_histogram", "data_wait"} <= set(last)
    assert (run / "projector" / "sprite.png").is_file()
    encoder = km.load_encoder(result["export"])
    assert encoder.output_shape == (None, 16)
    card = json.loads((tmp_path / result["export"] / "card.json").read_text())
    assert card["settings"]["preset"] == "demo"


def test_the_same_seed_gives_the_same_metrics(small_shapes):
    runs = [km.pretrain(run_dir=name, **SMALL)["run"] for name in ("a", "b")]

    def values(run):
        with open(f"{run}/metrics.jsonl") as lines:
            rows = [json.loads(line) for line in lines]
        for row in rows:
            for name in ("seconds", "images_per_second", "data_wait"):
                row.pop(name, None)
        return rows

    assert values(runs[0]) == values(runs[1])


def test_a_finished_run_returns_its_result(small_shapes, capsys):
    first = km.pretrain(**SMALL)
    assert km.pretrain(**{**SMALL, "verbose": True}) == first
    assert "finished already" in capsys.readouterr().out


def test_a_run_is_finished_though_its_log_was_damaged(small_shapes):
    own = km.PRESETS["demo"].replace(queue_size=64, momentum=0.9)
    options = {**QUICK, "preset": own, "epochs": 1}
    first = km.pretrain(**options)
    run = pathlib.Path(first["run"])
    (run / "result.json").unlink()
    shutil.rmtree(first["export"])
    (run / "metrics.jsonl").write_text("{broken\n")
    again = km.pretrain(**options)
    assert again["run"] == first["run"]
    assert km.load_encoder(again["export"]).output_shape == (None, 16)
    assert "loss" not in again


def test_a_run_is_finished_where_its_data_have_moved(tmp_path, capsys):
    pixels = np.random.default_rng(0).integers(0, 255, (8, 16, 16, 3), np.uint8)
    (tmp_path / "photos").mkdir()
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "photos" / f"{number}.png")
    options = {**QUICK, "batch_size": 8, "steps_per_epoch": 1, "epochs": 1}
    options |= {"run_dir": "run", "export_to": "export"}
    km.pretrain("photos", "demo", **options)
    # As if it had been stopped at its end, before the export.
    (tmp_path / "run" / "result.json").unlink()
    shutil.rmtree("export")
    shutil.move("photos", "elsewhere")
    moved = km.pretrain("elsewhere", "demo", **options)
    again = km.pretrain("elsewhere", "demo", **{**options, "verbose": True})
    assert again == moved and moved["export"] == "export"
    assert "finished already" in capsys.readouterr().out


def test_other_settings_get_a_folder_of_their_own(tmp_path, small_shapes):
    km.pretrain(**QUICK)
    second = km.pretrain(**{**QUICK, "epochs": 1})
    assert second["run"].endswith("shapes-demo-2")
    with pytest.raises(ValueError, match="epochs was 2, now 1"):
        km.pretrain(**{**QUICK, "epochs": 1}, run_dir="runs/shapes-demo")


def test_the_export_of_another_run_is_left_alone(tmp_path, small_shapes):
    first = km.pretrain(**QUICK)
    other = {**QUICK, "epochs": 1, "run_dir": "elsewhere/shapes-demo"}
    second = km.pretrain(**other)
    assert second["export"] == first["export"] + "-2"
    with pytest.raises(ValueError, match="encoder of another run"):
        km.pretrain(**{**QUICK, "seed": 1}, export_to=first["export"])


def test_an_interrupted_run_goes_on(small_shapes, monkeypatch, capsys):
    whole = km.pretrain(run_dir="whole", **{**SMALL, "epochs": 3})
    step = km.MoCo.update_key_encoder
    calls = []

    def interrupted(model):
        step(model)
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # For the thread that reads it.

    monkeypatch.setattr(km.MoCo, "update_key_encoder", interrupted)
    options = {**SMALL, "epochs": 3, "verbose": True, "run_dir": "broken"}
    stopped = km.pretrain(**options)
    assert stopped == {"run": "broken", "stopped": "SIGTERM"}
    out = capsys.readouterr().out
    assert "SIGTERM: stopping after this step" in out
    assert "Stopped after 1 epochs and 1 steps of 3" in out
    monkeypatch.setattr(km.MoCo, "update_key_encoder", step)
    resumed = km.pretrain(**options)
    out = capsys.readouterr().out
    assert "Going on after 1 epochs and 1 steps, from broken" in out
    assert resumed["loss"] == whole["loss"]
    assert resumed["knn_top1"] == whole["knn_top1"]
    assert not (pathlib.Path("broken") / "lock").exists()


def test_a_fresh_run_leaves_the_other_alone(tmp_path, small_shapes):
    first = km.pretrain(**QUICK)
    before = files(tmp_path / "runs" / "shapes-demo")
    second = km.pretrain(fresh=True, checkpoint_every=1, **QUICK)
    assert second["run"] == first["run"] + "-2"
    assert files(tmp_path / "runs" / "shapes-demo") == before
    assert second["loss"] == first["loss"]


def test_too_little_memory_is_one_line(small_shapes, monkeypatch):
    def fail(*_, **__):
        raise tf.errors.ResourceExhaustedError(
            None, None, "OOM when allocating"
        )

    monkeypatch.setattr(km.MoCo, "fit", fail)
    with pytest.raises(ValueError) as error:
        km.pretrain(**SMALL)
    for part in ("batch_size 64", "16 px", "resnet18", "64 x 8", "float32"):
        assert part in str(error.value)


def test_a_flat_folder_of_photographs_needs_no_labels(tmp_path, capsys):
    draw = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(10):
        shape = (30 + number, 40, 3)
        pixels = draw.integers(0, 255, shape).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number}.jpg")
    (tmp_path / "photos" / "notes.txt").write_text("not an image")
    result = km.pretrain(
        "photos",
        settings=("queue_size=8", "head_hidden_dim=8"),
        encoder="resnet18",
        width=2,
        image_size=16,
        batch_size=4,
        epochs=1,
    )
    assert "knn_top1" not in result
    assert math.isfinite(result["loss"])
    assert result["run"] == "runs/photos-moco_v2"
    assert "No kNN accuracy" in capsys.readouterr().out


def test_an_encoder_of_the_users_own_is_taken(tiny_encoder):
    images = np.random.default_rng(0).integers(0, 255, (32, 8, 8, 3), np.uint8)
    result = km.pretrain(
        images,
        settings=("queue_size=16", "head_hidden_dim=8"),
        encoder=tiny_encoder(),
        batch_size=8,
        epochs=1,
        verbose=False,
    )
    assert km.load_encoder(result["export"]).output_shape == (None, 4)
    with pytest.raises(ValueError, match="not built by name"):
        export_run(result["run"], "out")


def test_an_encoder_of_another_input_size_is_refused(tiny_encoder):
    images = np.zeros((32, 16, 16, 3), np.uint8)
    with pytest.raises(ValueError, match=r"\(8, 8, 3\).*\(16, 16, 3\)"):
        km.pretrain(images, encoder=tiny_encoder(), batch_size=8, verbose=False)


def test_a_run_is_exported_as_it_is(small_shapes):
    result = km.pretrain(**QUICK)
    pathlib.Path(result["run"], "result.json").unlink()  # As if unfinished.
    folder = export_run(result["run"], "again")
    a, b, c = (
        km.load_encoder(place).get_weights()
        for place in (folder, result["export"], result["run"])
    )
    for x, y, z in zip(a, b, c, strict=True):
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(x, z)
    assert km.trained_image_size(result["run"]) == 16
    pixels = np.random.default_rng(0).integers(0, 255, (4, 16, 16, 3), np.uint8)
    found, exported = (
        km.features(result[place], pixels) for place in ("run", "export")
    )
    np.testing.assert_allclose(found.features, exported.features, atol=1e-6)


def test_mixed_precision_trains_and_exports_float32(small_shapes):
    result = km.pretrain(precision="mixed_bfloat16", **QUICK)
    assert math.isfinite(result["loss"])
    assert keras.config.dtype_policy().name == "float32"
    for place in (result["export"], result["run"]):
        features = km.load_encoder(place)(np.zeros((1, 16, 16, 3)))
        assert features.dtype == "float32"


def test_masking_is_on_where_the_queue_is_large_for_the_data(small_shapes):
    result = km.pretrain(**QUICK)
    with open(f"{result['run']}/run.json") as file:
        assert json.load(file)["settings"]["mask_same_image"] is True
    off = {**QUICK, "settings": (*SMALL["settings"], "mask_same_image=false")}
    result = km.pretrain(**off)
    with open(f"{result['run']}/run.json") as file:
        assert json.load(file)["settings"]["mask_same_image"] is False


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dataset": "shapess"}, "Did you mean.*shapes"),
        ({"preset": "demoo"}, "Did you mean demo"),
        ({"settings": ("queue=3",)}, "Did you mean queue_size"),
        ({"settings": ("momentum=1.5",)}, r"`momentum` must be in \[0, 1\]"),
        ({"settings": ("temperature=0",)}, "`temperature` must be > 0"),
        ({"batch_size": 10_000}, "batch_size=10000, images=256"),
        ({"batch_size": 1}, "`batch_size` must be >= 2"),
        ({"width": 10**8}, "`width` must be <= 8192"),
        (
            {"settings": ("queue_size=10000000000",)},
            "takes .* GB; this machine",
        ),
        ({"settings": (5,)}, "`settings` is of type str"),
        ({"preset": 5}, "`preset` is of type str"),
        ({"seed": 0.5}, "`seed` is of type int"),
        ({"epochs": 1.5}, "`epochs` is of type int"),
        ({"epochs": -1}, "`epochs` must be >= 1"),
        ({"width": 0}, "`width` must be >= 1"),
        ({"image_size": 0}, "`image_size` must be >= 1"),
        ({"steps_per_epoch": 0}, "`steps_per_epoch` must be >= 1"),
        ({"steps_per_epoch": 99}, "`steps_per_epoch` must be at most 4"),
        ({"seed": -1}, "`seed` must be >= 0"),
        ({"checkpoint_every": "often"}, "`checkpoint_every` must be a number"),
        ({"checkpoint_every": "0min"}, "`checkpoint_every` must be a number"),
        ({"keep_every_epochs": 0}, "`keep_every_epochs` must be >= 1"),
        ({"on_nan": "hope"}, "`on_nan` must be stop or skip"),
        ({"knn_every": -1}, "`knn_every` must be >= 0"),
        ({"precision": "float8"}, "`precision` must be one of"),
        ({"encoder": "resnet19"}, "'resnet19'. Did you mean resnet18"),
        ({"max_broken": 2}, "`max_broken`"),
        ({"export_to": "occupied"}, "left alone"),
        ({"export_to": "file/below"}, "is a file"),
        ({"run_dir": "same", "export_to": "same"}, "is the run folder"),
        ({"seed": 2**32}, "`seed` must be below"),
        ({"encoder": 5}, "`encoder` must be a name or a built"),
        ({"run_dir": "occupied"}, "no run"),
        ({"dataset": "empty"}, "No images in empty"),
    ],
    ids=str,
)
def test_bad_input_is_said_and_writes_nothing(
    tmp_path, small_shapes, options, message
):
    (tmp_path / "empty").mkdir()
    (tmp_path / "occupied").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "occupied" / "thesis.txt").write_text("x")
    before = files(tmp_path)
    with pytest.raises(ValueError, match=message):
        km.pretrain(**{**SMALL, **options})
    assert files(tmp_path) == before
