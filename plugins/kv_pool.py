"""The KV pool as operators see it: a region of the cache layout, in the shape of one entry."""

from trtc.plugins.op import Parameter

POOL_AXES = ("num_pages", "planes", "page_size", "num_kv_heads", "head_dim")
"""Plane 0 holds keys, plane 1 values."""
POOL_DTYPES = ("f32", "bf16", "f8e4m3")
POOL = Parameter("pool", POOL_AXES, POOL_DTYPES, role="pool")
POOL_OUT = Parameter("pool_out", POOL_AXES, POOL_DTYPES, role="pool")
LATENT_POOL_AXES = ("num_pages", "planes", "page_size", "latents", "width")
"""One plane with one latent of each token: `rank` elements, and those of the keys that rope turns
behind them."""
LATENT_POOL = Parameter("pool", LATENT_POOL_AXES, POOL_DTYPES, role="pool")
LATENT_POOL_OUT = Parameter("pool_out", LATENT_POOL_AXES, POOL_DTYPES, role="pool")
STATE_AXES = ("num_pages", "columns", "channels")
"""A convolution's state: its latest inputs, oldest first."""
STATE_DTYPES = ("f32", "bf16")
STATE = Parameter("state", STATE_AXES, STATE_DTYPES, role="pool")
STATE_OUT = Parameter("state_out", STATE_AXES, STATE_DTYPES, role="pool")
