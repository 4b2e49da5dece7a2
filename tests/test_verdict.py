import itertools
import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_moco as km
from keras_moco.monitoring.run import RunFolder, RunLog
from keras_moco.monitoring.verdict import chance_loss, turnover_steps
from keras_moco.terminal import say_nothing

CIFAR = {"queue_size": 4096, "batch_size": 512, "symmetric": False}
CHANCE = math.log(4097)
# The authors' log of their CIFAR run (97 steps an epoch): loss and kNN.
PUBLISHED = {
    1: (6.957, 0.3198),
    2: (7.250, 0.3352),
    3: (7.290, 0.3471),
    5: (6.862, 0.3795),
    10: (5.991, 0.4803),
    20: (4.341, 0.6138),
    50: (3.195, 0.7330),
    100: (2.726, 0.7806),
    200: (2.272, 0.8258),
}


def names(rows, settings=CIFAR):
    return [verdict.name for verdict in km.verdicts(rows, settings)]


def curve(losses, **figures):
    """Epochs of 97 steps."""
    return [
        {"step": 97 * (n + 1), "loss": loss, **figures}
        for n, loss in enumerate(losses)
    ]


def test_the_published_run_learns_from_its_first_epoch():
    rows = [
        {"step": 97 * epoch, "loss": loss, "knn_top1": knn}
        for epoch, (loss, knn) in PUBLISHED.items()
    ]
    assert set(names(rows)) == {"learning"}


def test_chance_and_turnover_are_those_of_the_settings():
    assert chance_loss(CIFAR) == pytest.approx(8.318, abs=5e-4)
    assert turnover_steps(CIFAR) == 8
    assert turnover_steps({**CIFAR, "symmetric": True}) == 4
    in_batch = {"queue_size": 0, "batch_size": 512}
    assert chance_loss(in_batch) == pytest.approx(math.log(512))
    assert turnover_steps(in_batch) == 0


def test_a_queue_fills_while_most_of_an_epoch_met_random_keys():
    # 65536 / 512 = 128 steps: of the second 97 steps 31 fill it.
    settings = {**CIFAR, "queue_size": 65536}
    assert names(curve([8.0, 9.0, 10.0]), settings) == [
        "filling",
        "learning",
        "learning",
    ]


def test_a_rise_while_random_keys_leave_is_no_divergence():
    settings = {**CIFAR, "queue_size": 65536}
    assert "diverged" not in names(curve([4.0, 8.0, 10.0, 9.5]), settings)


@pytest.mark.parametrize("share, name", [(0.995, "at"), (0.985, "learning")])
def test_a_loss_within_a_hair_of_chance_is_at_chance(share, name):
    found = names(curve([share * CHANCE] * 4))
    # Not before 200 steps.
    assert found[:2] == ["learning"] * 2
    assert {verdict.split()[0] for verdict in found[2:]} == {name}


def test_chance_waits_for_four_turnovers():
    settings = {**CIFAR, "queue_size": 32768}  # 64 steps.
    rows = curve([math.log(32769)] * 3)
    assert names(rows, settings) == ["filling", "learning"] + ["at chance"]


@pytest.mark.parametrize(
    "losses, last",
    [
        ([7.0, 5.0, 4.0, math.nan], "diverged"),
        ([7.0, 5.0, 4.0, math.inf], "diverged"),
        ([7.0, 5.0, 4.0, 1.11 * CHANCE], "diverged"),
        # Half of what was learned, 4.318, is 2.159.
        ([7.0, 5.0, 4.0, 6.2], "diverged"),
        ([7.0, 5.0, 4.0, 6.1], "learning"),
    ],
)
def test_a_loss_that_loses_what_was_learned_diverges(losses, last):
    assert names(curve(losses)) == ["learning"] * 3 + [last]


@pytest.mark.parametrize(
    "figures, name",
    [
        ({"feature_spread": 0.019}, "collapsed"),
        ({"feature_spread": 0.021}, "learning"),
        ({"feature_rank": 1.04}, "collapsed"),
        ({"feature_rank": 1.06}, "learning"),
    ],
)
def test_features_that_are_alike_have_collapsed(figures, name):
    assert names(curve([CHANCE * 0.9], **figures)) == [name]


def test_easy_keys_are_suspicious_where_knn_is_flat():
    easy = curve([1.0] * 4, contrast_top1=0.97)
    flat, rising, good = (
        [{**row, "knn_top1": start + n * gain} for n, row in enumerate(easy)]
        for start, gain in ((0.3, 0.001), (0.3, 0.1), (0.95, 0.001))
    )
    assert names(flat)[-1] == "shortcut suspected"
    assert names(rising)[-1] == names(good)[-1] == "learning"


def test_without_labels_the_negatives_decide():
    easy = {"contrast_top1": 0.97}
    low = curve([1.0] * 4, negative_similarity=0.02, **easy)
    high = curve([1.0] * 4, negative_similarity=0.4, **easy)
    hard = curve([1.0] * 4, negative_similarity=0.02, contrast_top1=0.9)
    assert names(low)[-1] == "shortcut suspected"
    assert names(high)[-1] == names(hard)[-1] == "learning"


def test_a_momentum_that_has_risen_to_1_is_no_frozen_encoder():
    frozen = curve([1.0] * 4, key_momentum=1.0, key_query_drift=0.98)
    risen = curve([1.0] * 4, key_momentum=1.0, key_query_drift=0.02)
    assert names(frozen)[-1] == "shortcut suspected"
    assert names(risen)[-1] == "learning"


def encoder(batch_norm=True):
    layers = [keras.Input((8, 8, 3)), keras.layers.Conv2D(8, 3)]
    if batch_norm:
        layers.append(keras.layers.BatchNormalization())
    layers += [keras.layers.ReLU(), keras.layers.Flatten()]
    layers.append(keras.layers.Dense(8, activation=None))
    if batch_norm:
        layers.append(keras.layers.BatchNormalization())
    else:
        layers.append(keras.layers.ReLU())
    return keras.Sequential(layers)


def noisy(noise=0.1):
    """Four batches of two views of 64 images of noise, with more of it."""
    draw = np.random.default_rng(0)
    images = draw.random((64, 8, 8, 3))
    views = [
        np.float32(
            np.clip(images + noise * draw.normal(size=images.shape), 0, 1)
        )
        for _ in range(2)
    ]
    return tf.data.Dataset.from_tensor_slices((*views, np.arange(64))).batch(
        16, drop_remainder=True
    )


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A function that trains and gives the last verdict, from the log."""
    counter = itertools.count()

    def judge(
        batch_norm=True, noise=0.1, epochs=5, rate=0.05, late=1.0, **options
    ):
        """`late` is the factor of the learning rate in the last two epochs."""
        options = {"temperature": 0.1, "momentum": 0.9, **options}
        options = {"queue_size": 64, "mask_same_image": True, **options}
        keras.utils.set_random_seed(0)
        model = km.MoCo(
            encoder(batch_norm), km.projection_head(8, 8), **options
        )
        model.compile(km.SGD(rate))
        settings = {"queue_size": options["queue_size"], "batch_size": 16}
        folder = tmp_path_factory.mktemp("runs") / str(next(counter))
        run = RunFolder(folder, settings)
        run.write("run.json", {"settings": settings})
        quality = km.QualityMonitor(noisy(noise))
        log = RunLog(run, 16, epochs, say_nothing, quality)
        model.fit(
            noisy(noise).repeat(13),
            epochs=epochs,
            callbacks=[
                keras.callbacks.LearningRateScheduler(
                    lambda epoch: rate * (late if epoch >= epochs - 2 else 1)
                ),
                quality,
                log,
            ],
            verbose=0,
        )
        return names(run.metrics(), settings)[-1]

    return judge


def test_a_real_run_that_learns(judged):
    assert judged(noise=0.3) == "learning"


def test_a_real_run_whose_queue_fills(judged):
    assert judged(epochs=2, queue_size=4096) == "filling"


def test_a_real_run_at_too_high_a_temperature_is_at_chance(judged):
    assert judged(temperature=100.0) == "at chance"


def test_a_real_run_without_momentum_and_batch_norm_collapses(judged):
    assert judged(batch_norm=False, momentum=0.0, epochs=3) == "collapsed"


def test_a_real_run_with_a_frozen_key_encoder_is_suspected(judged):
    assert judged(momentum=1.0) == "shortcut suspected"


def test_a_real_run_of_views_that_give_the_key_away_is_suspected(judged):
    assert judged(noise=0.0) == "shortcut suspected"


def test_a_real_run_whose_learning_rate_jumps_diverges(judged):
    assert judged(noise=0.3, epochs=6, late=1000.0) == "diverged"


def test_a_memory_bank_turns_over_once_an_epoch():
    settings = {"queue_size": 8, "batch_size": 4, "num_images": 20}
    assert turnover_steps(settings) == 20 / 4
    assert turnover_steps({**settings, "symmetric": True}) == 20 / 8
    assert turnover_steps({**settings, "num_images": None}) == 8 / 4
