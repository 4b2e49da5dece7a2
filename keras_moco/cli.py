"""The command line. Nothing heavy is imported before a command runs."""

import dataclasses
import importlib.metadata
import shlex
import sys

import click

from keras_moco import __version__
from keras_moco.errors import (
    UserError,
    leave,
    one_line_errors,
    wrap,
)
from keras_moco.kinds import to_text
from keras_moco.options import (
    data_dir_option,
    dataset_option,
    device_options,
    encoder_option,
    epochs_option,
    image_size_option,
    jit_option,
    json_option,
    max_broken_option,
    one_or_many,
    open_encoder,
    output_file,
    output_folder,
    precision_option,
    recipe_options,
    say_broken,
    say_size,
    steps_option,
)
from keras_moco.outputs import PICTURES, write_json
from keras_moco.presets import PRESETS, find_preset

COMMANDS = "keras_moco.commands"


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


def command(function):
    """A command of this file."""
    name = function.__name__.replace("_", "-")
    return main.command(name=name)(one_line_errors(function))


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
@click.option(
    "--to", "folder", required=True, metavar="DIR", callback=output_folder
)
def export(run_dir, folder):
    """Export the encoder of a run as it is now, finished or not."""
    from keras_moco.pretraining import export_run

    click.echo(f"Encoder  {export_run(run_dir, folder)}")


@command
@encoder_option
@dataset_option
@image_size_option
@data_dir_option
@max_broken_option
@click.option("--k", type=int, default=200, show_default=True)
@click.option("--temperature", type=float, default=0.1, show_default=True)
@json_option
def knn(
    encoder,
    dataset,
    image_size,
    data_dir,
    max_broken,
    k,
    temperature,
    json_file,
):
    """Accuracy of nearest neighbours of the encoder's features."""
    import keras_moco as km

    model, size = open_encoder(encoder, image_size)
    bank, test, _ = km.labeled_splits(
        one_or_many(dataset), size, data_dir, max_broken
    )
    say_size(bank.images, size)
    top1 = km.knn_accuracy(model, bank, test, k, temperature)
    k = min(k, len(bank.images))
    say_broken(bank.images, test.images)
    click.echo(
        f"kNN top-1 {100 * top1:.2f} %  (backbone features, cosine, k {k}, "
        f"T {temperature:g})\n"
        f"of {len(test.images):,} test images of {test.images.source}, by "
        f"{len(bank.images):,} training images"
    )
    if json_file:
        result = {"knn_top1": top1, "k": k, "temperature": temperature}
        result |= {"features": "backbone", "dataset": bank.images.source}
        write_json(json_file, result)


@command
@recipe_options
@click.option("--rows", type=int, default=6, show_default=True)
@click.option("--pairs", type=int, default=3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--to",
    "path",
    default="views.png",
    show_default=True,
    metavar="FILE",
    callback=output_file(*PICTURES),
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
@json_option
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
        write_json(json_file, {**figures, "settings": settings})


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
            value = to_text(getattr(preset, field.name))
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


if __name__ == "__main__":
    main()
