import numpy as np
import pytest

from keras_moco.data.shapes import CLASS_NAMES, make_shapes


def test_shapes_dtypes_and_balanced_labels():
    images, labels = make_shapes(50, image_size=24)
    assert images.shape == (50, 24, 24, 3) and images.dtype == np.uint8
    assert labels.dtype == np.int64
    assert len(CLASS_NAMES) == 10
    np.testing.assert_array_equal(np.bincount(labels), np.full(10, 5))


def test_image_depends_on_seed_and_index_only(monkeypatch):
    images, labels = make_shapes(47, seed=5)
    monkeypatch.setattr("keras_moco.data.shapes._CHUNK_PIXELS", 2 * 32**2)
    fewer, fewer_labels = make_shapes(13, seed=5)
    np.testing.assert_array_equal(images[:13], fewer)
    np.testing.assert_array_equal(labels[:13], fewer_labels)


def test_seeds_and_indices_give_different_images():
    both = np.concatenate([make_shapes(40, seed=s)[0] for s in (0, 1)])
    assert len(np.unique(both.reshape(80, -1), axis=0)) == 80


@pytest.mark.parametrize("size", [8, 33, 96])
def test_any_size(size):
    images, _ = make_shapes(10, image_size=size)
    contrast = images.reshape(10, -1).astype(float).std(axis=1)
    assert contrast.min() > 15  # every picture shows something


def test_size_changes_the_resolution_only():
    small, _ = make_shapes(20, image_size=16)
    large, _ = make_shapes(20, image_size=64)
    pooled = large.reshape(20, 16, 4, 16, 4, 3).mean(axis=(2, 4))
    assert np.abs(pooled - small).mean() < 20  # noise and edges


def test_pixels_and_colours_say_little_about_the_class():
    bank, bank_labels = make_shapes(2000, seed=0)
    query, query_labels = make_shapes(500, seed=1)
    bank_colours, query_colours = _histograms(bank), _histograms(query)
    flat = [x.reshape(len(x), -1) / np.float32(255) for x in (bank, query)]
    assert _knn(flat[0], bank_labels, flat[1], query_labels) < 0.3
    colours = _knn(bank_colours, bank_labels, query_colours, query_labels)
    assert colours < 0.4


def test_colours_do_not_identify_an_image():
    images, _ = make_shapes(500)
    grey = images.mean(axis=3, keepdims=True)
    assert np.abs(images - grey).max() < 20  # nearly grey
    means = images.mean(axis=(1, 2))
    nearest = np.linalg.norm(means[:, None] - means[None], axis=2)
    np.fill_diagonal(nearest, np.inf)
    assert np.median(nearest.min(axis=1)) < 5  # others have the same colour


@pytest.mark.parametrize("arguments", [(0, 32), (-1, 32), (10, 4)])
def test_too_few_or_too_small(arguments):
    with pytest.raises(ValueError, match="must be at least 1"):
        make_shapes(*arguments)


def _histograms(images):
    bins = images // 16
    return np.stack(
        [
            np.concatenate(
                [np.bincount(b[..., c].ravel(), minlength=16) for c in range(3)]
            )
            for b in bins
        ]
    ).astype(np.float32)


def _knn(bank, bank_labels, query, query_labels, k=100):
    bank /= np.linalg.norm(bank, axis=1, keepdims=True)
    query /= np.linalg.norm(query, axis=1, keepdims=True)
    nearest = np.argsort(-query @ bank.T, axis=1)[:, :k]
    votes = [np.bincount(bank_labels[i], minlength=10) for i in nearest]
    return np.mean(np.argmax(votes, axis=1) == query_labels)
