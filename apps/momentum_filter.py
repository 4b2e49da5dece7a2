"""`keras-moco momentum-filter`: the momentum update as a low-pass filter."""

import math
import sys

import click

from keras_moco.errors import UserError, one_line_errors, wrap
from keras_moco.options import output_file
from keras_moco.outputs import PICTURES, draft_of

PARAMETERS = 128  # Of the ramp: noise is measured across them.
NOISE = 0.05  # Its standard deviation, where the ramp rises by 1 in all.
TIME_CONSTANTS = 10  # At least that many: the second half is steady.
MAX_STEPS = 100_000
# Colours of Okabe and Ito, which the colour-blind tell apart.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
GREY = "#999999"


@click.command("momentum-filter")
@click.option(
    "--momentum",
    "momenta",
    default="0,0.9,0.99,0.999",
    show_default=True,
    metavar="M,M,...",
    help="Shares of itself that the key keeps in a step.",
)
@click.option(
    "--steps",
    type=int,
    help="Default: ten time constants of the largest momentum, at least 1000.",
)
@click.option(
    "--train",
    type=float,
    metavar="M",
    help="Train a small encoder on the built-in images at this momentum, and "
    "measure its weights, too.",
)
@click.option(
    "--trace",
    metavar="FILE",
    help="Measure weights that `keras_moco.WeightTrace` recorded, too.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--to",
    "path",
    default="momentum_filter.png",
    show_default=True,
    metavar="FILE",
    callback=output_file(*PICTURES),
    help="The picture (.png, .pdf or .svg).",
)
def main(momenta, steps, train, trace, seed, path):
    """Draw and measure the key's exponential average of a noisy query.

    Each step sets key = m key + (1 - m) query. On a parameter that rises
    steadily the key lags by m / (1 - m) steps, and of white noise it keeps
    (1 - m) / (1 + m) of the variance; the time constant is 1 / (1 - m) steps.
    They are measured on a made-up parameter and, with --train or --trace, on
    the weights of a run.
    """
    momenta = parse_momenta(momenta)
    if train is not None and trace:
        raise UserError("--train records a trace itself: leave out --trace.")
    if seed < 0:
        raise UserError(f"--seed must be >= 0. Received: {seed}")
    num_steps = enough_steps(momenta[-1], steps)
    train_steps = None if train is None else enough_steps(train, steps)
    recorded = read_trace(trace) if trace else None

    from keras_moco import average

    query = noisy_ramp(num_steps, seed)
    keys = [average.exponential_average(query, m) for m in momenta]
    rows = [average.measure_ramp(query, key) for key in keys]
    click.echo(ramp_table(num_steps, momenta, rows))
    if train is not None:
        trace = path.with_suffix(".npz")
        click.echo(f"\nTraining: {train_steps:,} steps at momentum {train:g}")
        record(train, train_steps, seed, trace)
        recorded = read_trace(trace)
    found = average.measure_trace(**recorded) if recorded else None
    if found:
        click.echo("\n" + trace_table(recorded, found))
    curves = {m: key[:, 0] for m, key in zip(momenta, keys, strict=True)}
    try:
        with draft_of(path) as draft:
            draw(draft, query[:, 0], curves, recorded, found)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}.") from error
    if train is not None:
        click.echo(f"Trace    {trace}")
    click.echo(f"Picture  {path}")


def parse_momenta(text):
    """The momenta of "0,0.9,0.99", rising and each once."""
    try:
        momenta = sorted({float(part) for part in text.split(",")})
    except ValueError:
        momenta = []
    if not momenta or not all(0 <= m < 1 for m in momenta):
        raise UserError(
            "--momentum must be numbers in [0, 1), such as 0,0.9,0.99. "
            f"Received: {text}"
        )
    if len(momenta) > len(COLORS):
        raise UserError(
            f"--momentum takes at most {len(COLORS)} numbers, to be told apart "
            f"in the picture. Received: {len(momenta)}"
        )
    return momenta


def enough_steps(momentum, steps, what="--steps"):
    """The number of steps, if the average is steady after half of them.

    Args:
        momentum: Float, in [0, 1) or refused.
        steps: Int, or None for as many as it takes.
        what: Str. What the user has to change.
    """
    if not 0 <= momentum < 1:
        raise UserError(f"Momentum must be in [0, 1). Received: {momentum:g}")
    least = math.ceil(round(TIME_CONSTANTS / (1 - momentum), 6))
    steps = max(least, 1000) if steps is None else steps
    if steps < least:
        raise UserError(
            f"{what} must be at least {least:,}, ten time constants of "
            f"momentum {momentum:g}. Received: {steps:,}"
        )
    if steps > MAX_STEPS:
        raise UserError(
            f"{what} must be at most {MAX_STEPS:,}, which is enough for "
            f"momentum {1 - TIME_CONSTANTS / MAX_STEPS:g}. Received: "
            f"{steps:,} for momentum {momentum:g}"
        )
    return steps


def noisy_ramp(steps, seed):
    """Parameters that rise from 0 to 1 with white noise, one a column."""
    import numpy as np

    noise = np.random.default_rng(seed).standard_normal((steps, PARAMETERS))
    return np.arange(steps)[:, None] / steps + NOISE * noise


@one_line_errors
def record(momentum, steps, seed, path):
    """Trains a small encoder on the built-in images, with a `WeightTrace`.

    The learning rate is constant: the closed forms are of steps of the query
    that stay as large as they are.
    """
    import keras

    import keras_moco as km

    keras.utils.set_random_seed(seed)
    preset = km.PRESETS["demo"].replace(
        momentum=momentum, mask_same_image=True, batch_norm_groups=1
    )
    images = km.load_images("shapes", "pretrain", image_size=16)
    per_epoch = min(steps, len(images) // 32)
    pairs = km.pretrain_dataset(
        images, preset, batch_size=32, seed=seed, steps_per_epoch=per_epoch
    )
    encoder = km.resnet("resnet18", image_size=16, width=8)
    model = km.MoCo.from_preset(preset, encoder)
    model.compile(km.SGD(0.03, weight_decay=preset.weight_decay))
    callbacks = [km.WeightTrace(path, seed=seed)]
    if sys.stdout.isatty():
        callbacks.append(km.terminal.LossBar())
    epochs = math.ceil(steps / per_epoch)
    model.fit(pairs, epochs=epochs, callbacks=callbacks, verbose=0)


def read_trace(path):
    """The `query`, `key` and `momentum` of a `WeightTrace`'s file, a dict."""
    import zipfile
    import zlib

    import numpy as np

    broken = OSError, EOFError, zipfile.BadZipFile, zlib.error
    try:
        file = np.load(path, allow_pickle=False)
        query, key, momenta = (file[n] for n in ("query", "key", "momentum"))
        if query.shape != key.shape or key.ndim != 2 or momenta.ndim != 1:
            raise ValueError("arrays of other shapes")
        if len(query) != len(momenta) + 1 or not key.size:
            raise ValueError("arrays of other lengths")
    except (*broken, ValueError, LookupError) as error:
        raise UserError(
            "--trace must be a file by keras_moco.WeightTrace. Received: "
            f"{path} ({type(error).__name__})"
        ) from error
    low, high = (float(m) for m in (momenta[0], momenta[-1]))
    if low != high:
        raise UserError(
            "The closed forms are of a constant momentum; that of the trace "
            f"goes from {low:g} to {high:g}."
        )
    enough_steps(low, len(momenta), "The steps of the trace")
    moves = np.ptp(np.diff(query[len(query) // 2 :], axis=0), axis=0)
    if not np.isfinite(query).all() or not moves.any():
        raise UserError(f"The weights in {path} are not finite or do not move.")
    return {"query": query, "key": key, "momentum": low}


def ramp_table(steps, momenta, rows):
    """What was measured on the ramp, beside the closed forms."""
    from keras_moco.average import ramp_lag, white_share

    lines = [
        f"A noisy ramp of {steps:,} steps, {PARAMETERS} parameters, measured "
        "in the second half",
        "",
        f"{'':8} {'time constant':>14} {'lag, steps':>15} {'noise':>22}",
        f"{'m':>8} {'1/(1-m)':>14} {'found':>8} {'m/(1-m)':>10} {'found':>11} "
        f"{'(1-m)/(1+m)':>14}",
    ]
    for momentum, (lag, noise) in zip(momenta, rows, strict=True):
        lines.append(
            f"{momentum:8g} {1 / (1 - momentum):14,.0f} {lag:8,.1f} "
            f"{ramp_lag(momentum):10,.1f} {noise:11.6f} "
            f"{white_share(momentum):14.6f}"
        )
    return "\n".join(lines)


def trace_table(recorded, found):
    """What was measured on recorded weights, beside the closed forms."""
    from keras_moco import average

    m, a = recorded["momentum"], found["correlation"]
    steps, weights = recorded["query"].shape
    white = average.white_share(m)
    correlated = average.correlated_share(m, a)
    lines = [
        f"{weights:,} recorded weights, {steps - 1:,} steps at momentum {m:g}",
        wrap(
            "Recorded keys differ from the average of the recorded queries by "
            f"at most {found['difference']:.1e} (float32 rounds), from the "
            f"queries by up to {found['apart']:.1e}.",
            "",
        ),
        "",
        "lag in steps: the key is nearest to the query of so many before",
        f"  {found['lag']:10,}  found",
        f"  {average.ramp_lag(m):10,.1f}  if weights drift: m/(1-m)",
        f"  {average.walk_lag(m):10,}  if weights walk at random: half of the "
        "average is younger",
        "variance of a step, key over query",
        f"  {found['noise']:10.6f}  found",
        f"  {(1 - m) * white:10.6f}  if weights are white noise: (1-m)^2/(1+m)",
        f"  {white:10.6f}  if their steps are: (1-m)/(1+m)",
        f"  {correlated:10.6f}  if steps j apart correlate by a^j: "
        "(1-m)/(1+m) (1+am)/(1-am)",
        f"              with a = {a:.2f}, found of steps 1 apart",
        wrap(
            "Steps of real weights follow one another (SGD's momentum alone "
            "correlates them by its 0.9): the key keeps more than of white "
            "ones, and less than the last line where the correlation falls off "
            "faster than a^j. What is slower than the time constant passes "
            "whole.",
            "",
        ),
    ]
    return "\n".join(lines)


def draw(path, query, keys, recorded, found):
    """Draws one parameter and its keys; below, what was recorded.

    Args:
        path: Where the picture goes.
        query: Float array (steps,).
        keys: Dict from the momentum to the key, (steps,).
        recorded: Dict of `read_trace`, or None.
        found: Dict of `measure_trace`, or None.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = 2 if recorded else 1
    figure = Figure(figsize=(11, 4.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, 2, squeeze=False)
    lines = {"query = key, m = 0" if 0 in keys else "query": query}
    lines |= {f"key, m = {m:g}": key for m, key in keys.items() if m > 0}
    last = max(3 * len(query) // 100, 50)
    for axis, count in zip(grid[0], (len(query), last), strict=True):
        draw_lines(axis, lines, count)
    grid[0, 0].set(title="A noisy ramp and its averages", ylabel="parameter")
    grid[0, 1].set(title=f"The last {last} steps")
    if recorded:
        draw_trace(grid[1], recorded, found)
    figure.savefig(path, dpi=130)


def draw_trace(axes, recorded, found):
    """Draws the recorded weight that went farthest, and the lag of all."""
    from keras_moco.average import ramp_lag, walk_lag

    query, key, m = (recorded[name] for name in ("query", "key", "momentum"))
    far = abs(query[-1] - query[0]).argmax()
    draw_lines(
        axes[0],
        {"query": query[:, far], f"key, m = {m:g}": key[:, far]},
        len(query),
    )
    axes[0].set(title="A weight of a real run", ylabel="weight")
    distance = found["distance"]
    axes[1].plot(distance, color=COLORS[0], linewidth=1.8)
    axes[1].set(
        title="Distance of the key from earlier queries",
        xlabel="steps before",
        ylabel="distance, in steps of the query",
        xlim=(0, len(distance) - 1),
        ylim=(0, None),
    )
    axes[1].spines[["top", "right"]].set_visible(False)
    marks = {
        "nearest": (found["lag"], COLORS[0], "-"),
        "random walk": (walk_lag(m), COLORS[1], "--"),
        "ramp": (ramp_lag(m), COLORS[2], ":"),
    }
    right = max(lag for lag, *_ in marks.values()) + len(distance) / 30
    for row, (name, (lag, color, style)) in enumerate(marks.items()):
        axes[1].axvline(lag, color=color, linestyle=style)
        height = 0.95 - 0.07 * row
        axes[1].annotate(
            f"{name}: {lag:.0f}",
            (lag, height),
            (right, height),
            xycoords=("data", "axes fraction"),
            textcoords=("data", "axes fraction"),
            va="center",
            color=color,
            arrowprops={"arrowstyle": "-", "color": color},
        )


def draw_lines(axis, lines, count):
    """Draws the last values of named lines, named at their ends."""
    steps = range(len(next(iter(lines.values()))))[-count:]
    colors = dict(zip(lines, (GREY, *COLORS), strict=False))
    for name, values in lines.items():
        width = 0.7 if colors[name] == GREY else 1.8
        axis.plot(steps, values[-count:], color=colors[name], linewidth=width)
    axis.set(xlabel="step", xlim=(steps[0], steps[-1]))
    axis.spines[["top", "right"]].set_visible(False)
    low, high = axis.get_ylim()
    # From the lowest end up, each name a line above the one before.
    names = sorted(lines, key=lambda name: lines[name][-1])
    places = []
    for name in names:
        end = (lines[name][-1] - low) / (high - low)
        places.append(max(end, places[-1] + 0.07 if places else end))
    above = max(places[-1] - 1, 0)
    for name, place in zip(names, places, strict=True):
        color = colors[name]
        axis.annotate(
            name,
            (steps[-1], lines[name][-1]),
            (1.05, place - above),
            textcoords="axes fraction",
            va="center",
            color="#666666" if color == GREY else color,
            arrowprops={"arrowstyle": "-", "color": color, "relpos": (0, 0.5)},
        )


if __name__ == "__main__":
    main()
