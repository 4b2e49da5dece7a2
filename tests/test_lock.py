import json
import os
import subprocess
import sys
import time

import pytest

from keras_moco.safety.lock import SILENT_SECONDS, RunLock

HOLD = """
import sys, time
from keras_moco.safety.lock import RunLock
with RunLock(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def other_process(tmp_path):
    """A process that holds the lock of the folder."""
    command = [sys.executable, "-c", HOLD, tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "held\n"
        yield run
        run.kill()


def test_two_processes_cannot_write_one_folder(tmp_path, other_process):
    with pytest.raises(ValueError, match=f"process {other_process.pid} on "):
        RunLock(tmp_path).__enter__()


def test_without_locks_of_the_system_the_process_is_looked_up(
    tmp_path, other_process, monkeypatch
):
    monkeypatch.setattr("keras_moco.safety.lock.fcntl", None)
    with pytest.raises(ValueError, match="is being written by another run"):
        RunLock(tmp_path).__enter__()


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path, other_process):
    other_process.kill()
    other_process.wait()
    lines = []
    with RunLock(tmp_path, lines.append):
        holder = json.loads((tmp_path / "lock").read_text())
        assert holder["pid"] == os.getpid()
    assert len(lines) == 1 and f"process {other_process.pid}" in lines[0]
    assert not (tmp_path / "lock").exists()


@pytest.mark.parametrize("silent", [10, SILENT_SECONDS + 10])
def test_another_machine_is_believed_for_a_time(tmp_path, silent):
    path = tmp_path / "lock"
    path.write_text(json.dumps({"host": "far", "pid": 1, "started": 0}))
    os.utime(path, (time.time() - silent,) * 2)
    lines = []
    lock = RunLock(tmp_path, lines.append)
    if silent < SILENT_SECONDS:
        with pytest.raises(ValueError, match="process 1 on far"):
            lock.__enter__()
    else:
        with lock:
            assert "process 1 on far" in lines[0]
    assert [p.name for p in tmp_path.iterdir() if p.name != "lock"] == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"pid": "x"}'])
def test_a_lock_that_says_nothing_is_free(tmp_path, content):
    (tmp_path / "lock").write_text(content)
    with RunLock(tmp_path, lambda line: None):
        pass


def test_its_holder_may_enter_again(tmp_path):
    lock = RunLock(tmp_path)
    with lock:
        with lock:
            pass
        assert (tmp_path / "lock").exists()
        with pytest.raises(ValueError):
            RunLock(tmp_path).__enter__()
