import pytest

from keras_moco.evaluation.recipes import FINETUNE, LINEAR_PROBE, parse_share


def test_the_linear_probe_is_the_published_one():
    recipe = LINEAR_PROBE
    assert recipe.frozen and recipe.weight_decay == 0.0
    assert (recipe.learning_rate, recipe.batch_size) == (30.0, 256)
    drops = [share * recipe.epochs for share in recipe.decay_at]
    assert (recipe.epochs, drops) == (100, [60, 80])


def test_setting_says_what_decides_the_recipe():
    assert set(LINEAR_PROBE.setting) == {"learning_rate", "weight_decay"}
    assert FINETUNE.replace(labels=0.1).setting["labels"] == 0.1


@pytest.mark.parametrize(
    "change",
    [
        {"learning_rate": 0.0},
        {"learning_rate": float("nan")},
        {"backbone_lr_scale": -1.0},
        {"weight_decay": -1.0},
        {"epochs": 0},
        {"batch_size": 0},
        {"labels": 0.0},
        {"labels": 1.1},
        {"labels": "10%"},
        {"epochs": 1.5},
        {"holdout": 1.0},
        {"seed": -1},
    ],
    ids=str,
)
def test_values_out_of_range_are_named(change):
    with pytest.raises(ValueError, match=next(iter(change))):
        FINETUNE.replace(**change)


def test_shares_are_read_and_what_is_none_is_refused():
    assert parse_share("10%") == 0.1 and parse_share("100%") == 1.0
    assert parse_share("0.5%") == 0.005
    for text in ("0%", "101%", "abc", "10", "nan%", "-1%", "%"):
        with pytest.raises(ValueError, match="such as 1%, 10% or 100%"):
            parse_share(text)
