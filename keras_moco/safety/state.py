"""The state of a run as a file, and the files of a folder."""

import hashlib
import io
import json
import os
import re
import zipfile
from typing import NamedTuple

import numpy as np

FORMAT = 1
# Epoch, step within it, and the first half of the content's SHA-256.
NAME = re.compile(r"epoch-(\d+)-step-(\d+)-([0-9a-f]{32})\.npz")


class Place(NamedTuple):
    """How far a run is: whole epochs, and steps of the one after them."""

    epoch: int
    step: int

    def __str__(self):
        within = f" and {self.step} steps" if self.step else ""
        return f"{self.epoch} epochs{within}"


def state_of(model):
    """All variables of a `MoCo`, by names that stay the same."""
    parts = {
        "encoder": model.encoder,
        "projector": model.projector,
        "predictor": model.predictor,
        "key_encoder": model.key_encoder,
        "key_projector": model.key_projector,
        "queue": model.key_queue,
        "guard": model.step_guard,
        "optimizer": model.optimizer,
        **{f"metrics/{metric.name}": metric for metric in model.metrics},
    }
    return {
        f"{part}/{number}": variable
        for part, owner in parts.items()
        if owner is not None
        for number, variable in enumerate(owner.variables)
    }


def write_state(file, model, place, identity):
    """Writes all variables, one after the other; returns the digest.

    A ZIP archive of NumPy arrays, as `numpy.savez` makes it: nothing in it can
    be run on loading. It is a function of the state alone, without a clock.
    """
    strategy = model.distribute_strategy
    per_replica = []
    with zipfile.ZipFile(file, "w") as archive:

        def write(name, array):
            # Without a time, which may be one that ZIP cannot tell.
            entry = zipfile.ZipInfo(f"{name}.npy")
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)

        for name, variable in state_of(model).items():
            copies = [
                copy.numpy()
                for copy in strategy.experimental_local_results(variable.value)
            ]
            if any(copy.tobytes() != copies[0].tobytes() for copy in copies):
                per_replica.append(name)
                write(name, np.stack(copies))
            else:
                write(name, copies[0])
        about = {
            "format": FORMAT,
            "epoch": place.epoch,
            "step": place.step,
            "identity": identity,
            "per_replica": per_replica,
        }
        write("about", np.array(json.dumps(about)))
    return file.digest()


def assign(strategy, variable, values):
    """Sets a variable to one value, or to those of the replicas that saved.

    On another number of replicas the first one takes the sum of what is summed
    up over them, and all of them the mean of anything else.
    """
    copies = strategy.experimental_local_results(variable.value)
    if len(values) not in (1, len(copies)):
        if variable.aggregation == "sum":
            total = np.sum(values, axis=0)
            values = [total] + [np.zeros_like(total)] * (len(copies) - 1)
        else:
            values = [np.mean(values, axis=0).astype(values[0].dtype)]
    if len(values) == 1:
        values = values * len(copies)
    for copy, value in zip(copies, values, strict=True):
        copy.assign(value)


class Hashed(io.RawIOBase):
    """A file that is written from begin to end and digested on the way."""

    def __init__(self, file):
        super().__init__()
        self.file = file
        self.sha = hashlib.sha256()

    def write(self, content):
        content = memoryview(content).cast("B")
        self.sha.update(content)
        rest = content
        while rest:  # The system may take a part only.
            rest = rest[self.file.write(rest) :]
        return len(content)

    def digest(self):
        return self.sha.hexdigest()[:32]


def checkpoints(folder):
    """The checkpoint files of a folder, the newest first."""
    if not folder.is_dir():
        return []
    paths = [path for path in folder.iterdir() if NAME.fullmatch(path.name)]
    return sorted(paths, key=lambda path: (place_of(path), path.name))[::-1]


def file_name(place, digest):
    """The name of the file of a state."""
    return f"epoch-{place.epoch:05}-step-{place.step:07}-{digest}.npz"


def place_of(path):
    """The place that a checkpoint file is named by."""
    epoch, step, _ = NAME.fullmatch(path.name).groups()
    return Place(int(epoch), int(step))


def read_whole(path):
    """The arrays of a checkpoint by name; None if a bit of it is not right."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content).hexdigest()[:32] != NAME.fullmatch(path.name)[3]:
        return None
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return dict(arrays)


def sync_folder(folder):
    """Makes the names in a folder last, where the system offers that."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
