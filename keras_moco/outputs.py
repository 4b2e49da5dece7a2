"""Files that are asked for: looked at before the work, put in place whole."""

import contextlib
import json
import os
import pathlib
import tempfile

PICTURES = (".png", ".pdf", ".svg")


def check_file(name, path, endings=()):
    """Raises unless a file can be written at that place.

    Args:
        name: Str. What the argument is called.
        path: Str or path.
        endings: Sequence of str, such as (".png", ".pdf"); () takes any.
    """
    path = pathlib.Path(path)
    if endings and path.suffix not in endings:
        *others, last = endings
        listed = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"{name} must end in {listed}. Received: {path}")
    if path.is_dir():
        raise ValueError(f"{name} must be a file; {path} is a folder.")
    if path.is_file() or not path.exists():  # Else a device.
        check_writable(path.parent)


def check_writable(folder):
    """Raises unless a folder can be made or written at that place."""
    place = pathlib.Path(folder).absolute()
    while not place.exists():
        if place.is_symlink():
            raise ValueError(f"{folder}: {place} is a link that leads nowhere.")
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"{folder} cannot be a folder: {place} is a file.")
    try:
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written: {error.strerror} ({place}). Give "
            "another folder."
        ) from error


@contextlib.contextmanager
def draft_of(path):
    """A path to write to; what is there takes the place of `path` at the end.

    Where the writing fails, what was there stays. A link is followed, and a
    device written itself.

    Args:
        path: Str or path. Its folder is made.

    Example:
        >>> with draft_of("out/features.npz") as draft:
        ...     np.savez(draft, **arrays)
    """
    path = pathlib.Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield draft
        draft.replace(path)
    except OSError as error:  # A full disk does not say whose.
        reason = error.strerror or str(error)
        raise OSError(error.errno, reason, str(path)) from error
    finally:
        draft.unlink(missing_ok=True)


def write_json(path, content):
    """Writes an object to a JSON file, for people too."""
    text = json.dumps(content, indent=2) + "\n"
    with draft_of(path) as draft:
        draft.write_text(text)
