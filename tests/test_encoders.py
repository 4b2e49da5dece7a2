import keras
import numpy as np
import pytest

from keras_moco.encoders import feature_dim, projection_head, resnet


@pytest.mark.parametrize(
    "name, parameters, features",
    # torchvision's counts without the classifier.
    [
        ("resnet18", 11_176_512, 512),
        ("resnet34", 21_284_672, 512),
        ("resnet50", 23_508_032, 2048),
    ],
)
def test_trainable_parameters_are_torchvisions(name, parameters, features):
    model = resnet(name)
    count = sum(int(np.prod(v.shape)) for v in model.trainable_variables)
    assert count == parameters
    assert model.output_shape == (None, features)


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
