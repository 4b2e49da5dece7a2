"""Training on images that are decoded at every step: files and streams."""

import itertools

import numpy as np
import pytest
from PIL import Image
from test_decode import encoded, photo

import keras_moco as km
from keras_moco.data import folder, tfds
from keras_moco.data.decode import try_header
from keras_moco.data.encoded import StreamedImages

PRESET = km.PRESETS["moco_v2"]


def numbered(batches):
    """{index: (query, key)} of all batches."""
    return {
        int(i): (q, k)
        for query, key, index in batches
        for q, k, i in zip(
            query.numpy(), key.numpy(), index.numpy(), strict=True
        )
    }


def write(path, content):
    path.write_bytes(content)


KINDS = {
    "truncated": lambda p: write(p / "x.jpg", encoded(photo())[:1500]),
    "truncated_png": lambda p: write(
        p / "x.png", encoded(photo(), "PNG")[:999]
    ),
    "empty": lambda p: write(p / "x.jpg", b""),
    "text": lambda p: write(p / "x.jpg", b"not an image"),
    "png_named_jpg": lambda p: write(p / "x.jpg", encoded(photo(), "PNG")),
    "sixteen_bit": lambda p: Image.fromarray(
        (np.arange(3000, dtype=np.uint16) * 20).reshape(50, 60)
    ).save(p / "x.png"),
    "palette": lambda p: photo().quantize(16).save(p / "x.png"),
    "alpha": lambda p: photo(mode="RGBA").save(p / "x.png"),
    "grey": lambda p: photo(mode="L").save(p / "x.jpg"),
    "cmyk": lambda p: photo(mode="CMYK").save(p / "x.jpg"),
    "one_pixel": lambda p: Image.new("RGB", (1, 1)).save(p / "x.jpg"),
    "very_wide": lambda p: Image.new("RGB", (10_000, 3)).save(p / "x.jpg"),
    "tiff": lambda p: photo().save(p / "x.tif"),
    "gif": lambda p: photo().save(p / "x.gif"),
}
BROKEN = {"truncated", "truncated_png", "empty", "text"}


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_file_is_decoded_or_stood_in_for(tmp_path, kind):
    for number in range(7):
        photo(50 + number, 70).save(tmp_path / f"{number}.jpg")
    KINDS[kind](tmp_path)
    images = km.load_images(tmp_path, "pretrain", max_broken=0.2)
    for index in range(len(images)):
        content = images.read(index)
        shape = try_header(content)
        whole = np.int32([[0, 0, *shape]] * 2)
        flips = np.array([False, True])
        crops = images.decode_crops(index, content, whole, flips, 24, shape)
        assert crops.dtype == np.uint8 and crops.shape == (2, 24, 24, 3)
        assert np.array_equal(crops[1], crops[0][:, ::-1])
    assert len(images.broken) == (kind in BROKEN)
    if kind in BROKEN:
        assert "/x." in images.broken[0]


def test_no_kind_of_file_stops_an_epoch(tmp_path):
    for kind, write_kind in KINDS.items():
        (tmp_path / kind).mkdir()
        write_kind(tmp_path / kind)
    images = km.load_images(tmp_path, "pretrain", max_broken=0.5)
    pairs = km.pretrain_dataset(images, PRESET, 24, batch_size=len(images))
    assert len(pairs) == 1
    for query, key, _ in pairs:
        assert query.shape == key.shape == (len(images), 24, 24, 3)
        for views in (query.numpy(), key.numpy()):
            assert views.min() >= 0 and views.max() <= 1
    assert {name.split("/")[-2] for name in images.broken} == BROKEN


def test_files_that_vanish_while_training_are_stood_in_for(tmp_path):
    for number in range(8):
        photo(50 + number, 70).save(tmp_path / f"{number}.jpg")
    images = km.load_images(tmp_path, "pretrain", max_broken=0.3)
    (tmp_path / "2.jpg").unlink()
    (tmp_path / "5.jpg").write_bytes(b"")
    pairs = km.pretrain_dataset(images, PRESET, image_size=24, batch_size=4)
    assert sorted(numbered(pairs)) == list(range(8))
    names = sorted(name[-5:] for name in images.broken)
    assert names == ["2.jpg", "5.jpg"]


def test_windows_of_jpegs_give_the_views_of_decoded_images(
    tmp_path, monkeypatch
):
    for number in range(4):
        photo(90, 120).rotate(9 * number).save(
            tmp_path / f"{number}.jpg", quality=95
        )
    decoded = km.load_images(tmp_path, "pretrain")
    monkeypatch.setattr(folder, "fits_in_memory", lambda _: False)
    files = km.load_images(tmp_path, "pretrain")
    assert decoded.array is not None and files.array is None
    a, b = (
        numbered(km.pretrain_dataset(images, PRESET, 64, 4))
        for images in (decoded, files)
    )
    for index in range(4):
        for x, y in zip(a[index], b[index], strict=True):
            assert np.abs(x - y).mean() < 0.01


# Streams


def open_stream(contents):
    def stream(seed, epoch):
        order = np.random.default_rng([seed, epoch]).permutation(len(contents))
        for index in order:
            yield int(index), contents[index]

    return stream


@pytest.fixture(scope="module")
def contents():
    return [encoded(photo(40 + i, 60).rotate(5 * i)) for i in range(9)]


def test_stream_gives_the_views_of_the_same_files(contents, tmp_path):
    stream = StreamedImages(open_stream(contents), 9, 9)
    for number, content in enumerate(contents):
        (tmp_path / f"{number}.jpg").write_bytes(content)
    files = km.load_images(tmp_path, "pretrain")
    a, b = (
        numbered(km.pretrain_dataset(images, PRESET, 24, 3))
        for images in (stream, files)
    )
    assert sorted(a) == sorted(b) == list(range(9))
    for index in a:
        np.testing.assert_array_equal(a[index], b[index])


def test_each_pass_of_a_stream_is_a_new_epoch(contents):
    stream = StreamedImages(open_stream(contents), 9, 9)
    pairs = km.pretrain_dataset(stream, PRESET, 24, 4)
    first, second = numbered(pairs), numbered(pairs)
    assert len(pairs) == 2 and len(first) == len(second) == 8
    both = first.keys() & second.keys()
    assert both
    assert all(not np.array_equal(first[i], second[i]) for i in both)
    later = numbered(km.pretrain_dataset(stream, PRESET, 24, 4, first_epoch=1))
    assert list(later) == list(second)
    for index in later:
        np.testing.assert_array_equal(later[index], second[index])


def test_image_before_stands_in_for_a_broken_one_of_a_stream(contents):
    stream = StreamedImages(
        open_stream([b"", *contents[1:]]), 9, 9, source="web", max_broken=0.2
    )
    views = numbered(km.pretrain_dataset(stream, PRESET, 24, 3))
    assert sorted(views) == list(range(9))
    assert stream.broken == ["web[0]"]
    assert views[0][0].max() > 0


def test_too_many_broken_images_end_a_stream(contents):
    stream = StreamedImages(open_stream([b"", b"", *contents[2:]]), 9, 9)
    pairs = km.pretrain_dataset(stream, PRESET, 24, 3)
    with pytest.raises(Exception, match="of 9 image files are broken"):
        list(pairs)


def test_first_images_of_a_stream_are_its_sample(contents):
    stream = StreamedImages(open_stream([b"", *contents[1:]]), 9, 9)
    sample = list(stream.sample(3, seed=1))
    order = [i for i, _ in open_stream(contents)(1, 0) if i]
    assert [index for index, _ in sample] == order[:3]
    assert sample[0][1].shape == (40 + order[0], 60, 3)
    with pytest.raises(TypeError, match="by index"):
        stream.decode(0)


def test_tfds_beyond_the_memory_is_streamed(tmp_path, monkeypatch):
    library = pytest.importorskip("tensorflow_datasets")
    features = library.features.FeaturesDict(
        {"image": library.features.Image(shape=(None, None, 3))}
    )
    pixels = [np.full((6, 7 + i, 3), 20 * i, np.uint8) for i in range(10)]
    library.disable_progress_bar()
    library.dataset_builders.store_as_tfds_dataset(
        name="photos",
        version="1.0.0",
        features=features,
        split_datasets={
            "train": [(i, {"image": p}) for i, p in enumerate(pixels)]
        },
        data_dir=tmp_path,
    )
    for module in ("keras_moco.data.tfds", "keras_moco.data.sources"):
        monkeypatch.setattr(f"{module}.is_tfds_name", lambda _: True)
    monkeypatch.setattr(tfds, "fits_in_memory", lambda _: False)
    images = km.load_images("photos", "pretrain", data_dir=tmp_path)
    assert isinstance(images, StreamedImages) and len(images) == 10
    assert images.num_shuffled == 10 and images.labels is None
    passes = [list(images.open_stream(0, epoch)) for epoch in (0, 0, 1)]
    assert passes[0] == passes[1] != passes[2]
    assert sorted(passes[0]) == sorted(passes[2])
    assert len({index for index, _ in passes[0]}) == 10
    assert all(0 <= index < 2**63 for index, _ in passes[0])
    pairs = km.pretrain_dataset(images, PRESET, 8, 5)
    # A picture of one colour stays one, whatever is done to it.
    for query, _, _ in itertools.islice(pairs, 2):
        np.testing.assert_allclose(np.ptp(query, axis=(1, 2)), 0, atol=1e-5)
