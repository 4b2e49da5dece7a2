"""What happens around the steps of `fit`."""

import keras

from keras_moco.evaluate import knn_accuracy


class MomentumUpdate(keras.callbacks.Callback):
    """Applies the momentum update after every training step.

    It owns the moment; the rule is `MoCo.update_key_encoder`. When Keras runs
    several steps in one call (`steps_per_execution`), batches end without a
    callback in between: the update is then placed inside the compiled step.
    At the end of an epoch it lets replicas share their batch statistics.

    Raises:
        ValueError: `steps_per_execution` above 1 on several replicas.

    Example:
        >>> model.fit(pairs, callbacks=[MomentumUpdate()])  # or without: the
        >>> model.fit(pairs)  # model adds it

    Reference:
        Eq. 2 of He et al. 2019, arXiv:1911.05722.
    """

    def set_model(self, model):
        super().set_model(model)
        in_step = model.steps_per_execution > 1
        replicas = model.distribute_strategy.num_replicas_in_sync
        if in_step and replicas > 1:
            raise ValueError(
                "`steps_per_execution` must be 1 on several replicas: Keras "
                "cannot run more inside one call there. Received: "
                f"steps_per_execution={model.steps_per_execution} on "
                f"{replicas} replicas"
            )
        if in_step != model.update_in_step:
            model.update_in_step = in_step
            model.train_function = None  # Traced for the other place.

    def on_train_batch_end(self, batch, logs=None):
        if not self.model.update_in_step:
            self.model.update_key_encoder()

    def on_epoch_end(self, epoch, logs=None):
        self.model.average_statistics()


class KNNMonitor(keras.callbacks.Callback):
    """Measures k-nearest-neighbour accuracy while the encoder learns.

    Adds `knn_top1` to the logs of the epoch, for the callbacks behind it.

    Args:
        bank: `tf.data.Dataset` of (images, labels) batches.
        queries: `tf.data.Dataset` of (images, labels) batches.
        every: Int >= 1. Epochs between measurements; the last epoch of `fit`
            is always measured. Defaults to 1.
        k: Int. Neighbours. Defaults to 200.
        temperature: Float. Of the votes. Defaults to 0.1.

    Example:
        >>> monitor = KNNMonitor(bank, test, every=10)
        >>> history = model.fit(pairs, epochs=200, callbacks=[monitor])
        >>> history.history["knn_top1"]

    Reference:
        Wu et al. 2018, arXiv:1805.01978, section 3.4.
    """

    def __init__(self, bank, queries, every=1, k=200, temperature=0.1):
        super().__init__()
        if every < 1:
            raise ValueError(f"`every` must be at least 1. Received: {every}")
        self.bank = bank
        self.queries = queries
        self.every = every
        self.k = k
        self.temperature = temperature

    def on_epoch_end(self, epoch, logs=None):
        last = epoch + 1 == self.params.get("epochs")
        if (epoch + 1) % self.every == 0 or last:
            logs["knn_top1"] = knn_accuracy(
                self.model.encoder,
                self.bank,
                self.queries,
                self.k,
                self.temperature,
            )
