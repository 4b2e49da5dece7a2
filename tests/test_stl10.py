"""On a small archive in the exact format of the original."""

import io
import tarfile

import numpy as np
import pytest

import keras_moco as km
from keras_moco.data import stl10

CLASSES = "airplane bird car cat deer dog horse monkey ship truck".split()
COUNTS = {"train": 12, "test": 7, "unlabeled": 21}


def pictures(stem):
    draw = np.random.default_rng(list(COUNTS).index(stem))
    return draw.integers(0, 256, (COUNTS[stem], 96, 96, 3), np.uint8)


def labels(stem):
    return np.arange(COUNTS[stem]) % 10


def original_files():
    """Written value by value: colour, then column, then row."""
    files = {}
    for stem in COUNTS:
        planes = [
            image[:, column, colour].tobytes()
            for image in pictures(stem)
            for colour in range(3)
            for column in range(96)
        ]
        files[f"{stem}_X.bin"] = b"".join(planes)
        if stem != "unlabeled":
            files[f"{stem}_y.bin"] = bytes(int(n) + 1 for n in labels(stem))
    files["class_names.txt"] = "\n".join(CLASSES).encode() + b"\n"
    files["fold_indices.txt"] = b"0 1 2\n3 4 5\n"
    return files


@pytest.fixture(scope="module", params=["folder", "tar.gz"])
def data_dir(request, tmp_path_factory):
    place = tmp_path_factory.mktemp("stl10")
    if request.param == "folder":
        (place / "stl10_binary").mkdir()
        for name, content in original_files().items():
            (place / "stl10_binary" / name).write_bytes(content)
    else:
        with tarfile.open(place / "stl10_binary.tar.gz", "w:gz") as archive:
            for name, content in original_files().items():
                member = tarfile.TarInfo(f"stl10_binary/{name}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    return place


def test_images_labels_and_classes(data_dir):
    for split, stem in (("train", "train"), ("test", "test")):
        images = km.load_images("stl10", split, data_dir=data_dir)
        np.testing.assert_array_equal(images.array, pictures(stem))
        np.testing.assert_array_equal(images.labels, labels(stem))
        assert images.class_names == CLASSES


def test_pretraining_takes_the_unlabelled_images(data_dir, monkeypatch):
    monkeypatch.setattr(stl10, "CHUNK", 4)  # 21 images: the last is short.
    for split in ("pretrain", "unlabelled"):
        images = km.load_images("stl10", split, data_dir=data_dir)
        np.testing.assert_array_equal(images.array, pictures("unlabeled"))
        assert images.labels is None


def test_the_files_themselves_may_be_given(data_dir):
    (inside,) = data_dir.iterdir()
    images = km.load_images("stl10", "test", data_dir=inside)
    assert len(images) == 7


def test_unknown_split_is_refused(data_dir):
    with pytest.raises(ValueError, match="splits of stl10"):
        km.load_images("stl10", "validation", data_dir=data_dir)


def test_damaged_files_are_named(tmp_path):
    folder = tmp_path / "stl10_binary"
    folder.mkdir()
    files = original_files()
    (folder / "train_X.bin").write_bytes(files["train_X.bin"][:-5])
    with pytest.raises(ValueError, match="no whole number of images"):
        km.load_images("stl10", "train", data_dir=tmp_path)
    (folder / "train_X.bin").write_bytes(files["train_X.bin"])
    with pytest.raises(ValueError, match="has no train_y.bin"):
        km.load_images("stl10", "train", data_dir=tmp_path)
    (folder / "train_y.bin").write_bytes(files["train_y.bin"][:-1])
    (folder / "class_names.txt").write_bytes(files["class_names.txt"])
    with pytest.raises(ValueError, match="12 images and 11 labels"):
        km.load_images("stl10", "train", data_dir=tmp_path)


def test_a_half_downloaded_archive_is_named(data_dir, tmp_path):
    (whole,) = data_dir.iterdir()
    if whole.is_dir():
        pytest.skip("of the archive only")
    half = tmp_path / "stl10_binary.tar.gz"
    half.write_bytes(whole.read_bytes()[:200_000])
    with pytest.raises(ValueError, match="download it again"):
        km.load_images("stl10", "pretrain", data_dir=tmp_path)
