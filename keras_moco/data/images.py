"""Images addressable by index: the one interface to every data source."""

import hashlib
import io
import threading

import numpy as np
from PIL import Image, ImageOps

_EXIF_ORIENTATION = 0x0112


class Images:
    """Images held in one array, with labels and names where there are any.

    Attributes:
        array: uint8 NumPy array `(N, H, W, 3)`, or None if the images are
            decoded one at a time (see `EncodedImages`).
        labels: int64 NumPy array `(N,)`, or None.
        class_names: List of str, or None.
        size: `(H, W)` if all images have one size, else None.
        fingerprint: Short hex string that changes with the content.
        broken: List of str. Names of the files found broken so far.

    Args:
        array: uint8 array `(N, H, W, 3)`; grey `(N, H, W)` and `(N, H, W, 1)`
            are repeated to three channels.
        labels: Optional integers `(N,)`.
        class_names: Optional list of str.
        names: Optional list of N file names. Defaults to `source[i]`.
        source: Str. Where the images come from. Defaults to "array".
        description: Str that identifies the content, for `fingerprint`.
            Defaults to a digest of the pixels.

    Raises:
        ValueError: If `array` is not made of uint8 images, or `labels` has
            another length.

    Example:
    ```python
    images = Images(np.zeros((10, 32, 32, 3), "uint8"))
    print(len(images), images.size, images.name(3))  # 10 (32, 32) array[3]
    ```
    """

    def __init__(
        self,
        array,
        labels=None,
        class_names=None,
        names=None,
        source="array",
        description=None,
    ):
        self.array = _as_rgb(array)
        self.size = self.array.shape[1:3]
        description = description or (
            f"{self.array.shape} {hashlib.sha256(self.array).hexdigest()}"
        )
        self._describe(labels, class_names, names, source, description)

    def _describe(
        self,
        labels=None,
        class_names=None,
        names=None,
        source="images",
        description="",
    ):
        if labels is not None:
            labels = np.asarray(labels, np.int64)
            if labels.shape != (len(self),):
                raise ValueError(
                    f"`labels` must have shape ({len(self)},), one per image. "
                    f"Received: labels.shape={labels.shape}"
                )
        self.labels = labels
        self.class_names = None if class_names is None else list(class_names)
        self.source = source
        self.fingerprint = hashlib.sha256(description.encode()).hexdigest()[:12]
        self.broken = []
        self._names = names

    def __len__(self):
        return len(self.array)

    def __repr__(self):
        return f"<{type(self).__name__}: {len(self)} of {self.source}>"

    def name(self, index):
        """File name of image `index`, or `source[index]`."""
        return self._names[index] if self._names else f"{self.source}[{index}]"

    def decode(self, index, min_side=None):
        """One image, uint8 `(H, W, 3)`.

        Args:
            index: Int in [0, N).
            min_side: Optional int. The shorter side that is enough for the
                caller: a JPEG file may then be decoded at 1/2, 1/4 or 1/8 of
                its scale. Ignored where the image is already decoded.
        """
        del min_side
        return self.array[index]

    def check(self):
        """Raises a ValueError if too many images were found broken."""


class EncodedImages(Images):
    """Images that are files or encoded bytes, decoded on demand.

    If an image turns out to be broken, `decode` gives the next one that is not
    (index + 1, ..., from 0 after the last), adds its name to `broken` and goes
    on until more than the allowed share is broken.

    Args:
        items: List of N paths or of N bytes objects, in any format that Pillow
            reads.
        size: `(H, W)` if all images are known to have one size, else None.
        labels, class_names, names, source, description: As for `Images`.
        broken: Tuple of names already found broken, and not in `items`.
            Defaults to ().
        max_broken: Float in [0, 1]. Share of all files that may be broken.
            Defaults to 0.01.
    """

    array = None

    def __init__(
        self, items, size=None, *, broken=(), max_broken=0.01, **about
    ):
        self._items = items
        self.size = size
        self._describe(**about)
        self.broken.extend(broken)
        self.max_broken = max_broken
        self._num_found = len(items) + len(broken)
        self._broken_indices = set()
        self._lock = threading.Lock()

    def __len__(self):
        return len(self._items)

    def check(self):
        check_broken(self.broken, self._num_found, self.max_broken)

    def decode(self, index, min_side=None):  # noqa: D102 (inherited)
        for step in range(len(self)):
            candidate = (index + step) % len(self)
            if candidate in self._broken_indices:
                continue
            image = try_decode(self._items[candidate], min_side)
            if image is not None:
                return image
            with self._lock:
                if candidate not in self._broken_indices:
                    self._broken_indices.add(candidate)
                    self.broken.append(self.name(candidate))
            self.check()
        raise ValueError(f"None of the {len(self)} images can be decoded.")


def match_classes(bank, test):
    """Labels test images by the classes of the bank, by name.

    Class folders are numbered in each split apart, so the numbers may differ.

    Args:
        bank: Labelled `Images`.
        test: Labelled `Images`.

    Returns:
        `test`, with the bank's labels.

    Raises:
        ValueError: `test` has classes that the bank lacks.
    """
    if bank.class_names and test.class_names:
        unknown = sorted(set(test.class_names) - set(bank.class_names))
        if unknown:
            raise ValueError(
                "The test images have classes that the training images lack: "
                f"{', '.join(unknown)}. Expected the same class folders."
            )
        numbers = [bank.class_names.index(name) for name in test.class_names]
        test.labels = np.array(numbers)[test.labels]
        test.class_names = bank.class_names
    return test


class MissingSplit(ValueError):
    """The data has no such split."""


def check_broken(broken, num_found, max_broken):
    """Raises a ValueError if too large a share of the files is broken."""
    if len(broken) <= max_broken * num_found and len(broken) < num_found:
        return
    shown = ", ".join(broken[:10]) + (", ..." if len(broken) > 10 else "")
    share = np.ceil(100 * len(broken) / num_found) / 100
    advice = (
        "None is left; give a folder with readable images."
        if len(broken) == num_found
        else f"Repair or remove them, or allow more: --max-broken {share:g}"
    )
    raise ValueError(
        f"{len(broken)} of {num_found} image files are broken ({shown}), but "
        f"the share allowed is {max_broken:g}. {advice}"
    )


def try_header(item):
    """`(H, W)` as it will be decoded, or None if this is not an image."""
    try:
        with _open(item) as image:
            width, height = image.size
            turned = _orientation(image) >= 5
            return (width, height) if turned else (height, width)
    except Exception:  # Pillow's decoders raise nearly anything on bad data
        return None


def try_decode(item, min_side=None):
    """Decodes a path or bytes: uint8 `(H, W, 3)`, or None if it is broken."""
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
                return _as_rgb(np.uint8(grey)[None])[0]
            image.info.pop("transparency", None)  # convert() warns of it
            return np.array(image.convert("RGB"))
    except Exception:  # Pillow's decoders raise nearly anything on bad data
        return None


def _open(item):
    return Image.open(io.BytesIO(item) if isinstance(item, bytes) else item)


def _orientation(image):
    # Pillow decodes a whole PNG in search of EXIF data after the pixels.
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    return image.getexif().get(_EXIF_ORIENTATION, 1)


def _as_rgb(array):
    shape = getattr(array, "shape", None)
    good = (
        isinstance(array, np.ndarray)
        and array.dtype == np.uint8
        and (array.ndim == 3 or (array.ndim == 4 and shape[3] in (1, 3)))
        and array.size > 0
    )
    if not good:
        raise ValueError(
            "An array of images must be uint8 NumPy of shape (N, H, W, 3), "
            "(N, H, W, 1) or (N, H, W), values 0 to 255, N at least 1. "
            f"Received: {type(array).__name__}, shape={shape}, "
            f"dtype={getattr(array, 'dtype', None)}"
        )
    if array.ndim == 3:
        array = array[..., None]
    if array.shape[3] == 1:
        array = np.repeat(array, 3, axis=3)
    return np.ascontiguousarray(array)


def fits_in_memory(num_bytes):
    """Whether `num_bytes` are at most half of the memory that is free now."""
    import psutil  # tensorflow-datasets depends on it

    return num_bytes <= psutil.virtual_memory().available / 2
