import keras
import pytest

import keras_moco as km
from keras_moco.build import build_model, prepare


@pytest.fixture
def small_shapes(monkeypatch):
    counts = {"pretrain": 100, "train": 100, "test": 20}
    monkeypatch.setattr("keras_moco.data.sources._SHAPES_COUNTS", counts)


def test_every_field_is_filled_in_from_the_data(small_shapes):
    name, preset, images, source = prepare(batch_size=64, data_dir="somewhere")
    assert name == "demo"
    assert (preset.image_size, len(images)) == (32, 100)
    assert preset.batch_norm_groups == 4  # 16 of 64 each.
    assert preset.mask_same_image  # 1,024 keys of 100 images.
    assert source["data_dir"] == "somewhere"


def test_settings_and_options_change_the_preset(small_shapes):
    _, preset, _, _ = prepare(
        settings=("queue_size=8", "batch_norm_groups=1"), width=4, epochs=None
    )
    assert (preset.queue_size, preset.width) == (8, 4)
    assert preset.batch_norm_groups == 1
    assert preset.epochs == km.PRESETS["demo"].epochs
    assert not preset.mask_same_image  # 8 keys of 100 images.


def test_groups_must_divide_the_batch(small_shapes):
    with pytest.raises(ValueError, match="`batch_norm_groups` must divide"):
        prepare(settings=("batch_norm_groups=3",), batch_size=64)


def test_precision_is_the_models_alone(small_shapes):
    _, preset, _, _ = prepare(batch_size=32, width=2)
    model = build_model(preset, None, 10, "mixed_bfloat16")
    assert model.encoder.compute_dtype == "bfloat16"
    assert keras.config.dtype_policy().name == "float32"
    assert float(model.optimizer.learning_rate) > 0


def test_jit_is_as_asked_for(small_shapes):
    _, preset, _, _ = prepare(batch_size=32, width=2)
    for jit, compiled in (("on", True), ("off", False), ("auto", False)):
        model = build_model(preset, None, 10, "float32", jit)
        assert model.jit_compile is compiled  # There is no GPU here.


def test_width_is_of_the_resnets(small_shapes):
    with pytest.raises(ValueError, match="vit_tiny has one width"):
        prepare(encoder="vit_tiny", width=16)


def test_preset_may_start_residual_branches_at_zero(small_shapes):
    _, preset, _, _ = prepare(settings="zero_init_residual=true", width=2)
    model = build_model(preset, None, 10, "float32")
    gamma = model.encoder.get_layer("stage0_0_b_bn").gamma
    assert not gamma.numpy().any()
