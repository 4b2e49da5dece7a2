"""Which devices a run takes, and what the method needs of the others."""

import json
import os
import socket

import tensorflow as tf


class WorkerLost(ConnectionError):
    """Another machine of this run does not answer any more."""


def choose_strategy(devices="auto", worker_timeout=60):
    """The strategy of a run: none, several devices, or several machines.

    Where the environment variable TF_CONFIG names a cluster, it is
    `MultiWorkerMirroredStrategy` over all devices of all machines, and must
    be made before TensorFlow computes anything. Inside the scope of a strategy
    it is that one.

    Args:
        devices: "auto" (all GPUs, else the CPU), "cpu", "all" (all GPUs, or
            all logical CPUs where there is no GPU), or how many of these.
        worker_timeout: Seconds after which a machine that does not answer is
            given up. Defaults to 60.

    Returns:
        `tf.distribute.Strategy`; the default one on one device.

    Raises:
        ValueError: In one line: more devices than there are, a malformed
            TF_CONFIG, or a port that is taken.

    Example:
        >>> with choose_strategy(devices=2).scope():
        ...     model = MoCo.from_preset(preset, encoder)
    """
    if tf.distribute.has_strategy():
        return tf.distribute.get_strategy()
    if os.environ.get("TF_CONFIG"):
        return _over_machines(os.environ["TF_CONFIG"], worker_timeout)
    if devices == "cpu":
        tf.config.set_visible_devices([], "GPU")
    gpus = tf.config.list_logical_devices("GPU")
    there = gpus or tf.config.list_logical_devices("CPU")
    counts = {"auto": len(gpus) or 1, "cpu": 1, "all": len(there)}
    count = counts.get(devices, devices)
    if not str(count).isdigit() or not 1 <= int(count) <= len(there):
        kind = "GPUs" if gpus else "logical CPUs"
        raise ValueError(
            "`devices` must be auto, cpu, all, or a number up to "
            f"{len(there)}, the {kind} there are. Received: {devices!r}"
        )
    if int(count) == 1:
        return tf.distribute.get_strategy()
    names = [device.name for device in there[: int(count)]]
    return tf.distribute.MirroredStrategy(names)


def split_cpu(count):
    """Splits the CPU into logical devices, to try several without a GPU.

    Args:
        count: Int in 1..256. To be called before TensorFlow computes anything.

    Example:
        >>> split_cpu(2)
        >>> strategy = choose_strategy("all")
    """
    if not 1 <= count <= 256:
        raise ValueError(f"There must be 1 to 256 CPUs. Received: {count}")
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * count
    tf.config.set_logical_device_configuration(cpu, parts)


def is_chief(strategy):
    """Whether this process is the one that writes, of those of a strategy."""
    if not over_machines(strategy):
        return True
    cluster = strategy.cluster_resolver
    if cluster.task_type == "chief":
        return True
    has_chief = "chief" in cluster.cluster_spec().jobs
    return not has_chief and cluster.task_id == 0


def over_machines(strategy):
    """Whether a strategy goes over several processes."""
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def distribute_batches(strategy, make_dataset, batch_size):
    """Gives each process its own share of every batch.

    Args:
        strategy: `tf.distribute.MultiWorkerMirroredStrategy`.
        make_dataset: Function of (share, shares) -> `tf.data.Dataset` of that
            consecutive share of every batch.
        batch_size: Int. Of the global batch.
    """

    def dataset_fn(context):
        dataset = make_dataset(
            context.input_pipeline_id, context.num_input_pipelines
        )
        each = context.get_per_replica_batch_size(batch_size)
        return dataset.rebatch(each, drop_remainder=True)

    return strategy.distribute_datasets_from_function(dataset_fn)


def agree(strategy, *facts):
    """Raises unless all processes of a strategy state the same facts.

    Args:
        strategy: `tf.distribute.Strategy`.
        *facts: JSON values, such as the settings of a run.
    """
    if not over_machines(strategy):
        return
    text = json.dumps(facts, sort_keys=True, default=str)
    number = tf.strings.to_hash_bucket_fast(text, 2**62)

    def everyone():
        return gather(tf.reshape(number, (1,)))

    numbers = strategy.run(tf.function(everyone))
    numbers = strategy.experimental_local_results(numbers)[0].numpy()
    if len(set(numbers.tolist())) > 1:
        raise ValueError(
            "The workers were started with different settings, or do not see "
            "the same run folder: give all of them the same command, and a "
            "--run-dir on a disk that they share."
        )


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
    # An argument of the step has no device of its own, which gathering needs.
    tensor = tf.identity(tensor)
    return tf.distribute.get_replica_context().all_gather(tensor, axis=0)


def first_row(tensor):
    """Where this replica's rows begin in what `gather` returns."""
    number = tf.distribute.get_replica_context().replica_id_in_sync_group
    if num_replicas() == 1 or tensor.shape[0] is not None:
        return number * tf.shape(tensor)[0]
    # The last batch of an array may fall into unequal shares.
    return tf.reduce_sum(gather(tf.shape(tensor)[:1])[:number])


def shuffle(tensor, step):
    """Deals the rows of all replicas anew, in an order of the step.

    Args:
        tensor: (batch, ...) of this replica.
        step: Int scalar tensor. All replicas draw the same order from it.

    Returns:
        Pair of this replica's new rows (batch, ...) and the order, for
        `unshuffle`.

    Reference:
        Shuffling BN, section 3.3 of He et al. 2019, arXiv:1911.05722.
    """
    everyone = gather(tensor)
    seed = (0, tf.cast(step, tf.int32))
    draws = tf.random.stateless_uniform(tf.shape(everyone)[:1], seed)
    order = tf.argsort(draws)
    return tf.gather(everyone, order[_own_rows(tensor)]), order


def unshuffle(tensor, order):
    """Puts the rows of `shuffle` back to where they came from."""
    return tf.gather(gather(tensor), tf.argsort(order)[_own_rows(tensor)])


def _own_rows(tensor):
    first = first_row(tensor)
    return slice(first, first + tf.shape(tensor)[0])


def _over_machines(text, worker_timeout):
    """`MultiWorkerMirroredStrategy` of a TF_CONFIG, checked first."""
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        address = cluster[task["type"]][int(task["index"])]
        host, port = address.rsplit(":", 1)
        port = int(port)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise ValueError(
            "TF_CONFIG is malformed. Expected, on the first of two machines: "
            '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": '
            f'{{"type": "worker", "index": 0}}}}. Received: {text!r:.200}'
        ) from error
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            raise ValueError(
                f"Port {port}, which TF_CONFIG gives to this worker "
                f"({address}), cannot be opened: {error.strerror}. Give "
                "another one to all workers."
            ) from error
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    # TensorFlow asks the others every 30 s and waits 3 times for 10 s.
    strategy.extended._check_health_interval = worker_timeout / 2
    strategy.extended._check_health_timeout = worker_timeout / 6
    return strategy
