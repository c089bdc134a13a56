"""Messages of the KServe v2 inference protocol, as Triton extends it."""
