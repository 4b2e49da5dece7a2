import keras
import numpy as np
import pytest
from conftest import GOLDEN

from keras_moco.optimizers import LARS, SGD, build_optimizer
from keras_moco.presets import PRESETS
from keras_moco.schedules import WarmupCosine, WarmupSteps

VARIABLES = ("kernel", "dense", "bias", "zero")


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(GOLDEN / "optimizers.npz"))


@pytest.mark.parametrize("kind", ["sgd", "sgd_nesterov", "lars"])
def test_ten_steps_are_those_of_pytorch(golden, kind):
    options = {
        "learning_rate": float(golden["learning_rate"]),
        "momentum": float(golden["momentum"]),
        "weight_decay": float(golden["weight_decay"]),
    }
    if kind == "lars":
        trust = float(golden["trust_coefficient"])
        optimizer = LARS(**options, trust_coefficient=trust)
    else:
        optimizer = SGD(**options, nesterov=kind == "sgd_nesterov")
    variables = [keras.Variable(golden[f"init_{name}"]) for name in VARIABLES]
    for step in range(10):
        grads = [golden[f"grads_{name}"][step] for name in VARIABLES]
        optimizer.apply(
            [keras.ops.cast(grad, "float32") for grad in grads], variables
        )
    for name, variable in zip(VARIABLES, variables, strict=True):
        np.testing.assert_allclose(
            variable.numpy(), golden[f"{kind}_{name}"], rtol=1e-4, atol=1e-5
        )


def test_a_changing_rate_scales_the_whole_momentum():
    # PyTorch: v = m v + g, w -= lr v. In Keras' SGD the old rate stays in v.
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay(
        [0], [1.0, 0.1]
    )
    variable = keras.Variable([0.0])
    optimizer = SGD(schedule, momentum=0.5)
    for _ in range(2):
        optimizer.apply([keras.ops.ones(1)], [variable])
    np.testing.assert_allclose(variable.numpy(), -1.0 - 0.1 * 1.5, rtol=1e-6)


@pytest.mark.parametrize("kind", [SGD, LARS])
def test_excluded_variables_do_not_decay(kind):
    weights = [keras.Variable(np.ones((2, 2))) for _ in range(2)]
    optimizer = kind(1.0, weight_decay=0.25)
    optimizer.exclude_from_weight_decay(var_list=weights[:1])
    optimizer.apply([keras.ops.zeros((2, 2))] * 2, weights)
    np.testing.assert_array_equal(weights[0].numpy(), 1.0)
    assert np.all(weights[1].numpy() < 1.0)


@pytest.mark.parametrize(
    "optimizer",
    [SGD(0.1, 0.8, True, 1e-3), LARS(0.1, 0.8, False, 1e-3, 0.01)],
    ids=["sgd", "lars"],
)
def test_config_round_trip(optimizer):
    config = keras.saving.serialize_keras_object(optimizer)
    copy = keras.saving.deserialize_keras_object(config)
    assert copy.get_config() == optimizer.get_config()


def test_arguments_out_of_range_are_named():
    with pytest.raises(ValueError, match="`momentum`.*1.5"):
        SGD(momentum=1.5)
    with pytest.raises(ValueError, match="`weight_decay`.*-1"):
        SGD(weight_decay=-1)


def test_preset_gives_rate_per_256_images_and_cosine():
    optimizer = build_optimizer(PRESETS["moco_v2"], 512, total_steps=100)
    schedule = optimizer._learning_rate
    assert isinstance(schedule, WarmupCosine)
    np.testing.assert_allclose(schedule(0), 0.06, rtol=1e-6)
    assert optimizer.coupled_weight_decay == 1e-4


def test_v1_drops_at_epochs_120_and_160_of_200():
    schedule = build_optimizer(PRESETS["moco_v1"], 256, 200)._learning_rate
    assert isinstance(schedule, WarmupSteps)
    assert schedule.boundaries == [120, 160]


def test_v3_is_lars_with_ten_epochs_of_warmup():
    optimizer = build_optimizer(PRESETS["moco_v3"], 4096, total_steps=1000)
    assert isinstance(optimizer, LARS)
    assert optimizer._learning_rate.warmup_steps == 100
    np.testing.assert_allclose(optimizer._learning_rate.learning_rate, 9.6)
