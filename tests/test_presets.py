import dataclasses

import pytest

from keras_moco.presets import (
    PRESETS,
    Preset,
    View,
    find_preset,
    parse_setting,
)


def test_published_numbers():
    v1, v2, v3 = (PRESETS[f"moco_v{i}"] for i in (1, 2, 3))
    for preset in (v1, v2):
        assert (preset.queue_size, preset.momentum) == (65536, 0.999)
        assert (preset.base_learning_rate, preset.weight_decay) == (0.03, 1e-4)
        assert (preset.batch_size, preset.epochs) == (256, 200)
    assert (v1.temperature, v1.head_layers, v1.decay_at) == (
        0.07,
        1,
        (0.6, 0.8),
    )
    assert (v2.temperature, v2.head_layers, v2.decay_at) == (0.2, 2, ())
    assert v2.head_hidden_dim == 2048
    assert (v3.queue_size, v3.optimizer, v3.warmup_epochs) == (0, "lars", 10)
    demo = PRESETS["cifar10"]
    assert (demo.queue_size, demo.temperature, demo.momentum) == (
        4096,
        0.1,
        0.99,
    )
    # .06 at batch 512.
    assert demo.base_learning_rate * 512 / 256 == 0.06


def test_views_are_the_published_ones():
    query, key = PRESETS["moco_v1"].views
    assert query == key
    assert query == View(
        jitter=(0.4, 0.4, 0.4, 0.4),
        jitter_probability=1.0,
        grayscale_first=True,
        blur=0.0,
    )
    assert PRESETS["moco_v2"].views == (View(), View())
    query, key = PRESETS["moco_v3"].views
    assert (query.blur, query.solarize) == (1.0, 0.0)
    assert (key.blur, key.solarize) == (0.1, 0.2)


def test_every_preset_says_its_source_and_command():
    for preset in PRESETS.values():
        assert "Command: keras-moco pretrain" in " ".join(
            preset.summary.split()
        )


@pytest.mark.parametrize(
    "text, expected",
    [
        ("queue_size=4096", ("queue_size", 4096)),
        ("temperature = 0.1", ("temperature", 0.1)),
        ("symmetric=true", ("symmetric", True)),
        ("symmetric=0", ("symmetric", False)),
        ("final_momentum=none", ("final_momentum", None)),
        ("final_momentum=1", ("final_momentum", 1.0)),
        ("mask_same_image=false", ("mask_same_image", False)),
        ("crop_scale=0.08,1", ("crop_scale", (0.08, 1.0))),
        ("decay_at=", ("decay_at", ())),
        ("decay_at=0.6,0.8", ("decay_at", (0.6, 0.8))),
        ("optimizer=lars", ("optimizer", "lars")),
    ],
)
def test_settings_are_read_by_the_type_of_their_field(text, expected):
    assert parse_setting(text) == expected


@pytest.mark.parametrize(
    "text, message",
    [
        ("queue_size", "FIELD=VALUE"),
        ("queu_size=1", "Did you mean queue_size"),
        ("summary=x", "no field 'summary'"),
        ("queue_size=many", "`queue_size` is of type int.*'many'"),
        ("queue_size=1.5", "`queue_size` is of type int"),
        ("symmetric=perhaps", "`symmetric` is of type bool"),
        ("crop_scale=1", "`crop_scale` is of type"),
    ],
)
def test_bad_settings_say_what_was_expected(text, message):
    with pytest.raises(ValueError, match=message):
        parse_setting(text)


@pytest.mark.parametrize(
    "change",
    [
        {"queue_size": -1},
        {"temperature": 0.0},
        {"temperature": float("nan")},
        {"momentum": 1.01},
        {"base_learning_rate": float("inf")},
        {"mean": (0.5, float("nan"), 0.5)},
        {"final_momentum": -0.1},
        {"batch_size": 0},
        {"epochs": 0},
        {"image_size": -3},
        {"crop_scale": (0.0, 1.0)},
        {"crop_scale": (0.9, 0.3)},
        {"blur": (0.5, 2.0)},
        {"jitter": (0.4, 0.4, 0.4, 0.6)},
        {"std": (0.0, 1.0, 1.0)},
        {"optimizer": "adam"},
        {"decay_at": (1.5,)},
    ],
    ids=str,
)
def test_values_out_of_range_are_named(change):
    (name,) = change
    with pytest.raises(ValueError, match=f"`{name}` must be"):
        PRESETS["moco_v2"].replace(**change)


@pytest.mark.parametrize(
    "change",
    [
        {"epochs": 1.5},
        {"batch_size": "16"},
        {"symmetric": 1},
        {"queue_size": True},
        {"momentum": None},
        {"crop_scale": 0.2},
        {"mean": (0.5, 0.5)},
        {"encoder": 18},
        {"decay_at": ("0.5",)},
    ],
)
def test_values_of_another_type_are_named(change):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=f"`{name}` is of type") as error:
        PRESETS["moco_v2"].replace(**change)
    assert repr(value) in str(error.value)


def test_lists_are_taken_for_tuples_and_whole_numbers_for_floats():
    preset = PRESETS["moco_v2"].replace(crop_scale=[0.5, 1], momentum=1)
    assert preset.crop_scale == (0.5, 1)


def test_a_preset_of_the_users_own_is_taken():
    own = PRESETS["moco_v2"].replace(epochs=3)
    assert find_preset(own, "photos") == ("own", own)
    with pytest.raises(ValueError, match="`preset` is of type str"):
        find_preset(5, "photos")


def test_preset_follows_the_dataset():
    assert find_preset(None, "shapes")[0] == "demo"
    assert find_preset(None, "cifar10")[0] == "cifar10"
    assert find_preset(None, "stl10")[0] == "stl10"
    assert find_preset(None, "photos/")[0] == "moco_v2"
    assert find_preset(None, ["a", "b"])[0] == "moco_v2"
    assert find_preset("moco_v1", "shapes") == ("moco_v1", PRESETS["moco_v1"])


def test_unknown_preset_names_the_nearest():
    with pytest.raises(ValueError, match="Did you mean moco_v2"):
        find_preset("mocov2", None)


def test_presets_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["demo"].momentum = 0.5
    assert isinstance(PRESETS["demo"].replace(momentum=0.5), Preset)
