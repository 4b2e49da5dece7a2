"""Several devices and several machines, as logical CPUs and processes."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from PIL import Image

SCRIPT = pathlib.Path(__file__).parent / "replicas.py"
SMALL = (
    "--encoder resnet18 --width 2 --image-size 16 --batch-size 8 --precision"
    " float32 --set queue_size=16 --set blur=0,0 --knn-every 0"
).split()


def start(*arguments, cluster=None, number=0, cwd=None):
    """Starts the script, as worker `number` of a cluster if there is one."""
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    if cluster:
        environment["TF_CONFIG"] = json.dumps(
            {
                "cluster": {"worker": cluster},
                "task": {"type": "worker", "index": number},
            }
        )
    return subprocess.Popen(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env=environment,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, timeout=300):
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


def two_ports():
    """Two addresses of this machine that nobody listens on."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(2):
            probe = stack.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    return [f"127.0.0.1:{port}" for port in ports]


def run(tmp_path, *arguments):
    code, _, err = finish(start(arguments[0], tmp_path / "out", *arguments[1:]))
    assert code == 0, err[-2000:]
    return dict(np.load(tmp_path / "out.npz"))


def assert_golden(found, golden):
    np.testing.assert_allclose(found["losses"], golden["step_loss"], atol=1e-5)
    for queue in found["queues"]:
        np.testing.assert_array_equal(queue, found["queues"][0])
        np.testing.assert_allclose(queue, golden["step_queue"][-1], atol=1e-5)
    for kind in ("query", "key"):
        for name in ("w1", "b1", "w2", "b2"):
            np.testing.assert_allclose(
                found[f"{kind}_{name}"],
                golden[f"final_{kind}_{name}"],
                atol=1e-5,
            )


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_give_the_golden_trajectory(tmp_path, golden_steps, replicas):
    found = run(tmp_path, "golden", replicas)
    assert len(found["queues"]) == replicas
    assert_golden(found, golden_steps)


@pytest.mark.slow
def test_four_replicas_are_one_device(tmp_path):
    # Of 12 images a step, as 4 does not divide the golden 6.
    found = [run(tmp_path, "golden", cpus, 2) for cpus in (1, 4)]
    assert len(found[1]["queues"]) == 4
    for name in found[0]:
        for copy in found[1][name] if name == "queues" else [found[1][name]]:
            expected = found[0][name]
            expected = expected[0] if name == "queues" else expected
            np.testing.assert_allclose(copy, expected, atol=1e-5)


@pytest.mark.slow
def test_two_processes_give_the_golden_trajectory(tmp_path, golden_steps):
    cluster = two_ports()
    workers = [
        start("golden", tmp_path / str(n), 1, cluster=cluster, number=n)
        for n in range(2)
    ]
    for worker in workers:
        code, _, err = finish(worker)
        assert code == 0, err[-2000:]
    found = [dict(np.load(tmp_path / f"{n}.npz")) for n in range(2)]
    for each in found:
        assert_golden(each, golden_steps)
    np.testing.assert_array_equal(found[0]["queues"], found[1]["queues"])


@pytest.mark.slow
def test_keys_are_normalised_among_shuffled_strangers(tmp_path):
    found = run(tmp_path, "shuffled", 2)
    images, order = found["images"], found["order"]

    def keys(shares):
        """NumPy's account: each share by its own statistics."""
        rows = np.empty((8, 18))
        for share in shares:
            x = images[share]
            mean = x.mean(axis=(0, 1, 2))
            x = (x - mean) / np.sqrt(x.var(axis=(0, 1, 2)) + 1e-5)
            rows[share] = x.reshape(len(share), 18)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True)

    np.testing.assert_allclose(
        found["norm"], keys([order[:4], order[4:]]), atol=1e-5
    )
    apart = keys([np.arange(4), np.arange(4, 8)])
    assert np.abs(found["norm"] - apart).max() > 1e-3
    flat = images.reshape(8, 18)
    flat = flat / np.linalg.norm(flat, axis=1, keepdims=True)
    np.testing.assert_allclose(found["plain"], flat, atol=1e-6)


# The command


@pytest.fixture
def photos(tmp_path):
    draw = np.random.default_rng(0)
    (tmp_path / "photos").mkdir()
    for number in range(24):
        pixels = draw.integers(0, 255, (16, 16, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / f"{number:02}.png")
    return tmp_path


def workers(cwd, *options, timeout=20, differing=()):
    """Starts `keras-moco pretrain` on two workers."""
    cluster = two_ports()
    command = ["--dataset", "photos", *SMALL, *options]
    command += ["--worker-timeout", timeout]
    return [
        start(
            "pretrain",
            cwd / f"weights{n}",
            *command,
            *(differing if n else ()),
            cluster=cluster,
            number=n,
            cwd=cwd,
        )
        for n in range(2)
    ]


def epochs_done(folder):
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line)["epoch"] for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_two_workers_make_one_run_and_one_export(photos):
    ends = [finish(w) for w in workers(photos, "--epochs", 2)]
    assert [code for code, _, _ in ends] == [0, 0], ends[0][2][-1500:]
    assert "epoch 2/2" in ends[0][1] and not ends[1][1]
    assert [path.name for path in (photos / "runs").iterdir()] == [
        "photos-moco_v2"
    ]
    assert len(list((photos / "saved_models").iterdir())) == 1
    assert epochs_done(photos / "runs" / "photos-moco_v2") == [1, 2]
    a, b = (dict(np.load(photos / f"weights{n}.npz")) for n in range(2))
    assert a
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])


def wait_for_epochs(process, folder, count):
    begin = time.monotonic()
    while len(epochs_done(folder)) < count:
        assert process.poll() is None, process.stderr.read()[-1500:]
        assert time.monotonic() - begin < 200
        time.sleep(0.1)


@pytest.mark.slow
def test_killed_worker_ends_the_other_and_both_go_on_again(photos):
    folder = photos / "runs" / "photos-moco_v2"
    first, second = workers(photos, "--epochs", 12, timeout=6)
    wait_for_epochs(first, folder, 1)
    second.kill()
    second.communicate()
    begin = time.monotonic()
    code, _, err = finish(first, timeout=120)
    assert time.monotonic() - begin < 60
    assert code == 2
    assert "does not answer any more" in err.splitlines()[-1]
    done = len(epochs_done(folder))
    assert 1 <= done < 12
    ends = [finish(w) for w in workers(photos, "--epochs", 12)]
    assert [code for code, _, _ in ends] == [0, 0], ends[0][2][-1500:]
    assert f"Going on after {done} epochs" in ends[0][1]
    assert epochs_done(folder) == list(range(1, 13))


@pytest.mark.slow
def test_workers_of_different_settings_are_told_apart(photos):
    both = workers(photos, "--epochs", 1, differing=("--seed", 1))
    for code, _, err in map(finish, both):
        assert code == 2
        assert "started with different settings" in err.splitlines()[-1]


@pytest.mark.slow
def test_run_goes_on_with_another_number_of_devices(photos):
    folder = photos / "runs" / "photos-moco_v2"
    command = ["--dataset", "photos", *SMALL, "--epochs", 12]
    for devices, epochs in ((2, 1), (1, 2), (2, 12)):
        process = start(
            "pretrain",
            photos / "weights",
            *command,
            "--logical-cpus",
            devices,
            cwd=photos,
        )
        if epochs < 12:
            wait_for_epochs(process, folder, epochs)
            process.send_signal(signal.SIGINT)
            code, out, _ = finish(process)
            assert code == 0 and "Go on    keras-moco pretrain" in out
        else:
            code, out, err = finish(process)
            assert code == 0, err[-1500:]
            assert "2 replicas of 4 images" in out
    assert epochs_done(folder) == list(range(1, 13))
