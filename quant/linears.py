"""The linears of a Transformers model that schemes quantise."""

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from torch import nn

from trtc.protos.errors import UnsupportedError
from trtc.quant.calibration_text import TokenSet
from trtc.quant.experts import STARVED_TOKENS, SeparateExperts, separate_experts
from trtc.quant.keep import kept_linears
from trtc.quant.layer_source import LayerSource
from trtc.quant.layerwise import run_text
from trtc.quant.reference_model import empty_model, load_config
from trtc.quant.scheme import Scheme

NEVER_QUANTIZED = (
    "*lm_head*",
    "*router*",
    "*kv_b_proj*",
    "*mlp.gate.*",
    "*block_sparse_moe.gate.*",
    "*feed_forward.gate.*",
    "*shared_expert_gate.*",
    # Of delta nets: how much a head writes and forgets, a number a token.
    "*.in_proj_a.*",
    "*.in_proj_b.*",
    "*.in_proj_ba.*",
    "*.a_proj.*",
    "*.b_proj.*",
    # Of those with decays by channel, which are of low rank as their gate is, too.
    "*.f_a_proj.*",
    "*.f_b_proj.*",
    "*.g_a_proj.*",
    "*.g_b_proj.*",
    # Of Mamba: steps, and what a state takes in and gives.
    "*.mamba.x_proj.*",
    "*.mamba.dt_proj.*",
    # Of DeepSeek Sparse Attention: what the scores of a head count.
    "*.indexer.weights_proj*",
    # Of Gemma 4, before the layers.
    "*per_layer_model_projection*",
)


def linear_shapes(model_dir: Path) -> dict[str, tuple[int, int]]:
    """(out_features, in_features) of every linear that schemes quantise, by its name in
    Transformers' model and in its order. No weights are read.

    Raises:
        CheckpointError: unreadable config.json.
        UnsupportedError: Transformers has no such model.
    """
    model = empty_model(load_config(model_dir))
    separate_experts(model)
    return {
        name: (linear.out_features, linear.in_features)
        for name, linear in quantizable_linears(model)
    }


def table_shape(model_dir: Path) -> tuple[int, int]:
    """(vocab_size, hidden_size) of a model's embeddings. No weights are read.

    Raises:
        CheckpointError, UnsupportedError: as `linear_shapes`.
    """
    rows, columns = empty_model(load_config(model_dir)).get_input_embeddings().weight.shape
    return rows, columns


def check_quantizable(
    shapes: Mapping[str, tuple[int, int]], scheme: Scheme, keep: Sequence[str] = ()
) -> tuple[str, ...]:
    """Refuse a model whose linears do not fit the scheme, before weights are read.

    Args:
        shapes: as `linear_shapes` gives them.
        keep: globs of linears that stay unquantised.

    Returns:
        The linears that stay unquantised.

    Raises:
        RequestError: a glob that names no linear.
        UnsupportedError: names the linear and its size.
    """
    kept = kept_linears(keep, list(shapes))
    group, block = scheme.group_size, scheme.hadamard
    for name, (_, in_features) in shapes.items():
        if block and name not in kept and in_features % block:
            raise UnsupportedError(
                f"has {in_features} input features, no multiple of {scheme.name}'s blocks of "
                f"{block}",
                field=name,
                remedy=f"Leave it out with --keep '{name}=bf16', or use --dtype int8_dynamic",
            )
    if group is None:
        return kept
    remedy = "Use --dtype int4_g32 where 32 divides it, or fp8 or int8_sq, which take any size"
    for name, (out_features, in_features) in shapes.items():
        if name in kept:
            continue
        if in_features % group:
            raise UnsupportedError(
                f"has {in_features} input features, no multiple of {scheme.name}'s group "
                f"of {group}",
                field=name,
                remedy=remedy,
            )
        if out_features % 2 and scheme.weight in ("i4", "iq4", "i4_f8"):
            raise UnsupportedError(
                f"has {out_features} output features; 4-bit rows are stored in pairs",
                field=name,
                remedy=remedy,
            )
    return kept


def quantizable_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Names and modules of all linears in decoder layers but routers, in the model's order."""
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) and "layers." in name
        if is_linear and not any(fnmatchcase(f"{name}.", rule) for rule in NEVER_QUANTIZED):
            yield name, module


def mark_starved(
    source: LayerSource, experts: tuple[SeparateExperts, ...], tokens: TokenSet
) -> tuple[str, ...]:
    """Mark the experts that the text hardly reaches, and name them."""
    if not experts:
        return ()
    for layer in experts:
        layer.collecting = True
    run_text(source, tokens)
    names = {id(module): name for name, module in source.model.named_modules()}
    starved = []
    for layer in experts:
        layer.collecting = False
        layer.starved = frozenset(
            i for i, seen in enumerate(layer.tokens_seen) if seen < STARVED_TOKENS
        )
        starved += [f"{names[id(layer)]}.{i}" for i in sorted(layer.starved)]
    return tuple(starved)
