"""JSON files that runs and exports leave, read again with care."""

import json

# What of them is used again.
NUMBER = (int, float)
KINDS = {
    "settings": dict,
    "baselines": dict,
    "versions": dict,
    "precision": str,
    "data": str,
    "seed": int,
    "image_size": (int, type(None)),
    "queue_size": int,
    "batch_size": int,
    "epochs": int,
    "num_images": int,
    "steps_per_epoch": (int, type(None)),
    "export": str,
    "run": str,
    "loss": NUMBER,
    "seconds": NUMBER,
    "images_per_second": NUMBER,
    "peak_memory_mb": NUMBER,
    "knn_top1": NUMBER,
    "knn_top1_untrained": NUMBER,
    "knn_top1_pixels": NUMBER,
}


def read_json(path):
    """The object in a JSON file of ours.

    Raises:
        ValueError: No JSON, no object, or a value of another kind than we
            write.
    """
    content = json.loads(path.read_text())
    check_json(content)
    return content


def check_json(content):
    """Raises unless what is known of an object is of its kind."""
    if not isinstance(content, dict):
        raise ValueError("it holds no JSON object")
    for name, value in content.items():
        kind = KINDS.get(name, object)
        if not isinstance(value, kind) or (
            kind in (int, NUMBER) and isinstance(value, bool)
        ):
            raise ValueError(f"{name} is {value!r}")
        if kind is dict:
            check_json(value)
