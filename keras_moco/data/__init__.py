"""Image sources and input pipelines."""
