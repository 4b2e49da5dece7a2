import os
import signal
import subprocess
import sys
import time

import pytest

from keras_moco.safety.signals import StopSignals, interrupted_by_sigterm

# Something that Python does not leave for a signal, as a step is.
LONG = """
import ctypes
from keras_moco.safety.signals import StopSignals
with StopSignals(say=lambda line: print(line, flush=True)) as signals:
    print("begun", flush=True)
    # Without a byte code in between: a mutex that is never free.
    libc = ctypes.CDLL(None)
    mutex = ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_second_signal_ends_at_once(name):
    number = getattr(signal, name)
    command = [sys.executable, "-c", LONG]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout.readline() == "begun\n"
        run.send_signal(number)
        assert name in run.stdout.readline()
        run.send_signal(number)
        assert run.wait(30) == 128 + number


def test_handlers_are_as_before():
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    with StopSignals() as signals:
        assert signal.getsignal(signal.SIGTERM) != before[0]
    assert signals.asked is None
    after = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    assert after == before


def test_sigterm_is_an_interrupt_that_says_so():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as stop, interrupted_by_sigterm():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
    assert stop.value.args == (signal.SIGTERM,)
    assert signal.getsignal(signal.SIGTERM) == before
