"""The page of runs: built from folders as `pretrain` leaves them."""

import html
import json
import pathlib
import re
import shutil
import subprocess

import numpy as np
import pytest
from click.testing import CliRunner
from keras_moco_apps.report import spans
from PIL import Image

import keras_moco as km
from keras_moco.cli import main
from keras_moco.monitoring.verdict import Verdict

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
NASTY = '<b>&"$x$_'


@pytest.fixture(scope="module")
def shades(tmp_path_factory):
    """Class folders of dark and bright images, and an encoder of 8 px."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 8)):
        for name, shade in ((f"bright {NASTY}", 180), ("dark", 20)):
            (folder / "shades" / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = shade + draw.integers(0, 60, (8, 8, 3))
                image = Image.fromarray(pixels.astype(np.uint8))
                image.save(folder / f"shades/{split}/{name}/{number}.png")
    return folder / "shades"


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_run(name, data="array, 9 images, x", epochs=3, **changes):
    """A run folder without training."""
    preset = {"queue_size": 16, "batch_size": 4, "epochs": 3, "seed": 0}
    preset |= {"encoder": "resnet18", "width": 2, "image_size": 8}
    settings = {"data": data, **preset, "precision": "float32", **changes}
    path = pathlib.Path(name)
    path.mkdir(parents=True)
    baselines = {"knn_top1_untrained": 0.3, "knn_top1_pixels": 0.25}
    about = {"settings": settings, "baselines": baselines}
    (path / "run.json").write_text(json.dumps(about))
    with open(path / "metrics.jsonl", "w") as lines:
        for epoch in range(1, epochs + 1):
            row = {"epoch": epoch, "loss": 3.0 - 0.5 * epoch}
            row |= {"knn_top1": 0.2 * epoch, "images_per_second": 100.0}
            row |= {"queue_fill": min(1.0, epoch / 2), "contrast_top1": 0.1}
            lines.write(json.dumps(row) + "\n")
    return settings


def report(*arguments):
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def page(*runs):
    result = report(*runs, "--to", "report.html")
    assert result.exit_code == 0, result.output
    return pathlib.Path("report.html").read_text()


def words(text):
    """What a reader sees of a page."""
    text = re.sub(r"<style>.*?</style>", " ", text, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def full_run(shades, name="full"):
    """A finished run with its export and a probe."""
    images = km.load_images(str(shades), "pretrain")
    data = f"{images.source}, {len(images)} images, {images.fingerprint}"
    settings = make_run(name, data)
    encoder = km.resnet("resnet18", 8, 2)
    km.export_encoder(encoder, "export", {"settings": settings})
    result = {"export": "export", "images_per_second": 99.0}
    pathlib.Path(name, "result.json").write_text(json.dumps(result))
    probe = {"confusion": [[5, 3], [0, 8]], "test_top1": 13 / 16}
    probe["per_class"] = {NASTY: 0.625, "dark": 1.0}
    pathlib.Path(name, "probe.json").write_text(json.dumps(probe))


def test_a_page_of_two_runs_holds_all_and_opens_on_a_phone(shades, tmp_path):
    full_run(shades)
    make_run(NASTY, temperature=0.5)
    text = page("full", NASTY)
    seen = words(text)
    for part in (
        "Nearest neighbours",
        "Map of features, by class",
        "top-1 81.2 %",
        "kNN top-1 60.0 % (untrained 30.0 %, raw pixels 25.0 %)",
        "Images: full Views images beside",
        "not shown",  # the data of the second run
        "≠ temperature - 0.5",
        NASTY,
    ):
        assert part in seen, part
    assert len(re.findall("Epochs? 1[: ]", seen)) == 2  # A verdict a run.
    assert "<b>" not in text and "http://" not in words(text)
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert len(text) < 5e6
    if CHROMIUM is None:
        pytest.skip("without Chromium the page was read, not opened")
    opened_in_chromium(text, tmp_path)


def opened_in_chromium(text, folder):
    """The page on a phone: its pictures load and nothing sticks out."""
    measure = """<script>addEventListener("load", () => {
      const found = {
        width: innerWidth,
        needed: document.documentElement.scrollWidth,
        loaded: [...document.images].map(i => i.complete && i.naturalWidth),
      };
      document.body.textContent = "FOUND" + JSON.stringify(found) + "END";
    })</script>"""
    (folder / "phone.html").write_text(text.replace("</body>", measure))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu"]
    command += ["--window-size=360,2000", "--dump-dom"]
    done = subprocess.run(
        [*command, (folder / "phone.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = json.loads(re.search("FOUND(.*?)END", done.stdout)[1])
    assert found["needed"] <= found["width"] <= 500
    assert len(found["loaded"]) == text.count("<img ") >= 7
    assert all(width > 0 for width in found["loaded"])


def test_settings_that_differ_are_marked():
    make_run("a")
    make_run("b")
    make_run("c", seed=1)
    assert 'class="differs"' not in page("a", "b")
    text = page("a", "b", "c")
    assert text.count('class="differs"') == 1 and "≠ seed 0 0 1" in words(text)


def test_verdicts_that_follow_each_other_are_one():
    names = ["filling", "filling", "learning", "filling"]
    verdicts = [Verdict(name, f"{name} now") for name in names]
    found = spans([{"epoch": n} for n in (1, 2, 3, 4)], verdicts)
    assert [(s["name"], s["first"], s["last"]) for s in found] == [
        ("filling", 1, 2),
        ("learning", 3, 3),
        ("filling", 4, 4),
    ]
    assert found[1]["sentence"] == "learning now"


def test_a_broken_line_is_said_and_the_rest_left_out():
    make_run("a")
    with open("a/metrics.jsonl", "a") as lines:
        lines.write('{"epoch": 4, "lo\n{"epoch": 5, "loss": 1.0}\n')
    seen = words(page("a"))
    assert "Line 4 of metrics.jsonl is damaged" in seen
    assert "3 of 3 epochs" in seen


def test_a_diverged_run_has_a_page():
    make_run("a", epochs=1)
    with open("a/metrics.jsonl", "a") as lines:
        lines.write('{"epoch": 2, "loss": NaN}\n')
    assert "diverged" in words(page("a"))


def test_data_that_changed_are_not_shown(shades):
    make_run("a", f"{shades}, 24 images, 0123456789ab")
    result = report("a", "--to", "report.html")
    assert "no longer those of the run" in " ".join(result.output.split())
    assert "no longer those of the run" in words(page("a"))


def spoil():
    """The folders of the cases below."""
    pathlib.Path("files").mkdir()
    pathlib.Path("files/notes.txt").write_text("x")
    make_run("empty", epochs=0)
    make_run("first", epochs=0)
    pathlib.Path("first/metrics.jsonl").write_text("{broken")
    make_run("damaged")
    pathlib.Path("damaged/run.json").write_text("{")
    make_run("lacking")
    pathlib.Path("lacking/run.json").write_text('{"settings": {}}')
    make_run("odd", queue_size="many")
    make_run("good")
    pathlib.Path("folder.html").mkdir()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["nowhere", "--to", "x.html"], "no run folder"),
        (["files", "--to", "x.html"], "no run folder"),
        (["empty", "--to", "x.html"], "no finished epoch yet."),
        (["first", "--to", "x.html"], "line 1 of metrics.jsonl is damaged"),
        (["damaged", "--to", "x.html"], "run.json is damaged"),
        (["lacking", "--to", "x.html"], "it lacks"),
        (["odd", "--to", "x.html"], "queue_size is 'many'"),
        (["good", "--to", "good/run.json"], "--to must end in .html"),
        (["good", "--to", "folder.html"], "--to must be a file"),
        (["good", "--to", "good/run.json/x.html"], "run.json is a file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, message):
    spoil()
    result = report(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert len(result.output.splitlines()) == 1
    assert not pathlib.Path("x.html").exists()
    assert json.loads(pathlib.Path("good/run.json").read_text())


def test_a_full_disk_is_one_line_and_leaves_the_old_page(monkeypatch):
    make_run("a")
    pathlib.Path("x.html").write_text("old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pathlib.Path, "write_text", full)
    result = report("a", "--curves-only", "--to", "x.html")
    assert result.exit_code == 2
    assert "No space left on device" in result.output.splitlines()[-1]
    assert pathlib.Path("x.html").read_text() == "old"
    assert not list(pathlib.Path().glob(".*tmp"))
