import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_moco as km
from keras_moco.monitoring import quality

draw = np.random.default_rng(0)


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def test_alignment_is_the_mean_squared_distance():
    x = unit(draw.normal(size=(5, 3)))
    assert quality.alignment(x, x) == 0.0
    assert quality.alignment(x, -x) == pytest.approx(4.0)
    # Right angles: 2.
    assert quality.alignment(np.eye(2), np.eye(2)[::-1]) == pytest.approx(2.0)


def test_uniformity_is_that_of_all_pairs():
    assert quality.uniformity(np.ones((3, 1))) == pytest.approx(0.0)
    # Four corners of a square: 4 pairs at 2, 2 pairs at 4.
    square = np.array([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    mean = (4 * math.exp(-4) + 2 * math.exp(-8)) / 6
    assert quality.uniformity(square) == pytest.approx(math.log(mean))


def test_effective_rank_is_exp_of_the_entropy_of_singular_values():
    assert quality.effective_rank(3.0 * np.eye(5)) == pytest.approx(5.0)
    assert quality.effective_rank(np.ones((6, 4))) == pytest.approx(1.0)
    assert quality.effective_rank(np.zeros((6, 4))) == 1.0
    x = draw.normal(size=(20, 7))
    # The roots of the eigenvalues of the Gram matrix, another way to them.
    values = np.sqrt(np.linalg.eigvalsh(x.T @ x))
    p = values / values.sum()
    expected = np.exp(-(p * np.log(p)).sum())
    assert quality.effective_rank(x) == pytest.approx(expected)


def test_what_is_not_finite_spans_nothing():
    assert quality.effective_rank(np.full((3, 3), np.nan)) == 1.0


def test_retrieval_finds_the_own_second_view():
    x = draw.normal(size=(6, 4))
    assert quality.retrieval_top1(x, 2.0 * x) == 1.0
    assert quality.retrieval_top1(x, np.roll(x, 1, axis=0)) == 0.0
    half = np.concatenate([x[:3], np.roll(x[3:], 1, axis=0)])
    assert quality.retrieval_top1(x, half) == 0.5
    assert quality.retrieval_top1(np.ones((6, 4)), np.ones((6, 4))) == 0.0


def test_histograms_count_every_cosine_once():
    counts = quality.histogram(np.array([-1.0, -0.99, 0.01, 0.99, 1.0000001]))
    assert len(counts) == 40 and sum(counts) == 5
    assert (counts[0], counts[20], counts[39]) == (2, 1, 2)


def test_drift_is_relative_to_the_query_weights():
    query = tf.Variable([3.0, 0.0]), tf.Variable([[4.0]])
    key = tf.Variable([3.0, 3.0]), tf.Variable([[8.0]])
    pairs = list(zip(query, key, strict=True))
    assert quality.drift(pairs) == pytest.approx(1.0)  # 5 / 5
    assert quality.drift(list(zip(query, query, strict=True))) == 0.0


@pytest.mark.parametrize(
    "keys, size", [(6, 16), (8, 16), (16, 16), (20, 16), (1, 5)]
)
def test_key_age_is_that_of_a_queue_that_is_played_through(keys, size):
    ages = []
    for step in range(1, 12):
        ages = [age + 1 for age in ages]
        ages = ([1] * keys + ages)[:size]
        mean, oldest = quality.key_age(step, keys, size)
        assert mean == pytest.approx(np.mean(ages))
        assert oldest == max(ages)


@pytest.fixture(scope="module")
def measured():
    """A model, its monitor and the logs of one measurement."""
    keras.utils.set_random_seed(0)
    encoder = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.GlobalAveragePooling2D(),
        ]
    )
    predictor = km.projection_head(8, 8, name="predictor")
    model = km.MoCo(encoder, km.projection_head(4, 8), predictor, queue_size=16)
    model.compile(km.SGD(0.05))
    views = [draw.random((70, 8, 8, 3), "float32") for _ in range(2)]
    monitor = km.QualityMonitor(views)
    pairs = tf.data.Dataset.from_tensor_slices(tuple(views)).batch(10)
    model.fit(pairs.take(3), verbose=0)
    before = [v.numpy() for v in model.variables]
    monitor.set_model(model)
    monitor.set_params({"epochs": 9})
    logs = {}
    monitor.on_epoch_end(0, logs)
    return model, monitor, logs, before


def test_figures_are_those_of_the_networks_in_inference_mode(measured):
    model, monitor, logs, _ = measured
    a, b = (np.float32(view) / 255 for view in monitor.views)
    f, g = model.encoder(a).numpy(), model.encoder(b).numpy()
    p, q = model.projector(f), model.projector(g)
    assert logs["alignment"] == pytest.approx(
        np.sum((unit(p) - unit(q)) ** 2, axis=1).mean(), rel=1e-4
    )
    uniform = [quality.uniformity(unit(x)) for x in (p, q)]
    assert logs["uniformity"] == pytest.approx(np.mean(uniform), rel=1e-4)
    for name, x in (("feature_rank", f), ("projection_rank", p)):
        assert logs[name] == pytest.approx(quality.effective_rank(x), rel=1e-3)
    nearest = np.argmax(unit(f) @ unit(g).T, axis=1)
    assert logs["retrieval_top1"] == np.mean(nearest == np.arange(70))
    query = unit(model.predictor(p))
    key = unit(model.key_projector(model.key_encoder(b)).numpy())
    cosine = query.numpy() @ key.T
    counts = monitor.histograms
    assert sum(counts["positive_histogram"]) == 70
    assert sum(counts["negative_histogram"]) == 70 * 69
    edges = np.linspace(-1, 1, 41)
    own = np.histogram(np.diag(cosine), edges)[0]
    # A cosine at an edge may fall to its other side.
    assert np.abs(own - counts["positive_histogram"]).sum() <= 2


def test_a_measurement_changes_no_variable_and_is_the_same_again(measured):
    model, monitor, logs, before = measured
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, value, variable.path)
    again = {}
    monitor.on_epoch_end(1, again)
    assert again == logs


def test_training_is_the_same_with_and_without(tiny_encoder, random_pairs):
    """Not a bit of a weight, not a draw differs."""
    weights = []
    for with_monitor in (True, False):
        keras.utils.set_random_seed(3)
        model = km.MoCo(tiny_encoder(), km.projection_head(4, 4), queue_size=16)
        model.compile(km.SGD(0.05))
        pairs = random_pairs()
        callbacks = [km.QualityMonitor(random_pairs(1))] * with_monitor
        model.fit(pairs, epochs=2, callbacks=callbacks, verbose=0)
        drawn = keras.random.normal((2,)).numpy()
        weights.append([*model.get_weights(), drawn])
    for a, b in zip(*weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_it_measures_every_so_many_epochs_and_the_last(measured):
    _, monitor, _, _ = measured
    other = km.QualityMonitor(monitor.views, every=2)
    other.set_model(monitor.model)
    other.set_params({"epochs": 5})
    found = []
    for epoch in range(5):
        logs = {}
        other.on_epoch_end(epoch, logs)
        found.append("alignment" in logs)
        assert bool(other.histograms) == found[-1]
    assert found == [False, True, False, True, True]


def test_the_grid_shows_each_query_beside_its_key():
    views = np.zeros((2, 3, 16, 16, 3), np.float32)
    views[1] = 1.0
    grid = km.QualityMonitor(tuple(views)).grid(columns=2)
    # Two rows of two pairs of 16 + 16 pixels, and a gap of one.
    assert grid.shape == (2 * 17, 2 * 33, 3) and grid.dtype == np.uint8
    assert (grid[:16, :16] == 0).all() and (grid[:16, 16:32] == 255).all()
    assert (grid[17:, 33:] == 255).all()  # There is no fourth.


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="`every` must be at least 1"):
        km.QualityMonitor(np.zeros((2, 2, 8, 8, 3)), every=0)
    with pytest.raises(ValueError, match="at least 2 images"):
        km.QualityMonitor(np.zeros((2, 1, 8, 8, 3)))
