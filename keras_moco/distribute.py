"""What the method needs to know of other replicas."""

import tensorflow as tf


def num_replicas():
    """Replicas that share each batch; 1 without a strategy."""
    return tf.distribute.get_strategy().num_replicas_in_sync


def gather(tensor):
    """Joins the rows of all replicas, in the same order on each of them.

    Args:
        tensor: (batch, ...) of this replica.

    Returns:
        (replicas * batch, ...); the tensor itself on one device.
    """
    if num_replicas() == 1:
        return tensor
    return tf.distribute.get_replica_context().all_gather(tensor, axis=0)


def first_row(tensor):
    """Where this replica's rows begin in what `gather` returns."""
    context = tf.distribute.get_replica_context()
    return context.replica_id_in_sync_group * tf.shape(tensor)[0]
