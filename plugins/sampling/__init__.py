"""The GPU sampler: its tensors, which the runtime fills, and its kernels."""
