"""Checks that the checkpoint has the tensors that its config.json describes. Reads headers only."""

import dataclasses
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from trtc.builder.checkpoint.reader import SafetensorsReader
from trtc.builder.spec import (
    AttentionSpec,
    DecoderSpec,
    DenseMlpSpec,
    GatedDeltaSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearSpec,
    Mamba1Spec,
    Mamba2Spec,
    MixerSpec,
    MoeMlpSpec,
    NormSpec,
    OfExperts,
    RecurrentSpec,
)
from trtc.protos.errors import CheckpointError
from trtc.quant.fused_experts import DOWN, EXPERTS, FUSED_EXPERTS, FUSED_GATELESS
from trtc.quant.scheme import CheckpointQuantization

Shape = tuple[int, ...]
_PREFIXES = ("model.", "language_model.model.", "model.language_model.", "backbone.")
"""What the names of a text model's tensors begin with."""
_HEADS = ("lm_head", "language_model.lm_head")
"""Where the lm_head of a text model is, alone and inside a model of several parts."""

_SPARSE = ".block_sparse_moe."
"""What some families call `mlp` where it has experts."""


def expected_tensors(spec: DecoderSpec) -> dict[str, Shape]:
    """Shape of every tensor of the unquantised checkpoint, by name, in the order of the layers."""
    shapes: dict[str, Shape] = {spec.embedding: (spec.vocab_size, spec.hidden_size)}
    for layer in spec.layers:
        for norm in (
            layer.attention_norm,
            layer.attention_post_norm,
            layer.mlp_norm,
            layer.mlp_post_norm,
        ):
            _add_norm(shapes, norm, spec.hidden_size)
        _add_mixer(shapes, layer.mixer)
        if isinstance(layer.mlp, MoeMlpSpec):
            _add_routers(shapes, layer.mlp)
        if layer.input is not None:
            _add_norm(shapes, layer.input.norm, spec.hidden_size)
        if layer.scalar is not None:
            shapes[layer.scalar] = (1,)
    for linear in spec.linears:
        _add_linear(shapes, linear)
    if (inputs := spec.layer_inputs) is not None:
        shapes[inputs.table] = (inputs.rows, inputs.projection.out_features)
        _add_linear(shapes, inputs.projection)
        _add_norm(shapes, inputs.norm, inputs.width)
    _add_norm(shapes, spec.final_norm, spec.hidden_size)
    _add_linear(shapes, spec.lm_head)
    return shapes


def check_tensors(
    spec: DecoderSpec,
    reader: SafetensorsReader,
    quantization: CheckpointQuantization | None = None,
) -> tuple[str, ...]:
    """Compare names and shapes; return the names that trtc does not know, for a warning.

    Of quantised linears the logical shape is compared: how its tensors lie is for the format's
    reader, who has checked them against each other.

    Raises:
        CheckpointError: missing tensors, shapes that contradict config.json, or biases that
            config.json does not speak of (leaving them out would change every answer).
    """
    expected = expected_tensors(spec)
    renamed = set() if quantization is None else _rename_quantized(expected, spec, quantization)
    known = renamed | set(expected)
    _check_missing([name for name in (*expected, *sorted(renamed)) if name not in reader], reader)
    for name, shape in expected.items():
        _check_shape(name, reader.stored(name).shape, shape)
    ignored = [re.compile(pattern) for pattern in spec.ignored_tensors]
    unknown = tuple(
        name
        for name in reader.names
        if name not in known and not any(pattern.fullmatch(name) for pattern in ignored)
    )
    _check_biases(spec, unknown)
    return unknown


def settle_prefix(spec: DecoderSpec, reader: SafetensorsReader) -> DecoderSpec:
    """The names of a text model's tensors inside a model of several parts.

    Published checkpoints call them `language_model.model.*`, newer Transformers
    `model.language_model.*`.
    """
    for prefix in _PREFIXES:
        found: DecoderSpec = _renamed(spec, partial(_with_prefix, prefix))
        if found.embedding in reader:
            return _with_inner_head(found, reader)
    return spec


def _with_inner_head(spec: DecoderSpec, reader: SafetensorsReader) -> DecoderSpec:
    """Published checkpoints of several parts have the lm_head inside the text model."""
    outer, inner = _HEADS
    if spec.lm_head.name != outer or f"{inner}.weight" not in reader:
        return spec
    return dataclasses.replace(spec, lm_head=dataclasses.replace(spec.lm_head, name=inner))


def settle_names(spec: DecoderSpec, reader: SafetensorsReader) -> DecoderSpec:
    """Tensors have those of the spec's `other_names` that the checkpoint has; and delta nets the
    convolutions."""

    def name_of(name: str) -> str:
        if name in reader:
            return name
        others = (name.replace(own, other) for own, other in spec.other_names)
        return next((other for other in others if other in reader), name)

    settled: DecoderSpec = _renamed(spec, name_of) if spec.other_names else spec
    layers = tuple(_with_convolutions(layer, reader) for layer in settled.layers)
    return dataclasses.replace(settled, layers=layers)


def _with_convolutions(layer: LayerSpec, reader: SafetensorsReader) -> LayerSpec:
    """A delta net's convolution lies in tensors of q, k and v, or in as many equal parts."""
    if not isinstance(layer.mixer, GatedDeltaSpec):
        return layer
    for in_thirds in (False, True):
        mixer = dataclasses.replace(layer.mixer, conv_in_thirds=in_thirds)
        sizes = ((f"{name}.weight", channels) for name, channels in mixer.convolutions)
        if all(name in reader and reader.stored(name).shape[:1] == (n,) for name, n in sizes):
            return dataclasses.replace(layer, mixer=mixer)
    return layer


def _with_prefix(prefix: str, name: str) -> str:
    """No string of a spec but a tensor's name begins with `model.`."""
    return prefix + name.removeprefix("model.") if name.startswith("model.") else name


def _renamed(value: Any, rename: Callable[[str], str]) -> Any:
    """A spec, or a part of one, with every string of it renamed."""
    if isinstance(value, str):
        return rename(value)
    if isinstance(value, tuple):
        return type(value)(_renamed(one, rename) for one in value)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    parts: dict[str, Any] = {name: _renamed(part, rename) for name, part in fields.items()}
    return dataclasses.replace(value, **parts)


def settle_embeddings(spec: DecoderSpec, reader: SafetensorsReader) -> DecoderSpec:
    """Tied embeddings stay tied unless the checkpoint has an lm_head that differs from them.

    Transformers decides the same way: then the checkpoint is right and config.json is not.
    """
    if f"{spec.lm_head.name}.weight" != spec.embedding:
        return spec
    for name in _HEADS:
        head = f"{name}.weight"
        if head in reader and not _same_bytes(reader, head, spec.embedding):
            return dataclasses.replace(
                spec,
                lm_head=dataclasses.replace(spec.lm_head, name=name),
                ignored_tensors=tuple(p for p in spec.ignored_tensors if not re.fullmatch(p, head)),
            )
    return spec


def settle_experts(spec: DecoderSpec, reader: SafetensorsReader) -> DecoderSpec:
    """Routed experts lie in tensors of their own, or all of a layer's in two: as the checkpoint has
    them.

    quant/fused_experts.py says which two. Transformers saves the dense layers of a mixture by the
    name of those with experts (Kimi-Linear).
    """
    layers = (
        dataclasses.replace(layer, mlp=_settled_mlp(layer.mlp, reader)) for layer in spec.layers
    )
    return dataclasses.replace(spec, layers=tuple(layers))


def _settled_mlp(
    mlp: DenseMlpSpec | MoeMlpSpec | None, reader: SafetensorsReader
) -> DenseMlpSpec | MoeMlpSpec | None:
    if isinstance(mlp, MoeMlpSpec):
        return _settled_experts(mlp, reader)
    if mlp is None or _has(reader, mlp.up):
        return mlp
    named = {
        name: dataclasses.replace(linear, name=linear.name.replace(".mlp.", _SPARSE))
        for name in ("gate", "up", "down")
        if (linear := getattr(mlp, name)) is not None
    }
    return dataclasses.replace(mlp, **named) if _has(reader, named["up"]) else mlp


def _has(reader: SafetensorsReader, linear: LinearSpec) -> bool:
    """Its weight, or what stands for that where it is quantised."""
    if linear.weight_name in reader:
        return True
    return any(name.startswith(f"{linear.name}.") for name in reader.names)


def _settled_experts(mlp: MoeMlpSpec, reader: SafetensorsReader) -> MoeMlpSpec:
    first = mlp.experts[0]
    module = first.down.name.removesuffix(f".{EXPERTS}.0.{DOWN}")
    if module == first.down.name or first.down.weight_name in reader:
        return mlp
    for up, down in FUSED_EXPERTS if first.gate is not None else FUSED_GATELESS:
        if f"{module}.{up}" in reader:
            return _fused_experts(mlp, f"{module}.{up}", f"{module}.{down}")
    return mlp


def _fused_experts(mlp: MoeMlpSpec, both: str, downs: str) -> MoeMlpSpec:
    """The same experts, as parts of two tensors."""
    number = len(mlp.experts)

    def fused(index: int, expert: DenseMlpSpec) -> DenseMlpSpec:
        hidden, width = expert.up.in_features, expert.up.out_features
        turned = mlp.fused_transposed
        of = OfExperts(index, number, hidden, transposed=turned)
        down = LinearSpec(downs, width, hidden, of_experts=of)

        def part(first: int, rows: int) -> LinearSpec:
            of = OfExperts(index, number, rows, first=first, transposed=turned)
            return LinearSpec(both, hidden, width, of_experts=of)

        if expert.gate is None:
            return dataclasses.replace(expert, up=part(0, width), down=down)
        gate, up = part(0, 2 * width), part(width, 2 * width)
        return dataclasses.replace(expert, gate=gate, up=up, down=down)

    experts = (fused(index, expert) for index, expert in enumerate(mlp.experts))
    return dataclasses.replace(mlp, experts=tuple(experts))


def _same_bytes(reader: SafetensorsReader, first: str, second: str) -> bool:
    one, other = reader.stored(first), reader.stored(second)
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    rows = zip(reader.read(first), reader.read(second), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in rows)


def _add_mixer(shapes: dict[str, Shape], mixer: MixerSpec | None) -> None:
    """Tensors that are not those of linears that schemes quantise."""
    if mixer is None:
        return
    if isinstance(mixer, AttentionSpec):
        by_head = mixer.qk_norm == "head"
        _add_norm(shapes, mixer.q_norm, mixer.head_dim if by_head else mixer.q.out_features)
        keys = mixer.num_kv_heads * mixer.head_dim
        _add_norm(shapes, mixer.k_norm, mixer.head_dim if by_head else keys)
        _add_norm(shapes, mixer.v_norm, mixer.head_dim)
        if mixer.sinks is not None:
            shapes[mixer.sinks] = (mixer.num_heads,)
        return
    if isinstance(mixer, LatentAttentionSpec):
        _add_norm(shapes, mixer.q_norm, mixer.q.in_features)
        _add_norm(shapes, mixer.kv_norm, mixer.rank)
        _add_linear(shapes, mixer.kv_b)
        if mixer.indexer is not None:
            _add_norm(shapes, mixer.indexer.k_norm, mixer.indexer.head_dim)
            _add_linear(shapes, mixer.indexer.weights)
        return
    if isinstance(mixer, GatedDeltaSpec):
        _add_delta(shapes, mixer)
        return
    shapes[f"{mixer.conv}.weight"] = (mixer.channels, 1, mixer.taps)
    if mixer.has_bias:
        shapes[f"{mixer.conv}.bias"] = (mixer.channels,)
    if isinstance(mixer, Mamba1Spec):
        for linear in mixer.projections:
            _add_linear(shapes, linear)
        shapes[mixer.a_log] = (mixer.channels, mixer.state_size)
        shapes[mixer.dt_bias] = shapes[mixer.skip] = (mixer.channels,)
        _add_norm(shapes, mixer.time_norm, mixer.rank)
        _add_norm(shapes, mixer.b_norm, mixer.state_size)
        _add_norm(shapes, mixer.c_norm, mixer.state_size)
    if isinstance(mixer, Mamba2Spec):
        heads = (mixer.num_heads,)
        shapes[mixer.a_log] = shapes[mixer.dt_bias] = shapes[mixer.skip] = heads
        _add_norm(shapes, mixer.norm, mixer.width)


def _convolutions(mixer: MixerSpec | None) -> tuple[str, ...]:
    """Prefixes of the tensors of a mixer's convolution."""
    if isinstance(mixer, GatedDeltaSpec):
        return tuple(name for name, _ in mixer.convolutions)
    return (mixer.conv,) if isinstance(mixer, RecurrentSpec) else ()


def _add_delta(shapes: dict[str, Shape], mixer: GatedDeltaSpec) -> None:
    for conv, channels in mixer.convolutions:
        shapes[f"{conv}.weight"] = (channels, 1, mixer.taps)
    for linear in mixer.gate_linears:
        _add_linear(shapes, linear)
    shapes[mixer.a_log] = mixer.a_log_shape or (mixer.num_value_heads,)
    shapes[mixer.dt_bias] = (mixer.num_value_heads * mixer.decays,)
    _add_norm(shapes, mixer.norm, mixer.value_dim)


def _add_routers(shapes: dict[str, Shape], mlp: MoeMlpSpec) -> None:
    for linear in mlp.routers:
        _add_linear(shapes, linear)
    if (bias := mlp.router.choice_bias) is not None:
        experts = mlp.router.linear.out_features
        shapes[bias.tensor] = (1, experts) if bias.is_row else (experts,)
    if mlp.router.expert_scale is not None:
        shapes[mlp.router.expert_scale] = (mlp.router.linear.out_features,)
    if (norms := mlp.norms) is not None:
        for norm in (norms.router, norms.experts, norms.experts_post, norms.shared_post):
            _add_norm(shapes, norm, mlp.router.linear.in_features)


def _add_norm(shapes: dict[str, Shape], norm: NormSpec | None, size: int) -> None:
    if norm is not None and norm.weight is not None:
        shapes[norm.weight] = (size,)
    if norm is not None and norm.bias is not None:
        shapes[norm.bias] = (size,)


def _add_linear(shapes: dict[str, Shape], linear: LinearSpec) -> None:
    """A fused tensor has the rows of its last part."""
    weight, bias = linear.weight_name, linear.bias_name
    if linear.of_experts is not None:
        shapes[weight] = linear.of_experts.shape(linear.in_features)
        if linear.has_bias:
            shapes[bias] = (linear.of_experts.num_experts, linear.of_experts.rows)
        return
    rows = max(linear.stored_rows, shapes.get(weight, (0,))[0])
    shapes[weight] = (rows, linear.in_features)
    if linear.has_bias:
        shapes[bias] = (rows,)


def _rename_quantized(
    expected: dict[str, Shape], spec: DecoderSpec, quantization: CheckpointQuantization
) -> set[str]:
    """Take quantised weights out of `expected`; return the tensors that stand for them."""
    names: set[str] = set()
    of_experts = {
        linear.name: (linear.of_experts.num_experts, linear.of_experts.rows, linear.in_features)
        for linear in spec.linears
        if linear.of_experts is not None
    }
    for prefix, linear in quantization.linears.items():
        shape = expected.pop(f"{prefix}.weight", None)
        if prefix in of_experts and expected.pop(prefix, None) is not None:
            shape = of_experts[prefix]
        if linear.shape is not None and shape is not None:
            _check_shape(f"{prefix}.weight", linear.shape, shape)
        names |= {name for source in linear.tensors.values() for name in source.names}
    for source in quantization.kv_scales.values():
        names |= set(source.names)
    return names


def _check_shape(name: str, stored: Shape, promised: Shape) -> None:
    if stored != promised:
        raise CheckpointError(
            f"tensor {name} is {list(stored)} in the checkpoint, "
            f"config.json makes it {list(promised)}",
            field="config.json",
            remedy="Use the config.json that the checkpoint was saved with",
        )


def _check_missing(missing: list[str], reader: SafetensorsReader) -> None:
    if not missing:
        return
    names = list(dict.fromkeys(missing))
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    raise CheckpointError(
        f"tensors are missing: {', '.join(names[:5])}{more}",
        field=str(reader.directory),
        remedy="Check that every shard is there and that config.json is of this model",
    )


def _check_biases(spec: DecoderSpec, unknown: tuple[str, ...]) -> None:
    known = {linear.name for linear in spec.linears}
    known |= {mixer.kv_b.name for _, mixer in spec.latent_attentions}
    known |= {one.weights.name for one in spec.indexers}
    known |= {one.name for mlp in spec.mixtures for one in mlp.routers}
    known |= {name for layer in spec.layers for name in _convolutions(layer.mixer)}
    for name in unknown:
        prefix, _, suffix = name.rpartition(".")
        if suffix == "bias" and prefix in known:
            raise CheckpointError(
                f"tensor {name} is in the checkpoint, but config.json says there is no such bias",
                field="config.json",
                remedy="Use the config.json that the checkpoint was saved with",
            )
