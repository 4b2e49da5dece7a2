"""One writer for a run folder."""

import contextlib
import json
import os
import pathlib
import platform
import threading
import time

import psutil

try:
    import fcntl
except ImportError:  # Windows: the process named in the file has to do.
    fcntl = None

# Another machine's process cannot be looked up; it is alive as long as it says
# so this often, and is taken to be gone when it has not for that long.
BEAT_SECONDS = 30
SILENT_SECONDS = 600


class RunLock:
    """A lock on a folder, held by one process until it ends, however it ends.

    The file `lock` names its holder. On one machine the operating system lets
    go of it with the process; over machines, where that may not hold (NFS), the
    file's time is the sign of life. May be entered again by its holder.

    Args:
        folder: Str or path.
        say: Function that prints a line.

    Raises:
        ValueError: On entering: another process holds it.

    Example:
        >>> with RunLock("runs/first"):
        ...     write()
    """

    def __init__(self, folder, say=print):
        self.path = pathlib.Path(folder) / "lock"
        self.say = say
        self.depth = 0

    def __enter__(self):
        if not self.depth:
            self._acquire()
        self.depth += 1
        return self

    def __exit__(self, *_):
        self.depth -= 1
        if not self.depth:
            self._ended.set()
            self._beating.join()
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, 0)
                if self._in_place():
                    self.path.unlink()
            os.close(self._file)

    def _acquire(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            before = self._holder()
            if self._taken() or _is_alive(before, self.path):
                raise ValueError(
                    f"{self.path.parent} is being written by another run "
                    f"({_describe(before)}). Wait for it or end it, or give "
                    "another folder with --run-dir."
                )
            process = psutil.Process()
            holder = {
                "host": platform.node(),
                "pid": process.pid,
                "started": process.create_time(),
            }
            os.ftruncate(self._file, 0)
            os.lseek(self._file, 0, os.SEEK_SET)
            os.write(self._file, json.dumps(holder).encode())
        except BaseException:
            os.close(self._file)
            raise
        if before:
            self.say(
                "The last run here ended without a word: this one takes over\n"
                f"({_describe(before)})."
            )
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True)
        self._beating.start()

    def _holder(self):
        """What the file says; {} of a new one, or one that says nothing."""
        with contextlib.suppress(ValueError, TypeError, KeyError):
            os.lseek(self._file, 0, os.SEEK_SET)
            content = json.loads(os.read(self._file, 1000))
            return {
                "host": str(content["host"]),
                "pid": int(content["pid"]),
                "started": float(content["started"]),
            }
        return {}

    def _taken(self):
        """Whether another process has it, or takes its place just now."""
        if fcntl is not None:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:  # A file system without locks.
                return False
        return not self._in_place()

    def _in_place(self):
        """Whether the path still leads to the file that was opened."""
        with contextlib.suppress(OSError):
            return os.path.samestat(os.fstat(self._file), self.path.stat())
        return False

    def _beat(self):
        while not self._ended.wait(BEAT_SECONDS):
            with contextlib.suppress(OSError):  # Full, read-only or gone.
                if self._in_place():
                    os.utime(self.path)


def _is_alive(holder, path):
    """Whether the process that a lock file names may still be writing."""
    if not holder:
        return False
    if holder["host"] == platform.node():
        with contextlib.suppress(psutil.Error, ValueError):
            started = psutil.Process(holder["pid"]).create_time()
            return holder["pid"] != os.getpid() and started == holder["started"]
        return False
    # By the clock of the file system, whatever those of the machines say.
    probe = path.with_name(f".{path.name}.{os.getpid()}")
    probe.touch()
    age = probe.stat().st_mtime - path.stat().st_mtime
    probe.unlink()
    return age < SILENT_SECONDS


def _describe(holder):
    if not holder:
        return "no process named"
    since = time.localtime(holder["started"])
    since = time.strftime("%Y-%m-%d %H:%M", since)
    return f"process {holder['pid']} on {holder['host']}, since {since}"
