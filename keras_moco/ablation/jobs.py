"""Several programs at once, each in a process of its own."""

import collections
import os
import shlex
import signal
import subprocess
import time

import psutil

from keras_moco.safety.signals import interrupted_by_sigterm

# Free memory that one run is taken to need.
RUN_BYTES = 4 * 2**30
COMMAND = "$ "  # Begins the line of a command, before what it prints.


def default_jobs():
    """How many runs go at once: one a core, and 4 GB of free memory each."""
    by_memory = psutil.virtual_memory().available // RUN_BYTES
    return max(1, min(len(own_cores()), by_memory))


def own_cores():
    """Numbers of the cores that this process may use."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # Not on macOS.
        return process.cpu_affinity()
    return list(range(psutil.cpu_count()))


def work_through(tasks, jobs, tick=lambda errors: None, seconds=0.5):
    """Runs the commands of all tasks; one that fails does not stop another.

    Each of several jobs keeps to its own share of the cores, as programs that
    share all of them only wait for each other. Processes are deaf to the
    terminal's Ctrl-C: when this function is left early, by that or by SIGTERM,
    it asks each of them to stop, once, and waits until they have.

    Args:
        tasks: Sequence of objects with `log`, the file that output goes to,
            `next_command()`, which returns a list of words or None when there
            is nothing left to do, and `is_busy()`, whether another process
            does the task just now, which is then waited for.
        jobs: Int >= 1. Tasks at once.
        tick: Function of the errors so far, called every so many seconds.
        seconds: Float > 0.

    Returns:
        Dict from each task that failed to its error, a str of one line.

    Raises:
        KeyboardInterrupt: It was interrupted, by SIGTERM too.

    Example:
        >>> errors = work_through(tasks, jobs=2)
    """
    cores = own_cores()
    share = max(1, len(cores) // jobs)
    slots = [
        _Slot(cores[n * share : (n + 1) * share] if jobs > 1 else [])
        for n in range(jobs)
    ]
    waiting, errors = collections.deque(tasks), {}
    with interrupted_by_sigterm():
        try:
            while True:
                busy = [slot.go_on(waiting, errors) for slot in slots]
                tick(errors)
                if not any(busy):
                    return errors
                time.sleep(seconds)
        finally:
            running = [slot.process for slot in slots if slot.process]
            for process in running:
                process.terminate()
            for process in running:
                process.wait()


class _Slot:
    """The place of one task at a time."""

    def __init__(self, cores):
        self.cores = cores
        self.task = self.process = self.command = None

    def go_on(self, waiting, errors):
        """Starts what comes next; returns whether there is work."""
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                return True
            self.process = None
            if code:
                errors[self.task] = last_words(self.task.log, code)
                self.task = None
        if self.task is None:
            if not waiting:
                return False
            self.task, self.command = waiting.popleft(), None
        if self.task.is_busy():
            return True
        command = self.task.next_command()
        if command is not None and command == self.command:
            errors[self.task] = "It was stopped by a signal."
            command = None
        if command is None:
            self.task = None
            return self.go_on(waiting, errors)
        self.command = command
        self.start(command)
        return True

    def start(self, command):
        self.task.log.parent.mkdir(parents=True, exist_ok=True)
        environment = os.environ.copy()
        if self.cores:  # Several on one GPU share its memory.
            environment["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        with open(self.task.log, "a") as log:
            log.write(f"{COMMAND}{shlex.join(command)}\n")
            log.flush()
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        process = psutil.Process(self.process.pid)
        if self.cores and hasattr(process, "cpu_affinity"):
            process.cpu_affinity(self.cores)


def last_words(log, code):
    """The error of a process that failed, in one line.

    Args:
        log: `pathlib.Path` of what it wrote.
        code: Int. Its exit code; the negative number of the signal that
            killed it.
    """
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (too little memory?)" if name == "SIGKILL" else ""
        return f"Killed by {name}{hint}."
    lines = log.read_text(errors="replace").splitlines()
    lines = [line.strip() for line in lines if line.strip()]
    if not lines or lines[-1].startswith(COMMAND):
        return f"Exit code {code}."
    return lines[-1].removeprefix("Error: ")
