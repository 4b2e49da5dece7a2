"""The momentum update as a filter: closed forms against plain sums."""

import numpy as np
import pytest

from keras_moco import average

MOMENTA = [0.0, 0.5, 0.9, 0.99]


def weights(momentum, count=5000):
    """What the query of 0, 1, ... steps before weighs in the key."""
    return (1 - momentum) * momentum ** np.arange(count)


@pytest.mark.parametrize("momentum", MOMENTA)
def test_closed_forms_are_the_sums_over_the_weights(momentum):
    weight = weights(momentum)
    ages = np.arange(len(weight))
    assert np.isclose(average.ramp_lag(momentum), weight @ ages)
    assert np.isclose(average.white_share(momentum), weight @ weight)
    # The cost of lag d on a random walk, whose distance grows as its steps.
    lags = range(200)
    cost = [weight @ abs(ages - lag) for lag in lags]
    assert cost[average.walk_lag(momentum)] == pytest.approx(min(cost))


@pytest.mark.parametrize("correlation", [-0.5, 0.0, 0.9])
def test_correlated_noise_is_kept_by_the_whole_double_sum(correlation):
    weight = weights(0.8, 200)
    ages = np.arange(200)
    covariance = correlation ** abs(ages[:, None] - ages)
    expected = weight @ covariance @ weight
    found = average.correlated_share(0.8, correlation)
    assert np.isclose(found, expected)


def test_average_is_the_weighted_sum_of_the_past():
    query = np.random.default_rng(0).random((30, 4))
    weight = weights(0.7, 30)
    start = np.ones(4)
    key = average.exponential_average(query, 0.7, start)
    past = weight[:29] @ query[:0:-1]
    assert np.allclose(key[-1], past + 0.7**29 * start)
    assert np.array_equal(average.exponential_average(query, 0.0), query)


def test_lag_and_noise_of_a_ramp_are_found():
    steps, count = 2000, 50
    noise = np.random.default_rng(0).standard_normal((steps, count))
    query = np.linspace(0, 1, steps, endpoint=False)[:, None] + 0.05 * noise
    key = average.exponential_average(query, 0.9)
    lag, share = average.measure_ramp(query, key)
    assert lag == pytest.approx(9, abs=0.2)
    assert share == pytest.approx(0.1 / 1.9, rel=0.03)


def test_trace_of_a_random_walk_is_measured():
    steps = np.random.default_rng(0).standard_normal((2001, 60))
    query = steps.cumsum(axis=0)
    query[:, 0] = 1.0  # A weight that does not move tells nothing.
    key = average.exponential_average(query, 0.95)
    key[1000, 5] += 0.25
    found = average.measure_trace(query, key, 0.95)
    assert found["difference"] == pytest.approx(0.25)
    assert found["apart"] == pytest.approx(np.abs(key - query).max())
    assert found["lag"] == pytest.approx(np.log(2) / 0.05, abs=3)
    assert found["noise"] == pytest.approx(0.05 / 1.95, rel=0.1)
    assert found["correlation"] == pytest.approx(0, abs=0.02)
    by_hand = key[1000:, 1:] - query[990:1991, 1:]
    scale = np.sqrt((np.diff(query[1000:, 1:], axis=0) ** 2).mean(axis=0))
    expected = np.sqrt(((by_hand / scale) ** 2).mean())
    assert found["distance"][10] == pytest.approx(expected)


def test_trace_of_drifting_weights_lags_as_a_ramp():
    draw = np.random.default_rng(0)
    noise = 0.01 * draw.standard_normal((1001, 20))
    query = np.arange(1001)[:, None] * draw.standard_normal(20) + noise
    key = average.exponential_average(query, 0.95)
    assert average.measure_trace(query, key, 0.95)["lag"] == 19
