"""keras_moco: momentum contrast (MoCo) for Keras 3 and TensorFlow.

Names are imported on first use, so that the command line answers at once.
"""

import importlib
import sys

__version__ = "0.4.3"

_HOME = {
    "MoCo": "moco",
    "MemoryBank": "memory_bank",
    "MomentumUpdate": "callbacks",
    "WeightTrace": "callbacks",
    "PRESETS": "presets",
    "Preset": "presets",
    "STUDIES": "ablation",
    "Study": "ablation",
    "SGD": "optimizers",
    "LARS": "optimizers",
    "build_optimizer": "optimizers",
    "build_encoder": "encoders",
    "resnet": "encoders",
    "vit": "encoders",
    "projection_head": "encoders",
    "swap_batch_norm": "layers",
    "load_images": "data.sources",
    "pretrain_dataset": "data.pipeline",
    "labeled_dataset": "data.labeled",
    "labeled_images": "data.labeled",
    "labeled_splits": "data.labeled",
    "evaluation_size": "evaluation.extract",
    "linear_probe": "evaluation.probe",
    "probe_features": "evaluation.probe",
    "features": "evaluation.extract",
    "fit_classifier": "evaluation.classify",
    "Recipe": "evaluation.recipes",
    "LINEAR_PROBE": "evaluation.recipes",
    "FINETUNE": "evaluation.recipes",
    "save_results": "evaluation.results",
    "knn_accuracy": "evaluation.knn",
    "Checkpoint": "safety.checkpoint",
    "Guard": "safety.guards",
    "nearest": "evaluation.knn",
    "KNNMonitor": "evaluation.knn",
    "QualityMonitor": "monitoring.quality",
    "Verdict": "monitoring.verdict",
    "verdicts": "monitoring.verdict",
    "export_encoder": "export",
    "export_classifier": "export",
    "load_encoder": "load",
    "trained_image_size": "load",
    "pretrain": "pretraining",
}
__all__ = sorted(_HOME)


def __getattr__(name):
    if name in _HOME:
        module = importlib.import_module(f"keras_moco.{_HOME[name]}")
        return getattr(module, name)
    try:
        return importlib.import_module(f"keras_moco.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"keras_moco.{name}":
            raise
        raise AttributeError(
            f"module 'keras_moco' has no attribute {name!r}"
        ) from None


if "keras" in sys.modules:
    # Registers what saved models hold, for `keras.models.load_model`.
    from keras_moco import moco, optimizers  # noqa: F401


def __dir__():
    return __all__
