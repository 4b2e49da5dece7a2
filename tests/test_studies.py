import pytest

from keras_moco.ablation.studies import STUDIES, parse_vary
from keras_moco.presets import PRESETS


def test_two_fields_are_a_grid():
    study = parse_vary(["queue_size=64, 256", "momentum=.9,1"])
    assert study.axes == ("queue_size", "momentum")
    assert study.settings == {
        "queue_size=64 momentum=0.9": {"queue_size": 64, "momentum": 0.9},
        "queue_size=64 momentum=1": {"queue_size": 64, "momentum": 1.0},
        "queue_size=256 momentum=0.9": {"queue_size": 256, "momentum": 0.9},
        "queue_size=256 momentum=1": {"queue_size": 256, "momentum": 1.0},
    }


def test_values_with_commas_are_set_apart_by_semicolons():
    study = parse_vary(["blur=0,0; 0.5,0.5"])
    assert list(study.settings) == ["blur=0,0", "blur=0.5,0.5"]
    study = parse_vary(["crop_scale=0.2,1"])
    assert study.settings == {"crop_scale=0.2,1": {"crop_scale": (0.2, 1.0)}}


@pytest.mark.parametrize(
    "texts, message",
    [
        (["momentum=1", "momentum=0"], "momentum varies twice"),
        (["momentum=1", "width=2", "epochs=1"], "One field or two"),
        (["momentum"], "FIELD=VALUE"),
        (["blur=0,0;0"], "is of type"),
    ],
)
def test_what_cannot_vary_is_said(texts, message):
    with pytest.raises(ValueError, match=message):
        parse_vary(texts)


@pytest.mark.parametrize("name", STUDIES)
def test_every_study_fits_every_preset_with_a_queue(name):
    for preset in PRESETS.values():
        if preset.queue_size:
            for fields in STUDIES[name].settings.values():
                preset.replace(**fields)


def test_v1_becomes_v2_by_one_change_at_a_time():
    v1, v2 = PRESETS["moco_v1"], PRESETS["moco_v2"]
    settings = list(STUDIES["v1-to-v2"].settings.values())
    steps = [
        {name for name in one if one[name] != other[name]}
        for one, other in zip(settings, settings[1:], strict=False)
    ]
    assert steps[0] == {"head_layers"} and steps[2] == {"decay_at"}
    for preset, fields in ((v1, settings[0]), (v2, settings[-1])):
        assert all(getattr(preset, name) == fields[name] for name in fields)
    # What else the two differ in stays the user's.
    both = {
        name
        for name in v1.__dataclass_fields__
        if getattr(v1, name) != getattr(v2, name)
    }
    assert both - set(settings[0]) == {
        "summary",
        "temperature",
        "head_hidden_dim",
    }
