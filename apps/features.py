"""`keras-moco features`: an encoder's features of any images, in a file."""

import csv

import click

from keras_moco.errors import one_line_errors
from keras_moco.options import (
    data_dir_option,
    encoder_option,
    image_size_option,
    max_broken_option,
    one_or_many,
    open_encoder,
    output_file,
    say_broken,
    say_size,
)


@click.command("features")
@encoder_option
@click.option(
    "--images",
    "--dataset",
    "dataset",
    multiple=True,
    required=True,
    metavar="DIR|NAME",
    help="A folder of images, with class folders or not; `shapes`; or a TFDS "
    "name such as stl10. Several folders: repeat it.",
)
@click.option(
    "--split",
    default="train",
    show_default=True,
    help="Of data that have any, as test or train[:1000].",
)
@image_size_option
@data_dir_option
@max_broken_option
@click.option(
    "--to",
    "path",
    required=True,
    metavar="FILE",
    callback=output_file(".npz", ".csv"),
    help="features.npz (arrays features, labels, names, class_names), or "
    "features.csv (a line an image).",
)
@one_line_errors
def main(encoder, dataset, split, image_size, data_dir, max_broken, path):
    """Write an encoder's features of images, with their file names."""
    import keras_moco as km

    model, size = open_encoder(encoder, image_size)
    images = km.load_images(
        one_or_many(dataset),
        split,
        data_dir=data_dir,
        max_broken=max_broken,
        image_size=size or 32,
    )
    say_size(images, size)
    found = km.features(model, images, size, verbose=True)
    say_broken(images)
    write = {".npz": write_npz, ".csv": write_csv}[path.suffix]
    with km.outputs.draft_of(path) as draft:
        write(draft, found, images.class_names)
    count, width = found.features.shape
    click.echo(f"Features {path}: {count:,} images, {width:,} features each")


def write_npz(path, found, class_names):
    """Arrays `features`, `names` and, where there are any, the labels."""
    import numpy as np

    arrays = {"features": found.features, "names": found.names}
    if found.labels is not None:
        arrays["labels"] = found.labels
    if class_names:
        arrays["class_names"] = class_names
    with open(path, "wb") as file:
        np.savez(file, **arrays)


def write_csv(path, found, class_names):
    """A line an image: its file name, its label if it has any, its features."""
    labels = [] if found.labels is None else [found.labels]
    if labels and class_names:
        labels = [[class_names[label] for label in found.labels]]
    numbers = [f"feature_{i}" for i in range(found.features.shape[1])]
    # Names of files need not be text; they are written as they are.
    with open(path, "w", newline="", errors="surrogateescape") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(["name", *["label" for _ in labels], *numbers])
        for name, *label, row in zip(
            found.names, *labels, found.features, strict=True
        ):
            # Nine digits give every float32 back as it was.
            lines.writerow([name, *label, *map("{:.9g}".format, row)])


if __name__ == "__main__":
    main()
