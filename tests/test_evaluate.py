import numpy as np
import pytest
import tensorflow as tf

import keras_moco as km
from keras_moco.evaluate import embed, knn_vote


def numpy_knn(bank, bank_labels, queries, query_labels, k, temperature):
    bank = bank / np.linalg.norm(bank, axis=1, keepdims=True)
    queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    right = 0
    for query, label in zip(queries, query_labels, strict=True):
        cosine = bank @ query
        nearest = np.argsort(-cosine)[:k]
        votes = np.zeros(10)
        for i in nearest:
            votes[bank_labels[i]] += np.exp(cosine[i] / temperature)
        right += votes.argmax() == label
    return right / len(queries)


def clusters(count, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 10, count)
    centres = np.random.default_rng(9).normal(size=(10, 16))
    return centres[labels] + 2 * rng.normal(size=(count, 16)), labels


@pytest.mark.parametrize("k, temperature", [(1, 0.1), (20, 0.07), (5000, 0.5)])
def test_knn_equals_numpys(k, temperature):
    data = (*clusters(2000, 0), *clusters(300, 1))
    ours = knn_vote(*data, k, temperature)
    assert np.isclose(ours, numpy_knn(*data, k, temperature), atol=0.004)
    assert 0.3 < ours < 1


def test_a_small_temperature_does_not_overflow():
    data = (*clusters(200, 0), *clusters(50, 1))
    # As T falls to 0 the nearest neighbour decides alone.
    assert knn_vote(*data, 50, 1e-5) == numpy_knn(*data, 1, 1.0)


def test_more_queries_than_a_chunk():
    data = (*clusters(100, 0), *clusters(2500, 1))
    assert np.isclose(
        knn_vote(*data, 5, 0.1), numpy_knn(*data, 5, 0.1), atol=0.002
    )


def test_constant_features_vote_without_nan():
    zeros, labels = np.zeros((20, 4)), np.arange(20) % 10
    assert 0 <= knn_vote(zeros, labels, zeros, labels, 5, 0.1) <= 0.5


def dataset(images, labels):
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(4)


def test_pixels_are_compared_when_there_is_no_encoder():
    images = np.random.default_rng(0).random((6, 2, 2, 3), "float32")
    features, labels = embed(None, dataset(images, np.arange(6)))
    np.testing.assert_array_equal(features, images.reshape(6, 12))
    np.testing.assert_array_equal(labels, np.arange(6))


def test_encoder_runs_in_inference_mode(tiny_encoder):
    encoder = tiny_encoder()
    images = np.random.default_rng(0).random((6, 8, 8, 3), "float32")
    features, _ = embed(encoder, dataset(images, np.arange(6)))
    np.testing.assert_allclose(
        features, encoder(images, training=False), atol=1e-6
    )


def test_identical_images_are_found(tiny_encoder):
    images = np.random.default_rng(0).random((30, 8, 8, 3), "float32")
    data = dataset(images, np.arange(30) % 10)
    assert km.knn_accuracy(tiny_encoder(), data, data, k=1) == 1.0


@pytest.mark.parametrize("option", [{"k": 0}, {"temperature": 0}], ids=str)
def test_arguments_out_of_range_are_named(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        km.knn_accuracy(None, None, None, **option)


def test_no_image_is_no_accuracy():
    none = np.zeros((0, 3)), np.zeros(0, int)
    with pytest.raises(ValueError, match="both sides"):
        knn_vote(*none, *none, 5, 0.1)
