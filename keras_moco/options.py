"""Options that several commands take, and what they do with them."""

import functools
import pathlib

import click

from keras_moco.errors import UserError
from keras_moco.outputs import PICTURES, check_file, check_writable


def output_file(*endings):
    """A callback of an option: the path, once a file can be written there."""

    def check(context, option, path):
        if path is None:
            return None
        try:
            check_file(option.opts[0], path, endings)
        except ValueError as error:
            raise UserError(str(error)) from error
        return pathlib.Path(path)

    return check


def output_folder(context, option, folder):
    """A callback of an option: the folder, once it can be written."""
    if folder is not None:
        try:
            if not folder:
                raise ValueError(f"{option.opts[0]} must be a folder.")
            check_writable(folder)
        except ValueError as error:
            raise UserError(str(error)) from error
    return folder


dataset_option = click.option(
    "--dataset",
    multiple=True,
    metavar="NAME|DIR",
    help="`shapes` (built in, the default), a TFDS name such as stl10, or a "
    "folder of images: flat, or with train/ and test/ in it, class folders "
    "or not. Several folders: repeat it.",
)
data_dir_option = click.option(
    "--data-dir", metavar="DIR", help="Where TFDS keeps its data sets."
)
max_broken_option = click.option(
    "--max-broken",
    type=float,
    default=0.01,
    show_default=True,
    help="Share of broken image files that is skipped.",
)
encoder_option = click.option(
    "--encoder",
    required=True,
    metavar="PATH",
    help="An export, a run folder (unfinished too), a SavedModel or a .keras "
    "file.",
)
image_size_option = click.option(
    "--image-size", type=int, help="Side in pixels. Default: as trained."
)
picture_option = click.option(
    "--picture",
    metavar="FILE",
    callback=output_file(*PICTURES),
    help="Draw the confusion matrix there (.png, .pdf or .svg).",
)
json_option = click.option(
    "--json",
    "json_file",
    metavar="FILE",
    callback=output_file(),
    help="Write it there.",
)
tensorboard_option = click.option(
    "--tensorboard",
    metavar="DIR",
    callback=output_folder,
    help="Log there for TensorBoard. Default: the run folder, if there is one.",
)


def recipe_options(function):
    """The options that choose data, preset and encoder."""
    for option in reversed(
        (
            dataset_option,
            click.option(
                "--preset", metavar="NAME", help="See `keras-moco presets`."
            ),
            click.option(
                "--set",
                "settings",
                multiple=True,
                metavar="FIELD=VALUE",
                help="Change a field of the preset, such as queue_size=4096. "
                "Repeatable.",
            ),
            click.option(
                "--encoder",
                metavar="NAME",
                help="See `keras-moco encoders`. Default: the preset's, as for "
                "the options below.",
            ),
            click.option(
                "--width",
                type=int,
                help="Channels of the first stage of resnet18 to resnet152.",
            ),
            click.option(
                "--image-size", type=int, help="Side of the views in pixels."
            ),
            click.option(
                "--batch-size",
                type=int,
                help="The learning rate follows: base x B / 256.",
            ),
            data_dir_option,
            max_broken_option,
        )
    ):
        function = option(function)
    return function


precision_option = click.option(
    "--precision",
    default="float32",
    show_default=True,
    help="float32, mixed_bfloat16 or mixed_float16.",
)
jit_option = click.option(
    "--jit",
    default="auto",
    show_default=True,
    help="Compile the train step with XLA: on, off or auto (on one GPU).",
)


def device_options(function):
    """The options that choose the devices; the command gets `devices`.

    Put it below `one_line_errors`: it is TensorFlow that splits the CPU.
    """

    @click.option(
        "--devices",
        default="auto",
        show_default=True,
        metavar="auto|cpu|all|N",
        help="auto: all GPUs, else the CPU. Several machines: set TF_CONFIG.",
    )
    @click.option(
        "--logical-cpus",
        type=int,
        default=1,
        help="Split the CPU into N devices, to try several without GPUs.",
    )
    @functools.wraps(function)
    def split(*args, devices, logical_cpus, **options):
        if logical_cpus != 1:
            from keras_moco.distribute import split_cpu

            split_cpu(logical_cpus)
            devices = "all" if devices == "auto" else devices
        return function(*args, devices=devices, **options)

    return split


epochs_option = click.option("--epochs", type=int)
steps_option = click.option(
    "--steps-per-epoch", type=int, help="For short epochs."
)


def one_or_many(dataset):
    """`shapes`, the one dataset given, or the list of them."""
    if not dataset:
        return "shapes"
    return dataset[0] if len(dataset) == 1 else list(dataset)


def open_encoder(place, image_size):
    """The encoder at a path, and the side in pixels at which it sees images.

    Args:
        place: What `load_encoder` takes.
        image_size: Int, or None for the size that it was trained on or that it
            takes alone.

    Returns:
        `keras.Model` for inference, and int; None where any size will do.
    """
    import keras_moco as km
    from keras_moco.evaluation.extract import input_size

    if image_size is not None and not 1 <= image_size <= 8192:
        raise UserError(
            f"--image-size must be from 1 to 8192. Received: {image_size}"
        )
    model = km.load_encoder(place, trainable=False)
    only = input_size(model) or (None, None)
    return model, image_size or km.trained_image_size(place) or only[0]


def say_size(images, size):
    """Says at which size an encoder sees images that have another."""
    from keras_moco import terminal

    if size and images.size != (size, size):
        click.echo(terminal.size_line(images, size))


def say_broken(*sources):
    """Names the files that were left out."""
    from keras_moco import terminal

    for images in sources:
        if images.broken:
            click.echo(terminal.broken_line(images.broken))
