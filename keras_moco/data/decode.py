"""From the bytes of a file to pixels: JPEG by TensorFlow, the rest by Pillow.

The content decides how, not the name. TensorFlow decodes just the window of a
JPEG that is needed; Pillow reads every other format and what TensorFlow's
decoder does not do (EXIF orientation, CMYK).
"""

import io
import itertools
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import tensorflow as tf
from PIL import Image, ImageOps

_EXIF_ORIENTATION = 0x0112
_TAIL = 1024  # Bytes behind which the end mark of a JPEG is looked for.


def try_header(item):
    """`(H, W)` as it will be decoded, or None if this is not a whole image.

    Args:
        item: Path or bytes. Only the header is read, and the end of a JPEG: a
            file that was cut off there is decoded to see what is left of it.
    """
    try:
        with _open(item) as image:
            size = _upright_size(image)
            whole = image.format != "JPEG" or _ends(item)
    except Exception:  # Pillow's decoders raise nearly anything on bad data
        return None
    return size if whole or try_decode(item) is not None else None


def try_decode(item, min_side=None):
    """Decodes a path or bytes: uint8 `(H, W, 3)`, or None if it is broken.

    Args:
        item: Path or bytes.
        min_side: Optional int. The shorter side that is enough: a JPEG may
            then be decoded at 1/2, 1/4 or 1/8 of its scale.
    """
    try:
        with _open(item) as image:
            orientation = _orientation(image)
            if min_side is not None:
                image.draft(None, (min_side, min_side))  # JPEG only
            image.load()
            if orientation != 1:
                image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I"):  # 16 bits: convert() would clip
                grey = np.clip(np.asarray(image, np.int64) >> 8, 0, 255)
                return np.repeat(np.uint8(grey)[..., None], 3, axis=2)
            image.info.pop("transparency", None)  # convert() warns of it
            return np.array(image.convert("RGB"))
    except Exception:  # Pillow's decoders raise nearly anything on bad data
        return None


def try_decode_boxes(content, boxes, size):
    """Decodes what several crops of one image need, at the scale they need.

    Args:
        content: Bytes of the file.
        boxes: Int array `(N, 4)`: top, left, height, width of each crop.
        size: Int. Side that the crops are resized to. JPEGs are decoded at
            1/2, 1/4 or 1/8 where every box still has as many pixels.

    Returns:
        Pair of a uint8 array `(H, W, 3)`, the whole image or the window
        around the boxes, and the boxes in it, int32; None if it is broken.
    """
    try:
        with _open(content) as image:
            shape = _upright_size(image)
            by_window = (
                image.format == "JPEG"
                and image.mode in ("RGB", "L")
                and _orientation(image) == 1
            )
    except Exception:  # Pillow's decoders raise nearly anything on bad data
        return None
    enough = boxes[:, 2:].min() // size
    scale = max(s for s in (1, 2, 4, 8) if s <= max(enough, 1))
    if by_window:
        reduced = tuple(-(-side // scale) for side in shape)
        boxes = fit_boxes(boxes, shape, reduced)
        corner = boxes[:, :2].min(axis=0)
        window = (boxes[:, :2] + boxes[:, 2:]).max(axis=0) - corner
        try:
            image = tf.io.decode_and_crop_jpeg(
                content, (*corner, *window), channels=3, ratio=scale
            )
            return image.numpy(), boxes - np.int32((*corner, 0, 0))
        except tf.errors.InvalidArgumentError:
            return None
    image = try_decode(content, min(shape) // scale)
    if image is None:
        return None
    return image, fit_boxes(boxes, shape, image.shape[:2])


def fit_boxes(boxes, shape, new_shape):
    """Boxes of an image `shape` for the same image of another size, int32."""
    if tuple(shape) == tuple(new_shape):
        return np.int32(boxes)
    factor = np.tile(np.divide(new_shape, shape), 2)
    corner = np.floor(boxes * factor)[:, :2]
    corner = np.minimum(corner, np.subtract(new_shape, 1))
    length = np.maximum(np.round(boxes * factor)[:, 2:], 1)
    length = np.minimum(length, new_shape - corner)
    return np.int32(np.concatenate([corner, length], axis=1))


def resize_boxes(image, boxes, size):
    """Crops of a uint8 array `(H, W, 3)`: bilinear, antialiased, uint8.

    Args:
        image: uint8 array `(H, W, 3)`.
        boxes: Int array `(N, 4)`: top, left, height, width of each crop.
        size: Int. Side of the result.

    Returns:
        uint8 array `(N, size, size, 3)`.
    """
    image = Image.fromarray(image)
    crops = np.empty((len(boxes), size, size, 3), np.uint8)
    for crop, (top, left, height, width) in zip(crops, boxes, strict=True):
        box = image.crop((left, top, left + width, top + height))
        crop[:] = box.resize((size, size), Image.Resampling.BILINEAR)
    return crops


def _open(item):
    if isinstance(item, bytes):
        return Image.open(io.BytesIO(item))
    if not os.path.isfile(item):  # A pipe would be waited for.
        raise ValueError
    return Image.open(item)


def _upright_size(image):
    width, height = image.size
    return (width, height) if _orientation(image) >= 5 else (height, width)


def _orientation(image):
    # Pillow decodes a whole PNG in search of EXIF data after the pixels.
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return image.getexif().get(_EXIF_ORIENTATION, 1)


def _ends(item):
    """Whether the end mark of a JPEG is where it belongs."""
    if isinstance(item, bytes):
        return b"\xff\xd9" in item[-_TAIL:]
    with open(item, "rb") as file:
        file.seek(0, io.SEEK_END)
        file.seek(max(0, file.tell() - _TAIL))
        return b"\xff\xd9" in file.read()


def decode_all(items, size):
    """Decodes images of one size.

    Args:
        items: List of N paths or bytes objects.
        size: `(H, W)`.

    Returns:
        `(array, decoded)`: uint8 array `(M, H, W, 3)` of the M images that
        could be decoded and have this size; list of N bools, which ones.
    """
    array = np.empty((len(items), *size, 3), np.uint8)

    def decode_into(index):
        image = try_decode(items[index])
        if image is None or image.shape != array.shape[1:]:
            return False
        array[index] = image
        return True

    decoded = in_threads(decode_into, range(len(items)))
    return (array if all(decoded) else array[decoded]), decoded


def in_threads(function, items, chunk=64):
    """`list(map(function, items))` in threads, a chunk of items per task."""
    chunks = [items[i : i + chunk] for i in range(0, len(items), chunk)]
    with ThreadPoolExecutor() as pool:
        results = pool.map(
            lambda part: [function(item) for item in part], chunks
        )
        return list(itertools.chain.from_iterable(results))
