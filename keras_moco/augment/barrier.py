"""A border that a compiler does not fuse across."""

import tensorflow as tf


def materialize_before(function, value, always_true):
    """`function(value)`, where a compiler computes `value` first.

    XLA on CPU fuses a producer into its consumer and so computes it again for
    each time it is read: once per tap of a filter, five times slower here. It
    does not fuse across the border of a branch.

    Args:
        function: Function of `value`.
        value: Tensor or structure of tensors that is costly to compute.
        always_true: Scalar bool tensor that is true, unknown to a compiler.

    Returns:
        `function(value)`.
    """

    def run():
        return function(value)

    # The other branch must differ, or the compiler removes both.
    return tf.cond(always_true, run, lambda: tf.zeros_like(run()))
