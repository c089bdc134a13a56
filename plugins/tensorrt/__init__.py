"""What TensorRT's plugins and plans need on the builder's side and the runtime's."""
