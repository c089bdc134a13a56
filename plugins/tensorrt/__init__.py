"""TensorRT plugins and plans: the parts that builder and runtime share."""
