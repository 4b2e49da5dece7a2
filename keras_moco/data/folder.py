"""Folders and files of images."""

import os
import pathlib

import numpy as np

from keras_moco.data.decode import decode_all, in_threads, try_header
from keras_moco.data.encoded import EncodedImages, check_broken
from keras_moco.data.images import Images, MissingSplit, fits_in_memory

IMAGE_ENDINGS = tuple(
    ".jpg .jpeg .png .bmp .gif .webp .tif .tiff .ppm .pgm".split()
)
# The sub-folders that a split may be in, best first.
_SUBFOLDERS = {
    "pretrain": ("unlabelled", "unlabeled", "train"),
    "train": ("train",),
    "test": ("test", "val"),
}


def load_folder(paths, split="train", max_broken=0.01):
    """Images of folders (searched through) and of single files.

    Args:
        paths: List of paths of folders and files.
        split: Str. In a folder with `train` and `test` (or `val`) sub-folders
            it picks one of them; "pretrain" prefers `unlabelled` to `train`,
            any other name is that sub-folder's. A folder without them is all
            "train" (and "pretrain"). Defaults to "train".
        max_broken: Float in [0, 1]. Share of files that may be broken: these
            are left out and named in `.broken`. Defaults to 0.01.

    Returns:
        `Images`, in the order of the sorted names; decoded already if all have
        one size and fit into half of the free memory. Labels are the first
        level of folders, provided that every image is in one and that there
        are at least two.

    Raises:
        ValueError: If a path does not exist or cannot be read, the split or
            any image is missing, or too many files are broken.
    """
    found = []  # (path, path relative to its folder, class folder or None)
    for path in paths:
        found.extend(_find(os.path.expanduser(os.fspath(path)), split))
    # One name for "photos" and "photos/": a run is known by it.
    where = ", ".join(str(pathlib.PurePath(path)) for path in paths)
    if not found:
        raise ValueError(
            f"No images in {where}. Expected files that end in "
            f"{' '.join(IMAGE_ENDINGS)}, in any sub-folder."
        )
    sizes = in_threads(lambda file: try_header(file[0]), found)
    broken = [f[0] for f, s in zip(found, sizes, strict=True) if not s]
    check_broken(broken, len(found), max_broken)
    good = [f for f, size in zip(found, sizes, strict=True) if size]
    sizes = set(sizes) - {None}
    size = sizes.pop() if len(sizes) == 1 else None
    array = None
    if size and fits_in_memory(len(good) * size[0] * size[1] * 3):
        array, decoded = decode_all([file[0] for file in good], size)
        checked = list(zip(good, decoded, strict=True))
        broken += [f[0] for f, ok in checked if not ok]
        check_broken(broken, len(found), max_broken)
        good = [file for file, ok in checked if ok]
    labels, class_names = _labels([file[2] for file in good])
    names = [file[0] for file in good]
    about = dict(
        labels=labels,
        class_names=class_names,
        names=names,
        source=where,
        # Not the folder's own path: a copy elsewhere is the same data.
        description="\n".join(f"{f[1]} {os.path.getsize(f[0])}" for f in good),
    )
    if array is None:
        return EncodedImages(
            names, size, broken=broken, max_broken=max_broken, **about
        )
    images = Images(array, **about)
    images.broken.extend(broken)
    return images


def _find(path, split):
    """Triples (path, relative path, class folder or None) of the images."""
    if os.path.isfile(path):
        return [(path, os.path.basename(path), None)]
    if not os.path.isdir(path):
        found = "is neither" if os.path.lexists(path) else "does not exist"
        raise ValueError(
            f"Expected a folder of images or an image file, but {path} "
            f"{found}. Check the path."
        )
    try:
        root = _split_folder(path, split)
        files = sorted(_walk(root))
    except OSError as error:
        raise ValueError(
            f"The folder {error.filename or path} cannot be read "
            f"({error.strerror}). Change its permissions or leave it out."
        ) from error
    triples = []
    for parts in files:
        folder = parts[0] if len(parts) > 1 else None
        triples.append((os.path.join(root, *parts), "/".join(parts), folder))
    return triples


def _split_folder(path, split):
    with os.scandir(path) as entries:
        below = {entry.name for entry in entries if entry.is_dir()}
    wanted = _SUBFOLDERS.get(split, (split,))
    # `train` alone might be a class, beside `car` and `plane`.
    if "train" in below and below & {"test", "val"}:
        for name in wanted:
            if name in below:
                return os.path.join(path, name)
    elif split in ("pretrain", "train"):
        return os.path.join(path, "train") if below == {"train"} else path
    raise MissingSplit(
        f"{path} has no split {split!r}: expected a folder with the sub-folders"
        f" `train` and `{wanted[0]}`, found {sorted(below)[:10]}. Add what "
        "is missing, or give the folder that holds both."
    )


def _walk(root):
    """Yields the parts of each image's path relative to `root`."""

    def fail(error):
        raise error

    seen = set()  # links may lead back to a folder above
    for folder, below, files in os.walk(root, onerror=fail, followlinks=True):
        if os.path.realpath(folder) in seen:
            below.clear()
            continue
        seen.add(os.path.realpath(folder))
        below[:] = sorted(name for name in below if name[0] != ".")
        relative = os.path.relpath(folder, root)
        parts = () if relative == "." else tuple(relative.split(os.sep))
        for name in files:
            if name[0] != "." and name.lower().endswith(IMAGE_ENDINGS):
                yield (*parts, name)


def _labels(folders):
    class_names = sorted(set(folders) - {None})
    if None in folders or len(class_names) < 2:
        return None, None
    index = {name: label for label, name in enumerate(class_names)}
    # Names of folders need not be text; those of classes are for people.
    names = [os.fsencode(name).decode(errors="replace") for name in class_names]
    return np.array([index[name] for name in folders]), names
