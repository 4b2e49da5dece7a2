"""Encoders and classifiers as products: a folder for whatever comes after."""

import contextlib
import json
import os
import pathlib
import shutil

import keras
import tensorflow as tf

from keras_moco.layers import plain_float32
from keras_moco.notes import read_json
from keras_moco.outputs import check_writable

EXPORTED = {
    "saved_model.pb",
    "fingerprint.pb",
    "variables",
    "assets",
    "card.json",
}
IMAGES = "float32 RGB in [0, 1], (batch, height, width, 3)"


def export_encoder(encoder, folder, card=None):
    """Writes an encoder as a SavedModel with its `.keras` copy beside it.

    The folder is a SavedModel: float32 images in [0, 1] in, features out, any
    batch size; TensorFlow alone can serve it. It holds also `encoder.keras`,
    for fine-tuning (a SavedModel is for inference only), and `card.json`. Both
    are made of Keras' own layers in float32: no keras_moco is needed to load
    them. It is written beside its place and moved there when it is whole.

    Args:
        encoder: Functional or Sequential `keras.Model`.
        folder: Str or path. Must not hold anything but an earlier export.
        card: Dict or None. What to note about it in `card.json`.

    Returns:
        `pathlib.Path` of the folder.

    Raises:
        ValueError: The folder holds something that is no export.

    Example:
        >>> export_encoder(model.encoder, "saved_models/stl10")
        >>> served = tf.saved_model.load("saved_models/stl10")
        >>> served.serve(images)  # float32 (batch, height, width, 3)
    """
    return _write(
        folder,
        "encoder",
        plain_float32(encoder),
        {**(card or {}), "output": "float32 features, (batch, features)"},
    )


def export_classifier(classifier, folder, class_names, card=None):
    """Writes a classifier as a SavedModel that knows its classes.

    As `export_encoder`, with `classifier.keras`. The SavedModel gives the
    names of the classes too, and so does `card.json`.

    Args:
        classifier: Functional or Sequential `keras.Model`, images ->
            probabilities (batch, classes).
        folder: Str or path. Must not hold anything but an earlier export of a
            classifier.
        class_names: List of str, in the order of the probabilities.
        card: Dict or None. What to note about it in `card.json`.

    Returns:
        `pathlib.Path` of the folder.

    Raises:
        ValueError: The folder holds something else.

    Example:
        >>> export_classifier(classifier, "saved_models/pets", ["cat", "dog"])
        >>> served = tf.saved_model.load("saved_models/pets")
        >>> best = tf.argmax(served.serve(images), axis=1)
        >>> tf.gather(served.class_names(), best)
    """
    names = tf.constant(class_names)
    return _write(
        folder,
        "classifier",
        plain_float32(classifier),
        {
            **(card or {}),
            "output": "float32 probabilities, (batch, classes)",
            "class_names": list(class_names),
        },
        class_names=lambda: names,
    )


def _write(folder, kind, model, card, **endpoints):
    """The folder of an export, made beside its place.

    Args:
        folder: Str or path.
        kind: "encoder" or "classifier".
        model: `keras.Model`, images -> outputs.
        card: Dict.
        **endpoints: Functions without arguments to be served too.
    """
    check_export_folder(folder, kind)
    folder = pathlib.Path(folder).resolve()  # Not the link to it.
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        draft.mkdir()
        archive = keras.export.ExportArchive()
        archive.track(model)
        images = tf.TensorSpec(model.input_shape, tf.float32)
        archive.add_endpoint("serve", model.__call__, input_signature=[images])
        for name, function in endpoints.items():
            archive.add_endpoint(name, function, input_signature=[])
        archive.write_out(draft, verbose=False)
        model.save(draft / f"{kind}.keras")
        card = {
            **card,
            "input": IMAGES,
            "input_shape": model.input_shape,
            "output_shape": model.output_shape,
            "parameters": model.count_params(),
        }
        text = json.dumps(card, indent=2)
        (draft / "card.json").write_text(text + "\n")
        if folder.exists():
            shutil.rmtree(folder)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def check_export_folder(folder, kind="encoder"):
    """Raises unless an export may go there: nothing, or an earlier export."""
    folder = pathlib.Path(folder)
    if folder.is_file():
        raise ValueError(f"The export needs a folder; {folder} is a file.")
    check_writable(folder)
    there = {path.name for path in folder.iterdir()} if folder.exists() else ()
    known = EXPORTED | {f"{kind}.keras"}
    if there and ("card.json" not in there or not there <= known):
        raise ValueError(
            f"{folder} holds files that are no exported {kind}; they are "
            "left alone. Export to another folder."
        )


def read_card(folder):
    """The `card.json` of an export folder; {} where there is none."""
    card = pathlib.Path(folder) / "card.json"
    with contextlib.suppress(OSError, ValueError):
        return read_json(card)
    return {}
