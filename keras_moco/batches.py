"""What a batch of `MoCo` must be, said in one line where it is not."""

import tensorflow as tf

from keras_moco.layers import check_groups


def check_views(query, key, index, needs_index):
    """Raises unless tensors are two views and, if needed, their numbers.

    Args:
        query: What comes first in a batch.
        key: What comes second, or None.
        index: What comes third, or None.
        needs_index: Bool.
    """
    if key is None:
        raise ValueError(
            "A batch must be (query, key) or (query, key, index): two "
            "views of each image, and its number if wanted."
        )
    if not query.dtype.is_floating:
        raise ValueError(
            "Views must be float images in [0, 1]. Received: "
            f"{query.dtype.name}. Divide by 255, or make them with "
            "`pretrain_dataset`."
        )
    same_rank = query.shape.rank == key.shape.rank
    if not (same_rank and query.shape[:1].is_compatible_with(key.shape[:1])):
        raise ValueError(
            "Query and key must be views of the same images. Received "
            f"arrays of shapes {query.shape} and {key.shape}; labels are "
            "no key."
        )
    if index is not None and not index.dtype.is_integer:
        raise ValueError(
            "The index of a batch must be the integer numbers of its "
            f"images. Received: {index.dtype.name}"
        )
    if needs_index and index is None:
        raise ValueError(
            "`mask_same_image=True` and a memory bank need batches of "
            "(query, key, index). Received batches of (query, key)."
        )


def check_sizes(spec, groups, replicas):
    """Raises unless all batches of a dataset can be shared out.

    Args:
        spec: The dataset's `element_spec`.
        groups: Int. Groups of batch normalisation.
        replicas: Int.
    """
    batch_size = tf.nest.flatten(spec)[0].shape[0]
    if batch_size is None:
        if groups == replicas == 1:
            return
        raise ValueError(
            "Batches must have a known size where several replicas or "
            "groups of batch normalisation share them: "
            "dataset.batch(size, drop_remainder=True)."
        )
    if batch_size % replicas:
        raise ValueError(
            f"A batch must be a multiple of the {replicas} replicas. "
            f"Received: {batch_size}"
        )
    check_groups(batch_size // replicas, groups)
