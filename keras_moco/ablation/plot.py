"""The pictures of an ablation: accuracy and loss against what varies."""

import statistics

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from keras_moco.ablation.trial import epochs

# Of Okabe and Ito, which the colour-blind tell apart; signs as well.
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
SIGNS = "osD^vP"


def draw_ablation(study, rows):
    """Accuracy against the settings, and the loss with that of chance.

    Of a grid, both accuracies with a line for each value of the second field.

    Args:
        study: `Study`.
        rows: What `summarize` gave.

    Returns:
        `matplotlib.figure.Figure`.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    if len(study.axes) == 2:
        for axis, measure, name in (
            (left, "knn_top1", "kNN top-1, %"),
            (right, "linear_top1", "linear top-1, %"),
        ):
            axis.set_ylabel(name)
            place = place_settings(axis, study, rows)
            second = study.axes[1]
            values = list(dict.fromkeys(row[second] for row in rows))
            for number, value in enumerate(values):
                own = [row for row in rows if row[second] == value]
                label = f"{second} {value}"
                draw_measure(axis, place, own, measure, number, label, 100)
    else:
        left.set_ylabel("top-1, %")
        place = place_settings(left, study, rows)
        draw_measure(left, place, rows, "knn_top1", 0, "kNN", 100)
        draw_measure(left, place, rows, "linear_top1", 1, "linear", 100)
        untrained = [r["knn_top1_untrained"] for r in rows]
        untrained = [value for value in untrained if value is not None]
        if untrained:
            level = 100 * statistics.fmean(untrained)
            left.axhline(level, color="0.5", ls=":", label="kNN untrained")
        right.set_ylabel("loss, nats")
        place_settings(right, study, rows)
        draw_measure(right, place, rows, "loss", 0, "last epoch")
        known = [row for row in rows if row["chance_loss"] is not None]
        places = [place[row["setting"]] for row in known]
        chance = [row["chance_loss"] for row in known]
        style = "_--" if study.axes else "_"
        right.plot(places, chance, style, color="0.5", label="ln(K + 1)")
    for axis in (left, right):
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    return figure


def draw_measure(axis, place, rows, measure, number, label, scale=1):
    """A line through the means, with the deviation over seeds as bars.

    The line is left out where the settings have no values to be ordered by.
    """
    ordered = axis.get_xlabel() != ""
    rows = [row for row in rows if row[measure] is not None]
    if rows:
        axis.errorbar(
            [place[row["setting"]] for row in rows],
            [scale * row[measure] for row in rows],
            [scale * (row[f"{measure}_std"] or 0) for row in rows],
            color=COLORS[number % len(COLORS)],
            marker=SIGNS[number % len(SIGNS)],
            linestyle="-" if ordered else "none",
            capsize=3,
            label=label,
        )


def place_settings(axis, study, rows):
    """Labels the x axis; returns a dict from each setting to its place.

    The queue's size is on a logarithmic axis, and so is 1 - m of the momentum
    m, where m = 1 has a place of its own, a decade beyond the last. All else
    stands side by side.
    """
    names = [row["setting"] for row in rows]
    field = study.axes[0] if study.axes else None
    values = [row.get(field) for row in rows]
    if field == "queue_size" and min(values) > 0:
        axis.set_xscale("log", base=2)
        axis.set_xlabel("queue_size K")
        places, ticks = values, {value: f"{value}" for value in values}
    elif field == "momentum":
        axis.set_xscale("log")
        axis.set_xlabel("1 - m")
        apart = [1 - value for value in values if value < 1]
        beyond = min(apart, default=1) / 10
        places = [1 - value if value < 1 else beyond for value in values]
        axis.set_xlim(max(places) * 2, min(places) / 2)
        ticks = {
            place: f"{1 - value:.3g}\nm {value:g}"
            for place, value in zip(places, values, strict=True)
        }
    else:
        labels = values if field else names
        kinds = list(dict.fromkeys(labels))
        places = [kinds.index(label) for label in labels]
        axis.set_xlabel(field or "")
        axis.set_xlim(-0.5, len(kinds) - 0.5)
        ticks = {
            place: f"{label}"
            for place, label in zip(places, labels, strict=True)
        }
    axis.set_xticks(list(ticks), list(ticks.values()), fontsize=8)
    axis.minorticks_off()
    return dict(zip(names, places, strict=True))


def draw_losses(study, runs):
    """The loss of each epoch: the mean over seeds, and the seeds, faintly.

    Args:
        study: `Study`.
        runs: Dict from (name of a setting, seed) to the folder of the run.

    Returns:
        `matplotlib.figure.Figure`.
    """
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    for number, name in enumerate(study.settings):
        color = COLORS[number % len(COLORS)]
        curves = [
            [row["loss"] for row in epochs(path)]
            for (setting, _), path in runs.items()
            if setting == name
        ]
        curves = [curve for curve in curves if curve]
        for curve in curves:
            axis.plot(range(1, len(curve) + 1), curve, color=color, alpha=0.3)
        means = [
            statistics.fmean(losses) for losses in zip(*curves, strict=False)
        ]
        style = {"color": color, "marker": SIGNS[number % len(SIGNS)]}
        axis.plot(
            range(1, len(means) + 1), means, **style, markersize=4, label=name
        )
    axis.set(xlabel="epoch", ylabel="loss, nats")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)
    return figure
