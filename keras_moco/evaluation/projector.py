"""The files of TensorBoard's embedding projector."""

import math

import numpy as np
from PIL import Image
from tensorboard.plugins import projector

from keras_moco.evaluation.neighbourhood import sample_features, thumbnails

THUMBNAIL = 32  # Pixels of an image on the page.


def write_projector(folder, encoder, images, size, count=1000):
    """Writes features, labels and thumbnails for the embedding projector.

    Args:
        folder: `pathlib.Path` of the run.
        encoder: `keras.Model`, run in inference mode.
        images: `Images`; labels and names are shown where there are any.
        size: Int. Side in pixels that the encoder sees.
        count: Int. Images at most. Defaults to 1000.

    Raises:
        ValueError: The images are read as a stream.
        OSError: The folder cannot be written.

    Example:
        >>> write_projector(pathlib.Path("runs/first"), encoder, images, 32)
    """
    rows, found = sample_features(encoder, images, size, count)
    place = folder / "projector"
    place.mkdir(parents=True, exist_ok=True)
    np.savetxt(place / "features.tsv", found.features, "%.5g", delimiter="\t")
    lines = ["label\timage"]
    for row, name in zip(rows, found.names, strict=True):
        label = images.class_of(row) or "-"
        lines.append(f"{_cell(label)}\t{_cell(name)}")
    (place / "metadata.tsv").write_text(
        "\n".join(lines) + "\n", "utf-8", errors="replace"
    )
    _sprite(thumbnails(images, rows, THUMBNAIL)).save(place / "sprite.png")
    config = projector.ProjectorConfig()
    embedding = config.embeddings.add()
    embedding.tensor_name = "features"
    embedding.tensor_path = "projector/features.tsv"
    embedding.metadata_path = "projector/metadata.tsv"
    embedding.sprite.image_path = "projector/sprite.png"
    embedding.sprite.single_image_dim.extend([THUMBNAIL, THUMBNAIL])
    projector.visualize_embeddings(str(folder), config)


def _cell(text):
    # A tab or a line break in a file's name would begin another cell.
    return " ".join(str(text).split())


def _sprite(squares):
    """All thumbnails in one square picture, row by row."""
    side = math.ceil(math.sqrt(len(squares)))
    tiles = np.ones((side * side, *squares.shape[1:]), np.float32)
    tiles[: len(squares)] = squares
    tiles = tiles.reshape(side, side, *squares.shape[1:])
    grid = tiles.swapaxes(1, 2).reshape(side * THUMBNAIL, side * THUMBNAIL, 3)
    return Image.fromarray(np.uint8(np.round(255.0 * grid)))
