import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_moco as km
from keras_moco.encoders import (
    build_encoder,
    describe,
    encoder_names,
    feature_dim,
    projection_head,
    resnet,
    vit,
)
from keras_moco.encoders.vit import positions
from keras_moco.export import export_encoder
from keras_moco.layers import norm_layers, num_groups, swap_batch_norm
from keras_moco.load import load_encoder


@pytest.mark.parametrize(
    "name, parameters, features",
    # torchvision's counts without the classifier.
    [
        ("resnet18", 11_176_512, 512),
        ("resnet34", 21_284_672, 512),
        ("resnet50", 23_508_032, 2048),
        ("resnet101", 42_500_160, 2048),
        ("resnet152", 58_143_808, 2048),
    ],
)
def test_trainable_parameters_are_torchvisions(name, parameters, features):
    assert describe(name) == (parameters, features)


def test_description_is_that_of_the_built_model():
    model = resnet("resnet18")
    count = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert describe("resnet18") == (count, 512)
    assert model.output_shape == (None, 512)


@pytest.mark.parametrize("name, last", [("resnet18", "b"), ("resnet50", "c")])
def test_residual_branches_may_start_at_zero(name, last):
    model = resnet(name, 32, 2, zero_init_residual=True)
    for layer in model.layers:
        if layer.name.endswith("_bn"):
            is_last = layer.name.endswith(f"_{last}_bn")
            np.testing.assert_array_equal(layer.gamma, 0.0 if is_last else 1.0)


def test_small_images_keep_their_resolution_in_the_stem():
    small, large = resnet("resnet18", 32, 4), resnet("resnet18", 96, 4)
    assert small.get_layer("stem_conv").kernel_size == (3, 3)
    assert small.get_layer("stem_conv").strides == (1, 1)
    assert large.get_layer("stem_conv").kernel_size == (7, 7)
    names = [layer.name for layer in small.layers]
    assert "stem_pool" not in names


def test_stride_of_a_bottleneck_is_on_its_3x3():
    model = resnet("resnet50", 224, 4)
    assert model.get_layer("stage1_0_a_conv").strides == (1, 1)
    assert model.get_layer("stage1_0_b_conv").strides == (2, 2)


def test_batch_norm_has_pytorchs_constants_and_convolutions_no_bias():
    model = resnet("resnet18", 32, 4)
    for layer in model.layers:
        if layer.name.endswith("_bn"):
            assert (layer.momentum, layer.epsilon) == (0.9, 1e-5)
        if layer.name.endswith("_conv"):
            assert not layer.use_bias


def test_strided_convolutions_pad_both_sides_alike():
    # torchvision pads 1 on each side: output pixel 0 is centred on input 0.
    model = resnet("resnet18", 32, 2, mean=(0, 0, 0), std=(1, 1, 1))
    pad = model.get_layer("stage1_0_a_pad")
    assert pad.padding == ((1, 1), (1, 1))


def test_normalisation_is_the_first_layer():
    model = resnet("resnet18", 32, 4, mean=(0.1, 0.2, 0.3), std=(0.5, 0.4, 0.2))
    layer = model.get_layer("normalize")
    image = np.random.default_rng(0).random((1, 2, 2, 3), "float32")
    expected = (image - [0.1, 0.2, 0.3]) / [0.5, 0.4, 0.2]
    np.testing.assert_allclose(layer(image), expected, rtol=1e-5)


def test_any_image_size_is_taken():
    model = resnet("resnet18", 32, 4)
    for size in (20, 33):
        features = model(np.zeros((2, size, size, 3), "float32"))
        assert features.shape == (2, 32)


def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="resnet18.*Received: 'resnet19'"):
        resnet("resnet19")
    with pytest.raises(ValueError, match="vit_small.*Received: 'vit_huge'"):
        vit("vit_huge")
    with pytest.raises(ValueError, match="mean keras.applications/ResNet50V2"):
        build_encoder("keras.applications/ResNet50V3")
    with pytest.raises(ValueError, match="no encoder 'xyzzy'. All of them"):
        build_encoder("xyzzy")


# Vision transformers


@pytest.mark.parametrize("name, width", [("vit_tiny", 192), ("vit_small", 384)])
def test_vit_has_the_parameters_of_its_parts(name, width):
    norm, attention = 2 * width, 4 * (width * width + width)
    mlp = 2 * 4 * width * width + 5 * width
    expected = 12 * (2 * norm + attention + mlp) + norm
    assert describe(name) == (expected, width)  # patches are frozen
    patches = 16 * 16 * 3 * width + width
    model = vit(name, freeze_patch_embedding=False)
    count = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert count == expected + patches


def test_positions_are_sines_and_cosines_of_columns_and_rows():
    table = positions(5, 8)
    for row, column, pair in [(0, 0, 0), (3, 1, 0), (2, 4, 1)]:
        frequency = 1 / 10000 ** (pair / 2)
        found = table[row, column, [pair, 2 + pair, 4 + pair, 6 + pair]]
        expected = [
            np.sin(column * frequency),
            np.cos(column * frequency),
            np.sin(row * frequency),
            np.cos(row * frequency),
        ]
        np.testing.assert_allclose(found, expected)


def test_positions_are_added_to_the_patches():
    model = vit("vit_tiny", 32)
    layer = model.get_layer("positions")
    x = np.random.default_rng(0).normal(size=(2, 8, 8, 192)).astype("float32")
    np.testing.assert_allclose(layer(x), x + positions(8, 192), atol=1e-5)


def test_attention_starts_in_xaviers_range():
    model = vit("vit_tiny", 32)
    for weight in model.get_layer("block0_attention").weights:
        values = weight.numpy()
        if "kernel" in weight.path:
            bound = np.sqrt(6 / (192 + 192))
            assert np.abs(values).max() <= bound
            np.testing.assert_allclose(
                values.std(), bound / np.sqrt(3), rtol=0.02
            )
        else:
            np.testing.assert_array_equal(values, 0)


def test_frozen_patches_stay_and_the_rest_learns(random_pairs):
    encoder = vit("vit_tiny", 8)
    model = km.MoCo(encoder, projection_head(192, 8), queue_size=16)
    model.compile(km.SGD(0.1))
    before = [v.numpy() for v in encoder.get_layer("patches").weights]
    block = encoder.get_layer("block3_mlp1").kernel.numpy()
    model.fit(random_pairs(steps=2), verbose=0)
    for part in (model.encoder, model.key_encoder):
        for old, new in zip(
            before, part.get_layer("patches").weights, strict=True
        ):
            np.testing.assert_array_equal(old, new)
    assert not np.array_equal(
        block, model.encoder.get_layer("block3_mlp1").kernel
    )
    key = model.key_encoder.get_layer("block3_mlp1").kernel
    assert not np.array_equal(block, key)


@pytest.mark.parametrize("size, nearest", [(100, 96), (7, 8), (2, 4)])
def test_patches_must_divide_the_image(size, nearest):
    with pytest.raises(
        ValueError, match=f"Received: {size}. Nearest: {nearest}"
    ):
        vit("vit_small", size)


# Encoders of Keras and keras-cv


def test_names_are_unique_and_ours_come_first():
    names = encoder_names()
    assert len(set(names)) == len(names) > 50
    assert names[:2] == ["resnet18", "resnet34"]
    assert "keras.applications/EfficientNetV2B0" in names
    assert "keras_cv/ResNet18Backbone" in names


@pytest.mark.parametrize(
    "name, size, features",
    [
        ("keras.applications/EfficientNetV2B0", 32, 1280),
        ("keras.applications/MobileNetV3Small", 32, 576),
        ("keras.applications/ConvNeXtTiny", 32, 768),
        ("keras_cv/ResNet18Backbone", 32, 512),
    ],
)
def test_encoders_of_other_libraries_are_swapped_and_exported(
    tmp_path, name, size, features
):
    x = np.random.default_rng(0).random((4, size, size, 3), "float32")
    encoder = build_encoder(name, size)
    assert encoder.output_shape == (None, features)
    before = encoder(x, training=False)
    swapped = swap_batch_norm(encoder, groups=2)
    own = [
        layer
        for layer in encoder._flatten_layers(include_self=False)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    assert len(norm_layers(swapped)) == len(own)
    assert num_groups(swapped) == (2 if own else 1)
    export_encoder(swapped, tmp_path / "export")
    loaded = load_encoder(tmp_path / "export")
    np.testing.assert_allclose(loaded(x, training=False), before, atol=1e-4)
    served = tf.saved_model.load(tmp_path / "export")
    np.testing.assert_allclose(served.serve(x), before, atol=1e-4)


@pytest.mark.parametrize(
    "name, options, scale",
    [
        ("MobileNetV3Small", {"include_preprocessing": False}, 1),
        ("EfficientNetB0", {}, 255),  # Divides by 255 itself.
    ],
)
def test_applications_get_normalised_images(name, options, scale):
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)
    ours = build_encoder(f"keras.applications/{name}", 32, mean=mean, std=std)
    theirs = getattr(keras.applications, name)(
        include_top=False,
        weights=None,
        input_shape=(32, 32, 3),
        pooling="avg",
        **options,
    )
    ours_ = [w for w in ours.weights if "normalize_images" not in w.path]
    for a, b in zip(ours_, theirs.weights, strict=True):
        a.assign(b + 0.05)
        b.assign(b + 0.05)
    x = np.random.default_rng(0).random((2, 32, 32, 3), "float32")
    expected = theirs(scale * (x - mean) / std, training=False)
    assert np.std(expected) > 0
    np.testing.assert_allclose(ours(x, training=False), expected, rtol=1e-3)


def test_image_too_small_for_a_network_is_one_line():
    with pytest.raises(ValueError, match="71") as error:
        build_encoder("keras.applications/Xception", 32)
    assert "\n" not in str(error.value)
    assert "larger `image_size`" in str(error.value)


def test_v1_head_is_linear_and_v2_head_has_one_hidden_relu():
    x = np.random.default_rng(0).normal(size=(3, 6)).astype("float32")
    linear = projection_head(6, 4, layers=1)
    kernel, bias = linear.get_weights()
    np.testing.assert_allclose(linear(x), x @ kernel + bias, atol=1e-6)
    mlp = projection_head(6, 4, hidden_dim=8, layers=2)
    k1, b1, k2, b2 = mlp.get_weights()
    expected = np.maximum(x @ k1 + b1, 0) @ k2 + b2
    np.testing.assert_allclose(mlp(x), expected, atol=1e-5)


def test_dense_layers_start_in_the_published_range():
    kernel = projection_head(400, 300, layers=1).get_weights()[0]
    bound = 1 / np.sqrt(400)
    assert np.abs(kernel).max() <= bound
    np.testing.assert_allclose(kernel.std(), bound / np.sqrt(3), rtol=0.02)


def test_v3_projector_normalises_last_without_scale_and_predictor_not():
    projector = projection_head(8, 4, layers=2, batch_norm=True)
    last = projector.layers[-1]
    assert not last.scale and not last.center
    assert not any(getattr(la, "use_bias", False) for la in projector.layers)
    predictor = projection_head(
        4, 4, layers=2, batch_norm=True, last_batch_norm=False
    )
    assert type(predictor.layers[-1]).__name__ == "Dense"


def test_a_head_needs_a_layer():
    with pytest.raises(ValueError, match="`layers`.*0"):
        projection_head(4, layers=0)


def test_encoder_that_gives_a_map_is_refused_with_the_remedy():
    maps = keras.Sequential([keras.Input((8, 8, 3)), keras.layers.Conv2D(4, 3)])
    with pytest.raises(ValueError, match="GlobalAveragePooling2D"):
        feature_dim(maps)


def test_unbuilt_encoder_is_refused():
    with pytest.raises(ValueError, match="built Keras model"):
        feature_dim(keras.Sequential([keras.layers.Flatten()]))


def test_lambda_layers_and_several_inputs_are_refused():
    images = keras.Input((8, 8, 3))
    x = keras.layers.Lambda(lambda x: 2 * x, name="twice")(images)
    x = keras.layers.GlobalAveragePooling2D()(x)
    with pytest.raises(ValueError, match="Lambda layer, 'twice'") as error:
        feature_dim(keras.Model(images, x))
    assert "\n" not in str(error.value)
    other = keras.Input((3,), name="meta")
    y = keras.layers.Add()([keras.layers.GlobalMaxPooling2D()(images), other])
    with pytest.raises(ValueError, match="one input.*takes 2: .*meta"):
        feature_dim(keras.Model([images, other], y))
