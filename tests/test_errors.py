import signal
import subprocess
import sys

import pytest

COMMAND = """
import time
from keras_moco.errors import one_line_errors
@one_line_errors
def command():
    try:
        print("begun", flush=True)
        time.sleep(60)
    finally:
        print("put away", flush=True)
command()
"""


@pytest.mark.parametrize("name, code", [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_command_that_is_stopped_puts_its_things_away(name, code):
    command = [sys.executable, "-c", COMMAND]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout.readline() == "begun\n"
        run.send_signal(getattr(signal, name))
        assert run.wait(60) == code
        assert run.stdout.read() == "put away\n"
        assert run.stderr.read() == "Stopped.\n"
