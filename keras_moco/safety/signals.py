"""SIGTERM, SIGINT and SIGUSR1: a wish to stop, not an end in mid-air."""

import contextlib
import os
import signal
import socket
import threading

SIGNALS = {
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR1")
    if hasattr(signal, name)  # No SIGUSR1 on Windows.
}


@contextlib.contextmanager
def interrupted_by_sigterm():
    """While entered, SIGTERM raises what Ctrl-C does: all is put away.

    The `KeyboardInterrupt` has the signal as its argument. In another than the
    main thread nothing is changed.
    """

    def interrupt(number, frame):
        raise KeyboardInterrupt(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class StopSignals:
    """While entered, the first signal is noted and the second ends at once.

    A thread reads them: Python itself would hear of the second one only after
    the step, which may take a minute. In another than the main thread nothing
    is changed, as Python allows no more.

    Args:
        say: Function that prints a line.

    Attributes:
        asked: Name of the signal that came, or None.

    Example:
        >>> with StopSignals() as signals:
        ...     while not signals.asked:
        ...         step()
    """

    def __init__(self, say=print):
        self.say = say
        self.asked = None
        self._end = contextlib.ExitStack()

    def __enter__(self):
        self.asked = None
        if threading.current_thread() is not threading.main_thread():
            return self
        inlet, outlet = socket.socketpair()
        inlet.setblocking(False)
        # Last in, first out: the thread ends when the inlet is closed.
        self._end.callback(outlet.close)
        listening = threading.Thread(
            target=self._listen, args=(outlet,), daemon=True
        )
        self._end.callback(listening.join)
        self._end.callback(inlet.close)
        before = signal.set_wakeup_fd(inlet.fileno(), warn_on_full_buffer=False)
        self._end.callback(signal.set_wakeup_fd, before)
        for number in SIGNALS:
            handler = signal.signal(number, lambda *_: None)
            self._end.callback(signal.signal, number, handler)
        listening.start()
        return self

    def __exit__(self, *_):
        self._end.close()

    def _listen(self, outlet):
        while received := outlet.recv(16):
            for number in received:
                if number not in SIGNALS:
                    continue
                if self.asked:
                    os._exit(128 + number)
                self.asked = signal.Signals(number).name
                self.say(
                    f"{self.asked}: stopping after this step, which is "
                    "saved. Once more to stop at once."
                )
