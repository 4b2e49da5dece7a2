"""Pictures of runs and features, as matplotlib figures.

Colours are those of Okabe and Ito, which the colour-blind can tell apart; line
styles, markers or hatches say the same a second time.
"""

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

COLORS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
)
LINES = ("-", "--", "-.", ":")
MARKERS = "osD^vPX*<>"
# Colour and hatch of each verdict.
VERDICTS = {
    "filling": ("#56B4E9", "//"),
    "learning": ("#009E73", ""),
    "at chance": ("#E69F00", ".."),
    "collapsed": ("#000000", ""),
    "shortcut suspected": ("#CC79A7", "xx"),
    "diverged": ("#D55E00", "\\\\"),
}
# Inches. At 100 dots an inch half a page; still readable on a phone.
WIDTH, HEIGHT = 4.8, 3.0


def draw_curves(series, ylabel, levels=(), spans=()):
    """Curves over epochs, with levels to compare and verdicts below.

    Args:
        series: List of (number of the run, label, epochs, values).
        ylabel: Str.
        levels: List of (label, value): horizontal lines.
        spans: List of (number of the run, label, list of (verdict, first
            epoch, last epoch)), one strip each on the time axis.

    Returns:
        `Figure`.
    """
    height = HEIGHT + (0.35 + 0.22 * len(spans) if spans else 0)
    figure = _figure(WIDTH, height)
    if spans:
        ratios = [HEIGHT, 0.1 + 0.22 * len(spans)]
        axis, strip = figure.subplots(2, sharex=True, height_ratios=ratios)
        _draw_spans(strip, spans)
        figure.supxlabel("epoch", fontsize=9)
    else:
        axis = figure.subplots()
        axis.set_xlabel("epoch", fontsize=9)
    for number, label, epochs, values in series:
        axis.plot(
            epochs,
            values,
            color=COLORS[number % len(COLORS)],
            linestyle=LINES[number % len(LINES)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=4,
            markevery=max(1, len(epochs) // 12),
            label=plain(label),
        )
    for number, (label, value) in enumerate(levels):
        axis.axhline(
            value,
            color="#555555",
            linewidth=1,
            linestyle=LINES[(number + 1) % len(LINES)],
            label=plain(label),
        )
    axis.set_ylabel(ylabel, fontsize=9)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.tick_params(labelsize=8)
    axis.grid(color="#dddddd", linewidth=0.5)
    axis.legend(fontsize=8, framealpha=0.8)
    return figure


def _draw_spans(axis, spans):
    for row, (_, _, parts) in enumerate(spans):
        for name, first, last in parts:
            color, hatch = VERDICTS.get(name, ("#999999", ""))
            axis.broken_barh(
                [(first - 1, last - first + 1)],
                (row - 0.4, 0.8),
                facecolor=color,
                hatch=hatch,
                edgecolor="white",
                linewidth=0.5,
            )
    axis.set_yticks(
        range(len(spans)), [plain(label) for _, label, _ in spans], fontsize=8
    )
    axis.set_ylim(len(spans) - 0.5, -0.5)
    axis.tick_params(labelsize=8)
    there = {name for _, _, parts in spans for name, _, _ in parts}
    patches = [
        Patch(facecolor=color, hatch=hatch, edgecolor="white", label=name)
        for name, (color, hatch) in VERDICTS.items()
        if name in there
    ]
    axis.figure.legend(
        handles=patches,
        loc="outside upper left",
        ncols=3,
        fontsize=8,
        frameon=False,
    )


def draw_map(points, groups, names):
    """Points of the plane, coloured and shaped by their group.

    Args:
        points: Float array (points, 2), see `principal_plane`.
        groups: Int array (points,).
        names: List of str, one a group.

    Returns:
        `Figure`.
    """
    figure = _figure(WIDTH, WIDTH)
    axis = figure.subplots()
    for number, name in enumerate(names):
        mine = points[groups == number]
        axis.scatter(
            mine[:, 0],
            mine[:, 1],
            s=12,
            linewidths=0,
            alpha=0.8,
            color=COLORS[number % len(COLORS)],
            marker=MARKERS[number % len(MARKERS)],
            label=plain(name),
        )
    axis.set(xticks=[], yticks=[])
    figure.legend(
        loc="outside lower center",
        ncols=3,
        fontsize=8,
        frameon=False,
        markerscale=1.8,
    )
    return figure


def draw_neighbours(images, nearest, titles=None):
    """Images, each with its nearest ones beside it.

    Args:
        images: Array (images, height, width, 3), floats in [0, 1].
        nearest: Int array (rows, 1 + neighbours); the first of a row is the
            image itself.
        titles: List of str, one an image, or None.

    Returns:
        `Figure`.
    """
    rows, columns = nearest.shape
    figure = _figure(WIDTH, 0.3 + rows * (WIDTH / columns + 0.15))
    grid = figure.subplots(rows, columns, squeeze=False)
    for row, indices in zip(grid, nearest, strict=True):
        for axis, index in zip(row, indices, strict=True):
            axis.imshow(images[index], interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            axis.spines[:].set_visible(axis is row[0])
            if titles:
                axis.set_xlabel(plain(titles[index], 10), fontsize=7)
    grid[0, 0].set_title("image", fontsize=8)
    if columns > 1:
        grid[0, 1].set_title("nearest", fontsize=8)
    return figure


def draw_confusion(confusion, names):
    """The share of each true class (row) that got each answer.

    Args:
        confusion: Counts (classes, classes), true class by answer.
        names: List of str, of the classes.

    Returns:
        `Figure`.
    """
    counts = np.array(confusion)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 2.0 + 0.35 * min(len(names), 100)
    figure = _figure(side + 0.6, side)
    axis = figure.subplots()
    image = axis.imshow(100 * shares, vmin=0, vmax=100, cmap="cividis")
    figure.colorbar(image, ax=axis, label="% of the class", shrink=0.8)
    axis.set(xlabel="answer", ylabel="class")
    ticks, names = range(len(names)), [plain(name) for name in names]
    if len(names) <= 30:
        axis.set_xticks(ticks, names, rotation=90, fontsize=8)
        axis.set_yticks(ticks, names, fontsize=8)
        for row, column in np.ndindex(shares.shape):
            share = 100 * shares[row, column]
            axis.text(
                column,
                row,
                f"{share:.0f}",
                ha="center",
                va="center",
                fontsize=6,
                color="black" if share > 60 else "white",
            )
    return figure


def plain(text, longest=28):
    """A text as it is: no formula, never hidden, not too long."""
    text = str(text)
    if len(text) > longest:
        half = longest // 2 - 1
        text = f"{text[:half]}...{text[-half:]}"
    text = text.replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def _figure(width, height):
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
