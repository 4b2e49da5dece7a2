import json
import subprocess
import sys

import keras
import numpy as np
import pytest

import keras_moco as km

PLAIN_TENSORFLOW = """
import sys
sys.modules["keras"] = sys.modules["keras_moco"] = None  # Not to be imported.
import numpy as np, tensorflow as tf
folder, images, features = sys.argv[1:]
served = tf.saved_model.load(folder)
images = np.load(images)
np.testing.assert_allclose(served.serve(images), np.load(features), atol=1e-5)
assert served.serve(images[:1]).shape[0] == 1
"""


def images(size=20, count=3):
    return np.random.default_rng(0).random((count, size, size, 3), "float32")


def test_saved_model_gives_the_features_with_tensorflow_alone(tmp_path):
    encoder = km.resnet("resnet18", image_size=32, width=4)
    km.export_encoder(encoder, tmp_path / "out")
    np.save(tmp_path / "images.npy", images())
    np.save(tmp_path / "features.npy", encoder(images()))
    names = ("out", "images.npy", "features.npy")
    subprocess.run(
        [
            sys.executable,
            "-c",
            PLAIN_TENSORFLOW,
            *(tmp_path / n for n in names),
        ],
        check=True,
        cwd=tmp_path,
    )


def test_keras_copy_is_loaded_trainable_and_equal(tmp_path):
    encoder = km.resnet("resnet18", image_size=32, width=4)
    folder = km.export_encoder(encoder, tmp_path / "a" / "b")
    for place in (folder, folder / "encoder.keras"):
        loaded = km.load_encoder(place)
        np.testing.assert_array_equal(loaded(images()), encoder(images()))
        assert len(loaded.trainable_variables) == len(
            encoder.trainable_variables
        )


def test_card_says_the_contract_and_what_it_is_given(tmp_path):
    encoder = km.resnet("resnet18", image_size=32, width=4)
    folder = km.export_encoder(encoder, tmp_path / "out", {"knn_top1": 0.5})
    card = json.loads((folder / "card.json").read_text())
    assert card["knn_top1"] == 0.5
    assert card["output_shape"] == [None, 32]
    assert "[0, 1]" in card["input"]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_mixed_precision_encoder_exports_float32(tmp_path, policy):
    keras.config.set_dtype_policy(policy)
    try:
        encoder = km.resnet("resnet18", image_size=32, width=4)
    finally:
        keras.config.set_dtype_policy("float32")
    assert encoder(images()).dtype == policy.removeprefix("mixed_")
    loaded = km.load_encoder(km.export_encoder(encoder, tmp_path / "out"))
    assert loaded(images()).dtype == "float32"
    for a, b in zip(loaded.get_weights(), encoder.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_earlier_export_is_replaced_and_other_files_are_not(tmp_path):
    encoder = km.resnet("resnet18", image_size=32, width=4)
    km.export_encoder(encoder, tmp_path / "out", {"run": 1})
    km.export_encoder(encoder, tmp_path / "out", {"run": 2})
    card = json.loads((tmp_path / "out" / "card.json").read_text())
    assert card["run"] == 2
    (tmp_path / "out" / "notes.txt").write_text("x")
    with pytest.raises(ValueError, match="left alone"):
        km.export_encoder(encoder, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ValueError, match="left alone"):
        km.export_encoder(encoder, tmp_path / "mine")
    assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]


def test_a_failed_export_leaves_nothing_behind(tmp_path, monkeypatch):
    encoder = km.resnet("resnet18", image_size=32, width=4)

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr("keras.Model.save", full)
    with pytest.raises(OSError, match="No space"):
        km.export_encoder(encoder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_link_is_followed(tmp_path, tiny_encoder):
    (tmp_path / "far").mkdir()
    link = tmp_path / "link"
    link.symlink_to("far")
    for _ in range(2):  # Anew, and in place of an earlier one.
        km.export_encoder(tiny_encoder(), link)
        assert link.is_symlink()
        assert (tmp_path / "far/encoder.keras").is_file()
    assert not list(tmp_path.glob(".*"))
