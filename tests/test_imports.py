"""The ladder: a module imports only from rows above its own."""

import ast
import pathlib
import subprocess
import sys

import keras_moco

PACKAGE = pathlib.Path(keras_moco.__file__).parent
LADDER = [
    "kinds",
    "outputs",
    "presets",
    "checks",
    "losses",
    "schedules",
    "average",
    "distribute",
    "queue",
    "memory_bank",
    "layers",
    "batches",
    "optimizers",
    "encoders",
    "augment",
    "data",
    "pictures",
    "preview",
    "callbacks",
    "safety",
    "moco",
    "notes",
    "export",
    "build",
    "bench",
    "terminal",
    "monitoring",
    "ablation",
    "doctor",
    "load",
    "evaluation",
    "pretraining",
    "errors",
    "options",
    "cli",
]


def imported_modules(path):
    """The keras_moco modules (first part of the name) that a file names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "keras_moco":
                names = [f"keras_moco.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {
            name.split(".")[1]
            for name in names
            if name.startswith("keras_moco.")
        }
    return found & set(LADDER)


def files():
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[0] != "__init__":
            yield parts[0], path


def test_every_module_has_its_rung():
    assert {rung for rung, _ in files()} == set(LADDER)


def test_imports_go_up_the_ladder_only():
    for rung, path in files():
        allowed = set(LADDER[: LADDER.index(rung) + 1])
        assert imported_modules(path) <= allowed, path


def test_public_names_are_there_and_documented():
    for name in keras_moco.__all__:
        assert getattr(keras_moco, name).__doc__ or name == "PRESETS", name


def test_unknown_name_is_an_attribute_error():
    assert not hasattr(keras_moco, "no_such_name")


def test_saved_models_load_after_importing_keras_and_the_package():
    code = (
        "import keras, keras_moco; "
        "print(keras.saving.get_registered_object('keras_moco>MoCo'), "
        "keras.saving.get_registered_object('keras_moco>SGD'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "None" not in done.stdout


def test_command_line_loads_nothing_heavy():
    code = (
        "import sys, keras_moco.cli; "
        "print({'keras', 'tensorflow', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
