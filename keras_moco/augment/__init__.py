"""Batched, stateless two-view augmentation with torchvision's semantics."""

from keras_moco.augment.blur import gaussian_blur
from keras_moco.augment.color import (
    adjust_brightness,
    adjust_contrast,
    adjust_hue,
    adjust_saturation,
    jitter,
    solarize,
    to_grayscale,
)
from keras_moco.augment.crop import crop
from keras_moco.augment.random import draw_parameters
from keras_moco.augment.views import (
    device_views,
    draw_views,
    recolor,
    recolor_views,
    two_views,
)

__all__ = [
    "adjust_brightness",
    "adjust_contrast",
    "adjust_hue",
    "adjust_saturation",
    "crop",
    "device_views",
    "draw_parameters",
    "draw_views",
    "gaussian_blur",
    "jitter",
    "recolor",
    "recolor_views",
    "solarize",
    "to_grayscale",
    "two_views",
]
