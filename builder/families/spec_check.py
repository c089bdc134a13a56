"""Is a DecoderSpec one that a graph can be written from? A wrong field is named by its place."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal, NoReturn

from trtc.builder.families.bounds import (
    INTEGERS,
    LATENT_MULTIPLE,
    MAX_EXPERTS_OF_ALL_LAYERS,
)
from trtc.builder.families.config import shown
from trtc.builder.spec import (
    AttentionSpec,
    BranchNorms,
    DecoderSpec,
    DenseMlpSpec,
    GatedDeltaSpec,
    IndexerSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearSpec,
    Mamba1Spec,
    Mamba2Spec,
    MoeMlpSpec,
    OfExperts,
    RopeSpec,
    RouterSpec,
    ShortConvSpec,
)
from trtc.protos.errors import RequestError

_MOST: Mapping[str, int] = {
    **INTEGERS,
    "num_heads": INTEGERS["num_attention_heads"],
    "num_kv_heads": INTEGERS["num_key_value_heads"],
    "nope_dim": INTEGERS["qk_nope_head_dim"],
    "rope_dim": INTEGERS["qk_rope_head_dim"],
    "value_dim": INTEGERS["v_head_dim"],
    "rank": INTEGERS["kv_lora_rank"],
    "num_key_heads": INTEGERS["linear_num_key_heads"],
    "num_value_heads": INTEGERS["linear_num_value_heads"],
    "key_dim": INTEGERS["linear_key_head_dim"],
    "num_groups": INTEGERS["mamba_n_groups"],
    "state_size": INTEGERS["mamba_d_state"],
    "in_features": 1 << 22,
    "out_features": INTEGERS["vocab_size"],
}
"""Upper bounds of sizes, by their fields; the lower one is 1."""
_POSITIVE = ("eps", "scale", "attention_factor", "softcap", "logit_softcap", "limit")


def check_spec(spec: DecoderSpec, source: str) -> None:
    """Check types, ranges and sizes that must agree.

    Args:
        source: what the spec comes from, for messages.

    Raises:
        RequestError: the first field that is wrong, by its place: `layers[3].mixer.num_heads`.
    """
    check = _Check(source)
    check.types("", spec)
    check.decoder(spec)


class _Check:
    def __init__(self, source: str) -> None:
        self._source = source
        self._hints: dict[type, Mapping[str, Any]] = {}
        """Fields of the dataclasses met so far."""

    def fail(self, place: str, problem: str) -> NoReturn:
        raise RequestError(problem, field=f"{self._source}: {place}")

    def types(self, place: str, value: Any) -> None:
        """Of every field, however deep; and the range of every number."""
        if type(value) not in self._hints:
            self._hints[type(value)] = _hints(type(value))
        for name, kind in self._hints[type(value)].items():
            field = getattr(value, name)
            where = f"{place}.{name}" if place else name
            if not _fits(field, kind):
                self.fail(where, f"is {shown(field)}, not {_spelled(kind)}")
            self._number(where, name, field)
            parts = field if isinstance(field, tuple) else (field,)
            for index, part in enumerate(parts):
                if dataclasses.is_dataclass(part):
                    self.types(f"{where}[{index}]" if parts is field else where, part)

    def _number(self, place: str, name: str, value: object) -> None:
        if isinstance(value, float) and not math.isfinite(value):
            self.fail(place, f"is {value}, not a finite number")
        if name in _POSITIVE and isinstance(value, int | float) and value <= 0:
            self.fail(place, f"is {value}, not a positive number")
        if isinstance(value, int) and not isinstance(value, bool) and name in _MOST:
            self.between(place, value, 1, _MOST[name])

    def between(self, place: str, value: float, least: float, most: float) -> None:
        if not least <= value <= most:
            self.fail(place, f"is {value}, not from {least} to {most}")

    def same(self, place: str, value: int, expected: int, what: str) -> None:
        if value != expected:
            self.fail(place, f"is {value}, and {what} makes it {expected}")

    def decoder(self, spec: DecoderSpec) -> None:
        self.between("layers", len(spec.layers), 1, INTEGERS["num_hidden_layers"])
        self.between("max_position_embeddings", spec.max_position_embeddings, 1, 2**31 - 1)
        mlps = [layer.mlp for layer in spec.layers]
        experts = sum(len(mlp.experts) for mlp in mlps if isinstance(mlp, MoeMlpSpec))
        self.between("layers", experts, 0, MAX_EXPERTS_OF_ALL_LAYERS)
        self.linear("lm_head", spec.lm_head, spec.hidden_size, spec.vocab_size)
        for index, layer in enumerate(spec.layers):
            self.layer(f"layers[{index}]", layer, spec.hidden_size)
            self.shared_cache(f"layers[{index}].mixer", spec, index, layer)
            self.selection(f"layers[{index}].mixer", spec, index, layer)
        self.inputs(spec)

    def layer(self, place: str, layer: LayerSpec, hidden: int) -> None:
        if layer.parallel and layer.mlp_norm is not None:
            self.fail(f"{place}.mlp_norm", "is given, and a parallel layer has the mixer's norm")
        if layer.mixer is None:
            if layer.mlp is None or layer.parallel:
                self.fail(f"{place}.mixer", "is None, and a layer has a mixer, an MLP or both")
        elif isinstance(layer.mixer, AttentionSpec):
            self.attention(f"{place}.mixer", layer.mixer, hidden)
        elif isinstance(layer.mixer, LatentAttentionSpec):
            self.latent_attention(f"{place}.mixer", layer.mixer, hidden)
        elif isinstance(layer.mixer, GatedDeltaSpec):
            self.delta(f"{place}.mixer", layer.mixer, hidden)
        elif isinstance(layer.mixer, Mamba1Spec):
            self.mamba1(f"{place}.mixer", layer.mixer, hidden)
        elif isinstance(layer.mixer, Mamba2Spec):
            self.mamba2(f"{place}.mixer", layer.mixer, hidden)
        else:
            self.convolution(f"{place}.mixer", layer.mixer, hidden)
        if isinstance(layer.mlp, DenseMlpSpec):
            self.mlp(f"{place}.mlp", layer.mlp, hidden)
        elif layer.mlp is not None:
            self.experts(f"{place}.mlp", layer.mlp, hidden)

    def attention(self, place: str, spec: AttentionSpec, hidden: int) -> None:
        if spec.num_heads % spec.num_kv_heads:
            self.fail(
                f"{place}.num_kv_heads",
                f"{spec.num_kv_heads} does not divide the {spec.num_heads} heads",
            )
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.linear(f"{place}.q", spec.q, hidden, q)
        for name, linear in (("k", spec.k), ("v", spec.v)):
            if linear is not None:
                self.linear(f"{place}.{name}", linear, hidden, kv)
        self.linear(f"{place}.o", spec.o, q, hidden)
        if spec.gate is not None:
            self.linear(f"{place}.gate", spec.gate, hidden, q)
        self.rope(f"{place}.rope", spec.rope, spec.head_dim)
        if spec.window is not None:
            self.between(f"{place}.window", spec.window, 1, 2**31 - 1)
        elif spec.chunked:
            self.fail(f"{place}.chunked", "is True, and there is no window")
        norms = {"q_norm": spec.q_norm, "k_norm": spec.k_norm, "v_norm": spec.v_norm}
        for name, norm in norms.items():
            if norm is not None and norm.centered:
                self.fail(f"{place}.{name}.centered", "is True, and q, k and v have RMS norms only")
            is_weighted = norm is not None and norm.weight is not None
            if is_weighted and spec.q.interleaved is not None:
                self.fail(f"{place}.{name}", "is given, and interleaved heads are reordered")
        if spec.norm_after_rope and spec.qk_norm == "row":
            self.fail(f"{place}.norm_after_rope", "is True, and norms over all heads are before it")
        if spec.k is not None and spec.v is None and spec.k.interleaved is not None:
            self.fail(f"{place}.v", "is None, and interleaved heads are reordered")
        self._pairs(place, spec)

    def inputs(self, spec: DecoderSpec) -> None:
        """All layers take an input, or none does."""
        hidden, inputs = spec.hidden_size, spec.layer_inputs
        if inputs is not None:
            self.between("layer_inputs.width", inputs.width, 1, INTEGERS["hidden_size"])
            self.between("layer_inputs.rows", inputs.rows, spec.vocab_size, INTEGERS["vocab_size"])
            columns = inputs.width * len(spec.layers)
            self.linear("layer_inputs.projection", inputs.projection, hidden, columns)
            if inputs.norm.centered:
                self.fail("layer_inputs.norm.centered", "is True, and inputs have RMS norms only")
        for index, layer in enumerate(spec.layers):
            place = f"layers[{index}].input"
            if (layer.input is None) != (inputs is None):
                self.fail(place, "does not fit layer_inputs")
            if layer.input is not None and inputs is not None:
                self.linear(f"{place}.gate", layer.input.gate, hidden, inputs.width)
                self.linear(f"{place}.projection", layer.input.projection, inputs.width, hidden)

    def shared_cache(self, place: str, spec: DecoderSpec, index: int, layer: LayerSpec) -> None:
        """A layer without keys of its own reads those of an earlier one that is alike."""
        mixer = layer.mixer
        if not isinstance(mixer, AttentionSpec):
            return
        if mixer.kv_layer is None:
            if mixer.k is None:
                self.fail(f"{place}.k", "is None, and there is no kv_layer")
            return
        for name in ("k", "v", "k_norm", "v_norm"):
            if getattr(mixer, name) is not None:
                self.fail(f"{place}.{name}", "is given beside kv_layer")
        self.between(f"{place}.kv_layer", mixer.kv_layer, 0, index - 1)
        source = spec.layers[mixer.kv_layer].mixer
        if not isinstance(source, AttentionSpec) or source.kv_layer is not None:
            self.fail(f"{place}.kv_layer", f"is {mixer.kv_layer}, which has no keys of its own")
        for name in ("num_kv_heads", "head_dim", "window", "chunked"):
            if getattr(mixer, name) != getattr(source, name):
                self.fail(f"{place}.{name}", f"is not that of layer {mixer.kv_layer}")

    def latent_attention(self, place: str, spec: LatentAttentionSpec, hidden: int) -> None:
        heads = spec.num_heads
        q_rank = hidden if spec.q_a is None else spec.q_a.out_features
        if spec.q_a is not None:
            self.linear(f"{place}.q_a", spec.q_a, hidden, q_rank)
        self.linear(f"{place}.q", spec.q, q_rank, heads * spec.head_dim)
        self.linear(f"{place}.kv_a", spec.kv_a, hidden, spec.width)
        self.linear(f"{place}.kv_b", spec.kv_b, spec.rank, heads * (spec.nope_dim + spec.value_dim))
        self.linear(f"{place}.o", spec.o, heads * spec.value_dim, hidden)
        self.rope(f"{place}.rope", spec.rope, spec.rope_dim)
        self.same(f"{place}.rope.rotary_dim", spec.rope.rotary_dim, spec.rope_dim, "rope_dim")
        if spec.width % LATENT_MULTIPLE:
            self.fail(f"{place}.rank", f"and rope_dim make {spec.width}, no multiple of 8")
        for name, linear in (("q", spec.q), ("kv_a", spec.kv_a), ("kv_b", spec.kv_b)):
            if linear.rows is not None:
                self.fail(f"{place}.{name}.rows", "is given, and the tensor is taken whole")
        if spec.kv_b.has_bias:
            self.fail(f"{place}.kv_b.has_bias", "is True, and no kernel adds it")
        for name, norm in (("q_norm", spec.q_norm), ("kv_norm", spec.kv_norm)):
            if norm is not None and norm.centered:
                self.fail(f"{place}.{name}.centered", "is True, and latents have RMS norms only")

        if spec.indexer is not None:
            self.indexer(f"{place}.indexer", spec.indexer, spec, hidden)

    def indexer(
        self, place: str, spec: IndexerSpec, attention: LatentAttentionSpec, hidden: int
    ) -> None:
        self.between(f"{place}.top_k", spec.top_k, 1, INTEGERS["index_topk"])
        self.between(f"{place}.head_dim", spec.head_dim, attention.rope_dim, _MOST["head_dim"])
        if spec.head_dim % LATENT_MULTIPLE:
            self.fail(f"{place}.head_dim", f"is {spec.head_dim}, no multiple of 8")
        width, q_rank = spec.num_heads * spec.head_dim, attention.q.in_features
        self.linear(f"{place}.q", spec.q, q_rank, width)
        self.linear(f"{place}.k", spec.k, hidden, spec.head_dim)
        self.linear(f"{place}.weights", spec.weights, hidden, spec.num_heads)
        if not spec.k_norm.centered or spec.k_norm.bias is None:
            self.fail(f"{place}.k_norm", "is no LayerNorm with a bias")
        pairs = spec.q.interleaved
        if not pairs == spec.k.interleaved == spec.k_norm.interleaved:
            self.fail(f"{place}.k.interleaved", "is not that of q and k_norm")
        if pairs is not None:
            self.same(f"{place}.q.interleaved.head_dim", pairs.head_dim, spec.head_dim, "head_dim")
            rotary = attention.rope_dim
            self.same(f"{place}.q.interleaved.rotary_dim", pairs.rotary_dim, rotary, "rope")

    def selection(self, place: str, spec: DecoderSpec, index: int, layer: LayerSpec) -> None:
        """A layer that selects no tokens may have those of an earlier one that does."""
        mixer = layer.mixer
        if not isinstance(mixer, LatentAttentionSpec) or mixer.selection_layer is None:
            return
        if mixer.indexer is not None:
            self.fail(f"{place}.selection_layer", "is given beside an indexer")
        self.between(f"{place}.selection_layer", mixer.selection_layer, 0, index - 1)
        source = spec.layers[mixer.selection_layer].mixer
        if not isinstance(source, LatentAttentionSpec) or source.indexer is None:
            self.fail(
                f"{place}.selection_layer", f"is {mixer.selection_layer}, which has no indexer"
            )

    def _pairs(self, place: str, spec: AttentionSpec) -> None:
        pairs = spec.q.interleaved
        if spec.k is not None and pairs != spec.k.interleaved:
            self.fail(f"{place}.k.interleaved", "is not that of q")
        if pairs is not None:
            self.same(f"{place}.q.interleaved.head_dim", pairs.head_dim, spec.head_dim, "head_dim")
            rotary = spec.rope.rotary_dim
            self.same(f"{place}.q.interleaved.rotary_dim", pairs.rotary_dim, rotary, "rope")

    def rope(self, place: str, rope: RopeSpec, head_dim: int) -> None:
        if rope.rotary_dim % 2:
            self.fail(f"{place}.rotary_dim", f"is {rope.rotary_dim}, not a pair of halves")
        self.between(f"{place}.rotary_dim", rope.rotary_dim, 2, head_dim)
        half = rope.rotary_dim // 2
        self.same(f"{place}.inv_freq", len(rope.inv_freq), half, "rotary_dim")
        if rope.short_length is not None:
            self.same(f"{place}.short_inv_freq", len(rope.short_inv_freq), half, "rotary_dim")
        for name in ("inv_freq", "short_inv_freq"):
            if not all(map(math.isfinite, getattr(rope, name))):
                self.fail(f"{place}.{name}", "has numbers that are not finite")

    def convolution(self, place: str, spec: ShortConvSpec, hidden: int) -> None:
        self.same(f"{place}.channels", spec.channels, hidden, "hidden_size")
        self.between(f"{place}.taps", spec.taps, 2, INTEGERS["conv_L_cache"])
        self.linear(f"{place}.in_proj", spec.in_proj, hidden, 3 * hidden)
        self.linear(f"{place}.out_proj", spec.out_proj, hidden, hidden)

    def delta(self, place: str, spec: GatedDeltaSpec, hidden: int) -> None:
        heads = spec.num_value_heads
        if heads % spec.num_key_heads:
            self.fail(
                f"{place}.num_key_heads",
                f"{spec.num_key_heads} does not divide the {heads} value heads",
            )
        self.between(f"{place}.taps", spec.taps, 2, INTEGERS["linear_conv_kernel_dim"])
        self.between(f"{place}.value_dim", spec.value_dim, 1, INTEGERS["linear_value_head_dim"])
        if isinstance(spec.qkv, tuple):
            for name, linear, width in zip("qkv", spec.qkv, spec.parts, strict=True):
                self.linear(f"{place}.qkv.{name}", linear, hidden, width)
        else:
            self.linear(f"{place}.qkv", spec.qkv, hidden, spec.channels)
        if spec.decays not in (1, spec.key_dim):
            self.fail(f"{place}.decays", f"is {spec.decays}, neither 1 nor key_dim")
        # Beyond 2 states grow without bound.
        self.between(f"{place}.write_scale", spec.write_scale, 0, 2)
        self.low_rank(f"{place}.z", spec.z_down, spec.z, hidden, heads * spec.value_dim)
        self.linear(f"{place}.b", spec.b, hidden, heads)
        self.low_rank(f"{place}.a", spec.a_down, spec.a, hidden, heads * spec.decays)
        if spec.a_log_shape:
            elements = math.prod(spec.a_log_shape)
            self.same(f"{place}.a_log_shape", elements, heads, "num_value_heads")
        self.linear(f"{place}.out_proj", spec.out_proj, heads * spec.value_dim, hidden)
        if spec.norm.centered:
            self.fail(f"{place}.norm.centered", "is True, and heads have RMS norms only")

    def low_rank(
        self, place: str, down: LinearSpec | None, up: LinearSpec, hidden: int, width: int
    ) -> None:
        rank = hidden if down is None else down.out_features
        if down is not None:
            self.linear(f"{place}_down", down, hidden, rank)
        self.linear(place, up, rank, width)

    def mamba1(self, place: str, spec: Mamba1Spec, hidden: int) -> None:
        most = INTEGERS["mamba_expand"] * INTEGERS["hidden_size"]
        self.between(f"{place}.channels", spec.channels, 1, most)
        self.between(f"{place}.taps", spec.taps, 2, INTEGERS["mamba_d_conv"])
        self.linear(f"{place}.x", spec.x, hidden, spec.channels)
        self.linear(f"{place}.z", spec.z, hidden, spec.channels)
        self.linear(f"{place}.time", spec.time, spec.channels, spec.rank)
        self.linear(f"{place}.b", spec.b, spec.channels, spec.state_size)
        self.linear(f"{place}.c", spec.c, spec.channels, spec.state_size)
        self.linear(f"{place}.dt", spec.dt, spec.rank, spec.channels)
        self.linear(f"{place}.out_proj", spec.out_proj, spec.channels, hidden)
        for name in ("time_norm", "b_norm", "c_norm"):
            norm = getattr(spec, name)
            if norm is not None and norm.centered:
                self.fail(f"{place}.{name}.centered", "is True, and steps have RMS norms only")

    def mamba2(self, place: str, spec: Mamba2Spec, hidden: int) -> None:
        if spec.num_heads % spec.num_groups:
            self.fail(
                f"{place}.num_groups",
                f"{spec.num_groups} does not divide the {spec.num_heads} heads",
            )
        self.between(f"{place}.taps", spec.taps, 2, INTEGERS["mamba_d_conv"])
        self.between(f"{place}.head_dim", spec.head_dim, 1, INTEGERS["mamba_d_head"])
        self.linear(f"{place}.z", spec.z, hidden, spec.width)
        self.linear(f"{place}.xbc", spec.xbc, hidden, spec.channels)
        self.linear(f"{place}.dt", spec.dt, hidden, spec.num_heads)
        self.linear(f"{place}.out_proj", spec.out_proj, spec.width, hidden)
        if spec.norm.centered:
            self.fail(f"{place}.norm.centered", "is True, and groups have RMS norms only")
        if spec.dt_min < 0 or (spec.dt_max is not None and not spec.dt_min < spec.dt_max):
            self.fail(f"{place}.dt_max", f"is {spec.dt_max}, and dt_min {spec.dt_min}")

    def mlp(self, place: str, mlp: DenseMlpSpec, hidden: int, *, routed: bool = False) -> None:
        width = mlp.up.out_features
        self.linear(f"{place}.up", mlp.up, hidden, width)
        self.linear(f"{place}.down", mlp.down, width, hidden)
        if not routed:
            for name, value in (("limit", mlp.limit), ("up_offset", mlp.up_offset or None)):
                if value is not None:
                    self.fail(f"{place}.{name}", f"is {value}, and only routed experts have it")
            if mlp.activation == "quick_gelu":
                self.fail(f"{place}.activation", "is quick_gelu, which only routed experts have")
        if mlp.gate is not None:
            self.linear(f"{place}.gate", mlp.gate, hidden, width)
            if mlp.activation == "relu2":
                self.fail(f"{place}.activation", "is relu2, which no kernel has beside a gate")

    def experts(self, place: str, mlp: MoeMlpSpec, hidden: int) -> None:
        number = len(mlp.experts)
        self.between(f"{place}.experts", number, 1, INTEGERS["num_experts"])
        self.router(f"{place}.router", mlp.router, hidden, number)
        if mlp.shared is not None:
            self.mlp(f"{place}.shared", mlp.shared, hidden)
        if mlp.shared_gate is not None:
            if mlp.shared is None:
                self.fail(f"{place}.shared_gate", "is given, and there is no shared expert")
            self.linear(f"{place}.shared_gate", mlp.shared_gate, hidden, 1)
        if mlp.norms is not None:
            self.branches(place, mlp, mlp.norms)
        width, inner = mlp.experts[0].up.out_features, hidden
        if mlp.latent is not None:
            inner = mlp.latent[0].out_features
            self.linear(f"{place}.latent[0]", mlp.latent[0], hidden, inner)
            self.linear(f"{place}.latent[1]", mlp.latent[1], inner, hidden)
        for index, expert in enumerate(mlp.experts):
            where = f"{place}.experts[{index}]"
            if (expert.gate is None) != (mlp.experts[0].gate is None):
                self.fail(f"{where}.gate", "is given for some experts of the layer only")
            if expert.gate is None and (expert.limit is not None or expert.up_offset):
                self.fail(f"{where}.limit", "and up_offset are for experts with a gate")
            self.mlp(where, expert, inner, routed=True)
            self.same(f"{where}.up.out_features", expert.up.out_features, width, "experts[0]")

    def branches(self, place: str, mlp: MoeMlpSpec, norms: BranchNorms) -> None:
        if mlp.shared is None:
            self.fail(f"{place}.shared", "is None, and norms are for experts beside one")
        if mlp.shared_gate is not None:
            self.fail(f"{place}.shared_gate", "is given, and branches with norms have none")
        for name in ("router", "experts", "experts_post", "shared_post"):
            if getattr(norms, name).centered:
                place = f"{place}.norms.{name}.centered"
                self.fail(place, "is True, and branches have RMS norms only")

    def of_experts(self, place: str, part: OfExperts, out_features: int) -> None:
        self.between(f"{place}.expert", part.expert, 0, part.num_experts - 1)
        self.between(f"{place}.step", part.step, 1, part.rows)
        last = part.first + part.step * (out_features - 1)
        self.between(f"{place}.first", part.first, 0, part.rows - 1)
        self.between(f"{place}.rows", part.rows, last + 1, 2**31 - 1)

    def router(self, place: str, router: RouterSpec, hidden: int, number: int) -> None:
        self.linear(f"{place}.linear", router.linear, hidden, number)
        self.between(f"{place}.num_groups", router.num_groups, 1, number)
        if number % router.num_groups:
            problem = f"{router.num_groups} does not divide the {number} experts"
            self.fail(f"{place}.num_groups", problem)
        size = number // router.num_groups
        if router.num_groups > 1 and size == 1 and router.group_score == "top2_sum":
            problem = f"is {number}, and a group of one expert has no top2_sum"
            self.fail(f"{place}.num_groups", problem)
        self.between(f"{place}.top_groups", router.top_groups, 1, router.num_groups)
        self.between(f"{place}.top_k", router.top_k, 1, router.top_groups * size)
        for name in ("epsilon", "margin"):
            if getattr(router, name) < 0:
                self.fail(f"{place}.{name}", f"is {getattr(router, name)}, a negative number")
        if router.score == "sparsemixer" and (router.choice_bias or router.num_groups > 1):
            self.fail(f"{place}.score", "is sparsemixer, which has neither a bias nor groups")

    def linear(self, place: str, linear: LinearSpec, in_features: int, out_features: int) -> None:
        self.same(f"{place}.in_features", linear.in_features, in_features, "the layer")
        self.same(f"{place}.out_features", linear.out_features, out_features, "the layer")
        if linear.grouped is not None:
            self.groups(f"{place}.grouped", linear, out_features)
        if linear.grouped is not None and linear.rows is not None:
            self.fail(f"{place}.rows", "is given beside grouped")
        if linear.of_experts is not None:
            self.of_experts(f"{place}.of_experts", linear.of_experts, out_features)
        if linear.rows is not None:
            begin, end = linear.rows
            if begin < 0 or end - begin != out_features:
                self.fail(f"{place}.rows", f"is {linear.rows}, not {out_features} rows")

    def groups(self, place: str, linear: LinearSpec, out_features: int) -> None:
        grouped = linear.grouped
        assert grouped is not None
        for begin, end in grouped.parts:
            if not 0 <= begin < end <= grouped.group:
                self.fail(f"{place}.parts", f"has {(begin, end)} of {grouped.group} rows")
        taken = sum(end - begin for begin, end in grouped.parts)
        if taken == 0 or out_features % taken:
            self.fail(f"{place}.parts", f"are {taken} rows, and {out_features} are no multiple")


def _hints(kind: type) -> Mapping[str, Any]:
    """Field -> type, of a dataclass."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


def _fits(value: object, kind: Any) -> bool:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_fits(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if arguments[-1] is Ellipsis:
            return all(_fits(one, arguments[0]) for one in value)
        return len(value) == len(arguments) and all(map(_fits, value, arguments))
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, type(None) if kind is None else kind)


def _spelled(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_spelled(one) for one in arguments)
    if origin is Literal:
        return " or ".join(map(repr, arguments))
    if origin is tuple:
        return f"a tuple of {_spelled(arguments[0])}"
    return "None" if kind is type(None) else str(kind.__name__)
