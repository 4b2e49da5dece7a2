"""How a command fails: in one line, where the user erred."""

import contextlib
import functools
import os
import pathlib
import re
import signal
import sys
import traceback
import warnings

import click

from keras_moco.safety.signals import interrupted_by_sigterm

PACKAGE = str(pathlib.Path(__file__).parent)


def one_line_errors(function):
    """Loads TensorFlow silently, and fails in one line where a user erred."""

    @functools.wraps(function)
    def run(*args, **options):
        try:
            load_tensorflow()
            with readable_warnings(), interrupted_by_sigterm():
                return function(*args, **options)
        except KeyboardInterrupt as stop:
            click.echo("Stopped.", err=True)
            leave(stop_code(stop))
        except OSError as error:
            text = " ".join(str(error).split())
            if error.strerror and error.filename:
                text = f"{error.filename}: {error.strerror}."
            raise UserError(text) from error
        except ValueError as error:
            if raised_here(error):
                raise UserError(" ".join(str(error).split())) from error
            raise
        except Exception as error:
            # TensorFlow wraps what a pipeline raises while it runs.
            found = re.search("[0-9]+ of [0-9]+ image files .*", str(error))
            if found:
                raise UserError(found.group()) from error
            raise

    return run


def stop_code(stop):
    """The exit code for a `KeyboardInterrupt`: 128 and the signal's number."""
    (number,) = stop.args or (signal.SIGINT,)
    return 128 + number


def leave(code):
    """Ends the process in the middle of its work.

    Python would wait for threads that still make views, and TensorFlow's write
    errors of their own while they wait for a machine that is lost.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class UserError(click.ClickException):
    """What the user gave cannot be used: one line, exit code 2."""

    exit_code = 2


def raised_here(error):
    """Whether our own code found the fault, and so words it for the user."""
    *_, last = traceback.extract_tb(error.__traceback__)
    return last.filename.startswith(PACKAGE)


@contextlib.contextmanager
def readable_warnings():
    """Shows warnings meant for the user without the code they come from."""

    def show_short(message, category, *place, **options):
        if category is UserWarning:
            click.echo(wrap(f"Warning: {message}", ""), err=True)
        else:
            show(message, category, *place, **options)

    with warnings.catch_warnings():
        show = warnings.showwarning
        warnings.showwarning = show_short
        yield


def load_tensorflow():
    """Imports it, and keeps what it writes on its way up from the user."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    # Its libraries write to the descriptor itself, before any setting holds.
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        import tensorflow as tf

        import keras_moco.pretraining  # noqa: F401

        tf.config.list_physical_devices()  # Says what it lacks.
    finally:
        os.dup2(saved, 2)
        os.close(saved)


def wrap(text, indent="  "):
    """A paragraph, indented, within 80 columns."""
    return click.wrap_text(text, 78, indent, indent)
