import keras
import numpy as np
import pytest
import tensorflow as tf
from PIL import Image

import keras_moco as km
from keras_moco.data.encoded import EncodedImages
from keras_moco.data.labeled import image_dataset
from keras_moco.evaluation.extract import Features, check_features


def dataset(*arrays):
    arrays = arrays if len(arrays) > 1 else arrays[0]
    return tf.data.Dataset.from_tensor_slices(arrays).batch(4)


def pixels(count=6, size=8):
    return np.random.default_rng(0).random((count, size, size, 3), "float32")


@pytest.fixture
def photos(tmp_path):
    """Two classes of files of two sizes: they are decoded one by one."""
    draw = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(3):
            side = 8 + number
            shape = (side, side, 3)
            Image.fromarray(draw.integers(0, 255, shape, "uint8")).save(
                tmp_path / name / f"{number}.png"
            )
    return tmp_path


def test_pixels_are_the_features_when_there_is_no_encoder():
    found = km.features(None, dataset(pixels(), np.arange(6)))
    np.testing.assert_array_equal(found.features, pixels().reshape(6, -1))
    np.testing.assert_array_equal(found.labels, np.arange(6))
    assert found.names is None
    assert km.features(None, dataset(pixels())).labels is None


def test_encoder_runs_in_inference_mode(tiny_encoder):
    encoder = tiny_encoder()
    found, _, _ = km.features(encoder, dataset(pixels()))
    expected = encoder(pixels(), training=False)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found.dtype == np.float32


def test_an_encoder_is_traced_once_whatever_the_last_batch():
    class Mean(keras.Model):
        traces = 0

        def call(self, images):
            Mean.traces += 1
            return tf.reduce_mean(images, axis=(1, 2))

    encoder = Mean()
    for count in (6, 5):  # Batches of 4.
        found = km.features(encoder, dataset(pixels(count)))
        expected = pixels(count).mean(axis=(1, 2))
        np.testing.assert_allclose(found.features, expected, rtol=1e-5)
    assert Mean.traces == 1


def test_half_precision_gives_float32_features():
    layers = [
        keras.Input((8, 8, 3)),
        keras.layers.GlobalAveragePooling2D(dtype="bfloat16"),
    ]
    found = km.features(keras.Sequential(layers), dataset(pixels())).features
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, pixels().mean(axis=(1, 2)), atol=0.01)


def test_folder_gives_names_and_labels_in_order(photos, tiny_encoder):
    found = km.features(tiny_encoder(), photos)
    expected = [str(photos / c / f"{i}.png") for c in ("cat", "dog")
                for i in range(3)]  # fmt: skip
    assert found.names == expected
    np.testing.assert_array_equal(found.labels, [0, 0, 0, 1, 1, 1])
    assert found.features.shape == (6, 4)


def test_chosen_images_keep_their_names_and_labels(photos, tiny_encoder):
    images = km.load_images(photos)
    encoder, rows = tiny_encoder(), np.array([4, 1])
    found = km.features(encoder, image_dataset(images, 8, rows=rows))
    assert found.names == [images.name(4), images.name(1)]
    assert found.labels.tolist() == [1, 0]
    whole = km.features(encoder, images, 8).features
    np.testing.assert_allclose(found.features, whole[rows], atol=1e-5)


def test_images_that_turn_out_broken_are_left_out(photos, tiny_encoder):
    paths = sorted(map(str, photos.rglob("*.png")))
    whole = km.features(tiny_encoder(), EncodedImages(paths, names=paths), 8)
    data = (photos / "cat" / "1.png").read_bytes()
    (photos / "cat" / "1.png").write_bytes(data[:60])  # The header is whole.
    images = EncodedImages(
        paths, labels=np.arange(6), names=paths, max_broken=0.5
    )
    keras.utils.set_random_seed(0)
    found = km.features(tiny_encoder(), images, 8)
    assert images.broken == [paths[1]]
    assert found.names == paths[:1] + paths[2:]
    np.testing.assert_array_equal(found.labels, [0, 2, 3, 4, 5])
    assert found.features.shape == (5, 4) and len(whole.features) == 6


def test_other_sizes_are_resized_and_it_is_said(tiny_encoder):
    encoder = tiny_encoder()
    with pytest.warns(UserWarning, match="12x12 px are resized to 8x8") as said:
        found = km.features(encoder, dataset(pixels(size=12)))
    assert len(said) == 1
    resized = tf.image.resize(pixels(size=12), (8, 8), antialias=True)
    np.testing.assert_allclose(found.features, encoder(resized), atol=1e-6)


def test_models_that_are_no_encoders_are_refused():
    image = keras.Input((8, 8, 3))
    maps = keras.Model(image, keras.layers.Conv2D(2, 3)(image))
    grey = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten()])
    for model, words in ((maps, "one vector an image"), (grey, "takes images")):
        with pytest.raises(ValueError, match=words):
            km.features(model, dataset(pixels()))
    with pytest.raises(ValueError, match="no images"):
        km.features(maps, dataset(pixels(0)))


def test_images_with_bad_features_are_named_by_file():
    rows = np.ones((12, 3), "float32")
    rows[:11, 1] = np.nan
    names = [f"photos/{i}.png" for i in range(12)]
    labels = np.arange(12)
    with pytest.raises(ValueError, match="11 test images") as error:
        check_features(Features(rows, labels, names), "test")
    assert "(photos/0.png, " in str(error.value)
    assert "photos/9.png, ...)" in str(error.value)
    with pytest.raises(ValueError, match=r"\(0, 1, "):
        check_features(Features(rows, labels), "test")


@pytest.mark.parametrize("kind, most", [("float16", 6e4), ("float32", 3e38)])
def test_features_are_finite_though_their_sum_is_not(kind, most):
    rows = np.full((3, 50), most, kind)
    check_features(Features(rows, np.arange(3)), "test")
    rows[1, 7] = -np.inf
    with pytest.raises(ValueError, match=r"1 test images are not .*\(1\)"):
        check_features(Features(rows, np.arange(3)), "test")


@pytest.mark.parametrize("size", [-5, 0, 8.5, (8, 8)])
def test_an_image_size_is_a_whole_number(photos, size):
    with pytest.raises(ValueError, match="`image_size`"):
        km.features(None, str(photos), image_size=size)


@pytest.fixture
def named(tmp_path):
    """Gives datasets of class folders, whose images are of one colour."""

    def make(split, **shades):
        for name, shade in shades.items():
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(4):
                colour = (shade, number, 255 - shade)
                Image.new("RGB", (8, 8), colour).save(
                    tmp_path / split / name / f"{number}.png"
                )
        return km.labeled_dataset(str(tmp_path / split), "train")

    return make


def test_classes_are_known_by_their_names(named):
    bank = named("bank", ant=10, bee=110, cat=210)
    test = named("asked", bee=112, cat=212)  # Numbers 0 and 1 of its own.
    assert km.knn_accuracy(None, bank, test, k=3) == 1.0
    found = km.linear_probe(None, bank, test)
    assert found["test_top1"] == 1.0
    assert found["per_class"] == [None, 1.0, 1.0]
    other = named("other", bee=110, wasp=112)
    for judge in (km.knn_accuracy, km.linear_probe):
        with pytest.raises(ValueError, match="training images lack: wasp"):
            judge(None, bank, other)


@pytest.mark.parametrize("judge", [km.knn_accuracy, km.linear_probe])
def test_what_is_judged_is_a_dataset_with_an_end(judge):
    good = dataset(pixels(), np.arange(6) % 2)
    with pytest.raises(ValueError, match="tf.data.Dataset.* 'photos'"):
        judge(None, good, "photos")
    with pytest.raises(ValueError, match="never ends"):
        judge(None, good.repeat(), good)


def test_images_up_to_255_are_said(tiny_encoder, recwarn):
    km.features(tiny_encoder(), dataset(16 * pixels()))
    assert not recwarn
    with pytest.warns(UserWarning, match="divide by 255"):
        km.features(tiny_encoder(), dataset(255 * pixels()))


def test_a_classifier_is_trained_on_images(tiny_encoder):
    data = dataset(pixels(), np.arange(6) % 2)
    with pytest.raises(ValueError, match="`Images`, as .* _BatchDataset"):
        km.fit_classifier(tiny_encoder(), data, data, km.FINETUNE)
