import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_moco as km
from keras_moco.monitoring.run import RunFolder


def images():
    return np.random.default_rng(0).random((3, 8, 8, 3), "float32")


def test_bare_saved_model_is_for_inference_only(tiny_encoder, tmp_path):
    encoder = tiny_encoder()

    class Served(tf.Module):
        @tf.function(input_signature=[tf.TensorSpec((None, None, None, 3))])
        def __call__(self, pixels):
            return encoder(pixels, training=False)

    served = Served()
    served.encoder = encoder
    tf.saved_model.save(served, tmp_path / "bare")
    loaded = km.load_encoder(tmp_path / "bare", trainable=False)
    assert not loaded.trainable_variables
    np.testing.assert_allclose(
        loaded.predict(images(), verbose=0), encoder(images()), atol=1e-5
    )
    with pytest.raises(ValueError, match="inference only"):
        km.load_encoder(tmp_path / "bare")


def test_export_without_its_keras_copy_is_a_saved_model(tiny_encoder, tmp_path):
    encoder = tiny_encoder()
    folder = km.export_encoder(encoder, tmp_path / "out")
    (folder / "encoder.keras").unlink()
    loaded = km.load_encoder(folder, trainable=False)
    np.testing.assert_allclose(loaded(images()), encoder(images()), atol=1e-5)


def test_code_in_a_file_is_not_run(tmp_path):
    path = tmp_path / "lambda.keras"
    layers = [
        keras.Input((8, 8, 3)),
        keras.layers.Lambda(lambda x: x * 2.0),
        keras.layers.GlobalAveragePooling2D(),
    ]
    keras.Sequential(layers).save(path)
    with pytest.raises(ValueError, match="Python code.*is not run") as error:
        km.load_encoder(path)
    assert "\n" not in str(error.value)


def test_a_place_without_encoder_is_named(tmp_path):
    for place in (tmp_path, tmp_path / "nowhere", tmp_path / "x.keras"):
        with pytest.raises(ValueError, match="no exported encoder"):
            km.load_encoder(place)
    (tmp_path / "saved_model.pb").write_bytes(b"no graph")
    with pytest.raises(ValueError, match="cannot be used"):
        km.load_encoder(tmp_path, trainable=False)
    (tmp_path / "run.json").write_text(json.dumps({"settings": {}}))
    with pytest.raises(ValueError, match="run.* has no checkpoint yet"):
        km.load_encoder(tmp_path)


def test_image_size_is_read_from_cards(tmp_path):
    card = json.dumps({"settings": {"image_size": 48}})
    (tmp_path / "card.json").write_text(card)
    for place in (tmp_path, tmp_path / "encoder.keras"):
        assert km.trained_image_size(place) == 48
    assert km.trained_image_size(tmp_path / "other.keras") is None
    for damaged in (
        '{"settings": null}',
        '{"settings": {"image_size": "x"}}',
        '{"settings": {"image_size": -5}}',
        '{"settings',
    ):
        (tmp_path / "card.json").write_text(damaged)
        with pytest.raises(ValueError, match="card.json is damaged"):
            km.trained_image_size(tmp_path)


def test_a_damaged_file_is_one_line(tiny_encoder, tmp_path):
    path = tmp_path / "encoder.keras"
    tiny_encoder().save(path)
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = bytearray(whole)
    flipped[middle : middle + 64] = bytes(64 * [0x55])
    for damaged in (b"", whole[:middle], bytes(flipped)):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="damaged|cannot be loaded") as e:
            km.load_encoder(path)
        assert "\n" not in str(e.value)


def test_settings_of_another_kind_are_a_damaged_run(tmp_path):
    settings = {"queue_size": 4, "batch_size": 4, "epochs": 1}
    settings |= {"encoder": "resnet18", "momentum": "fast"}
    (tmp_path / "run.json").write_text(json.dumps({"settings": settings}))
    run = RunFolder(tmp_path, None)
    with pytest.raises(ValueError, match="damaged: `momentum` is of type"):
        km.load.run_preset(run)


def test_a_damaged_saved_model_is_one_line(tiny_encoder, tmp_path):
    km.export_encoder(tiny_encoder(), tmp_path / "out")
    (tmp_path / "out/encoder.keras").unlink()
    (data,) = (tmp_path / "out/variables").glob("variables.data*")
    data.write_bytes(data.read_bytes()[:100])
    with pytest.raises(ValueError, match="out cannot be used"):
        km.load_encoder(tmp_path / "out", trainable=False)
