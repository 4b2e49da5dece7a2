"""The command line. Nothing heavy is imported before a command runs."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import pathlib
import re
import shlex
import sys
import traceback
import warnings

import click

from keras_moco import __version__
from keras_moco.presets import PRESETS, find_preset, setting_text

COMMANDS = "keras_moco.commands"
PACKAGE = str(pathlib.Path(__file__).parent)


class Commands(click.Group):
    """The commands below, and those of installed packages.

    A package offers one by an entry point of the group `keras_moco.commands`.
    """

    def list_commands(self, ctx):
        offered = importlib.metadata.entry_points(group=COMMANDS)
        return sorted({*super().list_commands(ctx), *offered.names})

    def get_command(self, ctx, name):
        own = super().get_command(ctx, name)
        if own is None:
            for entry in importlib.metadata.entry_points(
                group=COMMANDS, name=name
            ):
                return entry.load()
        return own


@click.group(
    cls=Commands, context_settings={"help_option_names": ["-h", "--help"]}
)
@click.version_option(__version__)
def main():
    """Momentum contrast: unlabelled images in, a good encoder out.

    Start with `keras-moco pretrain`, which needs no data.
    """


def one_line_errors(function):
    """Loads TensorFlow silently, and fails in one line where a user erred."""

    @functools.wraps(function)
    def run(*args, **options):
        try:
            with quiet_tensorflow():
                import tensorflow as tf

                import keras_moco.pretraining  # noqa: F401

                tf.config.list_physical_devices()  # Says what it lacks.
            with readable_warnings():
                return function(*args, **options)
        except KeyboardInterrupt:
            click.echo("Stopped.", err=True)
            leave(130)
        except (ValueError, OSError) as error:
            if isinstance(error, OSError) or raised_here(error):
                raise UserError(" ".join(str(error).split())) from error
            raise
        except Exception as error:
            # TensorFlow wraps what a pipeline raises while it runs.
            found = re.search("[0-9]+ of [0-9]+ image files .*", str(error))
            if found:
                raise UserError(found.group()) from error
            raise

    return run


def leave(code):
    """Ends the process in the middle of its work.

    Python would wait for threads that still make views, and TensorFlow's write
    errors of their own while they wait for a machine that is lost.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def command(function):
    """A command of this file."""
    name = function.__name__.replace("_", "-")
    return main.command(name=name)(one_line_errors(function))


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


@contextlib.contextmanager
def quiet_tensorflow():
    """Keeps what TensorFlow writes on its way up from the user."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ["KERAS_BACKEND"] = "tensorflow"
    # Its libraries write to the descriptor itself, before any setting holds.
    sys.stderr.flush()
    saved = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


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


@command
@recipe_options
@precision_option
@jit_option
@device_options
@click.option(
    "--worker-timeout",
    type=int,
    default=60,
    show_default=True,
    help="Seconds until a silent machine is given up.",
)
@epochs_option
@steps_option
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--run-dir",
    metavar="DIR",
    help="Folder of the run; an unfinished one goes on. Default: "
    "runs/<dataset>-<preset>.",
)
@click.option(
    "--knn-every",
    type=int,
    default=1,
    show_default=True,
    help="Epochs between kNN measurements, where there are labels; 0: none.",
)
@click.option(
    "--augment",
    default="cpu",
    show_default=True,
    help="Where views are made: cpu, or device (inside the train step).",
)
@click.option(
    "--export-to",
    metavar="DIR",
    help="Where the encoder goes. Default: saved_models/<run name>.",
)
@click.option(
    "--checkpoint-every",
    default="10min",
    show_default=True,
    metavar="N|Nmin",
    help="Steps or minutes from one checkpoint to the next, besides those at "
    "the end of each epoch.",
)
@click.option(
    "--keep-every-epochs",
    type=int,
    metavar="N",
    help="Keep a checkpoint every N epochs, besides the last three.",
)
@click.option(
    "--fresh", is_flag=True, help="Start anew, in a folder of its own."
)
@click.option(
    "--on-nan",
    default="stop",
    show_default=True,
    metavar="stop|skip",
    help="When a loss is not finite: stop, or skip the step (10 at most).",
)
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
@click.option(
    "--log-format",
    default="text",
    show_default=True,
    metavar="text|json",
    help="What is printed: text, or one JSON object a line.",
)
def pretrain(dataset, quiet, **options):
    """Pretrain an encoder on unlabelled images and export it."""
    from keras_moco.distribute import WorkerLost
    from keras_moco.pretraining import pretrain

    try:
        result = pretrain(one_or_many(dataset), verbose=not quiet, **options)
    except WorkerLost as error:
        UserError(" ".join(str(error).split())).show()
        leave(UserError.exit_code)
    if not result:  # Another machine has it.
        return
    for_people = not quiet and options["log_format"] == "text"
    if "stopped" in result:
        if for_people:
            click.echo(f"Go on    {go_on_command(result['run'])}")
        leave(0)
    if not for_people:
        return
    export = result["export"]
    if "knn_top1" in result:
        data = " ".join(f"--dataset {name}" for name in dataset or ["shapes"])
        click.echo(f"Next     keras-moco knn --encoder {export} {data}")
    else:
        click.echo(
            f'Next     keras_moco.load_encoder("{export}").predict(images)'
        )


@command
@click.argument("run_dir")
@click.option("--to", "folder", required=True, metavar="DIR")
def export(run_dir, folder):
    """Export the encoder of a run as it is now, finished or not."""
    from keras_moco.pretraining import export_run

    click.echo(f"Encoder  {export_run(run_dir, folder)}")


@command
@encoder_option
@dataset_option
@image_size_option
@data_dir_option
@click.option("--k", type=int, default=200, show_default=True)
@click.option("--temperature", type=float, default=0.1, show_default=True)
@click.option("--json", "json_file", type=click.Path(), help="Write it there.")
def knn(encoder, dataset, image_size, data_dir, k, temperature, json_file):
    """Accuracy of nearest neighbours of the encoder's features."""
    import keras_moco as km

    model, size = open_encoder(encoder, image_size)
    bank, test, _ = km.labeled_splits(one_or_many(dataset), size, data_dir)
    say_size(bank.images, size)
    top1 = km.knn_accuracy(model, bank, test, k, temperature)
    say_broken(bank.images, test.images)
    click.echo(
        f"kNN top-1 {100 * top1:.2f} %  (backbone features, cosine, k {k}, "
        f"T {temperature:g})"
    )
    if json_file:
        result = {"knn_top1": top1, "k": k, "temperature": temperature}
        result["features"] = "backbone"
        pathlib.Path(json_file).write_text(json.dumps(result) + "\n")


@command
@recipe_options
@click.option("--rows", type=int, default=6, show_default=True)
@click.option("--pairs", type=int, default=3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--to", "path", default="views.png", show_default=True, metavar="FILE"
)
def preview(dataset, rows, pairs, seed, path, **options):
    """Draw images beside their views, to see what a preset does."""
    from keras_moco.pretraining import prepare
    from keras_moco.preview import preview

    _, preset, images, _ = prepare(one_or_many(dataset), **options)
    preview(images, preset, path, rows=rows, pairs=pairs, seed=seed)
    click.echo(f"Views    {path}")


@command
@recipe_options
@precision_option
@jit_option
@click.option("--data-only", is_flag=True, help="Leave the step out.")
@click.option("--step-only", is_flag=True, help="Leave the data out.")
@click.option("--steps", type=int, default=20, show_default=True)
@click.option("--threads", type=int, help="Cores to use, of those there are.")
@click.option("--json", "json_file", type=click.Path(), help="Write it there.")
def bench(
    dataset,
    precision,
    jit,
    data_only,
    step_only,
    steps,
    threads,
    json_file,
    **options,
):
    """Measure where the time of a run goes, and say what to change."""
    from keras_moco.bench import bench, bottleneck
    from keras_moco.build import (
        JIT,
        PRECISIONS,
        build_model,
        check_choice,
        prepare,
    )

    if data_only and step_only:
        raise UserError("--data-only and --step-only leave nothing to measure.")
    if threads is not None:
        use_cores(threads)
    check_choice("precision", precision, PRECISIONS)
    check_choice("jit", jit, JIT)
    name, preset, images, _ = prepare(one_or_many(dataset), **options)
    model = None
    if not data_only:
        model = build_model(preset, None, 1000, precision, jit, len(images))
    figures = bench(images, preset, model, data=not step_only, steps=steps)
    for figure, value in figures.items():
        click.echo(f"{figure:27} {value:.4g}")
    if "data_wait" in figures:
        click.echo(wrap(bottleneck(figures)))
    if json_file:
        settings = {"preset": name, "precision": precision, "jit": jit}
        settings |= {"steps": steps}
        settings |= dataclasses.asdict(preset)
        text = json.dumps({**figures, "settings": settings}, indent=2)
        pathlib.Path(json_file).write_text(text + "\n")


@command
@recipe_options
@precision_option
@jit_option
@device_options
@epochs_option
@steps_option
@click.option("--run-dir", metavar="DIR", help="To look at its disk.")
@click.option(
    "--timed-steps",
    type=int,
    default=5,
    show_default=True,
    help="Steps tried to foretell the time of the run; 0: none.",
)
def doctor(dataset, **options):
    """Say what would go wrong with a run, before it starts.

    The options are those of `pretrain`. Exit code 1: it would fail.
    """
    from keras_moco.doctor import doctor
    from keras_moco.terminal import finding_line

    failing = False
    for finding in doctor(one_or_many(dataset), **options):
        click.echo(finding_line(finding))
        failing |= finding.mark == "problem"
    if failing:
        raise click.exceptions.Exit(1)


@command
@click.argument("part", required=False, default="")
def encoders(part):
    """List the encoders by name: parameters that are trained, features.

    PART narrows the list to the names that contain it, in any case.
    """
    from keras_moco.encoders import describe, encoder_names

    names = [name for name in encoder_names() if part.lower() in name.lower()]
    if not names:
        raise UserError(f"No encoder has {part!r} in its name.")
    for name in names:
        parameters, features = describe(name)
        click.echo(f"{name:40} {parameters:13,} {features:6,} features")


@main.command()
@click.argument("name", required=False)
def presets(name):
    """List the presets, or every field of one."""
    if name is None:
        for name, preset in PRESETS.items():
            click.echo(f"{name}\n{wrap(preset.summary)}")
        click.echo("\nEvery field of one: keras-moco presets NAME")
        return
    try:
        name, preset = find_preset(name, None)
    except ValueError as error:
        raise UserError(str(error)) from error
    for field in dataclasses.fields(preset):
        if field.name != "summary":
            value = setting_text(getattr(preset, field.name))
            click.echo(f"{field.name:20} {value}")


def go_on_command(run_dir):
    """The command of this process, as it goes on in its run folder."""
    words = [word for word in sys.argv[1:] if word != "--fresh"]
    named = any(word.split("=")[0] == "--run-dir" for word in words)
    if "--fresh" in sys.argv or not named:
        words += ["--run-dir", run_dir]  # The last one counts.
    return shlex.join(["keras-moco", *words])


def use_cores(count):
    """Keeps this process on some of its cores; before TensorFlow's threads."""
    import psutil

    process = psutil.Process()
    cores = process.cpu_affinity()
    if not 1 <= count <= len(cores):
        raise UserError(
            f"--threads must be between 1 and {len(cores)}, the cores there "
            f"are. Received: {count}"
        )
    process.cpu_affinity(cores[:count])


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

    if image_size is not None and image_size < 1:
        raise UserError(f"--image-size must be >= 1. Received: {image_size}")
    model = km.load_encoder(place, trainable=False)
    only = km.extract.input_size(model) or (None, None)
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


def one_or_many(dataset):
    """`shapes`, the one dataset given, or the list of them."""
    if not dataset:
        return "shapes"
    return dataset[0] if len(dataset) == 1 else list(dataset)


def wrap(text, indent="  "):
    """A paragraph, indented, within 80 columns."""
    return click.wrap_text(text, 78, indent, indent)


if __name__ == "__main__":
    main()
