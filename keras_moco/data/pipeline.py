"""Two views of each image, as `fit` reads them: a `tf.data` pipeline."""

import atexit
import functools
import gc
import itertools
import math

import numpy as np
import psutil
import tensorflow as tf

from keras_moco.augment import draw_views, recolor_views, two_views
from keras_moco.data.decode import try_header
from keras_moco.data.encoded import StreamedImages
from keras_moco.data.images import Images
from keras_moco.data.passes import Passes, draw_order


def pretrain_dataset(
    images,
    preset,
    image_size=None,
    batch_size=256,
    seed=0,
    first_epoch=0,
    augment=None,
    share=(0, 1),
    steps_per_epoch=None,
):
    """Batches of two views of each image, newly drawn in every epoch.

    One pass over the dataset is one epoch; the next pass is the next epoch,
    in another order and with other views. Both depend on `seed`, the epoch and
    the image alone, not on threads, batches or what ran before. So a run may
    go on from any step: what comes before it is not read (of streamed data it
    is read, and not decoded).

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
        share: Pair of ints. Which consecutive share of every batch is wanted,
            and how many there are: the part of one of several machines.
            Defaults to (0, 1), the whole batch.
        steps_per_epoch: Int or None. Batches a pass; None takes all that the
            images give. Better than `take`, which drops an iterator whose
            threads still work: TensorFlow may wait for them forever then.

    Returns:
        `tf.data.Dataset` of (query, key, index): float32 (batch_size,
        image_size, image_size, 3) in [0, 1] twice, int64 (batch_size,). With
        `augment="device"` of (images, epoch, index): uint8 (batch_size,
        height, width, 3), int64 (batch_size,) twice. Its `len` is the number
        of steps an epoch. By its attribute `passes` a `Checkpoint` has it
        start within an epoch.

    Raises:
        ValueError: A batch larger than the data, or that cannot be shared;
            views on the device of images that are not held in memory.

    Example:
        >>> images = load_images("shapes", "pretrain")
        >>> pairs = pretrain_dataset(images, PRESETS["demo"], batch_size=128)
        >>> model.fit(pairs, epochs=10)
    """
    images = images if isinstance(images, Images) else Images(images)
    size = image_size or preset.image_size or natural_size(images)
    steps = num_steps(images, batch_size, steps_per_epoch)
    options = {"seed": seed, "image_size": size, "views": preset.views}
    number, shares = share
    if batch_size % shares:
        raise ValueError(
            f"`batch_size` must be a multiple of the {shares} shares. "
            f"Received: {batch_size}"
        )
    global_batch_size, batch_size = batch_size, batch_size // shares
    own = slice(number * batch_size, (number + 1) * batch_size)
    identity = {
        "images": images.fingerprint,
        "seed": seed,
        "batch_size": global_batch_size,
        "steps_per_epoch": steps,
    }
    names = functools.partial(_names, images, global_batch_size, seed)
    passes = Passes(first_epoch, steps, identity, names)
    draw = (global_batch_size, own, seed, passes)
    if images.array is not None:
        batches = shuffled_batches(len(images), *draw)
        views = _views_of_array(images, augment, options)
        pairs = batches.map(views, num_parallel_calls=threads())
    elif augment == "device":
        raise ValueError(
            "Views on the device need images of one size that fit into memory. "
            f"{images.source} has to be decoded file by file: leave them to "
            "the CPU."
        )
    else:
        if isinstance(images, StreamedImages):
            batches = _stream(images, *draw)
            batches = batches.batch(batch_size, drop_remainder=True)
        else:
            batches = shuffled_batches(len(images), *draw)
            batches = batches.map(
                lambda epoch, index: (epoch, index, read(images, index)),
                threads(),
            )
        pairs = _views_of_files(batches, images, batch_size, augment, options)

    def start_at(epoch, step):
        passes.place = epoch, step
        # The pass of a generator has no length of its own.
        length = tf.data.experimental.assert_cardinality(steps)
        dataset = passes.clocked(steady(pairs if step else pairs.apply(length)))
        dataset.passes = passes
        return dataset

    passes.start_at = start_at
    return start_at(first_epoch, 0)


def _names(images, batch_size, seed, epoch, step):
    """The names of the images of a batch; None of a stream."""
    if isinstance(images, StreamedImages):
        return None
    order = draw_order(seed, epoch, len(images))
    chosen = order[step * batch_size : (step + 1) * batch_size]
    return [images.name(index) for index in chosen]


def shuffled_batches(rows, batch_size, own, seed, passes):
    """(epoch, index) of the own part of each batch, in a global shuffle.

    Args:
        rows: Int, the number of images; or int array, the chosen ones.
        batch_size: Int. Of the global batch.
        own: Slice of it.
        seed: Int.
        passes: `Passes`.

    Returns:
        `tf.data.Dataset` of two int64 (images of the own part,).
    """

    def batches():
        epoch, first_step = passes.begin()
        order = draw_order(seed, epoch, rows)
        for step in range(first_step, passes.steps):
            chosen = order[step * batch_size : (step + 1) * batch_size][own]
            yield np.full_like(chosen, epoch), chosen

    batch = tf.TensorSpec((own.stop - own.start,), tf.int64)
    return tf.data.Dataset.from_generator(
        batches, output_signature=(batch, batch)
    )


def _stream(images, batch_size, own, seed, passes):
    """(epoch, index, content) of each image of the own part of each batch."""

    def stream():
        epoch, first_step = passes.begin()
        passing = images.open_stream(seed, epoch)
        passing = itertools.islice(
            passing, first_step * batch_size, passes.steps * batch_size
        )
        for place, (index, content) in enumerate(passing):
            if own.start <= place % batch_size < own.stop:
                yield epoch, index, content

    number = tf.TensorSpec((), tf.int64)
    return tf.data.Dataset.from_generator(
        stream, output_signature=(number, number, tf.TensorSpec((), tf.string))
    )


def _views_of_array(images, augment, options):
    def on_device(epoch, index):
        return take(images, index), epoch, index

    def own(epoch, index):
        return *_twice(augment, take(images, index)), index

    def preset(epoch, index):
        pixels = take(images, index)
        return *two_views(pixels, index, epoch[0], **options), index

    if augment is None:
        return preset
    return on_device if augment == "device" else own


def _views_of_files(batches, images, batch_size, augment, options):
    size, views = options["image_size"], options["views"]
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

    def recolored(cut, drawn, index):
        return *recolor_views(cut, drawn, views=views), index

    if augment:
        pairs = batches.unbatch().map(own, threads())
        return pairs.batch(batch_size, drop_remainder=True)
    crops = cut_views(batches, images, batch_size, **options)
    return crops.map(recolored, threads())


def cut_views(batches, images, batch_size, *, image_size, views, seed):
    """The crops of image files that their views begin with.

    Args:
        batches: `tf.data.Dataset` of (epoch, index, content), each of
            (batch_size,): int64, int64 and the bytes of the files.
        images: `EncodedImages`.
        batch_size: Int.
        image_size: Int.
        views: Tuple of `View`.
        seed: Int.

    Returns:
        `tf.data.Dataset` of (crops, drawn, index): a tuple of uint8
        (batch_size, image_size, image_size, 3), one a view; what was drawn for
        them, see `draw_views`; int64 (batch_size,).
    """

    def draw(epoch, index, content):
        shape = tf.numpy_function(_shapes, [content], tf.int32)
        shape = tf.ensure_shape(shape, (batch_size, 2))
        drawn = draw_views(
            index, epoch[0], *tf.unstack(shape, axis=1), seed=seed, views=views
        )
        return index, content, shape, drawn

    def cut(index, content, shape, drawn):
        boxes, flips = (
            tf.stack([view[name] for view in drawn]) for name in ("box", "flip")
        )
        crops = tf.numpy_function(
            images.decode_crops,
            [index, content, boxes, flips, image_size, shape],
            tf.uint8,
        )
        crops = tf.ensure_shape(crops, (len(views), image_size, image_size, 3))
        return tuple(tf.unstack(crops)), drawn, index

    one_by_one = batches.map(draw, threads()).unbatch().map(cut, threads())
    return one_by_one.batch(batch_size, drop_remainder=True)


def _twice(augment, images):
    """Two views by a function or layer of the user's own."""
    images = tf.cast(images, tf.float32) / 255.0
    return [augment(images) for _ in range(2)]


def num_steps(images, batch_size, steps_per_epoch=None):
    """Batches of a pass: those asked for, or all that the data hold.

    Raises:
        ValueError: The data hold no whole batch, or fewer than asked for.
    """
    if not 1 <= batch_size <= len(images):
        raise ValueError(
            "`batch_size` must be at least 1 and at most the number of images. "
            f"Received: batch_size={batch_size}, images={len(images)}. Give "
            "another with --batch-size"
        )
    steps = len(images) // batch_size
    if steps_per_epoch is None:
        return steps
    if not 1 <= steps_per_epoch <= steps:
        raise ValueError(
            f"`steps_per_epoch` must be at most {steps}, the batches of "
            f"{batch_size} in the data. Received: {steps_per_epoch}"
        )
    return steps_per_epoch


def natural_size(images):
    """The side of views if nobody says otherwise: the images', at most 224."""
    return min(224, *images.size) if images.size else 224


def threads():
    """Cores that this process may use."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # Not on macOS.
        return len(process.cpu_affinity())
    return psutil.cpu_count()


def steady(dataset):
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


def take(images, index):
    """The images (batch, height, width, 3) of a batch of numbers, uint8."""
    # Through NumPy: a tensor of all images would be a second copy of them.
    batch = tf.numpy_function(images.array.__getitem__, [index], tf.uint8)
    return tf.ensure_shape(batch, (*index.shape, *images.array.shape[1:]))


def read(images, index):
    """The bytes of the files of a batch of numbers, strings (batch,)."""

    def read_all(index):
        return np.array([images.read(i) for i in index.tolist()], object)

    content = tf.numpy_function(read_all, [index], tf.string)
    return tf.ensure_shape(content, index.shape)


def _shapes(contents):
    """`(H, W)` of encoded images; what is broken counts as one pixel."""
    return np.int32([try_header(content) or (1, 1) for content in contents])


@atexit.register
def _end_passes():
    """Ends the passes that a program leaves unfinished.

    Their threads call Python. While the interpreter shuts down they would wait
    for it and it for them, forever (TensorFlow 2.21).
    """
    for thing in gc.get_objects():
        if issubclass(type(thing), tf.data.Iterator):
            vars(thing).clear()
