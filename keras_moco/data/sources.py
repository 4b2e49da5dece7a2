"""`load_images`: one function for every source of images."""

import os

import numpy as np

from keras_moco.data.folder import load_folder
from keras_moco.data.images import Images
from keras_moco.data.shapes import CLASS_NAMES, make_shapes
from keras_moco.data.stl10 import find_stl10, load_stl10
from keras_moco.data.tfds import is_tfds_name, load_tfds, nearest_names

_SHAPES_COUNTS = {"pretrain": 8000, "train": 8000, "test": 2000}


def load_images(
    source,
    split="train",
    *,
    data_dir=None,
    max_broken=0.01,
    image_size=32,
    count=None,
    seed=0,
):
    """Images from the built-in shapes, TFDS, folders or an array.

    Args:
        source: One of
            - "shapes", the built-in images (see `make_shapes`);
            - a folder, searched through, with or without class folders (an
              existing path goes before a TFDS name);
            - a name of TFDS, as "stl10" or "emnist/letters";
            - a list of folders and files;
            - a uint8 NumPy array `(N, H, W, 3)`, or grey.
        split: Str. By purpose: "pretrain" (for training without labels: the
            unlabelled split where there is one, else "train"), "train" (the
            labelled bank) or "test" (its queries). A folder may have them as
            sub-folders; TFDS' own split names are taken too, as
            "train[:1000]". Ignored for an array. Defaults to "train".
        data_dir: Optional path. TFDS' data folder, by default its own; for
            "stl10" also the folder of `stl10_binary.tar.gz`, unpacked or not.
        max_broken: Float in [0, 1]. Share of a folder's files that may be
            broken; they are skipped and named in `.broken`. Defaults to 0.01.
        image_size: Int. Side in pixels, of "shapes" only. Defaults to 32.
        count: Optional int. Number of images, of "shapes" only. Defaults to
            8000 (2000 for "test").
        seed: Int. Of "shapes" only. Defaults to 0.

    Returns:
        `Images`.

    Raises:
        ValueError: In one line, if the source is unknown, empty, unreadable,
            broken beyond `max_broken`, or lacks the split.

    Example:
    ```python
    images = load_images("shapes", count=1000)
    print(images.array.shape, images.class_names[images.labels[0]])
    photos = load_images(["holiday", "work/scans"], max_broken=0.05)
    ```
    """
    if not 0 <= max_broken <= 1:
        raise ValueError(
            "`max_broken` is a share and must be in [0, 1]. "
            f"Received: max_broken={max_broken}"
        )
    if isinstance(source, np.ndarray):
        return Images(source)
    if isinstance(source, (list, tuple)) and len(source) == 1:
        (source,) = source
    several = source if isinstance(source, (list, tuple)) else [source]
    if not several or not all(
        isinstance(path, (str, os.PathLike)) and str(path) for path in several
    ):
        raise ValueError(
            "Expected `shapes`, a TFDS name, a folder, a list of folders or a "
            f"uint8 array. Received: {type(source).__name__} {source!r:.80}"
        )
    if isinstance(source, (list, tuple)):
        return load_folder(source, split, max_broken)
    if source == "shapes":
        return _load_shapes(split, image_size, count, seed)
    if os.path.exists(os.path.expanduser(source)):
        return load_folder([source], split, max_broken)
    name = str(source)
    original = find_stl10(data_dir) if name == "stl10" else None
    if original:
        return load_stl10(original, split)
    if is_tfds_name(name):
        return load_tfds(name, split, data_dir)
    near = nearest_names(name)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    raise ValueError(
        f"Unknown dataset {name!r}: there is no such folder and no such name "
        f"in TFDS. {hint}Expected `shapes`, a folder, or a name listed at "
        "https://www.tensorflow.org/datasets"
    )


def _load_shapes(split, image_size, count, seed):
    if split not in _SHAPES_COUNTS:
        raise ValueError(
            "The splits of `shapes` are pretrain, train and test (and `count` "
            f"sets the number of images). Received: split={split!r}"
        )
    count = _SHAPES_COUNTS[split] if count is None else count
    # Even seeds train, odd ones test: never an image in common.
    stream = 2 * seed + (split == "test")
    array, labels = make_shapes(count, image_size, stream)
    return Images(
        array,
        labels,
        CLASS_NAMES,
        source="shapes",
        # 1 is the version of the drawing: raise it when the pixels change.
        description=f"shapes 1 {stream} {count} {image_size}",
    )
