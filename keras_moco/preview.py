"""What a recipe does to images, as a picture."""

import numpy as np
from matplotlib.figure import Figure

from keras_moco import augment
from keras_moco.data.pipeline import natural_size
from keras_moco.outputs import PICTURES, check_file, draft_of

OPERATIONS = ("b", "c", "s", "h")  # By number: brightness, contrast, ...


def preview(images, preset, path, *, rows=6, pairs=3, seed=0):
    """Draws images beside several pairs of their views.

    Under each view stands what was drawn for it: the share of the area, the
    factors of brightness (b), contrast (c) and saturation (s) and the turn of
    the hue (h) in their order, and what else was done. They are the views that
    training with this seed meets in its first epochs.

    Args:
        images: `Images`.
        preset: `Preset` whose views are shown.
        path: Str or path of the picture (.png, .pdf or .svg).
        rows: Int >= 1. Images shown. Defaults to 6.
        pairs: Int >= 1. Epochs shown, a query and a key each. Defaults to 3.
        seed: Int. Of the images shown and of the views. Defaults to 0.

    Raises:
        ValueError: `rows` or `pairs` below 1, or a file of another kind.

    Example:
        >>> preview(load_images("photos/"), PRESETS["moco_v2"], "views.png")
    """
    check_file("The picture", path, PICTURES)
    figure = view_grid(images, preset, rows=rows, pairs=pairs, seed=seed)
    with draft_of(path) as draft:
        figure.savefig(draft, dpi=110)


def view_grid(images, preset, *, rows=6, pairs=3, seed=0):
    """The picture of `preview`, as a matplotlib `Figure`."""
    if rows < 1 or pairs < 1 or seed < 0:
        raise ValueError(
            "`rows` and `pairs` must be at least 1, `seed` at least 0. "
            f"Received: rows={rows}, pairs={pairs}, seed={seed}"
        )
    size = preset.image_size or natural_size(images)
    chosen = list(images.sample(rows, seed))
    figure = Figure(figsize=(1.6 * (1 + 2 * pairs), 1.95 * len(chosen)))
    grid = figure.subplots(len(chosen), 1 + 2 * pairs, squeeze=False)
    for row, (index, image) in zip(grid, chosen, strict=True):
        _show(row[0], image, f"{image.shape[1]} x {image.shape[0]}")
        for number, axis in enumerate(row[1:]):
            epoch, view_number = divmod(number, 2)
            view = preset.views[view_number]
            drawn = augment.draw_parameters(
                view,
                *image.shape[:2],
                seed,
                epoch,
                np.array([index]),
                view_number,
            )
            seen = augment.crop(image[None], drawn, size)
            seen = augment.recolor(seen, drawn, view)
            drawn = {name: value[0].numpy() for name, value in drawn.items()}
            _show(axis, seen[0], caption(drawn, image.shape))
    titles = ["original"] + ["query", "key"] * pairs
    for axis, title in zip(grid[0], titles, strict=True):
        axis.set_title(title, fontsize=9)
    figure.tight_layout(pad=0.4)
    return figure


def caption(drawn, shape):
    """What was drawn for one view, in two short lines.

    Args:
        drawn: Dict of `draw_parameters`, for one image.
        shape: Shape of the image.
    """
    area = drawn["box"][2] * drawn["box"][3] / (shape[0] * shape[1])
    first = [f"{100 * area:.0f} %"]
    first += [name for name in ("flip", "blur", "solarize") if drawn[name]]
    second = []
    if drawn["jitter"]:
        factors = drawn["factors"]
        second = [f"{OPERATIONS[n]}{factors[n]:.1f}" for n in drawn["order"]]
    if drawn["grayscale"]:
        first.append("grey")
    return " ".join(first) + "\n" + " ".join(second)


def _show(axis, image, text):
    axis.imshow(image, interpolation="nearest")
    axis.set_xticks([])
    axis.set_yticks([])
    axis.set_xlabel(text, fontsize=6, labelpad=2)
