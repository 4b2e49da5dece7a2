"""An encoder from wherever one is: an export, a run, a file, a SavedModel."""

import dataclasses
import pathlib
import zipfile

import keras
import tensorflow as tf

from keras_moco.build import build_model
from keras_moco.encoders import encoder_names
from keras_moco.layers import plain_float32
from keras_moco.monitoring.run import RunFolder
from keras_moco.notes import read_json
from keras_moco.presets import Preset
from keras_moco.safety.checkpoint import FOLDER, Checkpoint, checkpoints


def load_encoder(place, trainable=True):
    """Loads an encoder as a `keras.Model` of float32.

    Args:
        place: Str or path. An export (a folder with `encoder.keras`), a run
            folder (finished or not, as its last epoch left it), a `.keras`
            file, or any SavedModel of images -> features.
        trainable: Bool. Whether it is to be trained further. A SavedModel
            without `encoder.keras` is for inference only, and is taken only if
            this is False. Defaults to True.

    Returns:
        `keras.Model`, images -> (batch, features).

    Raises:
        ValueError: In one line: no encoder at that place, one that cannot be
            loaded, or that cannot be trained.

    Example:
        >>> load_encoder("saved_models/stl10").predict(images)
    """
    path = pathlib.Path(place)
    if (path / "run.json").is_file():
        model, _, _ = load_run(path)
        return plain_float32(model.encoder)
    if (path / "encoder.keras").is_file():
        path = path / "encoder.keras"
    if path.suffix == ".keras" and path.is_file():
        return _load_keras(path)
    if not (path / "saved_model.pb").is_file():
        raise ValueError(
            f"{place} holds no exported encoder: expected an export (a folder "
            "with encoder.keras in it), a run folder (run.json), a SavedModel "
            "(saved_model.pb) or a .keras file."
        )
    if trainable:
        raise ValueError(
            f"{place} is a SavedModel without encoder.keras: it is for "
            "inference only and cannot be trained. Export the encoder again "
            "with keras-moco export, or give its .keras file."
        )
    return _load_saved_model(path)


def load_run(run_dir):
    """The model of a run as its last epoch left it.

    Args:
        run_dir: Folder of a run by `pretrain`, finished or not, of an encoder
            given by name.

    Returns:
        Tuple of the compiled `MoCo`, the `RunFolder` and the steps done.

    Raises:
        ValueError: No run there, no epoch finished, or an encoder of the
            user's own, which the folder does not describe.
    """
    path = pathlib.Path(run_dir)
    run = RunFolder(path, None)
    classifier = "frozen" in run.settings  # Which `require` says.
    if not classifier and not checkpoints(path / FOLDER):
        raise ValueError(f"The run in {path} has no checkpoint yet.")
    run.require("precision")
    preset = run_preset(run)
    if preset.encoder not in encoder_names():
        raise ValueError(
            f"The encoder {preset.encoder!r} of {path} was not built by name: "
            "rebuild it in Python; Checkpoint(run).restore(moco) loads it."
        )
    model = build_model(
        preset,
        None,
        1,
        run.settings["precision"],
        num_images=run.settings.get("num_images"),
    )
    Checkpoint(path).restore(model)
    return model, run, int(model.optimizer.iterations.numpy())


def run_preset(run):
    """The `Preset` of a run, of the settings in its folder.

    Args:
        run: `RunFolder`.
    """
    run.require("queue_size", "batch_size", "epochs", "encoder")
    fields = {field.name for field in dataclasses.fields(Preset)}
    known = {k: v for k, v in run.settings.items() if k in fields}
    try:
        return Preset(summary="", **known)
    except ValueError as error:
        raise ValueError(
            f"{run.path / 'run.json'} is damaged: {error}"
        ) from error


def trained_image_size(place):
    """The side of the images that an encoder was trained on, or None.

    Args:
        place: What `load_encoder` takes. An export notes it in `card.json`, a
            run in `run.json`; other files do not say.

    Example:
        >>> trained_image_size("saved_models/stl10-stl10")
        96
    """
    path = pathlib.Path(place)
    if path.name == "encoder.keras":
        path = path.parent
    if (path / "run.json").is_file():
        return RunFolder(path, None).settings.get("image_size")
    card = path / "card.json"
    if not card.exists():
        return None
    try:
        size = read_json(card).get("settings", {}).get("image_size")
        if size is not None and size < 1:
            raise ValueError(f"image_size is {size}")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{card} is damaged ({error}): it does not say which size the "
            "encoder was trained on. Give --image-size, or delete it."
        ) from error
    return size


def _load_keras(path):
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is damaged: it is no whole Keras file.")
    try:
        return keras.models.load_model(path, compile=False, safe_mode=True)
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        zipfile.BadZipFile,
    ) as error:
        if "safe_mode" in str(error):
            raise ValueError(
                f"{path} holds Python code (as a Lambda layer does), and code "
                "from a file is not run. Save the encoder without it; or, if "
                "you trust it, load it in Python with "
                "keras.models.load_model(path, safe_mode=False)."
            ) from error
        raise ValueError(
            f"{path} cannot be loaded as a Keras model: {error}"
        ) from error


def _load_saved_model(path):
    """A Keras model around the function that a SavedModel serves."""
    try:
        served = tf.saved_model.load(str(path))
        signature = served.signatures["serving_default"]
        ((name, spec),) = signature.structured_input_signature[1].items()
        (output,) = signature.structured_outputs
    except Exception as error:  # TensorFlow's on damaged files are many.
        raise ValueError(
            f"{path} cannot be used: expected a SavedModel whose signature "
            "`serving_default` takes images and gives features, one tensor "
            f"each. {type(error).__name__}: {error}"
        ) from error
    images = keras.Input(spec.shape[1:], dtype=spec.dtype.name)
    serve = keras.layers.Lambda(lambda x: signature(**{name: x})[output])
    model = keras.Model(images, serve(images), name="saved_model")
    model.served = served  # Its variables live as long as it does.
    return model
