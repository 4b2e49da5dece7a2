"""`keras-moco report`: runs as one HTML page that needs nothing else."""

import base64
import io
import itertools
import json
import os
import pathlib

import click

from keras_moco.errors import UserError, one_line_errors, wrap
from keras_moco.monitoring.verdict import chance_loss
from keras_moco.options import output_file

TEMPLATE = pathlib.Path(__file__).with_name("report.html")
SAMPLE = 1000  # Images whose features are looked at.
MOST_CLASSES = 20  # More of them cannot be told apart by colour and shape.


@click.command("report")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--to",
    "path",
    required=True,
    metavar="FILE.html",
    callback=output_file(".html"),
)
@click.option(
    "--dataset",
    metavar="NAME|DIR",
    help="Where the images are now. Default: where they were.",
)
@click.option("--data-dir", metavar="DIR", help="TFDS' data sets.")
@click.option(
    "--curves-only",
    is_flag=True,
    help="Leave out what needs the images and the encoder.",
)
@one_line_errors
def main(runs, path, dataset, data_dir, curves_only):
    """One HTML page of one run, or of several side by side.

    RUN is a run folder. A confusion matrix is shown where `keras-moco
    linear-probe` wrote RUN/probe.json (--json).
    """
    import jinja2

    import keras_moco as km

    names = short_names(runs)
    found = [
        read_run(folder, name) for folder, name in zip(runs, names, strict=True)
    ]
    for run in found:
        if not curves_only:
            click.echo(f"{run['path']}: images and features ...")
            said = len(run["notes"])
            run["pictures"] += look_inside(run, dataset, data_dir)
            for note in run["notes"][said:]:
                click.echo(wrap(note))
        run["pictures"] += confusion(run)
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.from_string(TEMPLATE.read_text("utf-8")).render(
        runs=found, curves=curves(found), settings=compare_settings(found)
    )
    with km.outputs.draft_of(path) as draft:
        draft.write_text(page, "utf-8")
    click.echo(f"Report   {path} ({path.stat().st_size / 1e6:.1f} MB)")


def short_names(folders):
    """The runs' own names, or their paths where these are alike."""
    names = [pathlib.Path(folder).resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else list(folders)


def read_run(folder, name):
    """What the folder of a run says, as the page needs it."""
    import keras_moco as km
    from keras_moco.monitoring.run import RunFolder

    run = RunFolder(folder, None)
    settings = run.settings
    rows = list(itertools.takewhile(has_loss, run.metrics()))
    run.require("queue_size", "batch_size", "epochs")
    lines = run.path / "metrics.jsonl"
    lines = lines.read_text(errors="replace") if lines.exists() else ""
    if not rows:
        broken = ": line 1 of metrics.jsonl is damaged" if lines else ""
        raise UserError(f"{run.path} has no finished epoch yet{broken}.")
    notes = []
    if len(rows) < len(lines.splitlines()):
        notes.append(
            f"Line {len(rows) + 1} of metrics.jsonl is damaged; what follows "
            "is left out."
        )
        click.echo(f"{run.path}: {notes[0]}")
    about, result = run.read("run.json"), run.read("result.json")
    verdicts = km.verdicts(rows, settings)
    return {
        "name": name,
        "path": run.path,
        "folder": run,
        "settings": settings,
        "rows": rows,
        "result": result,
        "baselines": about.get("baselines") or {},
        "versions": about.get("versions") or {},
        "chance": chance_loss(settings),
        "spans": spans(rows, verdicts),
        "notes": notes,
        "pictures": [],
    }


def has_loss(row):
    """Whether a line of metrics.jsonl has what every picture needs."""
    return isinstance(row.get("loss"), float) and type(row["epoch"]) is int


def spans(rows, verdicts):
    """Verdicts that follow each other alike, as one.

    Returns:
        List of dicts of `name`, `sentence`, `first` and `last` epoch.
    """
    found = []
    for row, verdict in zip(rows, verdicts, strict=True):
        if found and found[-1]["name"] == verdict.name:
            found[-1]["last"] = row["epoch"]
            continue
        found.append(
            {
                "name": verdict.name,
                "sentence": verdict.sentence,
                "first": row["epoch"],
                "last": row["epoch"],
            }
        )
    return found


def curves(runs):
    """The pictures over epochs, all runs in each."""
    from keras_moco.pictures import draw_curves

    def series(key, scale=1.0):
        found = []
        for number, run in enumerate(runs):
            rows = [row for row in run["rows"] if row.get(key) is not None]
            if rows:
                epochs = [row["epoch"] for row in rows]
                values = [scale * row[key] for row in rows]
                found.append((number, run["name"], epochs, values))
        return found

    def levels(label, values):
        """One line a value that differs, named by its run if there are two."""
        known = [
            (run["name"], round(value, 3))
            for run, value in zip(runs, values, strict=True)
            if value is not None
        ]
        if len({value for _, value in known}) <= 1:
            return [(label, value) for _, value in known[:1]]
        return [(f"{label}, {name}", value) for name, value in known]

    def baselines(key, label):
        values = [run["baselines"].get(key) for run in runs]
        return levels(label, [v if v is None else 100 * v for v in values])

    strips = [
        (
            number,
            run["name"],
            [
                (span["name"], span["first"], span["last"])
                for span in run["spans"]
            ],
        )
        for number, run in enumerate(runs)
    ]
    knn = baselines("knn_top1_untrained", "untrained")
    knn += baselines("knn_top1_pixels", "raw pixels")
    chance = levels("chance, ln(K+1)", [run["chance"] for run in runs])
    pictures = [
        ("Loss and verdicts", "loss", 1, "loss (nats)", chance, strips),
        ("kNN accuracy", "knn_top1", 100, "kNN top-1 (%)", knn, ()),
        ("Throughput", "images_per_second", 1, "images/s", (), ()),
        (
            "Right key found among the negatives",
            "contrast_top1",
            100,
            "contrast top-1 (%)",
            (),
            (),
        ),
        (
            "Directions that features span",
            "feature_rank",
            1,
            "effective rank",
            (),
            (),
        ),
    ]
    found = []
    for title, key, scale, ylabel, lines, strip in pictures:
        drawn = series(key, scale)
        if drawn:
            figure = draw_curves(drawn, ylabel, lines, strip)
            last = "; ".join(
                f"{name}: {values[-1]:.4g} after epoch {epochs[-1]}"
                for _, name, epochs, values in drawn
            )
            found.append(picture(figure, title, f"{ylabel}. {last}", "svg"))
    return found


def look_inside(run, dataset, data_dir):
    """Pictures of views and features; notes in the run what cannot be."""
    import numpy as np

    import keras_moco as km
    from keras_moco import pictures
    from keras_moco.evaluation import neighbourhood
    from keras_moco.preview import view_grid

    found = []
    try:
        images, test = load_data(run, dataset, data_dir)
        preset = km.load.run_preset(run["folder"])
        seed = run["settings"].get("seed", 0)
        figure = view_grid(images, preset, rows=4, pairs=2, seed=seed)
        found.append(
            picture(
                figure,
                "Views",
                "images beside their views in the first two epochs",
                "png",
            )
        )
        size = preset.image_size
        encoder = load_encoder(run)
        rows, sample = neighbourhood.sample_features(
            encoder, test, size, SAMPLE
        )
    except (ValueError, OSError) as error:
        what = "Features are" if found else "Views and features are"
        reason = " ".join(str(error).split())
        run["notes"].append(f"{what} not shown: {reason}")
        return found
    features, labels = np.nan_to_num(sample.features), sample.labels
    queries = np.random.default_rng(seed).permutation(len(rows))[:6]
    nearest = neighbourhood.nearest_images(features, queries, 5)
    shown, places = np.unique(nearest, return_inverse=True)
    figure = pictures.draw_neighbours(
        neighbourhood.thumbnails(test, rows[shown], min(size, 64)),
        places.reshape(nearest.shape),
        [test.class_of(row) or "" for row in rows[shown]],
    )
    found.append(
        picture(
            figure,
            "Nearest neighbours",
            f"six images and the five nearest of {len(rows)}, by the cosine "
            "of backbone features",
            "png",
        )
    )
    colored = "class"
    names = [test.class_of(row) for row in rows]
    if labels is None or not 1 < len(set(names)) <= MOST_CLASSES:
        labels, colored = neighbourhood.clusters(features, 8), "k-means cluster"
        names = [f"cluster {label + 1}" for label in labels]
    groups, labels = np.unique(labels, return_inverse=True)
    names = dict(zip(labels, names, strict=True))
    points, share = neighbourhood.principal_plane(features)
    figure = pictures.draw_map(
        points, labels, [names[number] for number in range(len(groups))]
    )
    found.append(
        picture(
            figure,
            f"Map of features, by {colored}",
            f"{len(points)} images on two principal components, "
            f"{100 * share:.0f} % of the variance",
            "svg",
        )
    )
    return found


def load_data(run, dataset, data_dir):
    """The images that were trained on, and those to look at (unseen ones)."""
    import keras_moco as km
    from keras_moco.data.images import MissingSplit

    noted = str(run["settings"].get("data", ""))
    source, _, fingerprint = (noted.rsplit(", ", 2) + ["", ""])[:3]
    if dataset is None:
        parts = source.split(", ")  # Several folders, or one with a comma.
        several = len(parts) > 1 and not os.path.exists(source)
        dataset = parts if several else source
    options = {"data_dir": data_dir}
    options["image_size"] = run["settings"].get("image_size") or 32
    images = km.load_images(dataset, "pretrain", **options)
    if images.fingerprint != fingerprint:
        raise ValueError(
            f"the images in {images.source} are no longer those of the run."
        )
    try:
        test = km.load_images(dataset, "test", **options)
    except MissingSplit:
        test = images
    return images, test


def load_encoder(run):
    """The exported encoder of a run, or the one of its newest checkpoint.

    Of an encoder of the user's own there is the export alone.
    """
    import keras_moco as km

    export = run["result"].get("export")
    card = km.export.read_card(export) if export else {}
    if card.get("settings") == run["settings"]:
        return km.load_encoder(export)
    return km.load_encoder(run["path"])


def confusion(run):
    """The confusion matrix, if `linear-probe --json` wrote one there."""
    from keras_moco.pictures import draw_confusion

    path = run["path"] / "probe.json"
    if not path.exists():
        return []
    try:
        probe = json.loads(path.read_text())
        figure = draw_confusion(probe["confusion"], list(probe["per_class"]))
        top1 = f"{100 * probe['test_top1']:.1f}"
    except (ValueError, KeyError, TypeError, IndexError) as error:
        run["notes"].append(f"{path} is no result of linear-probe: {error!r}")
        return []
    return [
        picture(
            figure,
            "Linear probe",
            f"confusion matrix, top-1 {top1} %; rows are the classes",
            "svg",
        )
    ]


def compare_settings(runs):
    """Rows of the table of settings, those that differ first.

    Returns:
        List of dicts of `name`, `values` (of each run) and `differs`.
    """
    names = {name: None for run in runs for name in run["settings"]}
    rows = []
    for name in names:
        values = [run["settings"].get(name, "-") for run in runs]
        texts = [
            value if isinstance(value, str) else json.dumps(value)
            for value in values
        ]
        differs = len(set(texts)) > 1
        rows.append({"name": name, "values": texts, "differs": differs})
    return sorted(rows, key=lambda row: not row["differs"])


def picture(figure, title, caption, kind):
    """A figure as the page embeds it."""
    content = io.BytesIO()
    options = {"metadata": {"Date": None}} if kind == "svg" else {"dpi": 110}
    figure.savefig(content, format=kind, **options)
    mime = {"svg": "image/svg+xml", "png": "image/png"}[kind]
    data = base64.b64encode(content.getvalue()).decode()
    return {
        "title": title,
        "caption": caption,
        "data": f"data:{mime};base64,{data}",
    }


if __name__ == "__main__":
    main()
