"""STL-10 from its original files, as downloaded, without TFDS.

The archive is `stl10_binary.tar.gz`; unpacked it is a folder `stl10_binary`
with `train_X.bin`, `train_y.bin`, `test_X.bin`, `test_y.bin`,
`unlabeled_X.bin`, `class_names.txt` and `fold_indices.txt`. An image is 3 x 96
x 96 bytes, each colour column by column; labels run from 1 to 10.
"""

import contextlib
import os
import pathlib
import tarfile

import numpy as np

from keras_moco.data.images import Images, MissingSplit

SIDE = 96
IMAGE_BYTES = 3 * SIDE * SIDE
CHUNK = 500  # Images read at a time: the unlabelled file has 2.7 GB.
FILES = {"pretrain": "unlabeled", "unlabelled": "unlabeled"}
NAMES = ("stl10_binary", "stl10_binary.tar.gz", "stl10_binary.tar")


def find_stl10(data_dir):
    """The original files under `data_dir`: a folder, an archive, or None.

    Args:
        data_dir: Str, path or None. `stl10_binary`, the archive itself, or
            the folder that holds one of them.
    """
    if data_dir is None:
        return None
    path = pathlib.Path(data_dir).expanduser()
    if path.is_file() or (path / "train_X.bin").is_file():
        return path
    found = [path / name for name in NAMES if (path / name).exists()]
    return found[0] if found else None


def load_stl10(path, split="train"):
    """Images of STL-10's original files.

    Args:
        path: What `find_stl10` found.
        split: "pretrain" (or "unlabelled"), "train" or "test".

    Returns:
        `Images` of 96 x 96; 100,000, 5,000 and 8,000 in the full data.

    Raises:
        ValueError: A file is missing or is not as long as it should be.

    Example:
        >>> load_stl10(find_stl10("downloads"), "train").class_names[0]
        'airplane'
    """
    stem = FILES.get(split, split)
    if stem not in ("unlabeled", "train", "test"):
        raise MissingSplit(
            "The splits of stl10 are pretrain (unlabelled), train and test. "
            f"Received: {split!r}"
        )
    wanted = [f"{stem}_X.bin"]
    if stem != "unlabeled":
        wanted += [f"{stem}_y.bin", "class_names.txt"]
    parts = dict(_read(path, wanted))
    for name in wanted:
        if name not in parts:
            raise ValueError(
                f"{path} has no {name}: expected the files of "
                "stl10_binary.tar.gz. Download it again or give TFDS' folder."
            )
    labels = class_names = None
    if stem != "unlabeled":
        labels = np.frombuffer(parts[f"{stem}_y.bin"], np.uint8).astype(int) - 1
        class_names = parts["class_names.txt"].decode().split()
        if len(labels) != len(parts[wanted[0]]) or labels.min() < 0:
            raise ValueError(
                f"{path} is damaged: {len(parts[wanted[0]])} images and "
                f"{len(labels)} labels from 1 in {stem}. Download it again."
            )
    array = parts[wanted[0]]
    return Images(
        array,
        labels,
        class_names,
        source="stl10",
        description=f"stl10 binary {stem} {len(array)}",
    )


def _read(path, wanted):
    """Yields (name, content) of the wanted files; images as an array."""
    with contextlib.ExitStack() as stack:
        try:
            if path.is_dir():
                for name in wanted:
                    if (path / name).is_file():
                        file = stack.enter_context(open(path / name, "rb"))
                        size = os.fstat(file.fileno()).st_size
                        yield name, _content(name, file, size)
                return
            archive = stack.enter_context(tarfile.open(path))
            left = set(wanted)
            for member in archive:  # In its order: a tar.gz cannot seek.
                name = pathlib.PurePosixPath(member.name).name
                if name in left and member.isfile():
                    file = archive.extractfile(member)
                    yield name, _content(name, file, member.size)
                    left.remove(name)
                if not left:
                    return
        except (tarfile.TarError, EOFError, OSError) as error:
            raise ValueError(
                f"{path} cannot be read ({error}). Expected the archive "
                "stl10_binary.tar.gz or its folder; download it again."
            ) from error


def _content(name, file, size):
    if not name.endswith("_X.bin"):
        return file.read()
    if size % IMAGE_BYTES or not size:
        raise ValueError(
            f"{name} has {size} bytes, which is no whole number of images of "
            f"{IMAGE_BYTES}. Download it again."
        )
    images = np.empty((size // IMAGE_BYTES, SIDE, SIDE, 3), np.uint8)
    for start in range(0, len(images), CHUNK):
        chunk = images[start : start + CHUNK]
        flat = np.frombuffer(file.read(len(chunk) * IMAGE_BYTES), np.uint8)
        # (image, colour, column, row) -> (image, row, column, colour)
        chunk[:] = flat.reshape(-1, 3, SIDE, SIDE).transpose(0, 3, 2, 1)
    return images
