import numpy as np
import pytest
import tensorflow as tf

import keras_moco as km
from keras_moco.evaluation import knn
from keras_moco.evaluation.knn import knn_vote, nearest


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
    assert ours == numpy_knn(*data, k, temperature)
    assert 0.3 < ours < 1


def test_bank_and_queries_are_read_in_parts(monkeypatch):
    data = (*clusters(300, 0), *clusters(50, 1))
    whole = nearest(data[0], data[2], 7)
    monkeypatch.setattr(knn, "BANK", 4)
    monkeypatch.setattr(knn, "QUERIES", 16)
    cosine, rows = nearest(data[0], data[2], 7)
    np.testing.assert_allclose(cosine, whole[0], atol=1e-6)
    np.testing.assert_array_equal(rows, whole[1])
    assert knn_vote(*data, 7, 0.1) == numpy_knn(*data, 7, 0.1)


def test_no_product_is_larger_than_is_said(monkeypatch):
    """The memory of `nearest` does not grow with the bank."""
    sizes, matmul = [], tf.matmul

    def watched(a, b, **options):
        product = matmul(a, b, **options)
        sizes.append(4 * tf.size(product).numpy())
        return product

    monkeypatch.setattr(tf, "matmul", watched)
    bank = np.random.default_rng(0).normal(size=(40000, 2)).astype("float32")
    nearest(bank, bank[:3000], 5)
    assert len(sizes) == 30 and max(sizes) <= 2**24


def test_rows_of_any_length_vote_alike():
    data = clusters(300, 0)
    queries, labels = clusters(50, 1)
    expected = knn_vote(*data, queries, labels, 7, 0.1)
    small = knn_vote(1e-9 * data[0], data[1], 1e-9 * queries, labels, 7, 0.1)
    assert expected == small == numpy_knn(*data, queries, labels, 7, 0.1)


def test_of_equal_neighbours_the_first_in_the_bank_counts(monkeypatch):
    monkeypatch.setattr(knn, "BANK", 3)
    bank = np.eye(4)[[1, 0, 0, 2, 0, 0]]  # Rows 1, 2, 4 and 5 are alike.
    cosine, rows = nearest(bank, np.eye(4)[[0, 3]], 3)
    np.testing.assert_array_equal(cosine, [[1, 1, 1], [0, 0, 0]])
    np.testing.assert_array_equal(rows, [[1, 2, 4], [0, 1, 2]])


def test_of_equal_votes_the_lower_class_wins():
    bank, query = np.eye(3)[[0, 0, 0, 0]], np.eye(3)[:1]
    labels = np.array([2, 1, 2, 1])
    assert knn_vote(bank, labels, query, np.array([1]), 4, 0.1) == 1.0
    assert knn_vote(bank, labels, query, np.array([2]), 3, 0.1) == 1.0


def test_a_class_that_the_bank_lacks_is_never_right():
    bank, labels = clusters(2000, 0)
    queries, query_labels = clusters(300, 1)
    kept = (labels != 3) & (labels != 9)
    data = bank[kept], labels[kept], queries, query_labels
    assert knn_vote(*data, 20, 0.1) == numpy_knn(*data, 20, 0.1)
    only = query_labels == 9
    assert knn_vote(*data[:2], queries[only], query_labels[only], 5, 1) == 0


def test_a_small_temperature_does_not_overflow():
    data = (*clusters(200, 0), *clusters(50, 1))
    # As T falls to 0 the nearest neighbour decides alone.
    assert knn_vote(*data, 50, 1e-5) == numpy_knn(*data, 1, 1.0)


def test_more_queries_than_a_chunk():
    data = (*clusters(100, 0), *clusters(2500, 1))
    assert knn_vote(*data, 5, 0.1) == numpy_knn(*data, 5, 0.1)


def test_constant_features_vote_without_nan():
    zeros, labels = np.zeros((20, 4)), np.arange(20) % 10
    assert 0 <= knn_vote(zeros, labels, zeros, labels, 5, 0.1) <= 0.5


def dataset(images, labels):
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(4)


def test_identical_images_are_found(tiny_encoder):
    images = np.random.default_rng(0).random((30, 8, 8, 3), "float32")
    data = dataset(images, np.arange(30) % 10)
    assert km.knn_accuracy(tiny_encoder(), data, data, k=1) == 1.0


@pytest.mark.parametrize(
    "option",
    [{"k": 0}, {"k": 5.0}, {"temperature": 0}, {"temperature": float("inf")}],
    ids=str,
)
def test_arguments_out_of_range_are_named(option):
    with pytest.raises(ValueError, match=next(iter(option))):
        km.knn_accuracy(None, None, None, **option)


def test_no_image_is_no_accuracy():
    none = np.zeros((0, 3)), np.zeros(0, int)
    with pytest.raises(ValueError, match="both sides"):
        knn_vote(*none, *none, 5, 0.1)


def test_accuracy_is_the_same_under_a_strategy(two_replicas, tiny_encoder):
    images = np.random.default_rng(0).random((40, 8, 8, 3), "float32")
    bank, test = (dataset(i, np.arange(20) % 4) for i in np.split(images, 2))
    with two_replicas.scope():
        encoder = tiny_encoder()
        there = km.knn_accuracy(encoder, bank, test, k=3)
    assert there == km.knn_accuracy(encoder, bank, test, k=3)
    rows = encoder.predict(images, verbose=0)
    labels = np.arange(20) % 4
    expected = numpy_knn(rows[:20], labels, rows[20:], labels, 3, 0.1)
    assert there == expected


def test_what_cannot_vote_is_one_line(tiny_encoder):
    images = np.random.default_rng(0).random((4, 8, 8, 3), "float32")
    good = dataset(images, np.arange(4))
    bare = tf.data.Dataset.from_tensor_slices(images).batch(4)
    broken = dataset(np.nan * images, np.arange(4))
    for bank, test, words in (
        (bare, good, "training images have no labels"),
        (good, dataset(images, np.arange(4) - 1), "test images have no labels"),
        (good, broken, r"4 test images are not finite \(0, 1, 2, 3\)"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            km.knn_accuracy(None, bank, test)
        assert "\n" not in str(error.value)


def test_constant_features_are_warned_of(tiny_encoder):
    encoder = tiny_encoder()
    for variable in encoder.trainable_variables:
        variable.assign(0 * variable)
    images = np.random.default_rng(0).random((20, 8, 8, 3), "float32")
    data = dataset(images, np.arange(20) % 4)
    with pytest.warns(UserWarning, match="constant"):
        assert 0 <= km.knn_accuracy(encoder, data, data) <= 0.5
