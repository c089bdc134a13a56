"""The TensorRT targets."""
