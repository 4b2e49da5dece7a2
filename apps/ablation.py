"""`keras-moco ablation`: what fields of the preset do, over several seeds."""

import contextlib
import json
import math
import os
import pathlib
import shlex
import sys
import time

import click

from keras_moco.ablation import STUDIES
from keras_moco.errors import UserError, leave, load_tensorflow, stop_code, wrap
from keras_moco.options import one_or_many, recipe_options
from keras_moco.safety.lock import RunLock

MINUTE = 60  # Seconds between lines where the output is no terminal.


@click.command("ablation")
@click.option(
    "--vary",
    multiple=True,
    metavar="FIELD=VALUE,...",
    help="A field of the preset and its values, such as momentum=0,0.9,0.99. "
    "Given twice, for two fields: all combinations.",
)
@click.option(
    "--study",
    metavar="NAME",
    help=f"Instead of --vary, one of {', '.join(STUDIES)}.",
)
@click.option(
    "--seeds", type=int, default=3, show_default=True, help="Runs of each."
)
@recipe_options
@click.option("--epochs", type=int)
@click.option("--steps-per-epoch", type=int, help="For short epochs.")
@click.option(
    "--jobs",
    type=int,
    help="Runs at once, each on its share of the cores. Default: one a core, "
    "with 4 GB of free memory each.",
)
@click.option(
    "--to",
    "folder",
    required=True,
    metavar="DIR",
    help="Folder of all runs and of their table. The same command goes on.",
)
def main(vary, study, seeds, jobs, folder, **options):
    """Train with every setting and seed, and compare what comes out.

    Each run is one of `keras-moco pretrain`, in a process and a folder of its
    own below DIR/runs. One that fails is reported in its row and stops no
    other. What is finished is not done again.
    """
    import keras_moco as km

    folder = pathlib.Path(folder)
    try:
        for name, count in (("--seeds", seeds), ("--jobs", jobs)):
            if count is not None and count < 1:
                raise ValueError(f"{name} must be >= 1. Received: {count}")
        check_folder(folder)
        chosen = choose_study(vary, study)
        presets = check(chosen, options)
        words = pretrain_words(options)
        runs = [
            km.ablation.Trial(
                folder,
                setting,
                fields,
                seed,
                words,
                options["dataset"],
                options["data_dir"],
            )
            for seed in range(seeds)
            for setting, fields in chosen.settings.items()
        ]
        with folder_of(folder, words):
            progress = Progress(runs, presets)
            to_do = len(runs) - len(progress.said)
            jobs = min(jobs or km.ablation.default_jobs(), max(to_do, 1))
            click.echo(
                f"Runs: {len(runs)} (settings: {len(chosen.settings)}, seeds: "
                f"{seeds}); finished: {len(progress.said)}; at once: {jobs}"
            )
            errors = km.ablation.work_through(runs, jobs, progress)
            progress.clear()
            report(folder, chosen, seeds, runs, errors)
    except (ValueError, OSError) as error:
        raise UserError(" ".join(str(error).split())) from error
    except KeyboardInterrupt as stop:
        click.echo("\nStopped. The same command goes on.", err=True)
        leave(stop_code(stop))
    if errors:
        sys.exit(1)


def check_folder(folder):
    """Raises where the folder is a file, or holds what no ablation wrote."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--to must be a folder; {folder} is a file.")
    there = set(os.listdir(folder)) if folder.exists() else set()
    if there - {"lock", "ablation.tmp"} and "ablation.json" not in there:
        raise ValueError(
            f"{folder} holds files that are no ablation. Give a new or empty "
            "folder with --to."
        )


def choose_study(vary, study):
    """The `Study` of the options `--vary` and `--study`."""
    import keras_moco as km

    if bool(vary) == bool(study):
        both = "not both" if vary else "one is needed"
        raise ValueError(
            f"Give --vary FIELD=VALUE,VALUE,... or --study NAME, {both}. "
            f"Studies: {', '.join(STUDIES)}."
        )
    return (
        km.ablation.parse_vary(vary) if vary else km.ablation.find_study(study)
    )


def check(study, options):
    """The full `Preset` of every setting, by its name.

    Raises:
        ValueError: What `pretrain` would refuse of the data and of a setting,
            or a field that is varied and set at once.
    """
    import keras_moco as km

    dataset = one_or_many(options["dataset"])
    names = ("encoder", "width", "image_size", "batch_size", "epochs")
    changes = {name: options[name] for name in names}
    fixed = {name for name in names if options[name] is not None}
    fixed |= dict(map(km.presets.parse_setting, options["settings"])).keys()
    twice = sorted(study.fields & fixed)
    if twice:
        raise ValueError(
            f"{', '.join(twice)}: set for all runs, but it is part of what "
            "varies. Leave one of the two out."
        )
    load_tensorflow()
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")  # They are the runs'.
    presets = {
        name: km.build.choose_preset(
            dataset,
            options["preset"],
            [*options["settings"], *km.ablation.as_settings(fields)],
            **changes,
        )[1]
        for name, fields in study.settings.items()
    }
    images = km.load_images(
        dataset,
        "pretrain",
        data_dir=options["data_dir"],
        max_broken=options["max_broken"],
    )
    return {
        name: km.build.fill_in(preset, images)
        for name, preset in presets.items()
    }


def pretrain_words(options):
    """The options of `pretrain` that all runs share, as words."""
    words = []
    for name, value in options.items():
        option = "--set" if name == "settings" else f"--{name}"
        for part in value if isinstance(value, tuple) else (value,):
            if part is not None:
                words += [option.replace("_", "-"), str(part)]
    return words


@contextlib.contextmanager
def folder_of(folder, words):
    """Keeps the folder to this ablation and to this process."""
    note = folder / "ablation.json"
    lock = RunLock(folder, say=lambda line: None)
    try:
        stack = contextlib.ExitStack()
        stack.enter_context(lock)
    except ValueError:
        raise ValueError(
            f"Another ablation is at work in {folder}. Wait for it or end it, "
            "or give another folder with --to."
        ) from None
    with stack:
        if note.exists():
            there = json.loads(note.read_text())["pretrain"]
            if there != words:
                raise ValueError(
                    f"{folder} holds an ablation of other options "
                    f"({shlex.join(there)}). Give another folder with --to, or "
                    "the same options to go on."
                )
        else:
            draft = note.with_suffix(".tmp")
            draft.write_text(json.dumps({"pretrain": words}, indent=2) + "\n")
            draft.replace(note)
        yield


class Progress:
    """Says which runs are done, and how long the others take."""

    def __init__(self, runs, presets):
        self.runs = runs
        self.epochs = {run: presets[run.setting].epochs for run in runs}
        self.said = {run for run in runs if run.next_command() is None}
        self.begin, self.before = time.monotonic(), self.epochs_done(runs)
        self.status, self.next_line = "", self.begin + MINUTE

    def epochs_done(self, runs):
        import keras_moco as km

        return sum(len(km.ablation.epochs(run.run_dir)) for run in runs)

    def __call__(self, errors):
        import keras_moco as km

        left = [run for run in self.runs if run not in errors]
        done, total = self.epochs_done(left), sum(map(self.epochs.get, left))
        self.status = f"epoch {done} of {total}"
        if done > self.before:
            spent = time.monotonic() - self.begin
            seconds = spent / (done - self.before) * (total - done)
            self.status += f", {math.ceil(seconds / 60)} min left"
        for run in self.runs:
            if run in self.said:
                continue
            if run in errors:
                self.say(run, "failed")
            elif run.next_command() is None:
                found = km.ablation.read_run(run.run_dir)
                names = {"knn_top1": "kNN", "linear_top1": "linear"}
                parts = [
                    f"{name} {100 * found[measure]:.1f} %"
                    for measure, name in names.items()
                    if measure in found
                ]
                self.say(run, ", ".join(parts) or f"loss {found['loss']:.3f}")
        line = f"{len(self.said)} of {len(self.runs)} runs, {self.status}"
        if sys.stdout.isatty():
            click.echo(f"\r{line:79}"[:80], nl=False)
        elif time.monotonic() > self.next_line:
            click.echo(line)
            self.next_line = time.monotonic() + MINUTE

    def say(self, run, result):
        self.clear()
        self.said.add(run)
        number = f"{len(self.said)} of {len(self.runs)}"
        click.echo(f"{number}  {run}: {result}"[:80])

    def clear(self):
        """Empties the line of a terminal that the progress is on."""
        if sys.stdout.isatty():
            click.echo(f"\r{'':79}\r", nl=False)


def report(folder, study, seeds, runs, errors):
    """Prints the table and writes it, with its pictures, to the folder."""
    import keras_moco as km
    from keras_moco.ablation import plot

    folders = {(run.setting, run.seed): run.run_dir for run in runs}
    errors = {(run.setting, run.seed): text for run, text in errors.items()}
    rows = km.ablation.summarize(study, folders, errors)
    for line in km.ablation.table_lines(rows, seeds):
        click.echo(line)
    pictures = {}
    if any(row["seeds"] for row in rows):
        pictures["accuracy.png"] = plot.draw_ablation(study, rows)
        pictures["loss.png"] = plot.draw_losses(study, folders)
    for name, figure in pictures.items():
        figure.savefig(folder / name, dpi=120)
    words = sys.argv[1:]
    words = words[words[:1] == ["ablation"] :]  # Not there as a file.
    command = shlex.join(["keras-moco", "ablation", *words])
    km.ablation.write_tables(folder, rows, seeds, command, list(pictures))
    untrained = [row["knn_top1_untrained"] for row in rows]
    known = [value for value in untrained if value is not None]
    if known:
        mean = 100 * sum(known) / len(known)
        click.echo(f"Untrained the encoder has a kNN accuracy of {mean:.1f} %.")
    click.echo(wrap(km.ablation.notes(rows), ""))
    for name in ("ablation.md", "ablation.csv", "runs.csv"):
        click.echo(f"Table    {folder / name}")
    for name in pictures:
        click.echo(f"Picture  {folder / name}")
    click.echo(f"Curves   tensorboard --logdir {folder / 'runs'}")


if __name__ == "__main__":
    main()
