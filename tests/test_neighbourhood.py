import numpy as np
import pytest

from keras_moco.evaluation import neighbourhood

DRAW = np.random.default_rng(0)


def test_an_image_comes_first_then_the_nearest_by_cosine():
    features = np.array([[1, 0], [5, 0.1], [0, 1], [1, 1.0], [1, 0]])
    nearest = neighbourhood.nearest_images(features, np.array([2, 4]), 2)
    assert nearest.tolist() == [[2, 3, 1], [4, 0, 1]]
    everything = neighbourhood.nearest_images(features, np.array([0]), 9)
    assert everything.shape == (1, 5)


def test_the_plane_holds_the_two_largest_eigenvalues():
    features = DRAW.normal(size=(50, 6))
    points, share = neighbourhood.principal_plane(features)
    unit = features / np.linalg.norm(features, axis=1, keepdims=True)
    values = np.linalg.eigvalsh(np.cov(unit.T))[::-1]
    np.testing.assert_allclose(points.var(axis=0, ddof=1), values[:2])
    assert share == pytest.approx(values[:2].sum() / values.sum())


def test_collapsed_and_one_dimensional_features_have_a_plane():
    points, share = neighbourhood.principal_plane(np.ones((5, 3)))
    assert np.abs(points).max() < 1e-9 and 0 <= share <= 1
    points, _ = neighbourhood.principal_plane(np.ones((4, 1)))
    assert points.shape == (4, 2)


def test_clusters_find_separate_groups():
    truth = np.repeat([0, 1, 2], 20)
    features = np.eye(3)[truth] + 0.01 * DRAW.normal(size=(60, 3))
    group = neighbourhood.clusters(features, 3)
    assert len(set(zip(truth, group, strict=True))) == len(set(group)) == 3
    assert sorted(neighbourhood.clusters(features[[0, 20]], 8)) == [0, 1]
