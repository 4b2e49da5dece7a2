import gzip
import io
import os
import shutil
import struct

import numpy as np
import pytest
from PIL import Image

from keras_moco.data import folder as folder_module
from keras_moco.data import tfds as tfds_module
from keras_moco.data.encoded import EncodedImages
from keras_moco.data.images import Images
from keras_moco.data.pipeline import pretrain_dataset
from keras_moco.data.sources import load_images
from keras_moco.presets import PRESETS

BASE = np.random.default_rng(0).integers(0, 256, (12, 16, 3)).astype("uint8")
BASE = np.asarray(Image.fromarray(BASE).resize((16, 12), Image.BILINEAR))


def write(path, value=0, size=(16, 12), **options):
    """Writes an image of one colour and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 10, 20)).save(path, **options)
    return path


def write_truncated(path):
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(buffer, "JPEG")
    path.write_bytes(buffer.getvalue()[:900])
    return path


def write_damaged(path):
    """A PNG whose header is whole and whose pixels are not."""
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 90).convert("RGB").save(buffer, "PNG")
    path.write_bytes(buffer.getvalue()[:2000])


def one_line(error):
    message = str(error.value)
    assert "\n" not in message
    return message


# Arrays and shapes


def test_array_is_taken_as_it_is():
    array = np.arange(2 * 4 * 5 * 3, dtype="uint8").reshape(2, 4, 5, 3)
    images = load_images(array)
    np.testing.assert_array_equal(images.array, array)
    assert (len(images), images.size) == (2, (4, 5))
    assert images.labels is None and images.class_names is None
    assert images.name(1) == "array[1]"
    np.testing.assert_array_equal(images.decode(1), array[1])


@pytest.mark.parametrize("shape", [(2, 4, 5), (2, 4, 5, 1)])
def test_grey_array_becomes_rgb(shape):
    array = np.arange(40, dtype="uint8").reshape(shape)
    images = load_images(array)
    assert images.array.shape == (2, 4, 5, 3)
    np.testing.assert_array_equal(images.array[..., 2], array.reshape(2, 4, 5))


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 4, 4, 3), "float32"),
        np.zeros((2, 4, 4, 2), "uint8"),
        np.zeros((0, 4, 4, 3), "uint8"),
        np.zeros((4,), "uint8"),
    ],
)
def test_other_arrays_are_refused(array):
    with pytest.raises(ValueError, match="must be uint8 NumPy") as error:
        load_images(array)
    one_line(error)


def test_labels_of_another_length_are_refused():
    with pytest.raises(ValueError, match="one per image"):
        Images(np.zeros((2, 4, 4, 3), "uint8"), labels=[0, 1, 2])


def test_fingerprint_follows_the_content():
    array = np.zeros((2, 4, 4, 3), "uint8")
    first, second = load_images(array), load_images(array.copy())
    assert first.fingerprint == second.fingerprint
    assert load_images(array + 1).fingerprint != first.fingerprint


def test_shapes_splits_are_disjoint_and_sized():
    train = load_images("shapes", "pretrain")
    test = load_images("shapes", "test")
    assert (len(train), len(test)) == (8000, 2000)
    assert len(train.class_names) == 10 and train.size == (32, 32)
    seen = {image.tobytes() for image in train.array}
    assert not any(image.tobytes() in seen for image in test.array)
    assert train.name(7) == "shapes[7]"
    assert load_images("shapes", "train").fingerprint == train.fingerprint
    assert test.fingerprint != train.fingerprint


def test_shapes_count_size_and_seed():
    images = load_images("shapes", count=20, image_size=40, seed=3)
    assert images.array.shape == (20, 40, 40, 3)
    other = load_images("shapes", count=20, image_size=40, seed=4)
    assert images.fingerprint != other.fingerprint


def test_shapes_have_no_other_split():
    with pytest.raises(ValueError, match="pretrain, train and test"):
        load_images("shapes", "train[:10]")


@pytest.mark.parametrize("source", [None, 3, "", [], [3]])
def test_other_sources_are_refused(source):
    with pytest.raises(ValueError, match="Expected `shapes`, a TFDS name"):
        load_images(source)


@pytest.mark.parametrize("share", [-0.1, 1.5])
def test_max_broken_is_a_share(share):
    with pytest.raises(ValueError, match=r"must be in \[0, 1\]"):
        load_images("shapes", max_broken=share)


# Folders


def test_flat_folder_is_sorted_and_unlabelled(tmp_path):
    for value in (30, 10, 20):
        write(tmp_path / f"{value}.png", value)
    images = load_images(tmp_path)
    assert images.array[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert images.labels is None
    assert images.name(0) == str(tmp_path / "10.png")
    assert images.size == (12, 16)
    assert load_images(str(tmp_path)).fingerprint == images.fingerprint


def test_class_folders_give_labels(tmp_path):
    write(tmp_path / "dog" / "a.png")
    write(tmp_path / "cat" / "deep" / "b.JPG")
    write(tmp_path / "cat" / "a.png")
    images = load_images(tmp_path)
    assert images.class_names == ["cat", "dog"]
    assert images.labels.tolist() == [0, 0, 1]
    assert images.labels.dtype == np.int64


def test_one_folder_or_stray_images_are_unlabelled(tmp_path):
    write(tmp_path / "cat" / "a.png")
    assert load_images(tmp_path).labels is None
    write(tmp_path / "dog" / "a.png")
    assert load_images(tmp_path).labels is not None
    write(tmp_path / "stray.png")
    assert load_images(tmp_path).labels is None


def test_train_and_test_folders_are_splits(tmp_path):
    for split, value in [("train", 1), ("val", 2)]:
        write(tmp_path / split / "cat" / "a.png", value)
        write(tmp_path / split / "dog" / "a.png", value)
    assert load_images(tmp_path, "train").array[0, 0, 0, 0] == 1
    assert load_images(tmp_path, "pretrain").array[0, 0, 0, 0] == 1
    assert load_images(tmp_path, "test").array[0, 0, 0, 0] == 2
    assert load_images(tmp_path, "val").labels.tolist() == [0, 1]
    write(tmp_path / "unlabelled" / "a.png", 3)
    assert load_images(tmp_path, "pretrain").array[0, 0, 0, 0] == 3
    assert load_images(tmp_path, "train").array[0, 0, 0, 0] == 1
    with pytest.raises(ValueError, match="no split 'other'"):
        load_images(tmp_path, "other")


def test_a_class_may_be_called_train(tmp_path):
    for name in ("car", "train"):
        write(tmp_path / name / "a.png")
    assert load_images(tmp_path).class_names == ["car", "train"]


def test_folder_without_splits_has_no_test(tmp_path):
    write(tmp_path / "a.png")
    assert len(load_images(tmp_path, "pretrain")) == 1
    with pytest.raises(ValueError, match="folder that holds both") as error:
        load_images(tmp_path, "test")
    one_line(error)


def test_several_folders_and_files(tmp_path):
    write(tmp_path / "b" / "cat" / "1.png", 1)
    write(tmp_path / "a" / "cat" / "2.png", 2)
    write(tmp_path / "a" / "dog" / "3.png", 3)
    single = write(tmp_path / "single.png", 4)
    images = load_images([tmp_path / "b", str(tmp_path / "a")])
    assert images.array[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert images.labels.tolist() == [0, 0, 1]
    images = load_images([tmp_path / "a", single])
    assert images.labels is None and len(images) == 3
    assert len(load_images([tmp_path / "a"])) == 2


def test_a_folder_has_one_name_with_a_slash_and_without(tmp_path, monkeypatch):
    write(tmp_path / "photos/a.png")
    monkeypatch.chdir(tmp_path)
    for name in ("photos", "photos/", "./photos"):
        assert load_images(name).source == "photos"


def test_copy_of_a_folder_has_the_same_fingerprint(tmp_path):
    write(tmp_path / "a" / "1.png")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    first = load_images(tmp_path / "a").fingerprint
    assert load_images(tmp_path / "b").fingerprint == first
    write(tmp_path / "b" / "2.png")
    assert load_images(tmp_path / "b").fingerprint != first


def test_other_files_are_ignored(tmp_path):
    write(tmp_path / "a.png")
    write(tmp_path / ".hidden.png")
    write(tmp_path / ".cache" / "b.png")
    for name in ("notes.txt", "labels.csv", "meta.json", "Thumbs.db"):
        (tmp_path / name).write_bytes(b"not an image")
    images = load_images(tmp_path)
    assert len(images) == 1 and images.broken == []


def test_links_in_a_circle_end(tmp_path):
    write(tmp_path / "a" / "1.png")
    os.symlink(tmp_path, tmp_path / "a" / "loop")
    assert len(load_images(tmp_path)) == 1


@pytest.mark.parametrize("with_text", [False, True])
def test_folder_without_images(tmp_path, with_text):
    if with_text:
        (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match="No images in .*jpg") as error:
        load_images(tmp_path)
    one_line(error)


def test_missing_path_in_a_list(tmp_path):
    write(tmp_path / "a.png")
    with pytest.raises(ValueError, match="gone does not exist") as error:
        load_images([tmp_path, tmp_path / "gone"])
    one_line(error)


def test_unreadable_folder(tmp_path, monkeypatch):
    def scandir(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", scandir)  # tests may run as root
    with pytest.raises(ValueError, match="cannot be read.*Permission") as error:
        load_images(tmp_path)
    one_line(error)


def test_a_pipe_is_no_image_and_is_not_waited_for(tmp_path):
    write(tmp_path / "a.png")
    os.mkfifo(tmp_path / "b.png")
    images = load_images(tmp_path, max_broken=0.5)
    assert (len(images), images.broken) == (1, [str(tmp_path / "b.png")])


def test_names_need_not_be_text(tmp_path):
    name = os.fsdecode(b"caf\xe9.png")
    write(tmp_path / name)
    images = load_images(tmp_path)
    assert images.name(0) == str(tmp_path / name)
    for folder in (b"\xe9", b"e"):
        write(tmp_path / "classes" / os.fsdecode(folder) / name)
    images = load_images(tmp_path / "classes")
    assert images.class_names == ["e", "\ufffd"]


def test_unequal_sizes_are_decoded_on_demand(tmp_path):
    write(tmp_path / "a.png", 1)
    write(tmp_path / "b.png", 2, size=(20, 10))
    images = load_images(tmp_path)
    assert images.array is None and images.size is None
    assert images.decode(1).shape == (10, 20, 3)
    assert images.decode(1)[0, 0].tolist() == [2, 10, 20]


def test_too_large_for_memory_is_decoded_on_demand(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "fits_in_memory", lambda _: False)
    write(tmp_path / "a.png", 7)
    images = load_images(tmp_path)
    assert images.array is None and images.size == (12, 16)
    assert images.decode(0)[0, 0, 0] == 7


def test_jpeg_is_decoded_at_a_reduced_scale(tmp_path):
    write(tmp_path / "a.jpg", size=(400, 200))
    write(tmp_path / "b.png", size=(401, 200))
    images = load_images(tmp_path)
    assert images.decode(0).shape == (200, 400, 3)
    assert images.decode(0, min_side=50).shape == (50, 100, 3)
    assert images.decode(0, min_side=60).shape == (100, 200, 3)
    assert images.decode(1, min_side=50).shape == (200, 401, 3)


# Kinds of images


def decode_one(tmp_path, image, name="a.png", **options):
    image.save(tmp_path / name, **options)
    images = load_images(tmp_path)
    assert images.broken == []
    decoded = images.decode(0)
    assert decoded.dtype == np.uint8 and decoded.shape == (*images.size, 3)
    return decoded


def test_png_named_jpg(tmp_path):
    image = Image.fromarray(BASE)
    image.save(tmp_path / "a.jpg", format="PNG")
    np.testing.assert_array_equal(load_images(tmp_path).decode(0), BASE)


def test_16_bit_png_is_scaled_not_clipped(tmp_path):
    grey = (np.arange(12 * 16, dtype=np.uint16) * 300).reshape(12, 16)
    decoded = decode_one(tmp_path, Image.fromarray(grey))
    np.testing.assert_array_equal(decoded[..., 1], grey >> 8)


def test_grey_palette_and_alpha(tmp_path):
    image = Image.fromarray(BASE)
    grey = decode_one(tmp_path, image.convert("L"))
    np.testing.assert_array_equal(grey[..., 0], np.asarray(image.convert("L")))
    palette = image.quantize(16)
    decoded = decode_one(tmp_path, palette)
    np.testing.assert_array_equal(decoded, np.asarray(palette.convert("RGB")))
    image.putalpha(100)
    np.testing.assert_array_equal(decode_one(tmp_path, image), BASE)


@pytest.mark.filterwarnings("error")
def test_palette_with_transparency(tmp_path):
    palette = Image.fromarray(BASE).quantize(16)
    expected = np.asarray(palette.convert("RGB"))
    decoded = decode_one(tmp_path, palette, transparency=bytes(range(16)))
    np.testing.assert_array_equal(decoded, expected)


def test_cmyk_jpeg(tmp_path):
    image = Image.new("RGB", (16, 12), (200, 40, 90)).convert("CMYK")
    decoded = decode_one(tmp_path, image, "a.jpg", quality=95)
    np.testing.assert_allclose(decoded[5, 5], (200, 40, 90), atol=6)


def test_one_pixel_and_very_wide(tmp_path):
    image = Image.new("RGB", (1, 1), (1, 2, 3))
    assert decode_one(tmp_path, image).tolist() == [[[1, 2, 3]]]
    wide = Image.new("L", (10000, 2), 9)
    assert decode_one(tmp_path, wide).shape == (2, 10000, 3)


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_exif_orientation(tmp_path, monkeypatch, name, in_memory):
    monkeypatch.setattr(folder_module, "fits_in_memory", lambda _: in_memory)
    array = np.zeros((16, 32, 3), "uint8")
    array[:, :16] = 255  # the left half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    decoded = decode_one(tmp_path, Image.fromarray(array), name, exif=exif)
    assert decoded.shape == (32, 16, 3)
    assert decoded[:12].min() > 200 and decoded[20:].max() < 50


def test_first_frame_of_gif(tmp_path):
    frames = [Image.new("RGB", (8, 8), (v, v, v)) for v in (255, 0)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    assert load_images(tmp_path).decode(0).min() == 255


@pytest.mark.parametrize("ending", ["bmp", "webp", "tiff", "ppm"])
def test_other_formats(tmp_path, ending):
    image = Image.new("RGB", (16, 12), (100, 100, 100))
    decoded = decode_one(tmp_path, image, f"a.{ending}")
    np.testing.assert_allclose(decoded, 100, atol=2)


# Broken files


@pytest.fixture
def with_broken(tmp_path):
    for index in range(8):
        write(tmp_path / f"{index}.jpg", 10 * index, size=(64, 64))
    write_truncated(tmp_path / "1.jpg")
    (tmp_path / "3.jpg").write_bytes(b"")
    (tmp_path / "5.jpg").write_text("this is text")
    return tmp_path


def test_broken_files_are_named_and_dropped(with_broken):
    images = load_images(with_broken, max_broken=0.5)
    assert len(images) == 5
    names = sorted(os.path.basename(name) for name in images.broken)
    assert names == ["1.jpg", "3.jpg", "5.jpg"]
    assert os.path.basename(images.name(1)) == "2.jpg"
    np.testing.assert_allclose(images.array[1, 0, 0, 0], 20, atol=3)


def test_too_many_broken_files(with_broken):
    with pytest.raises(ValueError, match="3 of 8 .*3.jpg.*0.38") as error:
        load_images(with_broken)
    assert "--max-broken 0.38" in one_line(error)


def test_pixels_too_are_checked_where_they_are_decoded_first(with_broken):
    write_damaged(with_broken / "7.png")
    images = load_images(with_broken, max_broken=0.5)
    assert images.array is not None
    assert any(name.endswith("7.png") for name in images.broken)
    with pytest.raises(ValueError, match="4 of 9"):
        load_images(with_broken, max_broken=0.4)


def test_only_broken_files(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"")
    with pytest.raises(ValueError, match="1 of 1"):
        load_images(tmp_path)
    with pytest.raises(ValueError, match="None is left"):
        load_images(tmp_path, max_broken=1.0)


def test_next_image_replaces_one_found_broken(with_broken, monkeypatch):
    monkeypatch.setattr(folder_module, "fits_in_memory", lambda _: False)
    write_damaged(with_broken / "1.png")
    images = load_images(with_broken, max_broken=0.5)
    assert len(images) == 6 and len(images.broken) == 3
    for _ in range(2):
        np.testing.assert_array_equal(images.decode(1), images.decode(2))
    assert len(images.broken) == 4
    assert images.broken[-1].endswith("1.png")


def test_too_many_found_broken_while_decoding(with_broken, monkeypatch):
    monkeypatch.setattr(folder_module, "fits_in_memory", lambda _: False)
    write_damaged(with_broken / "1.png")
    images = load_images(with_broken, max_broken=0.4)
    with pytest.raises(ValueError, match="4 of 9") as error:
        images.decode(1)
    assert "--max-broken" in one_line(error)


# TFDS


def test_unknown_dataset_names_the_nearest():
    with pytest.raises(ValueError, match="Did you mean .*cifar10") as error:
        load_images("cifar-10")
    one_line(error)
    with pytest.raises(ValueError, match="Did you mean .*shapes"):
        load_images("shape")
    with pytest.raises(ValueError, match="no such folder"):
        load_images("/no/such/folder")


def test_failed_download_says_how_to_use_data_dir(tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")

    def fail(self, url_or_urls):
        raise ConnectionError("no network\nsecond line")

    monkeypatch.setattr(tfds.download.DownloadManager, "download", fail)
    monkeypatch.setattr(
        tfds.download.DownloadManager, "download_and_extract", fail
    )
    with pytest.raises(ValueError, match="--data-dir FOLDER") as error:
        load_images("cifar10", data_dir=tmp_path)
    assert "no network" in one_line(error)


@pytest.mark.slow
def test_fashion_mnist_from_debian(fashion_dir, capfd):
    images = load_images("fashion_mnist", "test", data_dir=fashion_dir)
    printed = capfd.readouterr()
    assert printed.out == (
        "TFDS downloads and prepares fashion_mnist, this once.\n"
    )
    assert "absl" not in printed.err
    assert images.array.shape == (10000, 28, 28, 3)
    assert images.class_names[9] == "Ankle boot"
    np.testing.assert_array_equal(np.bincount(images.labels), np.full(10, 1000))
    assert images.name(3) == "fashion_mnist[3]"
    manual = fashion_dir / "downloads" / "manual"
    with gzip.open(manual / "t10k-images-idx3-ubyte.gz") as file:
        assert struct.unpack(">4i", file.read(16))[1:] == (10000, 28, 28)
        raw = np.frombuffer(file.read(), np.uint8).reshape(10000, 28, 28)
    theirs = {image.tobytes() for image in raw}
    ours = {image.tobytes() for image in images.array[..., 0]}
    assert ours == theirs

    part = load_images("fashion_mnist", "train[:100]", data_dir=fashion_dir)
    assert len(part) == 100
    train = load_images("fashion_mnist", "pretrain", data_dir=fashion_dir)
    assert len(train) == 60000
    assert train.fingerprint != images.fingerprint
    with pytest.raises(ValueError, match="It has: test, train") as error:
        load_images("fashion_mnist", "unlabelled", data_dir=fashion_dir)
    one_line(error)


def tiny_builder(
    tfds, tmp_path, monkeypatch, name, features, splits, file_format=None
):
    """A prepared TFDS dataset of ours, found under `name`."""
    tfds.disable_progress_bar()
    builder = tfds.dataset_builders.store_as_tfds_dataset(
        name=name,
        version="1.0.0",
        features=tfds.features.FeaturesDict(features),
        split_datasets={
            split: list(enumerate(examples))
            for split, examples in splits.items()
        },
        data_dir=tmp_path,
        disable_shuffling=True,
        file_format=file_format,
    )
    monkeypatch.setattr(tfds_module, "is_tfds_name", lambda _: True)
    monkeypatch.setattr(
        "keras_moco.data.sources.is_tfds_name", lambda base: base == name
    )
    return builder


def test_stl10_pretrains_on_the_unlabelled_split(tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    shape = (6, 6, 3)
    splits = {
        split: [
            {"image": np.full(shape, value, "uint8"), "label": label}
            for label in labels
        ]
        for split, value, labels in [
            ("train", 1, [0, 1]),
            ("test", 2, [1]),
            ("unlabelled", 3, [-1, -1, -1]),
        ]
    }
    features = {
        "image": tfds.features.Image(shape=shape),
        "label": tfds.features.ClassLabel(names=["cat", "dog"]),
    }
    builder = tiny_builder(
        tfds, tmp_path, monkeypatch, "stl10", features, splits
    )
    monkeypatch.setattr(tfds_module, "_builder", lambda *_: builder)
    pretrain = load_images("stl10", "pretrain")
    assert pretrain.array[:, 0, 0, 0].tolist() == [3, 3, 3]
    assert pretrain.labels is None and pretrain.class_names is None
    train = load_images("stl10", "train")
    assert train.labels.tolist() == [0, 1]
    assert train.class_names == ["cat", "dog"]
    assert load_images("stl10", "test").array[0, 0, 0, 0] == 2
    assert len(load_images("stl10", "unlabelled[:2]")) == 2


def test_variable_sizes_stay_encoded(tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    photos = [np.full((5 + i, 7, 3), 50 * i, "uint8") for i in range(3)]
    features = {
        "image": tfds.features.Image(shape=(None, None, 3)),
        "note": tfds.features.Text(),
    }
    splits = {"train": [{"image": photo, "note": "x"} for photo in photos]}
    tiny_builder(tfds, tmp_path, monkeypatch, "photos", features, splits)
    images = load_images("photos", data_dir=tmp_path)
    assert isinstance(images, EncodedImages)
    assert images.array is None and images.labels is None
    for index, photo in enumerate(photos):
        np.testing.assert_array_equal(images.decode(index), photo)


def test_dataset_without_images(tmp_path, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    features = {"text": tfds.features.Text()}
    splits = {"train": [{"text": "x"}]}
    tiny_builder(tfds, tmp_path, monkeypatch, "words", features, splits)
    with pytest.raises(ValueError, match="not a dataset of images"):
        load_images("words", data_dir=tmp_path)


def array_record(tmp_path, monkeypatch, count):
    """Photos of one grey each, 10 times their label, and these greys."""
    tfds = pytest.importorskip("tensorflow_datasets")
    greys = [10 * (i % 3) for i in range(count)]
    features = {
        "image": tfds.features.Image(shape=(8, 8, 3), encoding_format="png"),
        "label": tfds.features.ClassLabel(num_classes=3),
    }
    splits = {
        "train": [
            {"image": np.full((8, 8, 3), grey, "uint8"), "label": grey // 10}
            for grey in greys
        ]
    }
    tiny_builder(
        tfds, tmp_path, monkeypatch, "records", features, splits, "array_record"
    )
    return greys


def test_array_record_that_fits_is_held_decoded(tmp_path, monkeypatch):
    greys = array_record(tmp_path, monkeypatch, 7)
    images = load_images("records", data_dir=tmp_path)
    assert images.array[:, 3, 3, 1].tolist() == greys
    assert (images.labels * 10).tolist() == greys
    assert len(images.class_names) == 3


def test_array_record_beyond_the_memory_is_read_at_random(
    tmp_path, monkeypatch
):
    greys = array_record(tmp_path, monkeypatch, 12)
    monkeypatch.setattr(tfds_module, "fits_in_memory", lambda _: False)
    images = load_images("records", data_dir=tmp_path)
    assert images.array is None and len(images) == 12
    assert [images.decode(i)[0, 0, 0] for i in range(12)] == greys
    pairs = pretrain_dataset(images, PRESETS["demo"], 8, 4, seed=3)
    whole = [[part.numpy() for part in batch] for batch in pairs]
    read, places = images.read, []
    monkeypatch.setattr(
        images, "read", lambda index: places.append(index) or read(index)
    )
    rest = list(pairs.passes.start_at(0, 2))
    assert sorted(places) == sorted(whole[2][2])  # and not one before
    assert len(rest) == 1
    for part, expected in zip(rest[0], whole[2], strict=True):
        np.testing.assert_array_equal(part, expected)
