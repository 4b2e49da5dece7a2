import keras
import numpy as np
import pytest

from keras_moco.schedules import CosineMomentum, WarmupCosine, WarmupSteps

SCHEDULES = [
    CosineMomentum(0.99, 1.0, 100),
    WarmupCosine(0.3, 100, 10),
    WarmupSteps(1.0, [60, 80], 5),
]


def test_momentum_rises_by_half_a_cosine():
    schedule = CosineMomentum(0.99, 1.0, 100)
    for step in (0, 25, 50, 100, 150):
        share = min(step / 100, 1)
        expected = 1 - 0.01 * (np.cos(np.pi * share) + 1) / 2
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-6)


def test_learning_rate_warms_up_and_falls_to_zero():
    schedule = WarmupCosine(0.3, total_steps=110, warmup_steps=10)
    np.testing.assert_allclose(schedule(0), 0.03, rtol=1e-6)
    np.testing.assert_allclose(schedule(4), 0.15, rtol=1e-6)
    np.testing.assert_allclose(schedule(10), 0.3, rtol=1e-6)
    np.testing.assert_allclose(schedule(60), 0.15, rtol=1e-5)
    np.testing.assert_allclose(schedule(110), 0.0, atol=1e-7)


def test_without_warmup_the_first_step_has_the_full_rate():
    assert float(WarmupCosine(0.5, 10)(0)) == 0.5
    assert float(WarmupSteps(0.5, [5])(0)) == 0.5


def test_steps_drop_to_a_tenth():
    schedule = WarmupSteps(1.0, boundaries=[60, 80])
    rates = [float(schedule(step)) for step in (59, 60, 79, 80)]
    np.testing.assert_allclose(rates, [1, 0.1, 0.1, 0.01], rtol=1e-6)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_config_round_trip(schedule):
    config = keras.saving.serialize_keras_object(schedule)
    copy = keras.saving.deserialize_keras_object(config)
    assert copy.get_config() == schedule.get_config()
    assert float(copy(37)) == float(schedule(37))
