"""Each check by itself; what they say of a run is in test_doctor.py."""

import dataclasses

import pytest

from keras_moco import checks
from keras_moco.presets import PRESETS

PRESET = PRESETS["moco_v2"].replace(
    queue_size=1000, batch_size=100, epochs=10, batch_norm_groups=4
)
PLAN = checks.Plan(num_images=100_000, steps=1000)
MACHINE = checks.Machine(
    versions={"keras": "3.15.1", "tensorflow": "2.21.0"},
    cores=8,
    gpus=0,
    compute_capability=None,
    nvidia_driver=False,
    memory_bytes=16e9,
    disk_bytes=100e9,
)


def plan(**changes):
    return dataclasses.replace(PLAN, **changes)


def machine(**changes):
    return dataclasses.replace(MACHINE, **changes)


def only(found, mark, *words):
    """The one finding of that mark, which has to hold the words."""
    (finding,) = [f for f in found if f.mark == mark]
    for word in words:
        assert word in finding.text, finding.text
    return finding.text


def test_a_usual_run_has_no_problem():
    found = checks.check_machine(MACHINE)
    found += checks.check_plan(PRESET, PLAN, MACHINE)
    assert {f.mark for f in found} == {"ok", "note"}
    only(found, "note", "loss rises", "about 10 steps")


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"versions": {"keras": "2.15.0", "tensorflow": "2.21"}}, "keras 2.15"),
        (
            {"versions": {"keras": "3.8", "tensorflow": "2.9.1"}},
            "at least 2.18",
        ),
        ({"image_data_format": "channels_first"}, "channels_last is needed"),
        ({"floatx": "float16"}, "float32 is needed"),
    ],
)
def test_old_versions_and_other_defaults_are_problems(changes, words):
    only(checks.versions(machine(**changes)), "problem", words)


def test_a_release_candidate_is_a_version():
    there = {"keras": "3.10.0.dev1", "tensorflow": "2.20.0-rc0"}
    assert [f.mark for f in checks.versions(machine(versions=there))] == ["ok"]


def test_a_gpu_that_tensorflow_does_not_see_is_noted():
    found = checks.devices(machine(nvidia_driver=True))
    only(found, "note", "CUDA_VISIBLE_DEVICES")
    assert len(checks.devices(machine(nvidia_driver=True, gpus=1))) == 1


@pytest.mark.parametrize(
    "of_plan, of_machine, words",
    [
        ({"precision": "mixed_float16"}, {}, "slow on a CPU"),
        (
            {"precision": "mixed_bfloat16"},
            {"gpus": 1, "compute_capability": (7, 5)},
            "capability 7.5",
        ),
        ({"jit": "on", "replicas": 2}, {"gpus": 2}, "XLA on 2 devices"),
        ({"jit": "on"}, {}, "slower on a CPU"),
    ],
)
def test_precision_and_jit_that_do_not_suit(of_plan, of_machine, words):
    found = checks.precision(machine(**of_machine), plan(**of_plan))
    only(found, "note", words)
    suited = machine(gpus=1, compute_capability=(8, 0))
    assert not checks.precision(suited, plan(precision="mixed_bfloat16"))


def test_groups_are_counted_on_each_device():
    only(checks.batch(PRESET, PLAN), "ok", "100 images", "4 groups of 25")
    two = checks.batch(PRESET, plan(replicas=2))
    only(two, "ok", "50 images", "2 groups of 25")
    small = PRESET.replace(batch_size=16)
    only(checks.batch(small, PLAN), "note", "4 groups of 4", "noisy")
    whole = PRESET.replace(batch_norm_groups=1)
    only(checks.batch(whole, PLAN), "note", "tell the right key")
    across = PRESET.replace(batch_norm_groups=1, sync_batch_norm=True)
    only(checks.batch(across, PLAN), "ok", "over 100")


def test_large_batches_with_sgd_are_questioned():
    large = PRESET.replace(batch_size=2048)
    only(checks.learning_rate(large, PLAN), "note", "lars")
    lars = large.replace(optimizer="lars")
    only(checks.learning_rate(lars, PLAN), "ok", "0.03 x 2048 / 256 = 0.24")


@pytest.mark.parametrize("images, mark", [(10_000, "ok"), (9_999, "note")])
def test_a_queue_above_a_tenth_of_the_data_is_noted(images, mark):
    found = checks.queue_against_data(PRESET, plan(num_images=images))
    assert [f.mark for f in found] == [mark]


def test_what_becomes_of_keys_of_the_same_image_is_said():
    few = plan(num_images=500)
    for masked, words in ((True, "are left out of"), (False, "are among")):
        preset = PRESET.replace(mask_same_image=masked)
        only(checks.queue_against_data(preset, few), "note", words)


def test_a_queue_that_cannot_fill_is_said():
    short = plan(steps=1, num_images=4000)  # 10 steps of 100 keys, 1000 fit
    big = PRESET.replace(queue_size=4096)
    text = only(
        checks.queue_turnovers(big, short),
        "note",
        "will not fill: that takes 41 steps, and there are 10",
    )
    assert text.endswith("--set queue_size=64.")  # a tenth of 1000 keys
    small = checks.queue_turnovers(
        PRESET.replace(queue_size=64), plan(steps=0.2)
    )
    only(small, "note", "below 10 there is little to see. Take more epochs.")
    twice = big.replace(queue_size=1800, symmetric=True)
    only(checks.queue_turnovers(twice, short), "note", "1.1 times")


def test_in_batch_negatives_have_no_queue_to_check():
    preset = PRESET.replace(queue_size=0)
    assert checks.queue_turnovers(preset, PLAN) == []
    only(checks.queue_against_data(preset, PLAN), "ok", "of the batch")


def test_memory_is_counted_from_shapes():
    preset = PRESET.replace(image_size=32)
    known = plan(parameters=10_000_000, activations=1_000_000)
    expected = 160e6 + 8 * 1000 * 128  # weights four times, the queue twice
    expected += 100 * (4e6 + 8 * 32 * 32 * 3 * 4)
    assert checks.training_bytes(preset, known) == expected
    half = dataclasses.replace(known, precision="mixed_bfloat16")
    saved = expected - checks.training_bytes(preset, half)
    assert saved == 100 * 2e6  # activations only
    low = machine(memory_bytes=expected)
    only(checks.memory(preset, known, low), "problem", "halve --batch-size")
    only(checks.memory(preset, known, MACHINE), "ok", "160 MB of weights")


def test_a_disk_without_room_is_a_problem():
    known = plan(parameters=10_000_000)
    need = 4 * (120e6 + 4 * 1000 * 128) + 80e6
    for free, mark in ((need - 1, "problem"), (need, "ok")):
        found = checks.disk(PRESET, known, machine(disk_bytes=free))
        assert [f.mark for f in found] == [mark]
