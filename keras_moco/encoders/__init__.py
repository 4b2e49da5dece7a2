"""Encoders by name, and the heads on top of them."""

from keras_moco.encoders.catalogue import (
    build_encoder,
    check_name,
    describe,
    encoder_names,
)
from keras_moco.encoders.heads import (
    feature_dim,
    frozen_copy,
    projection_head,
)
from keras_moco.encoders.resnet import resnet
from keras_moco.encoders.vit import vit

__all__ = [
    "build_encoder",
    "check_name",
    "describe",
    "encoder_names",
    "feature_dim",
    "frozen_copy",
    "projection_head",
    "resnet",
    "vit",
]
