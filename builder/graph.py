"""DecoderSpec -> source graph: standard ONNX with explicit Q/DQ, and trtc's attention and experts.

Rows are packed tokens: there is no batch dimension. A node's name is its site in the model
(`layers.3.attention.q.matmul`) and `<name>.out` its output. Shared initialisers: `embedding.weight`
(the lm_head's too when embeddings are tied), `rope.<k>.cos`, `rope.<k>.sin`.

A linear is [Mul pre_scale] -> [Gather columns] -> [QuantizeLinear -> DequantizeLinear] -> MatMul
with the transposed, dequantised weight -> [Add bias]. NVFP4 quantises its input by TensorRT's
TRT_FP4DynamicQuantize.
Inputs whose scales follow from them are trtc.quantize -> DequantizeLinear in blocks along a row.
Routers and the gates of shared experts multiply in f32: their input is cast, their weight is an f32
initialiser whose recipe rounds to the activation type first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trtc.builder.cache import cache_layout, default_page_size
from trtc.builder.experts import choice_bias, expert_scale, expert_weights
from trtc.builder.graph_writer import Attribute, GraphWriter, Value, onnx_type
from trtc.builder.module import TENSORRT_DOMAIN, TRTC_DOMAIN, Module
from trtc.builder.recipes import Cast, Load, QueryScaleTable, RopeTable, TensorReader
from trtc.builder.spec import (
    Activation,
    AttentionSpec,
    BranchNorms,
    DecoderSpec,
    DenseMlpSpec,
    GatedDeltaSpec,
    IndexerSpec,
    LatentAttentionSpec,
    LayerInputSpec,
    LayerInputsSpec,
    LayerSpec,
    LinearSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
    MoeMlpSpec,
    NormSpec,
    QueryScale,
    RopeSpec,
    ShortConvSpec,
)
from trtc.builder.weights import (
    LinearWeights,
    Tensor,
    absorbed_weights,
    attention_sinks,
    conv_bias,
    conv_weight,
    decay_rate,
    layer_scalar,
    linear_weights,
    norm_bias,
    norm_weight,
    of_heads,
    plain_linear,
    rows_in_order,
    scan_rate,
    source_recipe,
)
from trtc.plugins.iq4 import VALUES
from trtc.plugins.moe.op import MOE
from trtc.plugins.products import E8M0_BIAS
from trtc.plugins.rounding import cast
from trtc.plugins.six_bits import LEAST, MOST
from trtc.protos.errors import UnsupportedError
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import Limits
from trtc.protos.step import graph_inputs, group_input
from trtc.quant.scheme import CheckpointQuantization, Scheme


@dataclass(frozen=True)
class GraphRequest:
    """Options of the graph, besides the model."""

    scheme: Scheme
    kv_dtype: str
    """f32, bf16, f8e4m3, i8 or i4."""
    limits: Limits
    quantization: CheckpointQuantization | None = None
    page_size: int | None = None
    """Tokens of a KV page; None: as builder/cache.py finds best."""
    window_groups: bool = False
    """Whether pages that a window has left are released: see Target."""


def build_graph(spec: DecoderSpec, request: GraphRequest, reader: TensorReader) -> Module:
    """The source graph of a decoder. `reader` gives the scalars that passes compare, no weights.

    Raises:
        UnsupportedError: the scheme cannot hold one of the linears.
        CheckpointError: a scale is missing or does not fit.
    """
    _check_quantized_linears(spec, request.quantization)
    return _SourceGraph(spec, request, reader).build()


def _check_quantized_linears(
    spec: DecoderSpec, quantization: CheckpointQuantization | None
) -> None:
    if quantization is None:
        return
    known = {linear.name for linear in spec.linears}
    known |= {mixer.kv_b.name for _, mixer in spec.latent_attentions}
    for prefix in quantization.linears:
        if prefix not in known:
            raise UnsupportedError(
                "is quantised in the checkpoint; trtc quantises the linears of attention, MLP and "
                "experts only",
                field=prefix,
                remedy="Quantise again with the lm_head and the routers excluded",
            )


_StepInputs = Mapping[str, Value]
"""By the names of protos/step.py."""


class _SourceGraph:
    def __init__(self, spec: DecoderSpec, request: GraphRequest, reader: TensorReader) -> None:
        self._spec = spec
        self._request = request
        self._reader = reader
        self._dtype = request.scheme.dtype
        self._quantized = request.quantization.linears if request.quantization else {}
        self._writer = GraphWriter(reader)
        self._page_size = 0
        """Tokens of a page, once the cache is laid out."""
        self._groups: dict[int, int] = {}
        """Layer -> its group of the cache layout."""
        self._written: dict[int, Value] = {}
        """Layer -> its keys and values as it leaves them, which later layers may read too."""
        self._selected: dict[int, Value] = {}
        """Layer -> the tokens that it selected, which later layers may read too."""
        self._inputs: Sequence[Value] = ()
        """Of every layer, beside what the one before it gives."""
        self._ropes: dict[RopeSpec, tuple[Value, Value]] = {}
        self._ordered: dict[tuple[str, bytes], Value] = {}
        """By the names of activations and the orders of their columns: these, in that order."""

    def build(self) -> Module:
        kv = self._cache_layout()
        self._page_size = kv.page_size
        self._groups = {place.entry.layer: place.group for place in kv.places}
        steps = {
            name: self._writer.input(name, one.dtype, one.shape)
            for name, one, _ in graph_inputs(len(kv.groups))
        }
        pools: dict[int, list[Value]] = {}
        for place in kv.places:
            pool = self._writer.input(place.name, place.entry.element, kv.pool_shape(place))
            pools.setdefault(place.entry.layer, []).append(pool)
        positions = self._positions(steps)
        hidden = self._embedding(steps)
        written: list[Value] = []
        if self._spec.layer_inputs is not None:
            self._inputs = self._layer_inputs(self._spec.layer_inputs, hidden, steps)
        for index, layer in enumerate(self._spec.layers):
            own = pools.get(index, ())
            hidden, left = self._layer(index, layer, hidden, own, positions, steps)
            written += left
        logits = self._tail(hidden, steps)
        model, recipes = self._writer.finish([logits, *written])
        return Module(model, recipes, kv, self._request.limits)

    def _cache_layout(self) -> CacheLayout:
        request, dtype = self._request, self._request.kv_dtype
        page_size = request.page_size or default_page_size(
            self._spec,
            dtype,  # type: ignore[arg-type]
            state_dtype=self._dtype,
            max_seq_len=request.limits.max_seq_len,
            window_groups=request.window_groups,
        )
        return cache_layout(
            self._spec,
            page_size,
            dtype,  # type: ignore[arg-type]
            state_dtype=self._dtype,
            window_groups=request.window_groups,
        )

    def _positions(self, steps: _StepInputs) -> Value:
        """[1, T] int64, as RotaryEmbedding wants them."""
        positions = steps["positions"]
        wide = self._writer.node("Cast", "rope.positions", [positions], "i64", ("T",), to=7)
        return self._unsqueeze("rope.positions_row", wide)

    def _embedding(self, steps: _StepInputs) -> Value:
        spec, dtype = self._spec, self._dtype
        table = self._writer.weight("embedding.weight", self._embedding_tensor())
        hidden = self._writer.node(
            "Gather",
            "embedding.gather",
            [table, steps["token_ids"]],
            dtype,
            ("T", spec.hidden_size),
            axis=0,
        )
        if spec.embedding_scale is None:
            return hidden
        # Rounded to the activation type before it multiplies, as in Transformers.
        factor = cast(np.asarray(spec.embedding_scale, dtype=np.float32), dtype)
        scale = self._writer.constant("embedding.factor", factor, dtype)
        return self._writer.node("Mul", "embedding.scale", [hidden, scale], dtype, hidden.shape)

    def _embedding_tensor(self) -> Tensor:
        shape = (self._spec.vocab_size, self._spec.hidden_size)
        return Tensor(Cast(Load(self._spec.embedding), self._dtype), self._dtype, shape)

    def _layer(
        self,
        index: int,
        layer: LayerSpec,
        hidden: Value,
        pools: Sequence[Value],
        positions: Value,
        steps: _StepInputs,
    ) -> tuple[Value, Sequence[Value]]:
        """What it gives, and its part of the cache as it leaves it: one pool, two states, or
        nothing."""
        site, normed = f"layers.{index}", hidden
        written: Sequence[Value] = ()
        if layer.mixer is not None:
            normed = self._optional_norm(f"{site}.attention_norm", layer.attention_norm, hidden)
            name, mixed, written = self._mixer(index, layer.mixer, normed, pools, positions, steps)
            mixed = self._optional_norm(
                f"{site}.attention_post_norm", layer.attention_post_norm, mixed
            )
            hidden = self._add(f"{site}.{name}.residual", hidden, mixed)
        if layer.mlp is not None:
            if not layer.parallel:
                normed = self._optional_norm(f"{site}.mlp_norm", layer.mlp_norm, hidden)
            mixed = self._mlp_of_layer(f"{site}.mlp", layer.mlp, normed, hidden)
            mixed = self._optional_norm(f"{site}.mlp_post_norm", layer.mlp_post_norm, mixed)
            hidden = self._add(f"{site}.mlp.residual", hidden, mixed)
        if layer.input is not None:
            hidden = self._with_input(site, layer.input, hidden, self._inputs[index])
        if layer.scalar is not None:
            scalar = self._writer.weight(f"{site}.scalar", layer_scalar(layer.scalar, self._dtype))
            hidden = self._mul(f"{site}.scaled", hidden, scalar)
        return hidden, written

    def _layer_inputs(
        self, spec: LayerInputsSpec, embedded: Value, steps: _StepInputs
    ) -> Sequence[Value]:
        """[T, width] of every layer."""
        site, columns = "layer_inputs", spec.projection.out_features
        table = Tensor(Cast(Load(spec.table), self._dtype), self._dtype, (spec.rows, columns))
        norm = norm_weight(spec.norm, spec.width, self._dtype)
        inputs = self._writer.node(
            "layer_inputs",
            f"{site}.layer_inputs",
            [
                self._linear(f"{site}.projection", spec.projection, embedded),
                steps["token_ids"],
                self._writer.weight(f"{site}.table", table),
                self._writer.weight(f"{site}.norm.weight", _in_f32(norm)),
            ],
            self._dtype,
            ("T", columns),
            domain=TRTC_DOMAIN,
            width=spec.width,
            eps=spec.norm.eps,
            table_scale=spec.table_scale,
            scale=spec.scale,
        )
        return self._writer.split(f"{site}.split", inputs, spec.width)

    def _with_input(self, site: str, spec: LayerInputSpec, x: Value, given: Value) -> Value:
        site = f"{site}.input"
        active = self._active(site, spec.activation, self._linear(f"{site}.gate", spec.gate, x))
        product = self._mul(f"{site}.product", active, given)
        projected = self._linear(f"{site}.projection", spec.projection, product)
        return self._add(f"{site}.residual", x, self._norm(f"{site}.norm", spec.norm, projected))

    def _mixer(
        self,
        index: int,
        mixer: MixerSpec,
        x: Value,
        pools: Sequence[Value],
        positions: Value,
        steps: _StepInputs,
    ) -> tuple[str, Value, Sequence[Value]]:
        """Its name in sites, what it gives, and its part of the cache."""
        name = "attention"
        if isinstance(mixer, ShortConvSpec):
            name = "conv"
            mixed, *written = self._short_conv(index, mixer, x, pools[0], steps)
        elif isinstance(mixer, GatedDeltaSpec):
            name = "delta"
            mixed, *written = self._gated_delta(index, mixer, x, pools, steps)
        elif isinstance(mixer, Mamba1Spec):
            name = "mamba"
            mixed, *written = self._mamba1(index, mixer, x, pools, steps)
        elif isinstance(mixer, Mamba2Spec):
            name = "mamba"
            mixed, *written = self._mamba2(index, mixer, x, pools, steps)
        elif isinstance(mixer, LatentAttentionSpec):
            mixed, *written = self._latent_attention(index, mixer, x, pools, steps)
        else:
            mixed, *written = self._attention(index, mixer, x, pools, positions, steps)
        return name, mixed, written

    def _attention(
        self,
        index: int,
        spec: AttentionSpec,
        x: Value,
        pools: Sequence[Value],
        positions: Value,
        steps: _StepInputs,
    ) -> tuple[Value, ...]:
        """What it gives, and the pool with its keys and values if it has some of its own."""
        site = f"layers.{index}.attention"
        owner = index if spec.kv_layer is None else spec.kv_layer
        group = self._groups[owner]
        q = self._linear(f"{site}.q", spec.q, x)
        own: tuple[Value, ...] = ()
        if spec.k is not None:
            self._written[index] = self._write_kv(index, spec, x, pools[0], positions, steps)
            own = (self._written[index],)
        q = self._rotated(f"{site}.q", spec, spec.q_norm, q, positions, spec.num_heads)
        if spec.query_scale is not None:
            q = self._query_scale(f"{site}.q_scale", spec.query_scale, q, steps)
        sinks = attention_sinks(spec, self._dtype)
        no_quantisation = (None, None)
        attended = self._writer.node(
            "paged_attention",
            f"{site}.paged_attention",
            [
                q,
                self._written[owner],
                steps["query_start"],
                steps["context_lens"],
                steps[group_input("page_table", group)],
                *self._kv_scales(owner),
                *no_quantisation,
                None if sinks is None else self._writer.weight(f"{site}.sinks", sinks),
            ],
            self._dtype,
            q.shape,
            domain=TRTC_DOMAIN,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale,
            window=spec.window or 0,
            chunked=int(spec.chunked),
            softcap=spec.softcap or 0.0,
            out_dtype=self._dtype,
        )
        if spec.gate is not None:
            gate = self._linear(f"{site}.gate", spec.gate, x)
            opened = self._writer.node("Sigmoid", f"{site}.sigmoid", [gate], x.dtype, q.shape)
            attended = self._mul(f"{site}.gated", opened, attended)
        return (self._linear(f"{site}.o", spec.o, attended), *own)

    def _write_kv(
        self,
        index: int,
        spec: AttentionSpec,
        x: Value,
        pool: Value,
        positions: Value,
        steps: _StepInputs,
    ) -> Value:
        """The pool with the layer's keys and values."""
        site, group = f"layers.{index}.attention", self._groups[index]
        assert spec.k is not None
        k = self._linear(f"{site}.k", spec.k, x)
        v = k if spec.v is None else self._linear(f"{site}.v", spec.v, x)
        k = self._rotated(f"{site}.k", spec, spec.k_norm, k, positions, spec.num_kv_heads)
        if spec.v_norm is not None:
            v = self._head_norm(f"{site}.v_norm", spec.v_norm, v, spec.head_dim)
        return self._writer.node(
            "kv_write",
            f"{site}.kv_write",
            [k, v, pool, steps[group_input("slots", group)], *self._kv_scales(index)],
            pool.dtype,
            pool.shape,
            domain=TRTC_DOMAIN,
            output=f"kv_{index}_out",
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
        )

    def _kv_scales(self, index: int) -> tuple[Value | None, Value | None]:
        return self._kv_scale(index, "k"), self._kv_scale(index, "v")

    def _latent_attention(
        self,
        index: int,
        spec: LatentAttentionSpec,
        x: Value,
        pools: Sequence[Value],
        steps: _StepInputs,
    ) -> tuple[Value, ...]:
        """What it gives, the pool with its latents, and that with its index keys if it has some."""
        site, group, pool = f"layers.{index}.attention", self._groups[index], pools[0]
        q = x if spec.q_a is None else self._linear(f"{site}.q_a", spec.q_a, x)
        source = self._optional_norm(f"{site}.q_norm", spec.q_norm, q)
        left: tuple[Value, ...] = ()
        if spec.indexer is not None:
            self._selected[index], index_pool = self._select(
                index, spec.indexer, spec.rope, x, source, pools[1], steps
            )
            left = (index_pool,)
        selection = index if spec.selection_layer is None else spec.selection_layer
        q = self._linear(f"{site}.q", spec.q, source)
        kv = self._linear(f"{site}.kv_a", spec.kv_a, x)
        norm = norm_weight(spec.kv_norm, spec.rank, self._dtype)
        q, written = self._writer.node_of_two(
            "latent_kv_write",
            f"{site}.latent_kv_write",
            [
                q,
                kv,
                steps["positions"],
                steps[group_input("slots", group)],
                *self._rope_tables(spec.rope),
                self._writer.weight(f"{site}.kv_norm.weight", _in_f32(norm)),
                pool,
                self._latent_query_scale(spec.query_scale),
            ],
            (
                Value(f"{site}.latent_kv_write.out", q.dtype, q.shape),
                Value(f"kv_{index}_out", pool.dtype, pool.shape),
            ),
            domain=TRTC_DOMAIN,
            num_heads=spec.num_heads,
            head_dim=spec.head_dim,
            eps=spec.kv_norm.eps,
        )
        for_keys, for_values = absorbed_weights(spec, self._quantized, self._dtype)
        keys = self._writer.weight(f"{site}.keys.weight", for_keys)
        queries = self._head_linear(f"{site}.keys", q, keys, spec.head_dim, spec.width)
        attended = self._writer.node(
            "latent_attention",
            f"{site}.latent_attention",
            [
                queries,
                written,
                steps["query_start"],
                steps["context_lens"],
                steps[group_input("page_table", group)],
                self._selected.get(selection),
            ],
            self._dtype,
            ("T", spec.num_heads * spec.rank),
            domain=TRTC_DOMAIN,
            num_heads=spec.num_heads,
            rank=spec.rank,
            scale=spec.scale,
        )
        values = self._writer.weight(f"{site}.values.weight", for_values)
        out = self._head_linear(f"{site}.values", attended, values, spec.rank, spec.value_dim)
        return self._linear(f"{site}.o", spec.o, out), written, *left

    def _select(
        self,
        index: int,
        spec: IndexerSpec,
        rope: RopeSpec,
        x: Value,
        source: Value,
        pool: Value,
        steps: _StepInputs,
    ) -> tuple[Value, Value]:
        """The slots of the tokens that each token attends to, and the pool with the index keys.

        `source`: what queries are made of.
        """
        site, group = f"layers.{index}.indexer", self._groups[index]
        q = self._linear(f"{site}.q", spec.q, source)
        k = self._linear(f"{site}.k", spec.k, x)
        norm = norm_weight(spec.k_norm, spec.head_dim, self._dtype)
        bias = norm_bias(spec.k_norm, spec.head_dim, self._dtype)
        assert bias is not None
        q, written = self._writer.node_of_two(
            "index_write",
            f"{site}.index_write",
            [
                q,
                k,
                steps["positions"],
                steps[group_input("slots", group)],
                *self._rope_tables(rope),
                self._writer.weight(f"{site}.k_norm.weight", _in_f32(norm)),
                self._writer.weight(f"{site}.k_norm.bias", _in_f32(bias)),
                pool,
            ],
            (
                Value(f"{site}.index_write.out", q.dtype, q.shape),
                Value(f"{pool.name}_out", pool.dtype, pool.shape),
            ),
            domain=TRTC_DOMAIN,
            num_heads=spec.num_heads,
            eps=spec.k_norm.eps,
        )
        wide = self._cast(f"{site}.weights.f32", x, "f32")
        selected = self._writer.node(
            "select_tokens",
            f"{site}.select_tokens",
            [
                q,
                self._exact(f"{site}.weights", spec.weights, wide),
                written,
                steps["query_start"],
                steps["context_lens"],
                steps[group_input("page_table", group)],
            ],
            "i32",
            ("T", spec.top_k),
            domain=TRTC_DOMAIN,
            num_heads=spec.num_heads,
            top_k=spec.top_k,
            max_context=self._request.limits.max_seq_len,
        )
        return selected, written

    def _head_linear(self, site: str, x: Value, weight: Value, in_dim: int, out_dim: int) -> Value:
        return self._writer.node(
            "head_linear",
            f"{site}.head_linear",
            [x, weight],
            self._dtype,
            ("T", int(weight.shape[0]) * out_dim),
            domain=TRTC_DOMAIN,
            in_dim=in_dim,
            out_dim=out_dim,
        )

    def _latent_query_scale(self, scale: QueryScale | None) -> Value | None:
        """The factors of all positions, f32 that were rounded to the activation type."""
        if scale is None:
            return None
        length = self._request.limits.max_seq_len
        table = QueryScaleTable(scale.beta, scale.original_length, length, scale.offset)
        name = f"rope.q_scale_f32.{scale.offset}.{scale.original_length}.{scale.beta:g}"
        recipe = Cast(Cast(table, self._dtype), "f32")
        return self._writer.weight(name, Tensor(recipe, "f32", (length,)))

    def _short_conv(
        self, index: int, spec: ShortConvSpec, x: Value, state: Value, steps: _StepInputs
    ) -> tuple[Value, Value]:
        site, channels = f"layers.{index}.conv", spec.channels
        gated = self._linear(f"{site}.in_proj", spec.in_proj, x)
        inputs = [
            gated,
            state,
            *self._places(index, steps),
            self._writer.weight(f"{site}.weight", conv_weight(spec, self._dtype)),
        ]
        if spec.has_bias:
            inputs.append(self._writer.weight(f"{site}.bias", conv_bias(spec, self._dtype)))
        mixed, written = self._writer.node_of_two(
            "short_conv",
            f"{site}.short_conv",
            inputs,
            (
                Value(f"{site}.short_conv.out", self._dtype, ("T", channels)),
                Value(f"kv_{index}_out", state.dtype, state.shape),
            ),
            domain=TRTC_DOMAIN,
            page_size=self._page_size,
        )
        return self._linear(f"{site}.out_proj", spec.out_proj, mixed), written

    def _gated_delta(
        self,
        index: int,
        spec: GatedDeltaSpec,
        x: Value,
        states: Sequence[Value],
        steps: _StepInputs,
    ) -> tuple[Value, Value, Value]:
        site, (columns, matrix) = f"layers.{index}.delta", states
        heads = spec.num_value_heads
        qkv = self._queries_keys_values(site, spec, x)
        z = self._low_rank(f"{site}.z", spec.z_down, spec.z, x)
        b = self._linear(f"{site}.b", spec.b, x)
        a = self._low_rank(f"{site}.a", spec.a_down, spec.a, x)
        places = self._places(index, steps)
        mixed, columns_out = self._causal_conv(site, spec, qkv, columns, places)
        out, matrix_out = self._writer.node_of_two(
            "gated_delta",
            f"{site}.gated_delta",
            [
                mixed,
                z,
                b,
                a,
                matrix,
                *places,
                self._writer.weight(
                    f"{site}.rate", decay_rate(spec.a_log, heads, spec.a_log_shape)
                ),
                self._writer.weight(f"{site}.dt_bias", of_heads(spec.dt_bias, heads * spec.decays)),
                self._writer.weight(
                    f"{site}.norm.weight", norm_weight(spec.norm, spec.value_dim, "f32")
                ),
            ],
            (
                Value(f"{site}.gated_delta.out", self._dtype, z.shape),
                Value(f"{matrix.name}_out", matrix.dtype, matrix.shape),
            ),
            domain=TRTC_DOMAIN,
            key_heads=spec.num_key_heads,
            key_dim=spec.key_dim,
            value_heads=heads,
            value_dim=spec.value_dim,
            decays=spec.decays,
            write_scale=spec.write_scale,
            gate=spec.gate,
            eps=spec.norm.eps,
            page_size=self._page_size,
            out_dtype=self._dtype,
        )
        return self._linear(f"{site}.out_proj", spec.out_proj, out), columns_out, matrix_out

    def _queries_keys_values(self, site: str, spec: GatedDeltaSpec, x: Value) -> Value:
        if not isinstance(spec.qkv, tuple):
            return self._linear(f"{site}.qkv", spec.qkv, x)
        parts = [
            self._linear(f"{site}.{name}", linear, x)
            for name, linear in zip("qkv", spec.qkv, strict=True)
        ]
        return self._writer.node(
            "Concat", f"{site}.joined", parts, self._dtype, ("T", spec.channels), axis=1
        )

    def _low_rank(self, site: str, down: LinearSpec | None, up: LinearSpec, x: Value) -> Value:
        return self._linear(site, up, x if down is None else self._linear(f"{site}_down", down, x))

    def _mamba1(
        self, index: int, spec: Mamba1Spec, x: Value, states: Sequence[Value], steps: _StepInputs
    ) -> tuple[Value, Value, Value]:
        site, (columns, matrix) = f"layers.{index}.mamba", states
        places = self._places(index, steps)
        z = self._linear(f"{site}.z", spec.z, x)
        given = self._linear(f"{site}.x", spec.x, x)
        mixed, columns_out = self._causal_conv(site, spec, given, columns, places)
        b, c, time = (
            self._optional_norm(
                f"{site}.{name}_norm", norm, self._linear(f"{site}.{name}", linear, mixed)
            )
            for name, linear, norm in (
                ("b", spec.b, spec.b_norm),
                ("c", spec.c, spec.c_norm),
                ("time", spec.time, spec.time_norm),
            )
        )
        out, matrix_out = self._writer.node_of_two(
            "mamba1",
            f"{site}.mamba1",
            [
                mixed,
                z,
                self._linear(f"{site}.dt", spec.dt, time),
                b,
                c,
                matrix,
                *places,
                self._writer.weight(f"{site}.rate", scan_rate(spec)),
                self._writer.weight(f"{site}.dt_bias", of_heads(spec.dt_bias, spec.channels)),
                self._writer.weight(f"{site}.skip", of_heads(spec.skip, spec.channels)),
            ],
            (
                Value(f"{site}.mamba1.out", self._dtype, z.shape),
                Value(f"{matrix.name}_out", matrix.dtype, matrix.shape),
            ),
            domain=TRTC_DOMAIN,
            channels=spec.channels,
            state_size=spec.state_size,
            page_size=self._page_size,
        )
        return self._linear(f"{site}.out_proj", spec.out_proj, out), columns_out, matrix_out

    def _mamba2(
        self, index: int, spec: Mamba2Spec, x: Value, states: Sequence[Value], steps: _StepInputs
    ) -> tuple[Value, Value, Value]:
        site, (columns, matrix) = f"layers.{index}.mamba", states
        heads, places = spec.num_heads, self._places(index, steps)
        z = self._linear(f"{site}.z", spec.z, x)
        xbc = self._linear(f"{site}.xbc", spec.xbc, x)
        dt = self._linear(f"{site}.dt", spec.dt, x)
        mixed, columns_out = self._causal_conv(site, spec, xbc, columns, places)
        out, matrix_out = self._writer.node_of_two(
            "mamba2",
            f"{site}.mamba2",
            [
                mixed,
                z,
                dt,
                matrix,
                *places,
                self._writer.weight(f"{site}.rate", decay_rate(spec.a_log, heads)),
                self._writer.weight(f"{site}.dt_bias", of_heads(spec.dt_bias, heads)),
                self._writer.weight(f"{site}.skip", of_heads(spec.skip, heads)),
                self._writer.weight(
                    f"{site}.norm.weight", norm_weight(spec.norm, spec.width, "f32")
                ),
            ],
            (
                Value(f"{site}.mamba2.out", self._dtype, z.shape),
                Value(f"{matrix.name}_out", matrix.dtype, matrix.shape),
            ),
            domain=TRTC_DOMAIN,
            heads=heads,
            head_dim=spec.head_dim,
            groups=spec.num_groups,
            state_size=spec.state_size,
            dt_min=spec.dt_min,
            dt_max=spec.dt_max or 0.0,
            eps=spec.norm.eps,
            page_size=self._page_size,
        )
        return self._linear(f"{site}.out_proj", spec.out_proj, out), columns_out, matrix_out

    def _places(self, index: int, steps: _StepInputs) -> list[Value]:
        """Where a layer's states are found and left."""
        return [
            steps["query_start"],
            steps["context_lens"],
            steps[group_input("page_table", self._groups[index])],
            steps[group_input("slots", self._groups[index])],
        ]

    def _causal_conv(
        self,
        site: str,
        spec: GatedDeltaSpec | Mamba1Spec | Mamba2Spec,
        x: Value,
        columns: Value,
        places: Sequence[Value],
    ) -> tuple[Value, Value]:
        """silu(conv(x)), and the convolution's state as it leaves it."""
        inputs = [
            x,
            columns,
            *places,
            self._writer.weight(f"{site}.conv.weight", conv_weight(spec, self._dtype)),
        ]
        if isinstance(spec, Mamba1Spec | Mamba2Spec) and spec.has_bias:
            inputs.append(self._writer.weight(f"{site}.conv.bias", conv_bias(spec, self._dtype)))
        return self._writer.node_of_two(
            "causal_conv",
            f"{site}.causal_conv",
            inputs,
            (
                Value(f"{site}.causal_conv.out", self._dtype, x.shape),
                Value(f"{columns.name}_out", columns.dtype, columns.shape),
            ),
            domain=TRTC_DOMAIN,
            page_size=self._page_size,
        )

    def _kv_scale(self, index: int, which: str) -> Value | None:
        """None means 1: the scale is absent from the checkpoint, or the pool is not FP8."""
        quantization = self._request.quantization
        if quantization is None or self._request.kv_dtype != "f8e4m3":
            return None
        source = quantization.kv_scales.get(f"{which}:{index}")
        if source is None:
            return None
        tensor = Tensor(Cast(source_recipe(source), "f32"), "f32", ())
        return self._writer.weight(f"layers.{index}.attention.{which}_scale", tensor)

    def _qk_norm(self, site: str, norm: NormSpec | None, x: Value, spec: AttentionSpec) -> Value:
        """RMSNorm over each head's D values of x [T, heads * D], or over each row."""
        if norm is None or spec.qk_norm == "row":
            return self._optional_norm(site, norm, x)
        return self._head_norm(site, norm, x, spec.head_dim)

    def _head_norm(self, site: str, norm: NormSpec, x: Value, head_dim: int) -> Value:
        width = x.shape[1]
        assert isinstance(width, int)
        heads = self._reshape(f"{site}.heads", x, ("T", width // head_dim, head_dim))
        return self._reshape(f"{site}.flat", self._norm(site, norm, heads), ("T", width))

    def _rotated(
        self,
        site: str,
        spec: AttentionSpec,
        norm: NormSpec | None,
        x: Value,
        positions: Value,
        heads: int,
    ) -> Value:
        """q or k with its norm and its rotation."""
        if spec.norm_after_rope:
            x = self._rope(f"{site}_rope", spec.rope, x, positions, heads)
            return self._qk_norm(f"{site}_norm", norm, x, spec)
        x = self._qk_norm(f"{site}_norm", norm, x, spec)
        return self._rope(f"{site}_rope", spec.rope, x, positions, heads)

    def _rope(self, site: str, rope: RopeSpec, x: Value, positions: Value, heads: int) -> Value:
        """Rotated in f32 whatever the activation type."""
        cos, sin = self._rope_tables(rope)
        row = self._unsqueeze(f"{site}.row", self._cast(f"{site}.f32", x, "f32"))
        rotated = self._writer.node(
            "RotaryEmbedding",
            site,
            [row, cos, sin, positions],
            "f32",
            row.shape,
            interleaved=0,
            num_heads=heads,
            rotary_embedding_dim=rope.rotary_dim,
        )
        axis = self._axis()
        flat = self._writer.node("Squeeze", f"{site}.flat", [rotated, axis], "f32", x.shape)
        return self._cast(f"{site}.round", flat, self._dtype)

    def _query_scale(self, site: str, scale: QueryScale, x: Value, steps: _StepInputs) -> Value:
        """Each row by the factor of its position, which is rounded to the activation type."""
        length = self._request.limits.max_seq_len
        table = QueryScaleTable(scale.beta, scale.original_length, length, scale.offset)
        name = f"rope.q_scale.{scale.offset}.{scale.original_length}.{scale.beta:g}"
        weight = self._writer.weight(name, Tensor(Cast(table, self._dtype), self._dtype, (length,)))
        factors = self._writer.node(
            "Gather", f"{site}.gather", [weight, steps["positions"]], x.dtype, ("T",), axis=0
        )
        return self._mul(site, x, self._reshape(f"{site}.column", factors, ("T", 1)))

    def _rope_tables(self, rope: RopeSpec) -> tuple[Value, Value]:
        if rope not in self._ropes:
            number = len(self._ropes)
            cos = RopeTable(
                rope.inv_freq,
                rope.attention_factor,
                self._request.limits.max_seq_len,
                "cos",
                rope.short_inv_freq,
                rope.short_length or 0,
            )
            sin = replace(cos, function="sin")
            shape = (cos.short_length + cos.length, rope.rotary_dim // 2)
            self._ropes[rope] = (
                self._writer.weight(f"rope.{number}.cos", Tensor(cos, "f32", shape)),
                self._writer.weight(f"rope.{number}.sin", Tensor(sin, "f32", shape)),
            )
        return self._ropes[rope]

    def _mlp_of_layer(
        self, site: str, mlp: DenseMlpSpec | MoeMlpSpec, x: Value, hidden: Value
    ) -> Value:
        """`hidden` is what the layer's norm made x of."""
        if isinstance(mlp, DenseMlpSpec):
            return self._mlp(site, mlp, x)
        if mlp.norms is not None:
            return self._branches(site, mlp, mlp.norms, x, hidden)
        return self._moe(site, mlp, x)

    def _mlp(self, site: str, mlp: DenseMlpSpec, x: Value) -> Value:
        """What is between the linears works on each channel by itself, so those before `down` give
        its columns in the order that it has them in."""
        down = self._weights_of(mlp.down)

        def before(name: str, linear: LinearSpec) -> Value:
            weights = self._weights_of(linear)
            if down.column_order is not None:
                weights = rows_in_order(weights, down.column_order)
            return self._applied(f"{site}.{name}", weights, x)

        if mlp.gate is None:
            product = self._active(site, mlp.activation, before("up", mlp.up))
        else:
            gate, up = before("gate", mlp.gate), before("up", mlp.up)
            active = self._active(site, mlp.activation, gate)
            product = self._mul(f"{site}.product", active, up)
        return self._applied(f"{site}.down", replace(down, column_order=None), product)

    def _active(self, site: str, activation: Activation, x: Value) -> Value:
        if activation == "silu":
            sigmoid = self._writer.node("Sigmoid", f"{site}.sigmoid", [x], x.dtype, x.shape)
            return self._mul(f"{site}.silu", x, sigmoid)
        if activation == "relu2":
            positive = self._writer.node("Relu", f"{site}.relu", [x], x.dtype, x.shape)
            return self._mul(f"{site}.relu2", positive, positive)
        return self._writer.node("Gelu", f"{site}.gelu", [x], x.dtype, x.shape, approximate="tanh")

    def _moe(self, site: str, mlp: MoeMlpSpec, x: Value) -> Value:
        wide = self._cast(f"{site}.router.f32", x, "f32")
        logits = self._exact(f"{site}.router", mlp.router.linear, wide)
        routed = self._routed(site, mlp, x, logits)
        if mlp.shared is None:
            return routed
        shared = self._mlp(f"{site}.shared", mlp.shared, x)
        if mlp.shared_gate is not None:
            gate = self._exact(f"{site}.shared_gate", mlp.shared_gate, wide)
            share = self._writer.node(
                "Sigmoid", f"{site}.shared_gate.sigmoid", [gate], "f32", gate.shape
            )
            share = self._cast(f"{site}.shared_gate.round", share, self._dtype)
            shared = self._mul(f"{site}.shared.gated", shared, share)
        return self._add(f"{site}.shared.sum", routed, shared)

    def _branches(
        self, site: str, mlp: MoeMlpSpec, norms: BranchNorms, x: Value, hidden: Value
    ) -> Value:
        """Experts and a shared MLP, which reads x, each with norms of its own."""
        assert mlp.shared is not None
        for_router = self._norm(f"{site}.router.norm", norms.router, hidden)
        wide = self._cast(f"{site}.router.f32", for_router, "f32")
        logits = self._exact(f"{site}.router", mlp.router.linear, wide)
        for_experts = self._norm(f"{site}.experts.norm", norms.experts, hidden)
        routed = self._routed(site, mlp, for_experts, logits)
        routed = self._norm(f"{site}.experts.post_norm", norms.experts_post, routed)
        shared = self._mlp(f"{site}.shared", mlp.shared, x)
        shared = self._norm(f"{site}.shared.post_norm", norms.shared_post, shared)
        return self._add(f"{site}.shared.sum", shared, routed)

    def _exact(self, site: str, linear: LinearSpec, wide: Value) -> Value:
        """A product in f32, of which a choice or a weight follows."""
        weights = plain_linear(linear, self._dtype)
        logits = self._matmul(site, wide, self._widened(f"{site}.weight", weights.weight), "f32")
        if weights.bias is None:
            return logits
        return self._add(f"{site}.bias", logits, self._widened(f"{site}.bias", weights.bias))

    def _routed(self, site: str, mlp: MoeMlpSpec, x: Value, logits: Value) -> Value:
        if mlp.latent is None:
            return self._experts(site, mlp, x, logits)
        into, out_of = mlp.latent
        latent = self._linear(f"{site}.latent_in", into, x)
        found = self._experts(site, mlp, latent, logits)
        return self._linear(f"{site}.latent_out", out_of, found)

    def _experts(self, site: str, mlp: MoeMlpSpec, x: Value, logits: Value) -> Value:
        experts = expert_weights(mlp, self._quantized, self._dtype, self._reader)
        router = mlp.router
        weights = {
            **experts.inputs,
            "choice_bias": choice_bias(router),
            "expert_scale": expert_scale(router, self._dtype),
        }
        inputs = {"x": x, "router_logits": logits} | {
            name: self._writer.weight(f"{site}.experts.{name}", tensor)
            for name, tensor in weights.items()
            if tensor is not None
        }
        return self._writer.node(
            "moe",
            f"{site}.moe",
            [inputs.get(parameter.name) for parameter in MOE.inputs],
            self._dtype,
            x.shape,
            domain=TRTC_DOMAIN,
            I=mlp.experts[0].up.out_features,
            parts=1 if mlp.experts[0].gate is None else 2,
            top_k=router.top_k,
            score=router.score,
            margin=router.margin,
            num_groups=router.num_groups,
            top_groups=router.top_groups,
            group_score=router.group_score,
            renormalize=int(router.renormalize),
            epsilon=router.epsilon,
            scale=router.scale,
            weighs_inputs=int(router.weighs_inputs),
            activation=mlp.experts[0].activation,
            limit=mlp.experts[0].limit or 0.0,
            up_offset=mlp.experts[0].up_offset,
            group_size=experts.group_size,
            weight_dtype=experts.weight_dtype,
            layout="row_major",
            act_quant=experts.act_quant,
            hadamard=experts.hadamard,
            out_dtype=self._dtype,
        )

    def _widened(self, name: str, tensor: Tensor) -> Value:
        return self._writer.weight(name, _in_f32(tensor))

    def _tail(self, hidden: Value, steps: _StepInputs) -> Value:
        """Only the rows that need logits go through the final norm and the lm_head."""
        spec = self._spec
        rows = self._writer.node(
            "Gather",
            "logit_rows.gather",
            [hidden, steps["logit_rows"]],
            hidden.dtype,
            ("R", spec.hidden_size),
            axis=0,
        )
        normed = self._norm("final_norm", spec.final_norm, rows)
        is_tied = f"{spec.lm_head.name}.weight" == spec.embedding
        head = (
            self._embedding_tensor() if is_tied else plain_linear(spec.lm_head, self._dtype).weight
        )
        weight = self._writer.weight("embedding.weight" if is_tied else "lm_head.weight", head)
        product = self._matmul("lm_head", normed, weight, self._dtype)
        if spec.lm_head.has_bias:
            bias = plain_linear(spec.lm_head, self._dtype).bias
            assert bias is not None
            product = self._add("lm_head.bias", product, self._writer.weight("lm_head.bias", bias))
        if spec.logit_softcap is None:
            return self._cast_to("lm_head.f32", product, "logits")
        return self._softcap(self._cast("lm_head.f32", product, "f32"), spec.logit_softcap)

    def _softcap(self, logits: Value, softcap: float) -> Value:
        cap = self._writer.constant("lm_head.softcap", np.asarray(softcap, dtype=np.float32), "f32")
        shape = logits.shape
        divided = self._writer.node("Div", "lm_head.softcap_div", [logits, cap], "f32", shape)
        squashed = self._writer.node("Tanh", "lm_head.softcap_tanh", [divided], "f32", shape)
        return self._writer.node(
            "Mul", "lm_head.softcap_mul", [squashed, cap], "f32", shape, output="logits"
        )

    def _linear(self, site: str, linear: LinearSpec, x: Value) -> Value:
        return self._applied(site, self._weights_of(linear), x)

    def _weights_of(self, linear: LinearSpec) -> LinearWeights:
        return linear_weights(linear, self._quantized, self._dtype, self._reader)

    def _applied(self, site: str, weights: LinearWeights, x: Value) -> Value:
        if weights.pre_scale is not None:
            scale = self._writer.weight(f"{site}.pre_scale", weights.pre_scale)
            x = self._mul(f"{site}.pre_scale", x, scale)
        if weights.column_order is not None:
            x = self._in_order(site, x, weights.column_order)
        if weights.dynamic and weights.activation is not None:
            x = self._quantize_rows(f"{site}.input", x, weights, weights.activation)
        elif weights.input_scale is not None and weights.activation is not None:
            scale = self._writer.weight(f"{site}.input_scale", weights.input_scale)
            if weights.activation == "f4e2m1":
                x = self._quantize_blocks(f"{site}.input", x, scale, weights.group_size or 0)
            else:
                x = self._quantize_dequantize(f"{site}.input", x, scale, weights.activation)
        product = self._matmul(site, x, self._weight(site, weights), self._dtype)
        if weights.bias is None:
            return product
        bias = self._writer.weight(f"{site}.bias", weights.bias)
        return self._add(f"{site}.bias", product, bias)

    def _in_order(self, site: str, x: Value, order: Tensor) -> Value:
        """The columns of x in an order. Linears that read the same input often have the same one,
        since calibration found it of that input, and share them then."""
        key = x.name, order.recipe.load(self._reader).tobytes()
        if key not in self._ordered:
            indices = self._writer.weight(f"{site}.column_order", order)
            self._ordered[key] = self._writer.node(
                "Gather", f"{site}.ordered", [x, indices], x.dtype, x.shape, axis=1
            )
        return self._ordered[key]

    def _weight(self, site: str, weights: LinearWeights) -> Value:
        """[N, K] in the activation type, dequantised when it is stored otherwise."""
        weight = self._writer.weight(f"{site}.weight", weights.weight)
        if weights.scale is None:
            return weight
        scale = self._writer.weight(f"{site}.weight_scale", weights.scale)
        if weights.format == "mxfp4":
            scale = self._powers_of_two(f"{site}.weight_scale", scale)
        if weights.format == "f4e2m1":
            assert weights.scale_2 is not None and weights.group_size
            scale_2 = self._writer.weight(f"{site}.weight_scale_2", weights.scale_2)
            # TensorRT's pattern has them in the type of activations. By itself a weight is exact.
            between = "f32" if weights.activation is None else self._dtype
            return self._dequantize_blocks(
                f"{site}.weight", weight, scale, scale_2, weights.group_size, between
            )
        if weights.format == "iq4":
            weight = self._iq4_values(f"{site}.weight", weight)
        if weights.format == "i6":
            weight = self._within_six_bits(f"{site}.weight", weight)
        inputs = [weight, scale]
        if weights.zero is not None:
            inputs.append(self._writer.weight(f"{site}.weight_zero", weights.zero))
        attributes: dict[str, Attribute] = {"output_dtype": onnx_type(self._dtype)}
        if scale.shape:
            attributes["axis"] = len(scale.shape) - 1
        if weights.group_size:
            attributes["block_size"] = weights.group_size
        dequantized = self._writer.node(
            "DequantizeLinear",
            f"{site}.weight_dq",
            inputs,
            self._dtype,
            weight.shape,
            attributes=attributes,
        )
        if weights.scale_2 is None:
            return dequantized
        scale_2 = self._writer.weight(f"{site}.weight_scale_2", weights.scale_2)
        return self._quantize_dequantize(f"{site}.weight_f8", dequantized, scale_2, "f8e4m3")

    def _iq4_values(self, site: str, codes: Value) -> Value:
        """The numbers i8 that 4-bit codes stand for."""
        table = self._writer.constant("iq4_values", np.asarray(VALUES, np.int8), "i8")
        indices = self._cast(f"{site}_codes", codes, "i32")
        return self._writer.node(
            "Gather", f"{site}_values", [table, indices], "i8", codes.shape, axis=0
        )

    def _powers_of_two(self, site: str, exponents: Value) -> Value:
        """The numbers f32 that E8M0 stands for."""
        shape = exponents.shape
        bias, two = (
            self._writer.constant(f"e8m0_{name}", np.asarray(number, np.float32), "f32")
            for name, number in (("bias", E8M0_BIAS), ("base", 2))
        )
        wide = self._cast(f"{site}_exponents", exponents, "f32")
        power = self._writer.node("Sub", f"{site}_unbiased", [wide, bias], "f32", shape)
        return self._writer.node("Pow", f"{site}_powers", [two, power], "f32", shape)

    def _within_six_bits(self, site: str, codes: Value) -> Value:
        """The codes i8, of which this says that they have 6 bits."""
        bounds = [
            self._writer.constant(f"i6_{name}", np.asarray(bound, np.int8), "i8")
            for name, bound in (("least", LEAST), ("most", MOST))
        ]
        return self._writer.node("Clip", f"{site}_i6", [codes, *bounds], "i8", codes.shape)

    def _quantize_dequantize(self, site: str, x: Value, scale: Value, dtype: str) -> Value:
        quantized = self._writer.node(
            "QuantizeLinear", f"{site}_q", [x, scale], dtype, x.shape, output_dtype=onnx_type(dtype)
        )
        return self._writer.node(
            "DequantizeLinear",
            f"{site}_dq",
            [quantized, scale],
            x.dtype,
            x.shape,
            output_dtype=onnx_type(x.dtype),
        )

    def _quantize_rows(self, site: str, x: Value, weights: LinearWeights, dtype: str) -> Value:
        """Rows, or whole groups of them, by their largest magnitudes; rotated before as the weights
        were."""
        width, scales = x.shape[1], weights.input_scales
        assert isinstance(width, int)
        codes, row_scale = self._writer.node_of_two(
            "quantize",
            f"{site}_q",
            [x],
            (
                Value(f"{site}_q.out", dtype, x.shape),
                Value(f"{site}_q.scale", "f32", (x.shape[0], scales)),
            ),
            domain=TRTC_DOMAIN,
            out_dtype=dtype,
            scales=scales,
            hadamard=weights.hadamard,
        )
        return self._writer.node(
            "DequantizeLinear",
            f"{site}_dq",
            [codes, row_scale],
            x.dtype,
            x.shape,
            axis=1,
            block_size=width // scales,
            output_dtype=onnx_type(x.dtype),
        )

    def _quantize_blocks(self, site: str, x: Value, scale: Value, size: int) -> Value:
        """Blocks of a row to E2M1, each by an E4M3 scale that is computed on the way."""
        width = x.shape[1]
        assert isinstance(width, int)
        codes, scales = self._writer.node_of_two(
            "TRT_FP4DynamicQuantize",
            f"{site}_q",
            [x, scale],
            (
                Value(f"{site}_q.out", "f4e2m1", x.shape),
                Value(f"{site}_q.scale", "f8e4m3", (x.shape[0], width // size)),
            ),
            domain=TENSORRT_DOMAIN,
            axis=-1,
            block_size=size,
            scale_type=onnx_type("f8e4m3"),
        )
        return self._dequantize_blocks(site, codes, scales, scale, size, self._dtype)

    def _dequantize_blocks(
        self, site: str, codes: Value, scales: Value, scale_2: Value, size: int, between: str
    ) -> Value:
        """E2M1 codes by E4M3 scales of blocks, which scale_2 scales in turn, in type `between`."""
        attributes: dict[str, Attribute] = {"output_dtype": onnx_type(self._dtype)}
        wide = self._writer.node(
            "DequantizeLinear",
            f"{site}_scale_dq",
            [scales, scale_2],
            between,
            scales.shape,
            attributes={"output_dtype": onnx_type(between)},
        )
        return self._writer.node(
            "DequantizeLinear",
            f"{site}_dq",
            [codes, wide],
            self._dtype,
            codes.shape,
            attributes=attributes | {"axis": 1, "block_size": size},
        )

    def _matmul(self, site: str, x: Value, weight: Value, dtype: str) -> Value:
        """x [M, K] by weight [N, K]."""
        n, k = weight.shape
        transposed = self._writer.node(
            "Transpose", f"{site}.transpose", [weight], weight.dtype, (k, n)
        )
        return self._writer.node(
            "MatMul", f"{site}.matmul", [x, transposed], dtype, (x.shape[0], n)
        )

    def _optional_norm(self, site: str, norm: NormSpec | None, x: Value) -> Value:
        return x if norm is None else self._norm(site, norm, x)

    def _norm(self, site: str, norm: NormSpec, x: Value) -> Value:
        size = x.shape[-1]
        assert isinstance(size, int)
        weight = self._writer.weight(f"{site}.weight", norm_weight(norm, size, self._dtype))
        if norm.centered:
            return self._layer_norm(site, norm, x, weight)
        return self._writer.node(
            "RMSNormalization",
            site,
            [x, weight],
            x.dtype,
            x.shape,
            axis=-1,
            epsilon=norm.eps,
            stash_type=1,
        )

    def _layer_norm(self, site: str, norm: NormSpec, x: Value, weight: Value) -> Value:
        bias = norm_bias(norm, weight.shape[0], self._dtype)  # type: ignore[arg-type]
        inputs = [x, weight]
        if bias is not None:
            inputs.append(self._writer.weight(f"{site}.bias", bias))
        return self._writer.node(
            "LayerNormalization",
            site,
            inputs,
            x.dtype,
            x.shape,
            axis=-1,
            epsilon=norm.eps,
            stash_type=1,
        )

    def _add(self, site: str, x: Value, y: Value) -> Value:
        return self._writer.node("Add", site, [x, y], x.dtype, x.shape)

    def _mul(self, site: str, x: Value, y: Value) -> Value:
        return self._writer.node("Mul", site, [x, y], x.dtype, x.shape)

    def _cast(self, site: str, x: Value, dtype: str) -> Value:
        """x itself when it has that type already."""
        if x.dtype == dtype:
            return x
        return self._writer.node("Cast", site, [x], dtype, x.shape, to=onnx_type(dtype))

    def _cast_to(self, site: str, x: Value, output: str) -> Value:
        """The graph's output needs a node of its own, even if the types agree."""
        return self._writer.node(
            "Cast", site, [x], "f32", x.shape, output=output, to=onnx_type("f32")
        )

    def _axis(self) -> Value:
        return self._writer.constant("axis_0", np.asarray([0], dtype=np.int64), "i64")

    def _unsqueeze(self, site: str, x: Value) -> Value:
        return self._writer.node("Unsqueeze", site, [x, self._axis()], x.dtype, (1, *x.shape))

    def _reshape(self, site: str, x: Value, shape: tuple[int | str, ...]) -> Value:
        """The first axis is the one that varies."""
        sizes = [-1, *(size for size in shape[1:] if isinstance(size, int))]
        name = "shape_" + "x".join(str(size) for size in sizes[1:])
        target = self._writer.constant(name, np.asarray(sizes, dtype=np.int64), "i64")
        return self._writer.node("Reshape", site, [x, target], x.dtype, shape)


def _in_f32(tensor: Tensor) -> Tensor:
    """The same values, as they were rounded."""
    return Tensor(Cast(tensor.recipe, "f32"), "f32", tensor.shape)
