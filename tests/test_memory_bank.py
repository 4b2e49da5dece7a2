import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_moco as km
from keras_moco.load import load_run
from keras_moco.memory_bank import MemoryBank
from keras_moco.presets import PRESETS
from keras_moco.queue import unit_length
from keras_moco.safety.checkpoint import Checkpoint
from keras_moco.safety.state import checkpoints


def test_keys_are_written_over_those_of_the_same_images():
    bank = MemoryBank(5, 2, 3)
    before = bank.keys.numpy()
    np.testing.assert_allclose(np.linalg.norm(before, axis=1), 1, rtol=1e-6)
    keys = np.arange(4, dtype="float32").reshape(2, 2)
    bank.enqueue(tf.constant(keys), tf.constant([4, 1]))
    np.testing.assert_array_equal(bank.keys.numpy()[[4, 1]], keys)
    np.testing.assert_array_equal(
        bank.keys.numpy()[[0, 2, 3]], before[[0, 2, 3]]
    )
    np.testing.assert_array_equal(bank.index.numpy(), [-1, 1, -1, -1, 4])
    np.testing.assert_allclose((bank.fill(), bank.is_full()), (0.4, 0))
    bank.enqueue(tf.zeros((5, 2)), tf.range(5))
    np.testing.assert_allclose((bank.fill(), bank.is_full()), (1, 1))


def test_of_an_image_that_is_there_twice_the_last_key_counts():
    bank = MemoryBank(2000, 2, 3)
    index = tf.tile(tf.range(1000), [3])
    keys = np.random.default_rng(0).random((3000, 2), "float32")
    bank.enqueue(tf.constant(keys), index)
    np.testing.assert_array_equal(bank.keys.numpy()[:1000], keys[2000:])


def test_negatives_are_other_entries_at_every_step():
    bank = MemoryBank(50, 4, 40)
    draws = []
    for step in (0, 1, 1):
        keys, images = bank.negatives(tf.constant(step, tf.int64))
        np.testing.assert_array_equal(keys, bank.keys.numpy()[images])
        draws.append(images.numpy())
    np.testing.assert_array_equal(draws[1], draws[2])
    assert (draws[0] != draws[1]).any()
    many = np.concatenate(
        [bank.rows(tf.constant(step)).numpy() for step in range(100)]
    )
    counts = np.bincount(many, minlength=50)  # 80 of each, give or take 9.
    assert len(counts) == 50 and 40 < counts.min() and counts.max() < 120


@pytest.mark.parametrize("count", [0, 6])
def test_more_negatives_than_images_are_refused(count):
    with pytest.raises(ValueError, match="at most as many keys"):
        MemoryBank(5, 2, count)


# In the model


@pytest.fixture
def golden_bank(build_golden, golden_steps):
    """A function that builds the golden model on a bank.

    The 72 golden views are images 0 to 71, the queue's first keys those of 16
    further ones. At each step it draws what the queue holds: the trajectory
    has to be the same.
    """

    def build(**options):
        model = build_golden(num_images=88, **options)
        keys = model.queue.numpy()
        keys[72:] = golden_steps["init_queue"]
        model.queue.assign(keys)
        held, schedule = np.arange(72, 88), []
        for step in range(12):
            schedule.append(held.copy())
            images = np.arange(6 * step, 6 * step + 6)
            held[images % 16] = images
        schedule = tf.constant(np.array(schedule))
        model.key_queue.rows = lambda step: tf.gather(schedule, step)
        model.last_held = held
        return model

    return build


@pytest.fixture
def golden_triples(golden_steps):
    views = golden_steps["views"].astype("float32")
    index = np.arange(72).reshape(12, 6)
    return tf.data.Dataset.from_tensor_slices((views[:, 0], views[:, 1], index))


@pytest.mark.parametrize("replicas", [1, 2])
def test_bank_that_draws_the_queue_gives_the_golden_trajectory(
    replicas,
    two_replicas,
    golden_bank,
    golden_triples,
    golden_sgd,
    golden_steps,
):
    strategy = [tf.distribute.get_strategy(), two_replicas][replicas - 1]
    with strategy.scope():
        model = golden_bank()
        model.compile(golden_sgd())
    losses = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda step, logs: (
            found.append(logs["loss"]),
            model.reset_metrics(),
        )
    )
    found = []
    model.fit(golden_triples, callbacks=[losses], verbose=0)
    np.testing.assert_allclose(found, golden_steps["step_loss"], atol=1e-5)
    for copy in strategy.experimental_local_results(model.queue.value):
        np.testing.assert_allclose(
            copy.numpy()[model.last_held],
            golden_steps["step_queue"][-1],
            atol=1e-5,
        )
    for name, weight in zip(
        ("w1", "b1", "w2", "b2"),
        model.encoder.get_weights() + model.projector.get_weights(),
        strict=True,
    ):
        np.testing.assert_allclose(
            weight, golden_steps[f"final_query_{name}"], atol=1e-5
        )


def test_the_images_own_entry_is_left_out(build_golden, golden_pairs):
    query, key = next(iter(golden_pairs))
    model = build_golden(num_images=20)
    model.compile(km.SGD(0.0))
    index, held = np.arange(6), np.array([0, 0, 1, 9] * 4)
    model.key_queue.rows = lambda step: tf.constant(held)
    q = unit_length(model.projector(model.encoder(query))).numpy()
    k = unit_length(model.projector(model.encoder(key))).numpy()
    negative = q @ model.queue.numpy()[held].T / 0.2
    negative[index[:, None] == held[None, :]] = -np.inf
    positive = (q * k).sum(axis=1) / 0.2
    total = np.exp(positive) + np.exp(negative).sum(axis=1)
    expected = (np.log(total) - positive).mean()
    logs = model.train_on_batch(query, key, index, return_dict=True)
    np.testing.assert_allclose(logs["loss"], expected, rtol=1e-5)
    np.testing.assert_allclose(model.queue.numpy()[:6], k, atol=1e-6)


def test_a_bank_needs_an_index(build_golden, golden_pairs, golden_sgd):
    model = build_golden(num_images=88)
    model.compile(golden_sgd())
    with pytest.raises(ValueError, match="memory bank need batches"):
        model.fit(golden_pairs, verbose=0)


def test_a_saved_bank_goes_on(
    build_golden, golden_triples, golden_sgd, tmp_path
):
    whole = build_golden(num_images=88, momentum=0.0)
    whole.compile(golden_sgd())
    whole.fit(golden_triples.take(5), verbose=0)
    whole.save(tmp_path / "moco.keras")
    copy = keras.models.load_model(tmp_path / "moco.keras")
    for model in (whole, copy):
        model.fit(golden_triples.skip(5), verbose=0)
    np.testing.assert_array_equal(copy.queue.numpy(), whole.queue.numpy())
    np.testing.assert_array_equal(
        copy.queue_index.numpy(), whole.queue_index.numpy()
    )


@pytest.mark.parametrize(
    "negatives",
    [
        {"memory_bank": True, "momentum": 0.0, "queue_size": 16},
        {"queue_size": 0},  # The keys of the batch.
    ],
)
def test_a_run_that_goes_on_equals_one_that_never_stopped(
    tmp_path, tiny_encoder, negatives
):
    pixels = np.random.default_rng(0).integers(0, 255, (24, 8, 8, 3), np.uint8)
    preset = PRESETS["demo"].replace(batch_norm_groups=1, **negatives)

    class Crash(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if int(self.model.step_guard.steps.numpy()) == 6:
                raise RuntimeError("crash")

    def fit(folder, seed, *callbacks):
        keras.utils.set_random_seed(seed)
        pairs = km.pretrain_dataset(
            pixels, preset, 8, batch_size=6, augment=lambda x: x
        )
        model = km.MoCo.from_preset(preset, tiny_encoder(), num_images=24)
        model.compile(km.SGD(0.05))
        saves = Checkpoint(folder, every_steps=1, say=lambda line: None)
        model.fit(pairs, epochs=3, callbacks=[*callbacks, saves], verbose=0)

    fit(tmp_path / "whole", 0)
    with pytest.raises(RuntimeError, match="crash"):
        fit(tmp_path / "crashed", 0, Crash())
    fit(tmp_path / "crashed", 1)
    # The last part of a name is the digest of everything that is saved.
    ends = [
        checkpoints(tmp_path / name / "checkpoints")[0].name
        for name in ("whole", "crashed")
    ]
    assert ends[0] == ends[1]


# From a preset


def test_a_preset_asks_for_a_bank(tiny_encoder):
    preset = PRESETS["demo"].replace(memory_bank=True, queue_size=16)
    model = km.MoCo.from_preset(preset, tiny_encoder(), num_images=24)
    assert model.queue.shape == (24, 128)
    assert model.mask_same_image
    assert km.MoCo.from_config(model.get_config()).queue.shape == (24, 128)
    with pytest.raises(ValueError, match="`num_images` is needed"):
        km.MoCo.from_preset(preset, tiny_encoder())
    plain = PRESETS["demo"].replace(queue_size=16)
    model = km.MoCo.from_preset(plain, tiny_encoder(), num_images=24)
    assert model.queue.shape == (16, 128) and not model.mask_same_image


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"queue_size": 0}, "`queue_size` must be >= 1 with `memory_bank`"),
        ({"mask_same_image": False}, "must be true or none"),
    ],
)
def test_what_a_bank_cannot_be_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        PRESETS["demo"].replace(memory_bank=True, **changes)


def test_a_run_folder_knows_the_images_of_its_bank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counts = {"pretrain": 48, "train": 48, "test": 16}
    monkeypatch.setattr("keras_moco.data.sources._SHAPES_COUNTS", counts)
    result = km.pretrain(
        settings=("memory_bank=true", "momentum=0", "queue_size=32"),
        width=2,
        image_size=16,
        batch_size=16,
        epochs=1,
        knn_every=0,
        verbose=False,
    )
    model, run, steps = load_run(result["run"])
    assert model.queue.shape == (48, 128) and steps == 3
    assert float(model.key_queue.fill()) == 1.0
    assert run.settings["mask_same_image"] is True
