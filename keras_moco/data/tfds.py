"""Datasets of the tensorflow-datasets catalogue."""

import collections.abc
import contextlib
import difflib
import functools
import hashlib
import io
import logging

import numpy as np
import psutil

from keras_moco.data.decode import decode_all
from keras_moco.data.encoded import EncodedImages, StreamedImages
from keras_moco.data.images import Images, MissingSplit, fits_in_memory

# Names for purposes where a dataset's own are other than "train" and "test".
_SPLITS = {
    "stl10": {"pretrain": "unlabelled"},
    "imagenet2012": {"test": "validation"},  # its test split has no labels
}
_BATCH = 256


def load_tfds(name, split="train", data_dir=None):
    """Images of a TFDS dataset, held in memory where they fit.

    Images of one size are decoded; others, and those that would then take more
    than half of the free memory, stay encoded. What does not fit encoded either
    is read without labels: at random if TFDS has prepared it as ArrayRecord
    (`tfds build --file_format=array_record`), else as a stream.

    Args:
        name: Str as TFDS takes it: "cifar10", "emnist/letters", "mnist:3.*.*".
        split: Str. "pretrain" (the unlabelled split where there is one, else
            "train"), "train", "test" ("validation" where there is no "test"),
            or any split that TFDS takes, as "train[:1000]". Defaults to
            "train".
        data_dir: Optional path of TFDS' data folder. Defaults to TFDS' own.

    Returns:
        `Images` with labels if the dataset has a `label` feature of classes
        and the split is labelled.

    Raises:
        ValueError: If the dataset or split is unknown, has no image feature,
            or cannot be downloaded.
    """
    import tensorflow_datasets as tfds

    with _quiet(tfds):
        builder = _builder(tfds, name, data_dir)
        prepared = builder.is_prepared()
    if not prepared:
        size = builder.info.download_size
        what = f"{name} ({size})" if size else name
        print(f"TFDS downloads and prepares {what}, this once.")
    with _quiet(tfds):
        _prepare(tfds, builder, data_dir)
        return _read(tfds, builder, name, split)


def nearest_names(name):
    """Up to three names of datasets like `name`, "shapes" included."""
    import tensorflow_datasets as tfds

    known = [*tfds.list_builders(with_community_datasets=False), "shapes"]
    return difflib.get_close_matches(name.lower(), known, n=3, cutoff=0.5)


def is_tfds_name(name):
    """Whether `name`, without its configuration and version, is in TFDS."""
    import tensorflow_datasets as tfds

    base = name.split("/")[0].split(":")[0]
    return base in tfds.list_builders(with_community_datasets=False)


def _read(tfds, builder, name, split):
    split = _split_name(builder, split)
    info = builder.info.splits[split]
    image_key, label_key = _feature_keys(tfds, builder)
    shape = builder.info.features[image_key].shape
    wanted = {key: True for key in (image_key, label_key) if key}
    keep_encoded = (
        None in shape
        or builder.info.features[image_key].np_dtype != np.uint8
        or not fits_in_memory(info.num_examples * shape[0] * shape[1] * 3)
    )
    names = builder.info.features[label_key].names if label_key else None
    about = dict(
        source=name,
        description=f"{builder.info.full_name} {split} {info.num_examples}",
    )
    beyond_memory = keep_encoded and not fits_in_memory(info.num_bytes)
    if builder.info.file_format is tfds.core.FileFormat.ARRAY_RECORD:
        records = _Records(tfds, builder, split, image_key)
        if beyond_memory:
            return EncodedImages(records, **about)
        contents = list(records)
        about.update(_labels(records.integers(label_key), names))
        if keep_encoded:
            return EncodedImages(contents, **about)
        return Images(decode_all(contents, shape[:2])[0], **about)
    skip = {image_key: tfds.decode.SkipDecoding()} if keep_encoded else {}
    decoders = tfds.decode.PartialDecoding(wanted, decoders=skip)
    if beyond_memory:
        num_shuffled = _num_shuffled(info)
        return StreamedImages(
            functools.partial(
                _stream,
                functools.partial(builder.as_dataset, split, decoders=decoders),
                image_key,
                num_shuffled,
            ),
            info.num_examples,
            num_shuffled,
            **about,
        )
    dataset = builder.as_dataset(
        split=split,
        decoders=decoders,
        read_config=tfds.ReadConfig(try_autocache=False),
    )
    images, labels = [], []
    if not keep_encoded:
        images = np.empty((info.num_examples, *shape[:2], 3), np.uint8)
    start = 0
    for batch in tfds.as_numpy(dataset.batch(_BATCH)):
        image = batch[image_key]
        if keep_encoded:
            images.extend(image)
        else:  # grey spreads to three channels, alpha is dropped
            images[start : start + len(image)] = image[..., :3]
            start += len(image)
        labels.extend(batch[label_key] if label_key else [])
    about.update(_labels(labels, names))
    if keep_encoded:
        return EncodedImages(images, **about)
    return Images(images, **about)


def _labels(labels, names):
    """Labels and class names, if there are any; -1 stands for unknown."""
    if not labels or min(labels) < 0:
        return {}
    return {"labels": labels, "class_names": names}


class _Records(collections.abc.Sequence):
    """The encoded images of an ArrayRecord split, each read when asked for."""

    def __init__(self, tfds, builder, split, image_key):
        self._examples = builder.as_data_source(
            split,
            deserialize_method=tfds.decode.DeserializeMethod.DESERIALIZE_NO_DECODE,
        )
        self._image_key = image_key

    def __len__(self):
        return len(self._examples)

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError(index)  # What ends a loop; TFDS' is another one.
        features = self._examples[index].features.feature
        return features[self._image_key].bytes_list.value[0]

    def integers(self, key):
        """A feature of all examples; [] if there is no such feature."""
        if key is None:
            return []
        return [
            example.features.feature[key].int64_list.value[0]
            for example in self._examples
        ]


def _stream(as_dataset, image_key, num_shuffled, seed, epoch):
    """Yields number and bytes of all images, in the order of this epoch."""
    import tensorflow_datasets as tfds

    first, second = np.random.SeedSequence([seed, epoch]).generate_state(2)
    dataset = as_dataset(
        shuffle_files=True,
        read_config=tfds.ReadConfig(
            shuffle_seed=int(first), try_autocache=False, add_tfds_id=True
        ),
    )
    for example in dataset.shuffle(num_shuffled, int(second)):
        # The place in its file is what an example is known by everywhere.
        name = hashlib.sha256(example["tfds_id"].numpy()).digest()
        number = int.from_bytes(name[:8], "big") >> 1
        yield number, example[image_key].numpy()


def _num_shuffled(info):
    """As many images as fit into a sixteenth of the memory, encoded.

    Not of what is free: a run that goes on has to shuffle as before.
    """
    size = max(1, info.num_bytes // info.num_examples)
    share = psutil.virtual_memory().total // 16
    return int(min(info.num_examples, max(1000, share // size)))


@contextlib.contextmanager
def _quiet(tfds):
    """TFDS and what it calls write nothing to the terminal, and give up."""
    from tensorflow_datasets.core.download import downloader

    tfds.disable_progress_bar()
    # Its 10 retries take over three minutes where there is no network.
    downloader.MAX_RETRIES = 5
    loggers = [logging.getLogger(name) for name in ("absl", "urllib3")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _builder(tfds, name, data_dir):
    try:
        return tfds.builder(name, data_dir=data_dir, try_gcs=False)
    except Exception as error:  # ValueError, TypeError, AssertionError, ...
        raise ValueError(
            f"TFDS does not accept the name {name!r}: {_first_line(error)}"
        ) from error


def _prepare(tfds, builder, data_dir):
    where = f"--data-dir {data_dir}" if data_dir else "TFDS' own folder"
    try:
        builder.download_and_prepare(
            download_config=tfds.download.DownloadConfig(try_download_gcs=False)
        )
    except Exception as error:  # network, disk, checksum, manual download
        raise ValueError(
            f"TFDS could not download or prepare {builder.name} "
            f"({_first_line(error)}). Looked in {where}. Check the network, "
            "or prepare it where there "
            "is one and copy it: --data-dir FOLDER, where FOLDER holds "
            f"{builder.name}/, or the downloaded files in downloads/manual/"
        ) from error


def _first_line(error):
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]


def _split_name(builder, split):
    splits = builder.info.splits
    purposes = _SPLITS.get(builder.name, {})
    candidates = [purposes.get(split, split)]
    if split == "pretrain":
        candidates.append("train")
    if split == "test":
        candidates.append("validation")
    for candidate in candidates:
        try:
            if splits[candidate].num_examples:
                return candidate
        except (KeyError, ValueError):  # unknown, or not understood
            continue
    raise MissingSplit(
        f"{builder.name} has no images in a split {split!r}. "
        f"It has: {', '.join(sorted(splits))}"
    )


def _feature_keys(tfds, builder):
    """`(image key, label key or None)`."""
    features = builder.info.features
    images = [
        key
        for key in features
        if isinstance(features[key], tfds.features.Image)
    ]
    if not images:
        raise ValueError(
            f"{builder.name} is not a dataset of images. Its features are: "
            f"{', '.join(sorted(features))}"
        )
    label = "label" if "label" in features else None
    if label and not isinstance(features[label], tfds.features.ClassLabel):
        label = None
    return ("image" if "image" in images else images[0]), label
