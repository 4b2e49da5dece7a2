import itertools
import json
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_moco as km
from keras_moco.data.images import Images
from keras_moco.evaluation import classify
from keras_moco.evaluation.classifier import Classifier
from keras_moco.evaluation.classify import fit_classifier, split_labels
from keras_moco.monitoring.run import RunFolder
from keras_moco.safety.lock import RunLock

PROBE = km.LINEAR_PROBE.replace(learning_rate=1.0, epochs=5, batch_size=8)
FINETUNE = km.FINETUNE.replace(epochs=3, batch_size=8)


def shades(count, seed=0, size=8, classes=2):
    """Images whose class is how bright they are."""
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    pixels = draw.integers(0, 60, (count, size, size, 3))
    pixels += 180 * labels[:, None, None, None]
    return Images(pixels.astype("uint8"), labels, source=f"shades{seed}")


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def centred_encoder():
    """Features of opposite sign for dark and for bright images."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Rescaling(2.0, -1.0),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(momentum=0.5),  # For short runs.
            keras.layers.GlobalAveragePooling2D(),
        ]
    )


@pytest.fixture
def fit():
    """`fit_classifier` of a tiny encoder, the same at every call."""

    def run(recipe=PROBE, **options):
        encoder = options.pop("encoder", None) or centred_encoder()
        data = options.pop("data", (shades(40), shades(30, seed=1)))
        result = fit_classifier(encoder, *data, recipe, **options)
        return result, encoder

    return run


def rows(result):
    return RunFolder(result["run"], None).metrics()


def test_probe_reads_the_classes_from_a_frozen_encoder(fit, capsys):
    result, encoder = fit()
    assert result["test_top1"] > 0.9 and result["test_top5"] == 1.0
    assert set(result["setting"]) == {"learning_rate", "weight_decay", "epoch"}
    assert np.sum(result["confusion"]) == 30
    best = max(row["holdout_top1"] for row in rows(result))
    assert result["holdout_top1"] == best
    said = capsys.readouterr().out
    assert "36 images to train on, 4 to choose by, 30 to test" in said
    assert "epoch 1/5" in said and "left" in said
    assert all(len(line) <= 80 for line in said.splitlines())
    # A finished run is not trained again.
    again, _ = fit(encoder=encoder)
    assert again == json.loads(json.dumps(result))
    assert "finished already" in capsys.readouterr().out


def test_a_finished_run_says_where_it_has_exported_to(fit, capsys):
    recipe = FINETUNE.replace(epochs=1)
    fit(recipe, run_dir="run", export_to="first")
    again, encoder = fit(recipe, run_dir="run", export_to="second")
    assert again["export"] == "first"
    said = " ".join(capsys.readouterr().out.split())
    assert "Its export is in first, not in second." in said
    shutil.rmtree("first")
    fit(recipe, run_dir="run", export_to="first")
    said = " ".join(capsys.readouterr().out.split())
    assert "Its export, first, is not there any more." in said


def test_a_run_is_of_its_labels_and_of_its_encoder(fit):
    recipe = PROBE.replace(epochs=1)
    first, _ = fit(recipe)
    pixels, labels = shades(40).array, shades(40).labels
    other = Images(pixels, 1 - labels, source="shades0")
    assert other.fingerprint == shades(40).fingerprint
    second, _ = fit(recipe, data=(other, shades(30, seed=1)))
    pooled = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            *centred_encoder().layers[:-1],
            keras.layers.GlobalMaxPooling2D(),
        ]
    )
    third, _ = fit(recipe, encoder=pooled)
    fourth, _ = fit(recipe)
    runs = [result["run"] for result in (first, second, third, fourth)]
    assert len(set(runs)) == 3 and runs[3] == runs[0]


def test_an_encoder_with_dropout_is_found_unchanged(fit):
    layers = [*centred_encoder().layers, keras.layers.Dropout(0.5)]
    encoder = keras.Sequential([keras.Input((8, 8, 3)), *layers])
    result, _ = fit(PROBE.replace(epochs=1), encoder=encoder)
    assert "test_top1" in result


def test_a_save_that_fails_leaves_no_draft(fit, monkeypatch, tmp_path):
    def full(self, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Classifier, "save_weights", full)
    with pytest.raises(OSError, match="No space"):
        fit(PROBE.replace(epochs=1), run_dir="run")
    assert not list(tmp_path.glob("run/.tmp*"))


def test_an_image_of_each_class_is_left_to_train_on():
    recipe = FINETUNE.replace(holdout=0.9)
    kept, held = classify.split_labels(np.repeat([0, 1], [4, 2]), recipe)
    assert sorted([*kept, *held]) == list(range(6))
    assert sorted(kept < 4) == [False, True]


def test_learning_rate_drops_after_60_and_80_percent(fit):
    result, _ = fit(run_dir="drops", verbose=False)
    rates = [row["learning_rate"] for row in rows(result)]
    # Of the step to come: the drop after 3 of 5 epochs is seen at its end.
    np.testing.assert_allclose(rates, [1, 1, 0.1, 0.01, 0.01], rtol=1e-5)


def test_an_encoder_that_moves_in_a_probe_stops_it(fit, monkeypatch):
    class Leaky(Classifier):
        def __init__(self, *args):
            super().__init__(*args)
            self.frozen = False
            self.encoder.trainable = True

    monkeypatch.setattr(classify, "Classifier", Leaky)
    with pytest.raises(RuntimeError, match="frozen encoder has changed"):
        fit(PROBE.replace(epochs=1))


@pytest.mark.parametrize("recipe", [PROBE, FINETUNE], ids=["probe", "finetune"])
def test_stopped_run_goes_on_to_the_same_result(
    fit, monkeypatch, capsys, recipe
):
    recipe = recipe.replace(epochs=3)
    whole, _ = fit(recipe, run_dir="whole", export_to="a")
    saves = itertools.count(1)
    save = classify.save

    def killed(run, model, name):
        save(run, model, name)
        if name == classify.LAST and next(saves) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(classify, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            fit(recipe, run_dir="parts", export_to="b")
    assert "\n2 of 3 epochs are in parts: the same" in capsys.readouterr().out
    parts, _ = fit(recipe, run_dir="parts", export_to="b")
    assert "Going on after epoch 2 of 3" in capsys.readouterr().out
    for one, other in zip(rows(whole), rows(parts), strict=True):
        del one["images_per_second"], other["images_per_second"]
        assert one == other
    for result in (whole, parts):
        del result["run"]
        result.pop("export", None)
    assert whole == parts


def test_two_replicas_train_as_one(fit, two_replicas):
    one, _ = fit(PROBE.replace(epochs=2), run_dir="one")
    with two_replicas.scope():
        two, _ = fit(PROBE.replace(epochs=2), run_dir="two")
    for row, other in zip(rows(one), rows(two), strict=True):
        assert row["holdout_top1"] == other["holdout_top1"]
        np.testing.assert_allclose(row["loss"], other["loss"], rtol=1e-4)
    assert one["confusion"] == two["confusion"]
    with two_replicas.scope(), pytest.raises(ValueError, match="multiple of"):
        fit(PROBE.replace(batch_size=7))


def test_finetuning_trains_the_encoder_and_exports_a_classifier(fit):
    names = ["dark", "bright"]
    result, encoder = fit(
        FINETUNE.replace(learning_rate=0.5),
        class_names=names,
        export_to="out",
    )
    assert result["export"] == "out" and result["test_top1"] > 0.9
    classifier = keras.models.load_model("out/classifier.keras")
    trained = classifier.layers[1]
    for before, after in zip(
        encoder.get_weights(), trained.get_weights(), strict=True
    ):
        assert not np.array_equal(before, after)  # statistics too
    images = shades(30, seed=1)
    pixels = images.array.astype("float32") / 255
    served = tf.saved_model.load("out")
    shares = served.serve(pixels).numpy()
    np.testing.assert_allclose(shares.sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(
        shares, classifier.predict(pixels, verbose=0), atol=1e-5
    )
    assert [name.decode() for name in served.class_names().numpy()] == names
    card = json.loads(open("out/card.json").read())
    assert card["class_names"] == names
    # It is the classifier that was measured.
    top1 = np.mean(shares.argmax(axis=1) == images.labels)
    assert abs(top1 - result["test_top1"]) < 1e-6


def test_replicas_that_finetune_share_their_statistics(fit, two_replicas):
    # Statistics of a share of the batch differ; the mean of their means does
    # not, and the first convolution at rate 0 is the same on both.
    recipe = FINETUNE.replace(backbone_lr_scale=0.0, epochs=1)
    fit(recipe, run_dir="one", export_to="a")
    with two_replicas.scope():
        fit(recipe, run_dir="two", export_to="b")
    means = [
        keras.models.load_model(f"{name}/classifier.keras").layers[1].layers[2]
        for name in ("a", "b")
    ]
    np.testing.assert_allclose(
        *(layer.moving_mean for layer in means), atol=1e-5
    )


def test_an_encoder_at_rate_0_keeps_its_weights(fit):
    fit(FINETUNE.replace(backbone_lr_scale=0.0, epochs=1), export_to="out")
    _, encoder = fit(PROBE.replace(epochs=1))
    trained = keras.models.load_model("out/classifier.keras").layers[1]
    for before, after in zip(
        encoder.trainable_variables, trained.trainable_variables, strict=True
    ):
        np.testing.assert_array_equal(before, after)
    # Batch normalisation is in training mode.
    statistics = [m.layers[2].moving_mean for m in (encoder, trained)]
    assert not np.allclose(*statistics)


def test_labels_are_drawn_from_each_class_by_the_seed():
    labels = np.repeat([0, 1, 2], [100, 50, 20])
    recipe = FINETUNE.replace(labels=0.2, holdout=0.25, seed=3)
    kept, held = split_labels(labels, recipe)
    np.testing.assert_array_equal(np.bincount(labels[kept]), [15, 8, 3])
    np.testing.assert_array_equal(np.bincount(labels[held]), [5, 2, 1])
    assert len({*kept, *held}) == 34
    again = split_labels(labels, recipe)
    np.testing.assert_array_equal(kept, again[0])
    other, _ = split_labels(labels, recipe.replace(seed=4))
    assert set(kept) != set(other)
    everything = split_labels(labels, recipe.replace(labels=1.0))
    assert len(set(np.concatenate(everything))) == 170


def test_images_of_another_size_are_resized_and_that_is_said(fit, capsys):
    data = shades(40, size=12), shades(30, seed=1, size=12)
    result, encoder = fit(PROBE.replace(epochs=1), data=data)
    assert result["test_top1"] >= 0
    said = capsys.readouterr().out
    assert "12 x 12 px, resized to the 8 px that the encoder takes" in said
    with pytest.raises(ValueError, match="8 px only.*image_size=12"):
        fit(encoder=encoder, data=data, image_size=12)


def test_a_loss_above_that_of_guessing_is_warned_of(fit):
    data = shades(40), shades(30, seed=1)
    data[0].labels = np.random.default_rng(0).permutation(data[0].labels)
    recipe = PROBE.replace(learning_rate=1e6, epochs=1)
    with pytest.warns(UserWarning, match="guessing gives 0.693.* too high"):
        result, _ = fit(recipe, data=data)
    assert np.isfinite(result["interval"]).all()


def test_constant_features_give_chance_and_a_warning(fit):
    encoder = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(4, "relu", kernel_initializer="zeros"),
        ]
    )
    with pytest.warns(UserWarning, match="constant"):
        result, _ = fit(PROBE.replace(epochs=2), encoder=encoder)
    assert result["test_top1"] == result["test_top1_last"] == 1 / 2
    assert np.isfinite([row["loss"] for row in rows(result)]).all()


def test_what_cannot_be_trained_is_one_line(fit):
    km.export_encoder(centred_encoder(), "export")
    (classify.pathlib.Path("export") / "encoder.keras").unlink()
    unlabelled = Images(shades(30).array)
    unlearnable, alone = shades(40), shades(30)
    unlearnable.labels = np.random.default_rng(0).permutation(
        unlearnable.labels
    )
    alone.labels = np.zeros_like(alone.labels)
    strange = shades(30, seed=1, classes=3)
    few = FINETUNE.replace(labels=0.05)
    diverging = PROBE.replace(learning_rate=1e38)
    broken = centred_encoder()
    broken.layers[1].bias.assign(np.full(4, np.nan))
    images = keras.layers.Rescaling(2.0)
    for options, words in (
        ({"encoder": "export"}, "inference only"),
        ({"encoder": "nowhere"}, "no exported encoder"),
        (
            {"encoder": keras.Sequential([keras.Input((8, 8, 3)), images])},
            "feat",
        ),
        ({"data": (unlabelled, shades(30))}, "needs labels"),
        ({"data": (alone, alone)}, "two classes"),
        ({"data": (shades(30), strange)}, "training images lack: 2"),
        ({"recipe": few}, "of class 0 is 1, but each class needs two"),
        (
            {"recipe": diverging, "data": (unlearnable, shades(30))},
            "learning rate is too high",
        ),
        ({"encoder": broken}, "not finite"),
        ({"image_size": 0}, "image_size"),
    ):
        with pytest.raises(ValueError, match=words) as error:
            fit(run_dir=None, **options)
        assert "\n" not in str(error.value)


def test_a_folder_that_another_run_writes_is_left_alone(fit, tmp_path):
    with RunLock(tmp_path / "run"):
        with pytest.raises(ValueError, match="being written by another run"):
            fit(run_dir=tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == []
