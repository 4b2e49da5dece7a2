"""Small models and data that tests share."""

import os
import pathlib
import struct

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ["KERAS_BACKEND"] = "tensorflow"

import keras  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

import keras_moco as km  # noqa: E402

GOLDEN = pathlib.Path(__file__).parent / "golden"

# Two logical devices stand in for two GPUs; before TensorFlow starts.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2,
)


@pytest.fixture(autouse=True)
def seeded():
    keras.utils.set_random_seed(0)


@pytest.fixture(scope="session")
def two_replicas():
    """One strategy for all: each new one would start its own collectives."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture(scope="session")
def golden_steps():
    return dict(np.load(GOLDEN / "moco_steps.npz"))


@pytest.fixture
def build_golden(golden_steps):
    """A function that builds the perceptron of the golden trajectory."""
    z = golden_steps

    def build(**options):
        encoder = keras.Sequential(
            [
                keras.Input((4, 4, 3)),
                keras.layers.Flatten(),
                keras.layers.Dense(16, activation="relu"),
            ]
        )
        projector = keras.Sequential(
            [keras.Input((16,)), keras.layers.Dense(8)]
        )
        encoder.set_weights([z["init_w1"], z["init_b1"]])
        projector.set_weights([z["init_w2"], z["init_b2"]])
        options = {"queue_size": 16, "momentum": 0.9, **options}
        model = km.MoCo(encoder, projector, **options)
        if model.queue.shape[0] == 16:
            model.queue.assign(z["init_queue"])
        return model

    return build


@pytest.fixture
def golden_pairs(golden_steps):
    """The views of the golden trajectory, one batch a step."""
    views = golden_steps["views"].astype("float32")
    return tf.data.Dataset.from_tensor_slices((views[:, 0], views[:, 1]))


@pytest.fixture
def golden_sgd():
    return lambda: km.SGD(0.1, momentum=0.9, weight_decay=0.01)


@pytest.fixture
def tiny_encoder():
    """A function that builds an encoder with batch normalisation."""

    def build(size=8, features=4):
        return keras.Sequential(
            [
                keras.Input((size, size, 3)),
                keras.layers.Conv2D(features, 3),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
                keras.layers.GlobalAveragePooling2D(),
            ]
        )

    return build


@pytest.fixture
def random_pairs():
    """A function that gives batches of random views."""

    def build(steps=3, batch=6, size=8, index=False, seed=0):
        draw = np.random.default_rng(seed)
        shape = (steps, batch, size, size, 3)
        arrays = [draw.random(shape, "float32") for _ in range(2)]
        if index:
            count = steps * batch
            arrays.append(np.arange(count).reshape(steps, batch))
        return tf.data.Dataset.from_tensor_slices(tuple(arrays))

    return build


# Debian stripped name and time from the headers of the gzip files. Put back,
# they give the published files to the byte, as TFDS' checksums then confirm.
FASHION_TIMES = {
    "train-images-idx3-ubyte": 1504176606,
    "train-labels-idx1-ubyte": 1504176606,
    "t10k-images-idx3-ubyte": 1504176627,
    "t10k-labels-idx1-ubyte": 1504176627,
}


@pytest.fixture(scope="module")
def fashion_dir(tmp_path_factory):
    """TFDS folder with the files where it looks for manual downloads."""
    pytest.importorskip("tensorflow_datasets")
    debian = pathlib.Path("/usr/share/datasets/fashion-mnist")
    if not debian.is_dir():
        pytest.skip("needs Debian's package dataset-fashion-mnist")
    data_dir = tmp_path_factory.mktemp("tfds")
    manual = data_dir / "downloads" / "manual"
    manual.mkdir(parents=True)
    for name, seconds in FASHION_TIMES.items():
        stripped = (debian / f"{name}.gz").read_bytes()
        header = b"\x1f\x8b\x08\x08" + struct.pack("<I", seconds)
        header += stripped[8:10] + name.encode() + b"\0"
        (manual / f"{name}.gz").write_bytes(header + stripped[10:])
    return data_dir
