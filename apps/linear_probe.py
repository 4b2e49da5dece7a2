"""`keras-moco linear-probe`: classes read from an encoder's frozen features."""

import json
import pathlib

import click

from keras_moco.cli import encoder_option, one_line_errors, say_size


@click.command("linear-probe")
@encoder_option
@click.option(
    "--dataset",
    default="shapes",
    show_default=True,
    metavar="NAME|DIR",
    help="Labelled images, with a train and a test split.",
)
@click.option("--image-size", type=int, help="In pixels. Default: as trained.")
@click.option("--data-dir", metavar="DIR", help="TFDS' data sets.")
@click.option("--epochs", type=int, help="Default: 3, more of small data.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--baselines",
    is_flag=True,
    help="Also probe the same encoder untrained, and raw pixels.",
)
@click.option(
    "--picture",
    metavar="FILE",
    help="Draw the confusion matrix there (.png, .pdf or .svg).",
)
@click.option("--json", "json_file", type=click.Path(), help="Write it there.")
@one_line_errors
def main(
    encoder,
    dataset,
    image_size,
    data_dir,
    epochs,
    seed,
    baselines,
    picture,
    json_file,
):
    """Accuracy of a linear classifier on an encoder's frozen features.

    A grid of learning rates and weight decays is trained at once; the setting
    is chosen on a tenth of the training images, the test images are read once.
    """
    import keras

    import keras_moco as km

    # Of a bare SavedModel there is no untrained copy.
    model = km.load_encoder(encoder, trainable=baselines)
    size = image_size or km.trained_image_size(encoder)
    bank, test, names = km.labeled_splits(dataset, size, data_dir)
    say_size(bank.images, size)
    encoders = {"encoder": model}
    if baselines:
        encoders["untrained"] = keras.models.clone_model(model)
        encoders["raw pixels"] = None
    results = {}
    for name, model in encoders.items():
        result = km.linear_probe(model, bank, test, epochs=epochs, seed=seed)
        low, high = (100 * bound for bound in result["interval"])
        setting = result["setting"]
        click.echo(
            f"{name:10} top-1 {100 * result['test_top1']:.2f} % "
            f"({low:.1f} to {high:.1f}), top-5 "
            f"{100 * result['test_top5']:.2f} %"
        )
        click.echo(
            f"{'':10} learning rate {setting['learning_rate']:g}, decay "
            f"{setting['weight_decay']:g}, epoch {setting['epoch']}; "
            f"last epoch {100 * result['test_top1_last']:.2f} %"
        )
        results[name] = result
    result = results["encoder"]
    result["per_class"] = dict(zip(names, result["per_class"], strict=True))
    if picture:
        draw_confusion(result["confusion"], names, picture)
        click.echo(f"Confusion  {picture}")
    if json_file:
        result["baselines"] = {
            name: other
            for name, other in results.items()
            if other is not result
        }
        pathlib.Path(json_file).write_text(json.dumps(result, indent=2) + "\n")


def draw_confusion(confusion, names, path):
    """Draws the share of each true class (row) that got each answer."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = np.array(confusion)
    shares = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    side = 2.0 + 0.35 * min(len(names), 100)
    figure = Figure(figsize=(side + 0.6, side), layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    image = axis.imshow(100 * shares, vmin=0, vmax=100, cmap="cividis")
    figure.colorbar(image, ax=axis, label="% of the class", shrink=0.8)
    axis.set(xlabel="answer", ylabel="class")
    ticks = range(len(names))
    if len(names) <= 30:
        axis.set_xticks(ticks, names, rotation=90, fontsize=8)
        axis.set_yticks(ticks, names, fontsize=8)
        for row, column in np.ndindex(shares.shape):
            share = 100 * shares[row, column]
            color = "black" if share > 60 else "white"
            axis.text(
                column,
                row,
                f"{share:.0f}",
                ha="center",
                va="center",
                fontsize=6,
                color=color,
            )
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
