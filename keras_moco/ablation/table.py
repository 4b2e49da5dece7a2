"""The table of an ablation: its text, its files.

Without TensorFlow.
"""

import csv
import statistics
import textwrap

from keras_moco.ablation.studies import PUBLISHED
from keras_moco.ablation.trial import MEASURES, read_run


def summarize(study, runs, errors):
    """One row for each setting of a study: means and deviations over seeds.

    Args:
        study: `Study`.
        runs: Dict from (name of a setting, seed) to the folder of the run.
        errors: Dict from such pairs to an error, one line.

    Returns:
        List of dicts: `setting`, its fields, `seeds` (finished), of each
        measure the mean under its name and the sample standard deviation
        (None of one seed) under its name with `_std`, `published` (linear
        accuracy in %, or None), and by seed `runs` (what `read_run` gave) and
        `errors`.
    """
    rows = []
    for name, fields in study.settings.items():
        own = {s: read_run(path) for (n, s), path in runs.items() if n == name}
        own = {seed: found for seed, found in own.items() if found}
        row = {"setting": name, **fields, "seeds": len(own)}
        for measure in MEASURES:
            values = [one[measure] for one in own.values() if measure in one]
            row[measure] = statistics.fmean(values) if values else None
            several = len(values) > 1
            row[f"{measure}_std"] = (
                statistics.stdev(values) if several else None
            )
        row["published"] = PUBLISHED.get(name)
        row["runs"] = own
        row["errors"] = {s: e for (n, s), e in errors.items() if n == name}
        rows.append(row)
    return rows


COLUMNS = {
    "kNN %": lambda row: _percent(row, "knn_top1"),
    "linear %": lambda row: _percent(row, "linear_top1"),
    "loss": lambda row: _number(row["loss"], ".3f"),
    "ln(K+1)": lambda row: _number(row["chance_loss"], ".2f"),
    "wobble": lambda row: _number(row["wobble"], ".3f"),
    "GB": lambda row: _number(row["peak_memory_mb"], ".1f", 1 / 1024),
    "min": lambda row: _number(row["seconds"], ".1f", 1 / 60),
    "publ.": lambda row: _number(row["published"], ".1f"),
}
NOTES = (
    "Mean and standard deviation over seeds. kNN: backbone features, cosine, "
    "k 200, T 0.1. linear: the features protocol of linear-probe. loss: of the "
    "last epoch; ln(K+1) is that of chance. wobble: noise of the loss from "
    "epoch to epoch (root mean square of its second differences over the "
    "second half, over sqrt 6). GB: most memory of the process. min: training "
    "and kNN, beside the other jobs."
)
PUBLISHED_NOTE = (
    " publ.: linear accuracy on CIFAR-10 of a public reproduction with far "
    "more steps; compare the shape, not the level."
)


def notes(rows):
    """What the columns are, one paragraph."""
    published = any(row["published"] is not None for row in rows)
    return NOTES + PUBLISHED_NOTE * published


def cells(rows, seeds):
    """The table as lists of str, its head first.

    Args:
        rows: What `summarize` gave.
        seeds: Int. Runs of each setting.
    """
    columns = dict(COLUMNS)
    for name in ("linear %", "publ."):
        if all(columns[name](row) == "-" for row in rows):
            del columns[name]
    head = ["setting", "n", *columns]
    table = [head]
    for row in rows:
        done = row["seeds"]
        number = f"{done}/{seeds}" if done < seeds else str(done)
        values = [cell(row) for cell in columns.values()]
        table.append([row["setting"], number, *values])
    return table


def table_lines(rows, seeds, width=80):
    """The table for a terminal, and the errors below their rows."""
    table = cells(rows, seeds)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    room = width - sum(widths[1:]) - len(widths) + 1
    lines = []
    for number, (name, *values) in enumerate(table):
        parts = [
            value.rjust(size)
            for value, size in zip(values, widths[1:], strict=True)
        ]
        own = min(widths[0], room)
        if len(name) > own:  # On a line of its own.
            lines += [name[i : i + width] for i in range(0, len(name), width)]
            name = ""
        lines.append(" ".join([name.ljust(own), *parts]).rstrip())
        if number:
            lines += _error_lines(rows[number - 1], width)
    return lines


def _error_lines(row, width):
    return [
        line
        for seed, error in row["errors"].items()
        for line in textwrap.wrap(
            f"seed {seed} failed: {error}",
            width,
            initial_indent="  ",
            subsequent_indent="  ",
        )
    ]


def write_tables(folder, rows, seeds, command, pictures):
    """Writes the table and what it is made of.

    `ablation.md`, `ablation.csv` (a row a setting) and `runs.csv` (a row a
    run), in full precision and with accuracies in [0, 1].

    Args:
        folder: Path.
        rows: What `summarize` gave.
        seeds: Int. Runs of each setting.
        command: Str.
        pictures: List of file names.
    """
    settings = [{k: v for k, v in row.items() if k != "runs"} for row in rows]
    for row in settings:
        row["errors"] = "; ".join(
            f"seed {seed}: {error}" for seed, error in row["errors"].items()
        )
    _write_csv(folder / "ablation.csv", settings)
    runs = [
        {
            "setting": row["setting"],
            "seed": seed,
            **dict.fromkeys(MEASURES),
            **row["runs"].get(seed, {}),
            "error": row["errors"].get(seed),
        }
        for row in rows
        for seed in sorted({*row["runs"], *row["errors"]})
    ]
    _write_csv(folder / "runs.csv", runs)
    head, *body = cells(rows, seeds)
    lines = ["# Ablation", "", f"    {command}", ""]
    for line in (head, ["---"] * len(head), *body):
        lines.append("| " + " | ".join(line) + " |")
    for row in rows:
        for seed, error in row["errors"].items():
            lines += ["", f"- {row['setting']}, seed {seed} failed: {error}"]
    lines += ["", notes(rows)]
    lines += [line for name in pictures for line in ("", f"![{name}]({name})")]
    (folder / "ablation.md").write_text("\n".join(lines) + "\n")


def _write_csv(path, rows):
    names = dict.fromkeys(name for row in rows for name in row)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _percent(row, name):
    mean, deviation = row[name], row[f"{name}_std"]
    if mean is None:
        return "-"
    spread = "" if deviation is None else f" ± {100 * deviation:.1f}"
    return f"{100 * mean:.1f}{spread}"


def _number(value, form, scale=1):
    return "-" if value is None else format(value * scale, form)
