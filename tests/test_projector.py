import re
import shutil
import subprocess
import sys
import time
import urllib.request

import keras
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format
from PIL import Image
from tensorboard.plugins import projector

from keras_moco.data.images import Images
from keras_moco.evaluation.projector import write_projector

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def projected(tmp_path_factory):
    """A run folder with 30 images, whose encoder gives their mean colour."""
    folder = tmp_path_factory.mktemp("run")
    writer = tf.summary.create_file_writer(str(folder))
    with writer.as_default(step=1):
        tf.summary.scalar("loss", 1.0)
    writer.close()
    encoder = keras.Sequential(
        [keras.Input((8, 8, 3)), keras.layers.GlobalAveragePooling2D()]
    )
    colours = np.random.default_rng(0).integers(0, 255, (30, 1, 1, 3))
    pixels = np.broadcast_to(colours, (30, 12, 16, 3)).astype(np.uint8)
    # One name that is no text, as file systems have them.
    names = [f"photos/a\tb/{n}.jpg" for n in range(29)] + ["\udcff.jpg"]
    images = Images(pixels, np.arange(30) % 2, ["cat", "dog"], names)
    write_projector(folder, encoder, images, 8, count=20)
    return folder, images


def test_the_projector_has_features_labels_and_thumbnails(projected):
    folder, images = projected
    chosen = sorted(np.random.default_rng(0).permutation(30)[:20])
    features = np.loadtxt(folder / "projector/features.tsv", delimiter="\t")
    expected = images.array[chosen, 0, 0] / 255
    np.testing.assert_allclose(features, expected, rtol=1e-4)
    lines = (folder / "projector/metadata.tsv").read_text().splitlines()
    assert lines[0] == "label\timage"
    label = ("cat", "dog")[chosen[3] % 2]
    assert lines[4] == f"{label}\tphotos/a b/{chosen[3]}.jpg"
    sprite = np.array(Image.open(folder / "projector/sprite.png"))
    assert sprite.shape == (160, 160, 3)  # 5 x 5 thumbnails of 32 pixels.
    tile = sprite[32:64, 32:64]  # The seventh.
    assert (tile == images.array[chosen[6], 0, 0]).all()


def test_the_projector_config_names_files_that_are_there(projected):
    folder, _ = projected
    config = projector.ProjectorConfig()
    text_format.Parse((folder / "projector_config.pbtxt").read_text(), config)
    (embedding,) = config.embeddings
    for path in (
        embedding.tensor_path,
        embedding.metadata_path,
        embedding.sprite.image_path,
    ):
        assert (folder / path).is_file()
    assert list(embedding.sprite.single_image_dim) == [32, 32]


@pytest.fixture(scope="module")
def server(projected, tmp_path_factory):
    """The address of a TensorBoard of the run."""
    folder, _ = projected
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "tensorboard.main", "--port", "0"]
    command += ["--logdir", folder, "--load_fast", "false"]
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        address = None  # Such as http://localhost:6006
        while address is None and process.poll() is None:
            time.sleep(0.2)
            address = re.search(r"http://\S+:(\d+)", log.read_text())
        assert address, log.read_text()
        yield f"http://127.0.0.1:{address[1]}"
    finally:
        process.terminate()
        process.wait()


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="needs Debian's package chromium")
def test_the_projector_page_shows_the_features(server, tmp_path):
    # The first request waits for the events to be read.
    runs = f"{server}/data/plugin/projector/runs"
    while urllib.request.urlopen(runs).read() == b"[]":
        time.sleep(0.2)
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-unsafe-swiftshader",
        f"--user-data-dir={tmp_path}",
        "--virtual-time-budget=20000",
        f"--log-net-log={tmp_path / 'requests.json'}",
        f"--screenshot={tmp_path / 'page.png'}",
        f"{server}/data/plugin/projector/projector_binary.html",
    ]
    subprocess.run(command, capture_output=True, timeout=120)
    # The page asks for what it shows, one after the other: the thumbnails last.
    requests = (tmp_path / "requests.json").read_text()
    base = rf"{server}/data/plugin/projector/"
    for part in ("tensor", "metadata", "sprite_image"):
        asked = re.search(rf'{base}{part}\?[^"]+', requests)
        assert asked, part
        assert urllib.request.urlopen(asked[0]).status == 200
    page = np.array(Image.open(tmp_path / "page.png").convert("RGB"))
    assert len(np.unique(page.reshape(-1, 3), axis=0)) > 100
