"""Drawing of tokens on a GPU: its tensors, which the runtime fills, and its kernels."""
