import pytest

import keras_moco as km
from keras_moco.bench import bench, bottleneck

PRESET = km.PRESETS["demo"].replace(
    batch_size=16, queue_size=32, width=2, batch_norm_groups=1
)


@pytest.fixture(scope="module")
def images():
    return km.load_images("shapes", "pretrain", count=64, image_size=16)


def test_data_alone_needs_no_model(images):
    figures = bench(images, PRESET, steps=3)
    assert set(figures) == {"data_images_per_second"}
    assert figures["data_images_per_second"] > 0


def test_figures_fit_together(images):
    model = km.MoCo.from_preset(PRESET, km.resnet("resnet18", 16, 2))
    model.compile(km.build_optimizer(PRESET, 16, 100))
    figures = bench(images, PRESET, model, steps=3)
    assert set(figures) == {
        "data_images_per_second",
        "step_images_per_second",
        "pretrain_images_per_second",
        "data_wait",
        "momentum_update_ms",
        "checkpoint_seconds",
    }
    assert 0 <= figures["data_wait"] < 1
    share = (
        figures["pretrain_images_per_second"]
        / figures["step_images_per_second"]
    )
    assert figures["data_wait"] == pytest.approx(max(0, 1 - share))
    alone = bench(images, PRESET, model, data=False, steps=3)
    assert set(alone) == {
        "step_images_per_second",
        "momentum_update_ms",
        "checkpoint_seconds",
    }


@pytest.mark.parametrize("wait, words", [(0.02, "step limits"), (0.5, "50 %")])
def test_bottleneck_is_named(wait, words):
    assert words in bottleneck({"data_wait": wait})


def test_one_step_is_no_measurement(images):
    with pytest.raises(ValueError, match="`steps`.*1"):
        bench(images, PRESET, steps=1)
