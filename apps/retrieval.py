"""`keras-moco retrieval`: the nearest neighbours of images, to look at."""

import base64
import html
import io
import os
import pathlib
import string

import click

from keras_moco.errors import UserError, one_line_errors
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

THUMBNAIL = 160  # Pixels of the longer side.
# Colours of Okabe and Ito, which the colour-blind tell apart; signs as well.
MARKS = {True: ("#0072b2", "\u2713"), False: ("#d55e00", "\u2717")}


@click.command("retrieval")
@encoder_option
@click.option(
    "--dataset",
    multiple=True,
    metavar="NAME|DIR",
    help="Where neighbours are looked for: `shapes` (the default), a TFDS name "
    "or a folder, with class folders or not. Several folders: repeat it.",
)
@click.option("--split", default="train", show_default=True)
@click.option(
    "--query",
    "queries",
    multiple=True,
    metavar="FILE",
    help="Image whose neighbours are shown. Repeatable. Default: random ones "
    "of the data.",
)
@click.option("--rows", type=int, default=8, help="Random images.")
@click.option(
    "--k", type=int, default=8, show_default=True, help="Neighbours of each."
)
@click.option("--seed", type=int, default=0, help="Of the random images.")
@image_size_option
@data_dir_option
@max_broken_option
@click.option(
    "--to",
    "path",
    default="neighbours.html",
    show_default=True,
    metavar="FILE",
    callback=output_file(".html", ".png"),
    help="A page that holds all of it (.html), or a picture (.png).",
)
@one_line_errors
def main(
    encoder,
    dataset,
    split,
    queries,
    rows,
    k,
    seed,
    image_size,
    data_dir,
    max_broken,
    path,
):
    """Show the images that an encoder takes for the nearest neighbours."""
    import keras_moco as km
    from keras_moco.evaluation.extract import check_finite

    if min(rows, k) < 1 or seed < 0:
        raise UserError(
            "--rows and --k must be >= 1, --seed >= 0. Received: "
            f"{rows}, {k}, {seed}"
        )
    for file in queries:
        if not os.path.isfile(file):
            raise UserError(f"--query must be an image file. Received: {file}")
    model, size = open_encoder(encoder, image_size)
    images = km.load_images(
        one_or_many(dataset),
        split,
        data_dir=data_dir,
        max_broken=max_broken,
        image_size=size or 32,
    )
    asked = km.load_images(list(queries)) if queries else None
    say_size(images, size)
    bank = km.features(model, images, size, verbose=True)
    check_finite(bank, "searched")
    say_broken(images)
    found = search(model, images, bank, asked, size, rows, k, seed)
    marks = [row["right"] for one in found for row in one["neighbours"]]
    known = [mark for mark in marks if mark is not None]
    about = f"{len(bank.names):,} images of {images.source}, encoder {encoder}"
    if known:
        about += (
            f"; {sum(known)} of {len(known)} neighbours are of their query's "
            "class"
        )
    write = {".html": write_page, ".png": write_picture}[path.suffix]
    with km.outputs.draft_of(path) as draft:
        write(draft, found, about)
    click.echo(km.terminal.wrap(about))
    click.echo(f"Neighbours {path}")


def search(model, images, bank, asked, size, rows, k, seed):
    """The queries and their neighbours, an image never being its own.

    Args:
        model: The encoder.
        images: `Images` that are searched.
        bank: `Features` of them.
        asked: `Images` of the user's own, or None for random ones.
        size: Int or None. Side at which the encoder sees images.
        rows: Int. Number of random images.
        k: Int. Neighbours.
        seed: Int. Of the random images.

    Returns:
        List of dicts with `image`, `name`, `label` and `neighbours`; these are
        dicts with `image`, `name`, `label`, `cosine` and `right`.
    """
    import numpy as np

    import keras_moco as km
    from keras_moco.evaluation.extract import check_finite

    def one(place):
        number = images.kept[place]
        return {
            "image": images.decode(number, THUMBNAIL),
            "name": bank.names[place],
            "label": images.class_of(number),
        }

    if asked is None:
        order = np.random.default_rng(seed).permutation(len(bank.names))
        own = order[:rows]
        vectors, shown = bank.features[own], [one(place) for place in own]
    else:
        query = km.features(model, asked, size)
        check_finite(query, "query")
        real = {os.path.realpath(name): i for i, name in enumerate(bank.names)}
        own = [real.get(os.path.realpath(name)) for name in query.names]
        vectors, shown = query.features, []
        for number, place in enumerate(own):
            label = None if place is None else one(place)["label"]
            image = asked.decode(asked.kept[number], THUMBNAIL)
            name = query.names[number]
            shown.append({"image": image, "name": name, "label": label})
    # One more, as an image of the bank finds itself.
    cosine, places = km.nearest(bank.features, vectors, k + 1)
    for query, itself, near, where in zip(
        shown, own, cosine, places, strict=True
    ):
        pairs = [
            pair for pair in zip(near, where, strict=True) if pair[1] != itself
        ]
        query["neighbours"] = [
            {**one(place), "cosine": float(value)} for value, place in pairs[:k]
        ]
        for neighbour in query["neighbours"]:
            same = neighbour["label"] == query["label"]
            neighbour["right"] = None if query["label"] is None else same
    return shown


def caption(row):
    """What stands below an image, as a list of short lines."""
    lines = [] if row["label"] is None else [str(row["label"])]
    if "cosine" in row:
        lines.append(f"{row['cosine']:.3f}")
    if row.get("right") is not None:
        lines[0] = f"{MARKS[row['right']][1]} {lines[0]}"
    return lines


def write_picture(path, found, about):
    """Draws a line of images for each query."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = 1 + max(len(one["neighbours"]) for one in found)
    figure = Figure(
        figsize=(max(1.25 * columns, 4), 1.65 * len(found) + 0.4),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(found), columns, squeeze=False)
    for axes, query in zip(grid, found, strict=True):
        for axis in axes:
            axis.axis("off")
        shown = [query, *query["neighbours"]]
        for axis, row in zip(axes, shown, strict=False):
            axis.axis("on")
            axis.set(xticks=[], yticks=[])
            axis.imshow(thumbnail(row["image"]))
            color = MARKS.get(row.get("right"), ("black",))[0]
            file = os.fsencode(pathlib.Path(row["name"]).name[-20:])
            lines = [file.decode(errors="replace"), *caption(row)]
            # A file name is no formula: `$` would begin one.
            axis.set_xlabel(
                "\n".join(lines), fontsize=6, color=color, parse_math=False
            )
            for spine in axis.spines.values():
                spine.set(color=color, linewidth=2 if row is query else 1.5)
        axes[0].set_title("query", fontsize=7)
    figure.suptitle(about, fontsize=7, wrap=True, parse_math=False)
    figure.savefig(path, dpi=130)


PAGE = string.Template("""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Nearest neighbours</title>
<style>
body { font: 14px/1.4 system-ui, sans-serif; margin: 1rem auto;
  max-width: 75rem; padding: 0 1rem; color: #111; background: #fff }
h1 { font-size: 1.3rem; margin: 0 }
section { display: grid; gap: .6rem; padding: 1rem 0;
  grid-template-columns: repeat(auto-fill, minmax(6.5rem, 1fr));
  border-top: 1px solid #bbb; break-inside: avoid }
figure { margin: 0; padding: .25rem; border: 3px solid #bbb; min-width: 0 }
figure.query { border: 3px double #111 }
figure.right { border-color: $right }
figure.wrong { border: 3px dashed $wrong }
img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain }
img.small { image-rendering: pixelated }
figcaption { font-size: .75rem; overflow-wrap: anywhere }
@media print { body { margin: 0; max-width: none } }
</style>
<h1>Nearest neighbours</h1>
<p>$about. The number is the cosine of the features.$legend</p>
$sections
</html>
""")
LEGEND = " \u2713 and a solid frame: the query's class; \u2717 and dashes: not."


def write_page(path, found, about):
    """Writes a page that needs nothing but itself: images are inside."""
    marked = any(row["right"] is not None for row in found[0]["neighbours"])
    sections = [
        "<section>\n"
        + "\n".join(_figure(row) for row in (query, *query["neighbours"]))
        + "\n</section>"
        for query in found
    ]
    page = PAGE.substitute(
        about=html.escape(about),
        legend=LEGEND if marked else "",
        right=MARKS[True][0],
        wrong=MARKS[False][0],
        sections="\n".join(sections),
    )
    path.write_text(page, encoding="utf-8", errors="replace")


def _figure(row):
    kind = {True: "right", False: "wrong", None: ""}[row.get("right")]
    kind = kind if "cosine" in row else "query"
    small = "small" if max(row["image"].shape) <= 64 else ""
    lines = ["query"] if kind == "query" else []
    lines = "<br>".join(html.escape(line) for line in lines + caption(row))
    name = html.escape(row["name"])
    file = html.escape(pathlib.Path(row["name"]).name)
    return (
        f'<figure class="{kind}"><img class="{small}" alt="{name}" '
        f'title="{name}" src="{_data(row["image"])}">'
        f"<figcaption>{lines}<br>{file}</figcaption></figure>"
    )


def thumbnail(image):
    """A Pillow image of a uint8 array, not larger than it is shown."""
    from PIL import Image

    picture = Image.fromarray(image)
    picture.thumbnail((THUMBNAIL, THUMBNAIL))
    return picture


def _data(image):
    """An image as the address that holds it: small ones without loss."""
    kind = "png" if max(image.shape) <= 64 else "jpeg"
    file = io.BytesIO()
    thumbnail(image).save(file, kind, quality=85)
    return (
        f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
    )


if __name__ == "__main__":
    main()
