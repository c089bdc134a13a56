"""Tiny source graphs of every kind, made without a checkpoint, for the tests of passes."""

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray

from tests.support.caches import uniform_layout
from tests.support.steps import Run, Stepper
from trtc.builder.evaluator import Evaluator
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.graph_writer import GraphWriter, Value
from trtc.builder.module import Module
from trtc.builder.passes.base import Pass, run_passes
from trtc.builder.passes.invariants import check_module
from trtc.builder.passes.order import NATIVE_PASSES
from trtc.builder.recipes import Array, Cast, Load, Recipe, TensorReader
from trtc.builder.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseMlpSpec,
    IndexerSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearSpec,
    MoeMlpSpec,
    NormSpec,
    RopeSpec,
    RouterSpec,
)
from trtc.builder.weights import Tensor
from trtc.plugins.iq4 import VALUES
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import cast
from trtc.protos.dtypes import BY_ONNX
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import Limits
from trtc.quant.scheme import (
    CheckpointQuantization,
    QuantizedLinear,
    Scheme,
    TensorSource,
    scheme_named,
)

HIDDEN, WIDTH, VOCAB, HEADS, KV_HEADS, HEAD_DIM, GROUP = 32, 64, 40, 4, 2, 8, 16
RANK = 12
LIMITS = Limits(max_batch_size=4, max_seq_len=64, max_num_tokens=64)
KV = uniform_layout(
    num_layers=1, page_size=4, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="f32"
)


class Tensors:
    """A checkpoint in memory; what is not given is random, the same for the same name."""

    def __init__(self, tensors: Mapping[str, Array] | None = None) -> None:
        self.tensors = dict(tensors or {})
        self.shapes: dict[str, tuple[int, ...]] = {}

    def read(self, name: str) -> Array:
        if name not in self.tensors:
            self.tensors[name] = random_array(name, self.shapes[name])
        return self.tensors[name]


def random_array(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    noise = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape)
    if len(shape) == 1:
        noise = 0.3 * noise + ("bias" not in name)
    else:
        noise = noise * 1.5 / np.sqrt(shape[-1])
    return noise.astype(np.float32)


@dataclass(frozen=True)
class Tiny:
    """Which model, and how it is quantised."""

    scheme: str = "fp32"
    layers: int = 2
    bias: bool = False
    head_norm: bool = False
    gemma: bool = False
    """Post norms, softcaps, a scaled embedding, GELU, windows in every other layer."""
    experts: int = 0
    shared: Literal["", "plain", "gated"] = ""
    """An expert beside the routed ones."""
    fused: bool = False
    """q, k and v are rows of one tensor, gate and up of another; rope turns half of a head."""
    latent: bool = False
    """Attention to latents."""
    top_k: int = 0
    """Of the tokens that every layer with latents selects; 0: it attends to all."""
    tied: bool = False
    zero_points: bool = False
    pre_scales: bool = False
    equal_pre_scales: bool = False
    """Linears of one input have the same pre-scales, each under its own name."""
    scattered: str = ""
    """Linears of every layer that have groups scattered, those of one input in the same order."""
    equal_input_scales: bool = True
    per_tensor: bool = False
    kv_dtype: str | None = None
    dtype: Literal["f32", "bf16"] | None = None
    """Of activations, other than the scheme's: f32 shows errors that bf16 would hide."""


def scheme_of(kind: Tiny) -> Scheme:
    scheme = scheme_named(kind.scheme)
    return replace(scheme, dtype=kind.dtype) if kind.dtype else scheme


def tiny(kind: Tiny) -> tuple[Module, Tensors]:
    """The source graph, and the checkpoint that its recipes read."""
    spec = spec_of(kind)
    reader = Tensors()
    reader.shapes = _shapes(spec, kind)
    scheme = scheme_of(kind)
    quantization = None
    if scheme.weight not in ("f32", "bf16"):
        linears = {linear.name: _quantized(kind, linear, reader) for linear in spec.linears}
        kv_scales: dict[str, TensorSource] = {}
        if kind.kv_dtype == "f8e4m3":
            reader.tensors |= {"k": np.array(0.5, np.float32), "v": np.array(0.25, np.float32)}
            for layer in range(kind.layers):
                kv_scales |= {f"{x}:{layer}": TensorSource((x,)) for x in ("k", "v")}
        quantization = CheckpointQuantization("modelopt", scheme, linears, kv_scales)
    request = GraphRequest(
        scheme, kind.kv_dtype or scheme.dtype, LIMITS, quantization, page_size=KV.page_size
    )
    return build_graph(spec, request, reader), reader


def spec_of(kind: Tiny) -> DecoderSpec:
    return DecoderSpec(
        family="tiny",
        architecture="TinyForCausalLM",
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        max_position_embeddings=64,
        embedding="embed.weight",
        layers=tuple(_layer(kind, index) for index in range(kind.layers)),
        final_norm=NormSpec("norm.weight", 1e-5, kind.gemma),
        lm_head=LinearSpec("embed" if kind.tied else "lm_head", HIDDEN, VOCAB),
        embedding_scale=1.7 if kind.gemma else None,
        logit_softcap=4.0 if kind.gemma else None,
    )


def _layer(kind: Tiny, index: int) -> LayerSpec:
    at = f"layers.{index}"

    def norm(name: str) -> NormSpec:
        return NormSpec(f"{at}.{name}.weight", 1e-5, kind.gemma)

    q_size, kv_size = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    begins = {"q": 0, "k": q_size, "v": q_size + kv_size}

    def linear(name: str, rows: int, columns: int = HIDDEN) -> LinearSpec:
        if kind.fused and name in begins:
            begin = begins[name]
            return LinearSpec(f"{at}.qkv", columns, rows, kind.bias, (begin, begin + rows))
        return LinearSpec(f"{at}.{name}", columns, rows, kind.bias)

    rotary = HEAD_DIM // 2 if kind.fused else HEAD_DIM
    frequencies = tuple(float(100.0 ** (-i / rotary)) for i in range(rotary // 2))
    attention = AttentionSpec(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        rope=RopeSpec(rotary, frequencies),
        q=linear("q", q_size),
        k=linear("k", kv_size),
        v=linear("v", kv_size),
        o=linear("o", HIDDEN, q_size),
        q_norm=norm("q_norm") if kind.head_norm else None,
        k_norm=norm("k_norm") if kind.head_norm else None,
        window=6 if kind.gemma and index % 2 == 0 else None,
        softcap=3.0 if kind.gemma else None,
    )
    return LayerSpec(
        mixer=_latent(kind, at) if kind.latent else attention,
        mlp=_moe(kind, at) if kind.experts else _mlp(kind, linear),
        attention_norm=norm("attention_norm"),
        mlp_norm=norm("mlp_norm"),
        attention_post_norm=norm("attention_post") if kind.gemma else None,
        mlp_post_norm=norm("mlp_post") if kind.gemma else None,
    )


def _latent(kind: Tiny, at: str) -> LatentAttentionSpec:
    """Heads of 6 + 4 channels with values of 5, over latents of 12."""
    width, head_dim, value_dim = RANK + 4, 6 + 4, 5
    return LatentAttentionSpec(
        num_heads=HEADS,
        nope_dim=6,
        rope_dim=4,
        value_dim=value_dim,
        rank=RANK,
        scale=head_dim**-0.5,
        rope=RopeSpec(4, (1.0, 0.1)),
        q=LinearSpec(f"{at}.q", HIDDEN, HEADS * head_dim),
        kv_a=LinearSpec(f"{at}.kv_a", HIDDEN, width),
        kv_b=LinearSpec(f"{at}.kv_b", RANK, HEADS * (6 + value_dim)),
        kv_norm=NormSpec(f"{at}.kv_norm.weight", 1e-5),
        o=LinearSpec(f"{at}.o", HEADS * value_dim, HIDDEN),
        indexer=_indexer(f"{at}.indexer", kind.top_k) if kind.top_k else None,
    )


def _indexer(at: str, top_k: int) -> IndexerSpec:
    """Eight heads of 8 channels."""
    return IndexerSpec(
        num_heads=8,
        head_dim=8,
        top_k=top_k,
        q=LinearSpec(f"{at}.q", HIDDEN, 8 * 8),
        k=LinearSpec(f"{at}.k", HIDDEN, 8),
        k_norm=NormSpec(f"{at}.norm.weight", 1e-5, centered=True, bias=f"{at}.norm.bias"),
        weights=LinearSpec(f"{at}.weights", HIDDEN, 8),
    )


def _mlp(kind: Tiny, linear: Callable[..., LinearSpec]) -> DenseMlpSpec:
    return DenseMlpSpec(
        gate=linear("gate", WIDTH),
        up=linear("up", WIDTH),
        down=linear("down", HIDDEN, WIDTH),
        activation="gelu_tanh" if kind.gemma else "silu",
    )


def _moe(kind: Tiny, at: str) -> MoeMlpSpec:
    def expert(name: str) -> DenseMlpSpec:
        return DenseMlpSpec(
            gate=LinearSpec(f"{name}.gate", HIDDEN, WIDTH),
            up=LinearSpec(f"{name}.up", HIDDEN, WIDTH),
            down=LinearSpec(f"{name}.down", WIDTH, HIDDEN),
            activation="silu",
        )

    experts = tuple(expert(f"{at}.experts.{index}") for index in range(kind.experts))
    shared = expert(f"{at}.shared") if kind.shared else None
    return MoeMlpSpec(
        RouterSpec(LinearSpec(f"{at}.router", HIDDEN, kind.experts), 2),
        experts,
        shared,
        LinearSpec(f"{at}.shared_gate", HIDDEN, 1) if kind.shared == "gated" else None,
    )


def _shapes(spec: DecoderSpec, kind: Tiny) -> dict[str, tuple[int, ...]]:
    mixtures = [layer.mlp for layer in spec.layers if isinstance(layer.mlp, MoeMlpSpec)]
    routers = [linear for mlp in mixtures for linear in mlp.routers]
    shapes: dict[str, tuple[int, ...]] = {spec.embedding: (VOCAB, HIDDEN), "norm.weight": (HIDDEN,)}
    latents = [mixer for _, mixer in spec.latent_attentions]
    absorbed = [mixer.kv_b for mixer in latents]
    scales = [one.weights for one in spec.indexers]
    for linear in (*spec.linears, *absorbed, *scales, *routers, spec.lm_head):
        rows = (HEADS + 2 * KV_HEADS) * HEAD_DIM if linear.rows else linear.out_features
        shapes[f"{linear.name}.weight"] = (rows, linear.in_features)
        shapes[f"{linear.name}.bias"] = (rows,)
    for layer in spec.layers:
        for norm in (
            layer.attention_norm,
            layer.mlp_norm,
            layer.attention_post_norm,
            layer.mlp_post_norm,
        ):
            if norm is not None:
                shapes[norm.weight] = (HIDDEN,)
        if isinstance(layer.mixer, AttentionSpec):
            for norm in (layer.mixer.q_norm, layer.mixer.k_norm):
                if norm is not None:
                    shapes[norm.weight] = (HEAD_DIM,)
    for indexer in spec.indexers:
        for name in (indexer.k_norm.weight, indexer.k_norm.bias):
            assert name is not None
            shapes[name] = (indexer.head_dim,)
    return shapes | {mixer.kv_norm.weight: (RANK,) for mixer in latents}


def _quantized(kind: Tiny, linear: LinearSpec, reader: Tensors) -> QuantizedLinear:
    """Quantise by rounding to the nearest; puts the tensors into `reader`."""
    scheme = scheme_of(kind)
    name, group = linear.name, GROUP if scheme.group_size else None
    weight = reader.read(f"{name}.weight")
    blocks = weight.reshape(len(weight), -1, group or weight.shape[1])
    made: dict[str, Array] = {}
    if kind.zero_points:
        low, high = blocks.min(-1, keepdims=True), blocks.max(-1, keepdims=True)
        scale = (high - low) / 15
        zero = np.clip(np.rint(-low / scale), 0, 15)
        made["weight_zero"] = cast(zero[..., 0], "u4")
        codes, code_type = np.clip(np.rint(blocks / scale) + zero, 0, 15), "u4"
    elif scheme.weight == "iq4":
        # Scales that their bytes have: powers of two, of either sign.
        largest = np.abs(blocks).max(-1, keepdims=True)
        scale = np.exp2(np.ceil(np.log2(largest / 64))) * np.where(blocks[..., :1] < 0, -1, 1)
        distance = np.abs((blocks / scale)[..., None] - np.asarray(VALUES))
        codes, code_type = distance.argmin(-1), "u4"
    elif scheme.weight in ("f4e2m1", "mxfp4"):
        scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(6)
        if scheme.weight == "mxfp4":
            exponents = np.ceil(np.log2(scale))
            scale, made["weight_scale"] = np.exp2(exponents), cast(exponents[..., 0] + 127, "u8")
        else:
            unit = scale.max() / np.float32(448)
            made["weight_scale_2"] = np.asarray(unit, np.float32)
            made["weight_scale"] = cast(scale[..., 0] / unit, "f8e4m3")
            scale = made["weight_scale"].astype(np.float32)[..., None] * unit
        codes, code_type = blocks / scale, "f4e2m1"
    else:
        largest = np.abs(blocks).max(axis=None if kind.per_tensor else -1, keepdims=True)
        top = {"f8e4m3": 448.0, "i8": 127.0, "i6": 31.0, "i4": 7.0, "i4_f8": 7.0}[scheme.weight]
        scale = largest / np.float32(top)
        code_type = {"i4_f8": "i4", "i6": "i8"}.get(scheme.weight, scheme.weight)
        codes = np.clip(blocks / scale, -top, top)
        codes = codes if code_type == "f8e4m3" else np.rint(codes)
    made["weight"] = cast(codes.reshape(weight.shape), code_type)
    made.setdefault("weight_scale", scale[..., 0].astype(np.float32))
    if scheme.weight == "i4_f8":
        made["weight_scale_2"] = np.asarray(np.abs(weight).max() / 448.0, np.float32)
    if scheme.activation in ("f8e4m3", "i8") and not scheme.dynamic:
        is_shared = kind.equal_input_scales and name.rsplit(".", 1)[1] in "qkv gate up"
        base = 0.02 if is_shared else 0.02 + zlib.crc32(name.encode()) % 97 / 5000
        made["input_scale"] = np.asarray(base, np.float32)
    if kind.pre_scales:
        like = str(weight.shape[1]) if kind.equal_pre_scales else name
        factors = np.abs(random_array(f"{like}.pre", (weight.shape[1],)))
        made["pre_quant_scale"] = factors + np.float32(0.5)
    own = name.rsplit(".", 1)[1]
    if own in kind.scattered.split():
        seed = {"k": "q", "v": "q", "up": "gate"}.get(own, own).encode()
        order = np.random.default_rng(zlib.crc32(seed)).permutation(weight.shape[1])
        made["column_order"] = order.astype(np.int32)
    reader.tensors |= {f"{name}.{key}.q": value for key, value in made.items()}
    return QuantizedLinear(
        weight=scheme.weight,
        tensors={key: TensorSource((f"{name}.{key}.q",)) for key in made},
        group_size=group,
        has_zero_point=kind.zero_points,
        dynamic=scheme.dynamic,
        hadamard=GROUP if scheme.hadamard else 0,
    )


# Judging


def ops(module: Module) -> Counter[str]:
    """How many nodes of each operator; trtc's are named `trtc.linear`."""
    return Counter(
        f"{node.domain}.{node.op_type}" if node.domain else node.op_type
        for node in module.model.graph.node
    )


def before(step: Pass, kind: Tiny) -> tuple[Module, Tensors]:
    """The module as `step` finds it: after those before it in NATIVE_PASSES, or all of them."""
    module, reader = tiny(kind)
    place = NATIVE_PASSES.index(step) if step in NATIVE_PASSES else len(NATIVE_PASSES)
    module, _ = run_passes(module, NATIVE_PASSES[:place])
    return module, reader


def logits(module: Module, reader: TensorReader) -> NDArray[np.float32]:
    """Two sequences in chunks over scrambled pages, then one token each."""
    return logits_of(Evaluator(module, reader).run, module.kv)


def logits_of(run: Run, kv: CacheLayout) -> NDArray[np.float32]:
    """The same of anything that runs steps."""
    stepper = Stepper(run, kv, num_pages=16, scramble=1)
    ids = [int(i) for i in np.random.default_rng(3).integers(0, VOCAB, 24)]
    steps: Sequence[Mapping[str, Sequence[int]]] = (
        {"a": ids[:9]},
        {"b": ids[9:14], "a": ids[14:17]},
        {"a": ids[17:18], "b": ids[18:19]},
    )
    parts = [part for step in steps for part in stepper.step(step).values()]
    return np.concatenate(parts)


def assert_same_function(old: Module, new: Module, reader: Tensors, tolerance: float) -> None:
    """The logits of both modules agree to `tolerance` of their largest."""
    expected, found = logits(old, reader), logits(new, reader)
    assert np.isfinite(expected).all()
    np.testing.assert_allclose(found, expected, atol=tolerance * np.abs(expected).max(), rtol=0)


def assert_preserves(step: Pass, kind: Tiny, tolerance: float = 1e-5) -> tuple[Module, Module]:
    """Run `step` where it stands in the list; return the modules before and after.

    Checks that outputs stay, that the module given is not altered, that the same module gives the
    same bytes, and that the step finds nothing more to do in what it made.
    """
    old, reader = before(step, kind)
    serialized = old.model.SerializeToString(deterministic=True)
    new, changed = run_passes(old, [Loose(step)])
    assert changed
    again, _ = run_passes(old, [Loose(step)])
    assert old.model.SerializeToString(deterministic=True) == serialized
    assert again.model.SerializeToString(deterministic=True) == new.model.SerializeToString(
        deterministic=True
    )
    assert_same_function(old, new, reader, tolerance)
    _, changed_twice = step(new)
    assert not changed_twice
    return old, new


def assert_unchanged(step: Pass, module: Module) -> None:
    result, changed = step(module)
    assert not changed
    assert result is module


@dataclass(frozen=True)
class Loose:
    """A pass without its requirements: the tests meet them by hand."""

    step: Pass
    requires: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return self.step.name

    def __call__(self, module: Module) -> tuple[Module, bool]:
        return self.step(module)


class Hand:
    """A graph written by hand, for what the real one never has."""

    def __init__(self) -> None:
        self.reader = Tensors()
        self.writer = GraphWriter(self.reader)

    def input(self, name: str, *shape: int | str, dtype: str = "f32") -> Value:
        return self.writer.input(name, dtype, shape)

    def weight(
        self, name: str, *shape: int, dtype: str = "f32", recipe: Recipe | None = None
    ) -> Value:
        self.reader.shapes[name] = shape
        recipe = recipe or Cast(Load(name), dtype)
        return self.writer.weight(name, Tensor(recipe, dtype, shape))

    def constant(self, name: str, values: object, dtype: str = "f32") -> Value:
        array = np.asarray(values)
        array = array.astype(np.int64) if dtype == "i64" else cast(array, dtype)
        return self.writer.constant(name, array, dtype)

    def node(
        self, op: str, name: str, inputs: Sequence[Value | None], *shape: int | str, **rest: Any
    ) -> Value:
        dtype = rest.pop("dtype", "f32")
        domain = "trtc" if op in REGISTRY else ""
        return self.writer.node(op, name, inputs, dtype, shape, domain=domain, **rest)

    def transposed(self, weight: Value) -> Value:
        rows, columns = weight.shape
        dtype = weight.dtype
        return self.node("Transpose", f"{weight.name}.t", [weight], columns, rows, dtype=dtype)

    def module(self, *outputs: Value) -> Module:
        model, recipes = self.writer.finish(outputs)
        module = Module(model, recipes, KV, LIMITS)
        check_module(module)
        return module

    def run(self, module: Module, **inputs: Array) -> list[Array]:
        return list(Evaluator(module, self.reader).run(inputs).values())


def nodes(module: Module, op: str) -> list[onnx.NodeProto]:
    return [node for node in module.model.graph.node if node.op_type == op]


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    values = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in values.items()}


def given(node: onnx.NodeProto) -> dict[str, str]:
    """The inputs of one of trtc's nodes that are there, by parameter."""
    names = (parameter.name for parameter in REGISTRY[node.op_type].inputs)
    return {name: tensor for name, tensor in zip(names, node.input, strict=False) if tensor}


def dtype_of(module: Module, weight: str) -> str:
    """The element type of a weight."""
    initializers = module.model.graph.initializer
    return next(BY_ONNX[one.data_type].name for one in initializers if one.name == weight)


def shape_of(module: Module, weight: str) -> tuple[int, ...]:
    found = next(t for t in module.model.graph.initializer if t.name == weight)
    return tuple(found.dims)
