"""A run that is killed again and again, beside one that never was.

    killed.py OUT KIND KILLS [SEED]

KIND is "array", "devices" (two logical CPUs) or "folder" (of JPEG files). Runs
go to OUT/whole and OUT/killed; the processes that were killed, and where, to
OUT/kills.json. TensorFlow is imported once: each run is a fork made before its
runtime starts.
"""

import json
import os
import pathlib
import random
import signal
import sys
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras  # noqa: E402
import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

import keras_moco as km  # noqa: E402
from keras_moco import distribute, terminal  # noqa: E402
from keras_moco.monitoring.run import RunFolder, RunLog  # noqa: E402
from keras_moco.safety import state  # noqa: E402

EPOCHS = 12
PIXELS = np.random.default_rng(0).integers(0, 255, (30, 8, 8, 3), np.uint8)


def tiny_encoder():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),  # Its draws are part of the state.
            keras.layers.GlobalAveragePooling2D(),
        ]
    )


def train_array(out, name, devices):
    """Code of a user's own, with views that take no time to trace."""
    if devices > 1:
        distribute.split_cpu(devices)
    preset = km.PRESETS["demo"]
    pairs = km.pretrain_dataset(
        PIXELS, preset, 8, batch_size=6, augment=lambda images: images
    )
    with distribute.choose_strategy("all").scope():
        encoder = tiny_encoder()  # First, as it sets the seed.
        model = km.MoCo(encoder, km.projection_head(4, 4), queue_size=16)
        model.compile(km.SGD(0.05))
    run = RunFolder(out / name, {})
    run.write("run.json", {})
    log = RunLog(run, 6, EPOCHS, say=terminal.say_nothing)
    saves = km.Checkpoint(run.path, every_steps=2, say=lambda line: None)
    model.fit(pairs, epochs=EPOCHS, callbacks=[saves, log], verbose=0)


def train_folder(out, name):
    """The main job, on JPEG files of several sizes."""
    folder = out / "photos"
    if not folder.exists():
        folder.mkdir()
        for number, image in enumerate(PIXELS):
            image = Image.fromarray(image[:, : 5 + number % 4])
            image.save(folder / f"{number:02}.jpg")
    km.pretrain(
        str(folder),
        preset="moco_v2",
        settings=["queue_size=16", "head_output_dim=4", "head_hidden_dim=4"],
        encoder=tiny_encoder(),
        image_size=8,
        batch_size=6,
        epochs=EPOCHS,
        run_dir=out / name,
        export_to=out / f"{name}-export",
        checkpoint_every=2,
        verbose=False,
    )


def train(kind, out, name):
    if kind == "folder":
        train_folder(out, name)
    else:
        train_array(out, name, 2 if kind == "devices" else 1)


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def die_at(place, count):
    """Kills this process at the so manieth call of a function."""
    owner, name, before = {
        "step": (km.MoCo, "update_key_encoder", True),
        "write": (state.Hashed, "write", True),
        "sync": (os, "fsync", True),
        "move": (pathlib.Path, "replace", True),
        "moved": (pathlib.Path, "replace", False),
        "drop": (pathlib.Path, "unlink", True),
        "soon": (km.MoCo, "update_key_encoder", False),
    }[place]
    function = getattr(owner, name)
    left = [count]

    def dying(*args, **kwargs):
        left[0] -= 1
        if not left[0] and place == "soon":  # Wherever it is by then.
            threading.Timer(random.random() / 20, die).start()
        elif not left[0] and before:
            die()
        result = function(*args, **kwargs)
        if not left[0] and place != "soon":
            die()
        return result

    setattr(owner, name, dying)


def child(kind, out, name, death=None):
    """Trains in a fork; returns how it ended."""
    pid = os.fork()
    if not pid:
        try:
            if death:
                die_at(*death)
            train(kind, out, name)
        except BaseException:
            import traceback

            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main(out, kind, kills, seed):
    draw = random.Random(seed)
    # Two epochs at most, so that none of the runs comes to its end.
    calls = {"step": 9, "write": 900, "sync": 9, "move": 6, "moved": 6}
    calls |= {"drop": 12, "soon": 9}
    places = list(calls) * 2
    deaths = [(p, draw.randint(1, calls[p])) for p in places[:kills]]
    draw.shuffle(deaths)
    ends = [(*d, child(kind, out, "killed", d)) for d in deaths]
    ends.append(("end", 0, child(kind, out, "killed")))
    ends.append(("whole", 0, child(kind, out, "whole")))
    (out / "kills.json").write_text(json.dumps(ends))


if __name__ == "__main__":
    main(
        pathlib.Path(sys.argv[1]),
        sys.argv[2],
        int(sys.argv[3]),
        int(sys.argv[4]) if len(sys.argv) > 4 else 0,
    )
