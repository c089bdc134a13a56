"""Checkpoints that have the experts of a layer in two tensors, by the tensors' names.

They are [E, 2 * I, H], gate's rows first, and [E, H, I]. Names are within the module of the router
and the experts; experts with tensors of their own are `experts.0.gate_proj`, `up_proj` and so on.
"""

FUSED_EXPERTS = (
    ("experts.gate_up_proj", "experts.down_proj"),
    ("input_linear.weight", "output_linear.weight"),
)
"""Newer Transformers, Qwen3.5 and Mistral 4; Granite."""
FUSED_GATELESS = (("experts.up_proj", "experts.down_proj"),)
"""Of experts without a gate (Nemotron-3), [E, I, H] and [E, H, I]."""
EXPERTS, DOWN = "experts", "down_proj"
