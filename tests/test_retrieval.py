"""`keras-moco retrieval`, through the command line."""

import pathlib
import re
import shutil
import subprocess

import keras
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from keras_moco.cli import main

CHECK = """<script>
addEventListener("load", () => {
  const whole = [...document.images].filter(i => i.naturalWidth > 0).length;
  const fits = document.documentElement.scrollWidth <= innerWidth;
  document.body.dataset.found = `${whole} ${document.images.length} ${fits}`;
});
</script>"""


@pytest.fixture
def colours(tmp_path, monkeypatch):
    """Images of two shades in class folders; features are the mean colours."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for name, shade in (("a<b>&", (200, 40, 40)), ("blue", (40, 40, 200))):
        folder = tmp_path / "colours" / name
        folder.mkdir(parents=True)
        for number in range(5):
            pixels = np.array(shade) + draw.integers(0, 50, (8, 8, 3))
            file = folder / f"$x^ {number} <i>.png"
            Image.fromarray(pixels.astype("uint8")).save(file)
    layers = [keras.Input((8, 8, 3)), keras.layers.GlobalAveragePooling2D()]
    keras.Sequential(layers).save("encoder.keras")


def run(*arguments):
    arguments = ["--encoder", "encoder.keras", "--dataset", "colours",
                 *arguments]  # fmt: skip
    return CliRunner().invoke(main, ["retrieval", *map(str, arguments)])


def figures(page):
    """(class of the frame, cosine or None, title) of each image."""
    found = re.findall(
        r'<figure class="(\w*)">.*?title="(.*?)".*?<figcaption>(.*?)</fig',
        pathlib.Path(page).read_text(),
    )
    cosines = (re.search(r"\b[01]\.\d{3}\b", text) for *_, text in found)
    return [
        (kind, cosine and float(cosine.group()), title)
        for (kind, title, _), cosine in zip(found, cosines, strict=True)
    ]


def test_neighbours_are_those_of_the_features_and_marked(colours):
    result = run("--rows", 2, "--k", 9, "--to", "out/n.html")
    assert result.exit_code == 0, result.output
    assert "8 of 18 neighbours are of their query's class" in (
        " ".join(result.output.split())
    )
    found = figures("out/n.html")
    assert len(found) == 20
    for start in (0, 10):
        query, *others = found[start : start + 10]
        assert query[0] == "query" and query[1] is None
        # All other images; those of its own colour, and class, are nearest.
        assert [kind for kind, *_ in others] == ["right"] * 4 + ["wrong"] * 5
        assert len({title for *_, title in (query, *others)}) == 10
        cosines = [cosine for _, cosine, _ in others]
        assert cosines == sorted(cosines, reverse=True)
    assert [p.name for p in pathlib.Path("out").iterdir()] == ["n.html"]
    again = run("--rows", 2, "--k", 9, "--to", "again.html")
    assert again.exit_code == 0
    assert figures("again.html") == found
    run("--rows", 2, "--k", 9, "--seed", 1, "--to", "other.html")
    assert figures("other.html") != found


def test_given_images_are_looked_for(colours):
    own = next(pathlib.Path("colours/blue").iterdir())
    Image.new("RGB", (20, 10), (30, 30, 250)).save("mine.png")
    result = run("--query", own, "--query", "mine.png", "--k", 4)
    assert result.exit_code == 0, result.output
    found = figures("neighbours.html")
    # The one of the data is labelled, and not its own neighbour.
    assert [kind for kind, *_ in found[:5]] == ["query"] + ["right"] * 4
    assert own.name.split()[1] not in [t.split()[1] for *_, t in found[1:5]]
    assert [kind for kind, *_ in found[5:]] == ["query"] + [""] * 4
    assert all("blue" in title for *_, title in found[6:])


def test_the_page_opens_by_itself_in_a_browser(colours):
    browser = shutil.which("chromium")
    if not browser:
        pytest.skip("needs chromium, as Debian's package")
    assert run("--rows", 3, "--k", 4).exit_code == 0
    text = pathlib.Path("neighbours.html").read_text()
    assert "://" not in text and "<i>" not in text and "<b>" not in text
    pathlib.Path("checked.html").write_text(text + CHECK)
    options = "--headless --no-sandbox --disable-gpu --window-size=500,900"
    done = subprocess.run(
        [browser, *options.split(), f"--user-data-dir={pathlib.Path.cwd()}/x",
         "--dump-dom", f"file://{pathlib.Path.cwd()}/checked.html"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert 'data-found="15 15 true"' in done.stdout, done.stderr[-500:]


def test_picture_is_drawn(colours):
    result = run("--rows", 2, "--k", 3, "--to", "n.png")
    assert result.exit_code == 0, result.output
    with Image.open("n.png") as picture:
        width, height = picture.size
    assert width > height > 100


def test_images_without_labels_are_not_marked(colours):
    result = run("--dataset", "colours/blue", "--rows", 1, "--k", 2)
    assert result.exit_code == 0, result.output
    assert "class" not in result.output


def test_bad_input_is_one_line_and_exit_code_2(colours):
    pathlib.Path("broken.png").write_bytes(b"no image")
    for arguments, words in (
        (["--to", "n.pdf"], "must end in .html or .png"),
        (["--k", 0], "--k must be >= 1"),
        (
            ["--query", "nowhere.png"],
            "image file. Received: nowhere.png",
        ),
        (["--query", "shapes"], "Received: shapes"),
        (["--query", "broken.png"], "broken.png"),
        (["--encoder", "colours"], "no exported encoder"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2, result.output
        assert words in result.stderr
        assert len(result.stderr.splitlines()) == 1
    assert not pathlib.Path("neighbours.html").exists()
