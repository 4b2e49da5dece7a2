import sys
import time

import pytest

from keras_moco.ablation.jobs import (
    default_jobs,
    last_words,
    own_cores,
    work_through,
)


class Task:
    """Runs pieces of Python, one after the other."""

    def __init__(self, folder, name, *codes, busy=0):
        self.log = folder / "logs" / f"{name}.txt"
        self.codes, self.busy = list(codes), busy

    def next_command(self):
        code = self.codes.pop(0) if self.codes else None
        return code and [sys.executable, "-c", code]

    def is_busy(self):
        self.busy -= 1
        return self.busy >= 0


def writes(path, text="x"):
    return f"open({str(path)!r}, 'a').write({text!r})"


def test_commands_of_a_task_follow_each_other(tmp_path):
    out = tmp_path / "out"
    tasks = [
        Task(tmp_path, n, writes(out, "a"), writes(out, "b")) for n in "12"
    ]
    assert work_through(tasks, 1, seconds=0.01) == {}
    assert out.read_text() == "abab"


def test_one_that_fails_stops_no_other_and_its_last_words_are_kept(tmp_path):
    out = tmp_path / "out"
    fails = Task(tmp_path, "fails", "exit('Error: too \\nmany')", writes(out))
    dies = Task(tmp_path, "dies", "import os; os.kill(os.getpid(), 9)")
    works = Task(tmp_path, "works", writes(out))
    errors = work_through([fails, dies, works], 2, seconds=0.01)
    assert errors == {
        fails: "many",
        dies: "Killed by SIGKILL (too little memory?).",
    }
    assert out.read_text() == "x"


def test_a_command_that_changes_nothing_is_not_tried_for_ever(tmp_path):
    task = Task(tmp_path, "stopped", "pass", "pass", "pass")
    errors = work_through([task], 1, seconds=0.01)
    assert errors == {task: "It was stopped by a signal."}


def test_no_more_than_the_jobs_run_at_once(tmp_path):
    code = (
        "import pathlib, time\n"
        f"own = pathlib.Path({str(tmp_path)!r})\n"
        "own = own / '{}'\n"
        "own.touch(); time.sleep(0.2)\n"
        "print(len(list(own.parent.glob('?'))), flush=True); own.unlink()"
    )
    tasks = [Task(tmp_path, n, code.format(n)) for n in "123456"]
    assert work_through(tasks, 2, seconds=0.01) == {}
    counts = [int(task.log.read_text().split()[-1]) for task in tasks]
    assert max(counts) <= 2


def test_each_of_several_keeps_to_its_cores(tmp_path):
    cores = own_cores()
    if len(cores) < 2:
        pytest.skip("needs two cores")
    code = "import os, time; print(sorted(os.sched_getaffinity(0)))"
    tasks = [
        Task(tmp_path, n, f"import time; time.sleep(.3); {code}") for n in "12"
    ]
    work_through(tasks, 2, seconds=0.01)
    half = len(cores) // 2
    found = {task.log.read_text().splitlines()[-1] for task in tasks}
    assert found == {str(cores[:half]), str(cores[half : 2 * half])}


def test_a_task_that_another_process_does_is_waited_for(tmp_path):
    task = Task(tmp_path, "busy", writes(tmp_path / "out"), busy=3)
    ticks = []
    work_through([task], 1, ticks.append, seconds=0.01)
    assert len(ticks) > 3 and (tmp_path / "out").exists()


def test_who_leaves_early_lets_all_processes_stop(tmp_path):
    code = (
        "import pathlib, signal, sys, time\n"
        "own = pathlib.Path({!r})\n"
        "def stop(*_):\n"
        "    time.sleep(0.2); own.write_text('saved'); sys.exit()\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "own.write_text('begun'); time.sleep(60)"
    )
    files = [tmp_path / "a", tmp_path / "b"]
    tasks = [Task(tmp_path, f.name, code.format(str(f))) for f in files]

    def interrupt(errors):
        if all(file.exists() and file.read_text() for file in files):
            raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        work_through(tasks, 2, interrupt, seconds=0.01)
    assert [file.read_text() for file in files] == ["saved"] * 2
    assert time.monotonic() - begin < 50


def test_a_process_without_words_is_named_by_its_code(tmp_path):
    log = tmp_path / "log"
    log.write_text("Error: of the command before\n$ python -c pass\n\n")
    assert last_words(log, 3) == "Exit code 3."


def test_default_is_one_a_core_and_4_gb_each(monkeypatch):
    monkeypatch.setattr(
        "keras_moco.ablation.jobs.own_cores", lambda: list(range(8))
    )
    for gigabytes, jobs in ((1, 1), (13, 3), (100, 8)):
        free = type("memory", (), {"available": gigabytes * 2**30})
        monkeypatch.setattr("psutil.virtual_memory", lambda free=free: free)
        assert default_jobs() == jobs
