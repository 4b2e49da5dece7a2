"""`keras-moco linear-probe`: classes read from an encoder's frozen features."""

import click

from keras_moco.errors import UserError, one_line_errors
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
    say_size,
    tensorboard_option,
)


@click.command("linear-probe")
@encoder_option
@dataset_option
@click.option(
    "--protocol",
    type=click.Choice(["features", "augmented"]),
    default="features",
    show_default=True,
    help="features: computed once, 24 settings trained at once, in seconds. "
    "augmented: as published, on random crops and flips.",
)
@image_size_option
@data_dir_option
@max_broken_option
@click.option(
    "--epochs",
    type=int,
    help="Default: as many as the features need; augmented 100.",
)
@click.option("--batch-size", type=int, help="Default: 2048, augmented 256.")
@click.option(
    "--learning-rate",
    type=float,
    help="Default: four to choose from, augmented 30, whatever the batch size.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--run-dir",
    metavar="DIR",
    help="Of the augmented protocol; an unfinished run goes on. Default: "
    "runs/<dataset>-linear-probe.",
)
@click.option(
    "--baselines",
    is_flag=True,
    help="Also probe the same encoder untrained, and raw pixels.",
)
@picture_option
@tensorboard_option
@json_option
@one_line_errors
@device_options
def main(
    encoder,
    dataset,
    protocol,
    image_size,
    data_dir,
    max_broken,
    seed,
    devices,
    run_dir,
    baselines,
    picture,
    tensorboard,
    json_file,
    **numbers,
):
    """Accuracy of a linear classifier on an encoder's frozen features.

    The setting, or the epoch, is chosen on a tenth of the training images; the
    test images are read once.
    """
    import keras

    import keras_moco as km
    from keras_moco.evaluation.results import result_lines

    for option, given in (
        ("--run-dir", run_dir),
        ("--devices", devices != "auto"),
    ):
        if given and protocol == "features":
            raise UserError(f"{option} is of --protocol augmented.")
    numbers = {k: v for k, v in numbers.items() if v is not None}
    # Of a bare SavedModel there is no untrained copy, nor one to train on.
    trainable = baselines or protocol == "augmented"
    model = km.load_encoder(encoder, trainable=trainable)
    if image_size is None:
        image_size = km.trained_image_size(encoder)
    train, test, names = km.labeled_images(
        one_or_many(dataset), image_size, data_dir, max_broken
    )
    size = km.evaluation_size(train, model, image_size)
    encoders = {"encoder": model}
    if baselines:
        keras.utils.set_random_seed(seed)
        encoders["untrained"] = keras.models.clone_model(model)
        encoders["raw pixels"] = None

    def on_features(name, model):
        if "learning_rate" in numbers:
            numbers["learning_rates"] = (numbers.pop("learning_rate"),)
        return km.linear_probe(model, *splits, seed=seed, **numbers)

    def on_crops(name, model):
        own = run_dir
        if name != first:
            click.echo(f"\n{name}:")
            own = f"{results[first]['run']}-{name.replace(' ', '-')}"
        return km.fit_classifier(
            model,
            train,
            test,
            km.LINEAR_PROBE.replace(seed=seed, **numbers),
            image_size=size,
            devices=devices,
            run_dir=own,
        )

    first = next(iter(encoders))
    probe = on_crops
    if protocol == "features":
        say_size(train, size)
        splits = [km.labeled_dataset(i, image_size=size) for i in (train, test)]
        probe = on_features
    results = {}
    for name, model in encoders.items():
        results[name] = probe(name, model)
        by_class = names if name == first else ()
        click.echo(result_lines(name, results[name], by_class))
    km.save_results(
        results,
        names,
        json=json_file,
        picture=picture,
        tensorboard=tensorboard or results[first].get("run"),
    )
    if picture:
        click.echo(f"Confusion  {picture}")


if __name__ == "__main__":
    main()
