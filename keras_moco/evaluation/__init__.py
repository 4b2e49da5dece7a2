"""Is an encoder any good: features, kNN, probes, fine-tuning."""
