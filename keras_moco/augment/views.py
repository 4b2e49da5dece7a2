"""Two augmented views of a batch of images, compiled by XLA."""

import functools
import math

import tensorflow as tf

from keras_moco.augment import color
from keras_moco.augment.blur import gaussian_blur
from keras_moco.augment.crop import crop
from keras_moco.augment.random import draw_parameters


def recolor(images, parameters, view):
    """Everything that happens to a view after its crop.

    Args:
        images: uint8, or float32 in [0, 1], (batch, size, size, 3).
        parameters: Dictionary, see `draw_parameters`.
        view: `View` that the parameters were drawn from.

    Returns:
        float32 (batch, size, size, 3) in [0, 1].
    """

    def where(drawn, operation, images):
        # A branch if there is one image, a selection if there are more.
        return tf.cond(
            tf.reduce_any(drawn),
            lambda: tf.where(
                drawn[:, None, None, None], operation(images), images
            ),
            lambda: images,
        )

    def grayscale(images):
        return where(parameters["grayscale"], color.to_grayscale, images)

    def jitter(images):
        return color.jitter(
            images,
            *(parameters[key] for key in ("jitter", "order", "factors")),
        )

    def blur(images):
        kernel_size = 2 * math.ceil(3 * view.blur_sigma[1]) + 1
        return gaussian_blur(images, parameters["sigma"], kernel_size)

    images = tf.transpose(images, (0, 3, 1, 2))  # planar, see color.py
    if images.dtype == tf.uint8:
        images = tf.cast(images, tf.float32) / 255.0
    # What a view never does is not compiled.
    if view.grayscale and view.grayscale_first:
        images = grayscale(images)
    if view.jitter_probability:
        images = where(parameters["jitter"], jitter, images)
    if view.grayscale and not view.grayscale_first:
        images = grayscale(images)
    if view.blur:
        images = where(parameters["blur"], blur, images)
    if view.solarize:
        images = where(parameters["solarize"], color.solarize, images)
    return tf.transpose(images, (0, 2, 3, 1))


@tf.function(jit_compile=True, autograph=False)
def draw_views(index, epoch, height, width, *, seed, views):
    """Parameters of all views of a batch: `draw_parameters`, compiled.

    Args:
        index: int64 (batch,). Number of each example in the data.
        epoch: Int scalar tensor. Number of the epoch.
        height: Int tensor, scalar or (batch,). Height of the images.
        width: Int tensor, scalar or (batch,). Width of the images.
        seed: Int, Python or scalar tensor. Seed of the run.
        views: Tuple of `View`.

    Returns:
        Tuple of dictionaries, one per view.
    """
    return tuple(
        draw_parameters(view, height, width, seed, epoch, index, number)
        for number, view in enumerate(views)
    )


@tf.function(jit_compile=True, autograph=False)
def two_views(images, index, epoch, *, seed, image_size, views, loop=True):
    """Query and key views of a batch of images of one size.

    The views depend on (seed, epoch, index) only. Compiled once for each
    shape of a batch, in some seconds. Runs eagerly, in
    `tf.data.Dataset.map` and inside a train step.

    Args:
        images: uint8, or float32 in [0, 1], (batch, height, width, 3), all
            dimensions known.
        index: int64 (batch,). Number of each example in the data.
        epoch: Int scalar tensor (a Python number would compile anew).
        seed: Int, Python or scalar tensor. Seed of the run.
        image_size: Int. Height and width of the views.
        views: Pair of `View`, for the query and for the key; or just one, as
            a classifier is trained on.
        loop: Bool. True takes one image after the other, which keeps a CPU's
            cache warm and skips what was not drawn; False takes the batch at
            once, for an accelerator. Defaults to True.

    Returns:
        Tuple of float32 (batch, image_size, image_size, 3) in [0, 1], one for
        each of `views`.
    """
    height, width = images.shape[1:3]
    parameters = draw_views(index, epoch, height, width, seed=seed, views=views)

    def augment(images, parameters):
        return tuple(
            recolor(crop(images, drawn, image_size), drawn, view)
            for drawn, view in zip(parameters, views, strict=True)
        )

    return _map(augment, (images, parameters), loop, len(views))


def device_views(preset, seed):
    """The `MoCo.make_views` of a preset: whole batches, for an accelerator.

    Args:
        preset: `Preset` with an image size.
        seed: Int. Seed of the run.

    Returns:
        Function of images (batch, height, width, 3), index (batch,) and epoch
        (scalar), all tensors, that gives what `two_views` gives.
    """
    return functools.partial(
        two_views,
        seed=seed,
        image_size=preset.image_size,
        views=preset.views,
        loop=False,
    )


@tf.function(jit_compile=True, autograph=False)
def recolor_views(crops, parameters, *, views, loop=True):
    """`recolor` of both views, for crops made image by image.

    Args:
        crops: Pair of uint8, or float32 in [0, 1], (batch, size, size, 3),
            all dimensions known.
        parameters: Pair of dictionaries, see `draw_views`.
        views: Pair of `View`.
        loop: Bool. See `two_views`.

    Returns:
        Pair of float32 (batch, size, size, 3) in [0, 1].
    """

    def augment(crops, parameters):
        return tuple(map(recolor, crops, parameters, views))

    return _map(augment, (crops, parameters), loop, len(views))


def _map(augment, batch, loop, num_views):
    """Calls `augment` with the whole batch, or with batches of one image."""
    if not loop:
        return augment(*batch)

    def augment_one(one):
        one = tf.nest.map_structure(lambda x: x[None], one)
        return tuple(view[0] for view in augment(*one))

    return tf.map_fn(
        augment_one, batch, fn_output_signature=(tf.float32,) * num_views
    )
