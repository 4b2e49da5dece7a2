"""Programs on top of keras_moco, built only on what it offers to everyone."""
