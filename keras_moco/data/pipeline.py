"""From images to what `fit` and the evaluators read: `tf.data` pipelines."""

import itertools
import math

import numpy as np
import psutil
import tensorflow as tf

from keras_moco.augment import crop, draw_views, recolor_views, two_views
from keras_moco.data.decode import try_header
from keras_moco.data.encoded import StreamedImages
from keras_moco.data.images import Images
from keras_moco.data.sources import load_images

# Up to this size images are evaluated whole; above, the centre of 256/224 is.
WHOLE_IMAGE = 96


def pretrain_dataset(
    images,
    preset,
    image_size=None,
    batch_size=256,
    seed=0,
    first_epoch=0,
    augment=None,
):
    """Batches of two views of each image, newly drawn in every epoch.

    One pass over the dataset is one epoch; the next pass is the next epoch,
    in another order and with other views. Both depend on `seed`, the epoch and
    the image alone, not on threads, batches or what ran before.

    Args:
        images: `Images` of `load_images`, or a uint8 array (N, H, W, 3).
        preset: `Preset` whose views are taken.
        image_size: Int. Side of the views in pixels. None takes the preset's,
            else the images' own (at most 224).
        batch_size: Int in 1..N. The rest of an epoch is dropped.
        seed: Int. Defaults to 0.
        first_epoch: Int. Number of the first pass. Defaults to 0.
        augment: None for the preset's views. A function or Keras layer of your
            own, float32 images (batch, height, width, 3) in [0, 1] -> views;
            called twice a batch (a batch is one image where sizes differ; the
            views must then all have one size). "device" leaves the views to
            the model: see `MoCo.make_views`.

    Returns:
        `tf.data.Dataset` of (query, key, index): float32 (batch_size,
        image_size, image_size, 3) in [0, 1] twice, int64 (batch_size,). With
        `augment="device"` of (images, epoch, index): uint8 (batch_size,
        height, width, 3), int64 (batch_size,) twice. Its `len` is the number
        of steps an epoch.

    Raises:
        ValueError: A batch larger than the data; views on the device of
            images that are not held in memory.

    Example:
        >>> images = load_images("shapes", "pretrain")
        >>> pairs = pretrain_dataset(images, PRESETS["demo"], batch_size=128)
        >>> model.fit(pairs, epochs=10)
    """
    images = images if isinstance(images, Images) else Images(images)
    size = image_size or preset.image_size or natural_size(images)
    steps = num_steps(images, batch_size)
    options = {"seed": seed, "image_size": size, "views": preset.views}
    if images.array is not None:
        batches = _batches(images, batch_size, seed, first_epoch)
        views = _views_of_array(images, augment, options)
        pairs = batches.map(views, num_parallel_calls=_threads())
    elif augment == "device":
        raise ValueError(
            "Views on the device need images of one size that fit into memory. "
            f"{images.source} has to be decoded file by file: leave them to "
            "the CPU."
        )
    else:
        if isinstance(images, StreamedImages):
            one_by_one = _stream(images, steps * batch_size, seed, first_epoch)
        else:
            batches = _batches(images, batch_size, seed, first_epoch)
            one_by_one = batches.unbatch().map(
                lambda epoch, index: (epoch, index, _read(images, index)),
                _threads(),
            )
        pairs = _views_of_files(
            one_by_one, images, batch_size, augment, options
        )
    # The pass of a generator has no length of its own.
    pairs = pairs.apply(tf.data.experimental.assert_cardinality(steps))
    return _steady(pairs)


def _batches(images, batch_size, seed, first_epoch):
    """(epoch, index) of each batch, both (batch_size,), in a global shuffle."""
    steps = num_steps(images, batch_size)
    epochs = itertools.count(first_epoch)

    def batches():
        epoch = next(epochs)
        order = np.random.default_rng([seed, epoch]).permutation(len(images))
        for step in range(steps):
            chosen = order[step * batch_size : (step + 1) * batch_size]
            yield np.full_like(chosen, epoch), chosen

    batch = tf.TensorSpec((batch_size,), tf.int64)
    return tf.data.Dataset.from_generator(
        batches, output_signature=(batch, batch)
    )


def _stream(images, count, seed, first_epoch):
    """(epoch, index, content) of `count` images of each epoch."""
    epochs = itertools.count(first_epoch)

    def stream():
        epoch = next(epochs)
        passing = images.open_stream(seed, epoch)
        for index, content in itertools.islice(passing, count):
            yield epoch, index, content

    number = tf.TensorSpec((), tf.int64)
    return tf.data.Dataset.from_generator(
        stream, output_signature=(number, number, tf.TensorSpec((), tf.string))
    )


def _views_of_array(images, augment, options):
    def on_device(epoch, index):
        return _take(images, index), epoch, index

    def own(epoch, index):
        return *_twice(augment, _take(images, index)), index

    def preset(epoch, index):
        pixels = _take(images, index)
        return *two_views(pixels, index, epoch[0], **options), index

    if augment is None:
        return preset
    return on_device if augment == "device" else own


def _views_of_files(one_by_one, images, batch_size, augment, options):
    size, views, seed = options["image_size"], options["views"], options["seed"]
    # The smallest crop still has as many pixels as the view.
    smallest = min(view.crop_scale[0] for view in views)
    min_side = math.ceil(size / math.sqrt(smallest))

    def own(epoch, index, content):
        image = tf.numpy_function(
            lambda i, content: images.decode_content(int(i), content, min_side),
            [index, content],
            tf.uint8,
        )
        image = tf.ensure_shape(image, (None, None, 3))[None]
        return *(view[0] for view in _twice(augment, image)), index

    def crops(epoch, index, content):
        shape = tf.numpy_function(_shape, [content], tf.int32)
        drawn = draw_views(
            index[None], epoch, shape[0], shape[1], seed=seed, views=views
        )
        image, boxes = tf.numpy_function(
            images.decode_boxes,
            [
                index,
                content,
                tf.concat([view["box"] for view in drawn], axis=0),
                size,
                shape,
            ],
            (tf.uint8, tf.int32),
        )
        image = tf.ensure_shape(image, (None, None, 3))[None]
        boxes = tf.ensure_shape(boxes, (2, 4))
        cut = tuple(
            crop(image, {**view, "box": box[None]}, size)[0]
            for view, box in zip(drawn, tf.unstack(boxes), strict=True)
        )
        return cut, tf.nest.map_structure(lambda x: x[0], drawn), index

    def recolored(cut, drawn, index):
        return *recolor_views(cut, drawn, views=views), index

    pairs = one_by_one.map(crops if augment is None else own, _threads())
    pairs = pairs.batch(batch_size, drop_remainder=True)
    return pairs if augment else pairs.map(recolored, _threads())


def _twice(augment, images):
    """Two views by a function or layer of the user's own."""
    images = tf.cast(images, tf.float32) / 255.0
    return [augment(images) for _ in range(2)]


def labeled_dataset(
    images, split="train", image_size=None, batch_size=256, data_dir=None
):
    """Batches of (image, label) for evaluation, in order and unaugmented.

    Images above 96 pixels are cut to the centre of 224/256 of their shorter
    side, as published; smaller ones are taken whole (their largest square).

    Args:
        images: `Images` with labels, or what `load_images` takes: "shapes", a
            TFDS name, a folder with class folders.
        split: Str. "train" (a bank) or "test"; not used for `Images`.
        image_size: Int. Side in pixels. None takes the images' own (at most
            224).
        batch_size: Int. Defaults to 256; the last batch may be smaller.
        data_dir: Str or path. As in `load_images`.

    Returns:
        `tf.data.Dataset` of float32 (batch, image_size, image_size, 3) in
        [0, 1] and int64 (batch,).

    Raises:
        ValueError: The images have no labels.

    Example:
        >>> bank = labeled_dataset("cifar10", "train", image_size=32)
    """
    if not isinstance(images, Images):
        images = load_images(images, split, data_dir=data_dir)
    if images.labels is None:
        raise ValueError(
            "Evaluation needs labels: expected class folders or a labelled "
            f"dataset. {len(images)} images without labels came."
        )
    size = image_size or natural_size(images)
    data = tf.data.Dataset.from_tensor_slices(
        (tf.range(len(images), dtype=tf.int64), images.labels)
    )
    if images.array is not None:
        data = data.batch(batch_size).map(
            lambda index, label: (_centre(_take(images, index), size), label),
            _threads(),
        )
    else:
        min_side = math.ceil(size * 256 / 224)
        data = data.map(
            lambda index, label: (
                _centre(_decode(images, index, min_side)[None], size)[0],
                label,
            ),
            _threads(),
        ).batch(batch_size)
    return _steady(data)


def num_steps(images, batch_size):
    """Whole batches in the data, or raises if there is none."""
    if not 1 <= batch_size <= len(images):
        raise ValueError(
            "`batch_size` must be at least 1 and at most the number of images. "
            f"Received: batch_size={batch_size}, images={len(images)}. Give "
            "another with --batch-size"
        )
    return len(images) // batch_size


def natural_size(images):
    """The side of views if nobody says otherwise: the images', at most 224."""
    return min(224, *images.size) if images.size else 224


def _threads():
    """Cores that this process may use."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # Not on macOS.
        return len(process.cpu_affinity())
    return psutil.cpu_count()


def _steady(dataset):
    """Prefetches, without tf.data's autotuning.

    At the end of an epoch the thread that tunes is waited for, and it sleeps
    for as long as the epoch has lasted (TensorFlow 2.21): up to twice the time.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return dataset.prefetch(2).with_options(options)


def _take(images, index):
    # Through NumPy: a tensor of all images would be a second copy of them.
    batch = tf.numpy_function(images.array.__getitem__, [index], tf.uint8)
    return tf.ensure_shape(batch, (*index.shape, *images.array.shape[1:]))


def _read(images, index):
    content = tf.numpy_function(
        lambda i: images.read(int(i)), [index], tf.string
    )
    return tf.ensure_shape(content, ())


def _shape(content):
    """`(H, W)` of an encoded image; what is broken counts as one pixel."""
    return np.int32(try_header(content) or (1, 1))


def _decode(images, index, min_side):
    image = tf.numpy_function(
        lambda i: images.decode(int(i), min_side), [index], tf.uint8
    )
    return tf.ensure_shape(image, (None, None, 3))


def _centre(images, size):
    """The centre square of each image, resized with antialias."""
    height, width = tf.shape(images)[1], tf.shape(images)[2]
    side = tf.minimum(height, width)
    if size > WHOLE_IMAGE:
        side = tf.cast(
            tf.round(tf.cast(side, tf.float32) * (224 / 256)), tf.int32
        )
    box = tf.stack([(height - side) // 2, (width - side) // 2, side, side])
    count = tf.shape(images)[0]
    parameters = {
        "box": tf.repeat(box[None], count, axis=0),
        "flip": tf.zeros((count,), tf.bool),
    }
    return tf.ensure_shape(
        crop(images, parameters, size), (None, size, size, 3)
    )
