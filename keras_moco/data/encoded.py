"""Images that are decoded on demand: files, encoded bytes, streams."""

import itertools
import pathlib
import threading

import numpy as np

from keras_moco.data.decode import (
    fit_boxes,
    resize_boxes,
    try_decode,
    try_decode_boxes,
)
from keras_moco.data.images import Images


class EncodedImages(Images):
    """Images that are files or encoded bytes, decoded on demand.

    If an image turns out to be broken, the next one that is not stands in for
    it (index + 1, ..., from 0 after the last), its name is added to `broken`,
    and so on until more than the allowed share is broken.

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
        self._lock = threading.Lock()
        self._num_found = len(self) + len(broken)

    def __len__(self):
        return len(self._items)

    def check(self):
        check_broken(self.broken, self._num_found, self.max_broken)

    def decode(self, index, min_side=None):  # noqa: D102 (inherited)
        for step in range(len(self)):
            candidate = (index + step) % len(self)
            if candidate in self.broken_indices:
                continue
            image = try_decode(self._items[candidate], min_side)
            if image is not None:
                return image
            self._mark_broken(candidate)
        raise ValueError(f"None of the {len(self)} images can be decoded.")

    def read(self, index):
        """The bytes of image `index`; b"" if its file cannot be read."""
        item = self._items[index]
        try:
            return (
                item
                if isinstance(item, bytes)
                else pathlib.Path(item).read_bytes()
            )
        except OSError:
            return b""

    def decode_content(self, index, content, min_side=None):
        """`decode` of an image whose bytes are read already."""
        image = try_decode(content, min_side)
        if image is None:
            return self._stand_in(index, min_side)
        self._remember(image)
        return image

    def decode_crops(self, index, content, boxes, flips, size, shape):
        """Some crops of an image, resized as torchvision does on PIL images.

        Args:
            index: Int in [0, N).
            content: Bytes of the image.
            boxes: Int array `(N, 4)`: top, left, height and width of each
                crop, within `shape`.
            flips: Bool array `(N,)`. Which crops are mirrored.
            size: Int. Height and width of the result.
            shape: `(H, W)`, of `try_header`.

        Returns:
            uint8 array `(N, size, size, 3)`. If the image is broken, of the
            one that stands in for it.
        """
        found = try_decode_boxes(content, boxes, size)
        if found is None:
            image = self._stand_in(index)
            found = image, fit_boxes(boxes, shape, image.shape[:2])
        else:
            self._remember(found[0])
        crops = resize_boxes(*found, size)
        crops[flips] = crops[flips, :, ::-1]
        return crops

    def _remember(self, image):
        """Called with each image that could be decoded."""

    def _mark_broken(self, index):
        with self._lock:
            if index not in self.broken_indices:
                self.broken_indices.add(index)
                self.broken.append(self.name(index))
        self.check()

    def _stand_in(self, index, min_side=None):
        return self.decode(index, min_side)


class StreamedImages(EncodedImages):
    """Encoded images that pass by once an epoch, for data beyond the memory.

    They have no address: an index is a number of the image's own. For a broken
    one the image that was decoded before it stands in.

    Args:
        open_stream: Function of (seed, epoch) -> iterator over (index, bytes)
            of all images, shuffled.
        num_images: Int.
        num_shuffled: Int. Images that are shuffled at a time.
        source, description, max_broken: As for `EncodedImages`.
    """

    def __init__(self, open_stream, num_images, num_shuffled, **about):
        self._num_images = num_images
        self.open_stream = open_stream
        self.num_shuffled = num_shuffled
        self._last = None
        super().__init__((), **about)

    def __len__(self):
        return self._num_images

    def decode(self, index, min_side=None):
        """Not possible: raises a TypeError."""
        raise TypeError("Streamed images cannot be picked by index.")

    def sample(self, count, seed):  # noqa: D102 (inherited)
        decoded = (
            (index, try_decode(content))
            for index, content in self.open_stream(seed, 0)
        )
        good = (pair for pair in decoded if pair[1] is not None)
        return itertools.islice(good, count)

    def _remember(self, image):
        self._last = image

    def _stand_in(self, index, min_side=None):
        self._mark_broken(int(index))
        if self._last is None:
            self._last = next(self.sample(1, seed=0))[1]
        return self._last


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
