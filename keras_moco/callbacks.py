"""What happens around the steps of `fit`."""

import keras

from keras_moco.layers import average_statistics


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
        average_statistics(self.model)
