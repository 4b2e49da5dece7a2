"""Images addressable by index: the one interface to every data source."""

import hashlib

import numpy as np
import psutil


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
        broken_indices: Set of int. Images that another one stands in for.

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
        self.fingerprint = hashlib.sha256(
            description.encode(errors="surrogateescape")  # Names of files.
        ).hexdigest()[:12]
        self.broken = []
        self.broken_indices = set()
        self._names = names

    def __len__(self):
        return len(self.array)

    def __repr__(self):
        return f"<{type(self).__name__}: {len(self)} of {self.source}>"

    @property
    def kept(self):
        """Int array. The images that were not found broken so far."""
        return np.delete(np.arange(len(self)), sorted(self.broken_indices))

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

    def class_of(self, index):
        """The name or number of an image's class, as a str; None without."""
        if self.labels is None or self.labels[index] < 0:
            return None
        label = int(self.labels[index])
        return self.class_names[label] if self.class_names else str(label)

    def sample(self, count, seed):
        """Yields up to `count` pairs of index and image, drawn by `seed`."""
        order = np.random.default_rng(seed).permutation(len(self))
        for index in order[:count]:
            yield int(index), self.decode(index)

    def check(self):
        """Raises a ValueError if too many images were found broken."""


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
        numbers = class_numbers(bank.class_names, test.class_names)
        test.labels = np.append(numbers, -1)[test.labels]  # -1: unknown.
        test.class_names = bank.class_names
    return test


def class_numbers(known, names):
    """The place in `known` of each of `names`, int (names,)."""
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(
            "The test images have classes that the training images lack: "
            f"{', '.join(unknown)}. Expected the same class folders."
        )
    return np.array([known.index(name) for name in names])


class MissingSplit(ValueError):
    """The data has no such split."""


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
    return num_bytes <= psutil.virtual_memory().available / 2
