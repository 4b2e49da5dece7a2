"""How a run is going: its folder and log, TensorBoard, verdicts."""
