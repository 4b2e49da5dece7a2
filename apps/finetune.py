"""`keras-moco finetune`: a classifier from an encoder and some labels."""

import click

from keras_moco.errors import one_line_errors
from keras_moco.evaluation.recipes import FINETUNE, parse_share
from keras_moco.options import (
    data_dir_option,
    dataset_option,
    device_options,
    encoder_option,
    image_size_option,
    json_option,
    max_broken_option,
    one_or_many,
    picture_option,
    tensorboard_option,
)


@click.command("finetune")
@encoder_option
@dataset_option
@click.option(
    "--labels",
    default="100%",
    show_default=True,
    metavar="N%",
    help="Share of each class whose labels are used, such as 1% or 10%.",
)
@image_size_option
@data_dir_option
@max_broken_option
@click.option("--epochs", type=int, default=FINETUNE.epochs, show_default=True)
@click.option(
    "--batch-size", type=int, default=FINETUNE.batch_size, show_default=True
)
@click.option(
    "--learning-rate",
    type=float,
    default=FINETUNE.learning_rate,
    show_default=True,
    help="Of the linear layer, whatever the batch size.",
)
@click.option(
    "--backbone-lr-scale",
    type=float,
    default=FINETUNE.backbone_lr_scale,
    show_default=True,
    help="What the encoder's learning rate is of that.",
)
@click.option(
    "--weight-decay",
    type=float,
    default=FINETUNE.weight_decay,
    show_default=True,
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--run-dir",
    metavar="DIR",
    help="Folder of the run; an unfinished one goes on. Default: "
    "runs/<dataset>-finetune.",
)
@click.option(
    "--export-to",
    metavar="DIR",
    help="Where the classifier goes. Default: saved_models/<run name>.",
)
@picture_option
@tensorboard_option
@json_option
@one_line_errors
@device_options
def main(
    encoder,
    dataset,
    labels,
    image_size,
    data_dir,
    max_broken,
    devices,
    run_dir,
    export_to,
    picture,
    tensorboard,
    json_file,
    **numbers,
):
    """Train an encoder and a classifier on it, and export both as one.

    The epoch is chosen on a tenth of the labelled images; the test images are
    read once.
    """
    import keras_moco as km
    from keras_moco.evaluation.results import result_lines

    recipe = FINETUNE.replace(labels=parse_share(labels), **numbers)
    if image_size is None:
        image_size = km.trained_image_size(encoder)
    train, test, names = km.labeled_images(
        one_or_many(dataset), image_size, data_dir, max_broken
    )
    result = km.fit_classifier(
        encoder,
        train,
        test,
        recipe,
        class_names=names,
        image_size=image_size,
        devices=devices,
        run_dir=run_dir,
        export_to=export_to,
    )
    click.echo(result_lines("finetuned", result, names))
    km.save_results(
        {"finetuned": result},
        names,
        json=json_file,
        picture=picture,
        tensorboard=tensorboard or result["run"],
    )
    if picture:
        click.echo(f"Confusion  {picture}")
    click.echo(f"Classifier {result['export']}")


if __name__ == "__main__":
    main()
