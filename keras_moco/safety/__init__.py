"""A run that cannot be lost: checkpoints, lock, signals, guards."""
