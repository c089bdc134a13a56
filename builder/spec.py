"""The specification of a decoder: a family makes it from config.json, and the graph is written from
it.

Shapes: T tokens, H hidden_size, Hq/Hkv query/KV heads, D head_dim, I intermediate size, E experts.
"""

from dataclasses import dataclass, field
from typing import Literal

from trtc.protos.errors import UnsupportedError

Activation = Literal["silu", "gelu_tanh", "relu2", "quick_gelu"]
RouterScore = Literal["softmax", "sigmoid", "sparsemixer"]
GroupScore = Literal["max", "top2_sum"]
"""Of a group of experts: its largest score (DeepSeek-V2), or the sum of its two largest."""
QkNorm = Literal["head", "row"]
"""What q and k norms run over: each head's D values, or all heads of a token."""


@dataclass(frozen=True)
class Interleaved:
    """Heads whose rotary embedding turns dimensions (2i, 2i + 1), as in GLM, Cohere and Ernie.

    trtc turns (i, i + rotary_dim / 2). Scores do not change when q and k have their dimensions
    reordered alike, so rows of weights are: even dimensions first, then the odd ones.
    """

    head_dim: int
    rotary_dim: int
    first: int = 0
    """The first dimension of a head that turns."""


@dataclass(frozen=True)
class GroupedRows:
    """Rows of a fused tensor that lie in equal groups, one for each head: the first part of every
    group, then the second part of every group, and so on.

    Qwen3-Next's in_proj_qkvz has q, k, v and z of each key head side by side, and its q_proj the
    query and the gate of each head.
    """

    group: int
    """Rows of a group."""
    parts: tuple[tuple[int, int], ...]
    """Beginning and end within a group."""


@dataclass(frozen=True)
class OfExperts:
    """Where an expert's linear lies in a tensor of all experts (gpt-oss).

    The tensor has the linear's name, without `.weight`; biases [E, rows] end in `_bias`. The linear
    has rows first, first + step, ... of the `rows` that the tensor has of each expert.
    """

    expert: int
    num_experts: int
    rows: int
    first: int = 0
    step: int = 1
    transposed: bool = False
    """The tensor is [E, in_features, rows], not [E, rows, in_features]."""

    def shape(self, in_features: int) -> tuple[int, int, int]:
        """Of the tensor of weights."""
        inner = (in_features, self.rows) if self.transposed else (self.rows, in_features)
        return (self.num_experts, *inner)


@dataclass(frozen=True)
class LinearSpec:
    """y = x @ weight.T (+ bias): weight [out_features, in_features] as in Transformers."""

    name: str
    """Checkpoint prefix of the tensors: `model.layers.0.self_attn.q_proj`."""
    in_features: int
    out_features: int
    has_bias: bool = False
    rows: tuple[int, int] | None = None
    """Which rows of the checkpoint's tensor, when it is a fused one (Phi-3's qkv_proj)."""
    interleaved: Interleaved | None = None
    """Of q and k whose rotary embedding turns pairs of neighbours: the rows are reordered."""
    grouped: GroupedRows | None = None
    """Which rows of every group of the checkpoint's tensor, in place of `rows`."""
    of_experts: OfExperts | None = None
    """None: its tensors are its own, or `rows` of a fused one."""

    @property
    def stored_rows(self) -> int:
        """Rows that the checkpoint's tensor has at least."""
        if self.grouped is not None:
            taken = sum(end - begin for begin, end in self.grouped.parts)
            return self.out_features // taken * self.grouped.group
        return self.out_features if self.rows is None else self.rows[1]

    @property
    def weight_name(self) -> str:
        """Of the tensor that holds the weight."""
        return f"{self.name}.weight" if self.of_experts is None else self.name

    @property
    def bias_name(self) -> str:
        """Of the tensor that holds the bias, if it has one."""
        return f"{self.name}.bias" if self.of_experts is None else f"{self.name}_bias"


@dataclass(frozen=True)
class NormSpec:
    """RMSNorm or LayerNorm over the last axis."""

    weight: str | None
    """Tensor name; None: nothing multiplies the normalised values (Gemma 4's values)."""
    eps: float
    unit_offset: bool = False
    """Adds 1 to the weight (Gemma)."""
    centered: bool = False
    """LayerNorm: subtracts the mean."""
    bias: str | None = None
    """Tensor name; None: there is none. Of a centered norm."""
    multiplier: float = 1.0
    """Multiplies weight and bias: what scales the logits, when it is the final norm's."""
    interleaved: Interleaved | None = None
    """Of heads that a linear gives in this order; weight and bias have it then, too."""


@dataclass(frozen=True)
class RopeSpec:
    """Rotary embedding, rotating halves (not interleaved), over the first `rotary_dim` of a head.

    `inv_freq` [rotary_dim / 2] is already scaled (llama3, linear, yarn, longrope);
    `attention_factor` multiplies cos and sin.
    """

    rotary_dim: int
    inv_freq: tuple[float, ...]
    attention_factor: float = 1.0
    short_inv_freq: tuple[float, ...] = ()
    """Longrope: what sequences of up to `short_length` tokens use instead of `inv_freq`."""
    short_length: int | None = None
    """None: all sequences use `inv_freq`."""


NO_ROPE = RopeSpec(rotary_dim=2, inv_freq=(0.0,))
"""No rotary embedding: one pair of dimensions rotated by 0, which changes no bit."""


@dataclass(frozen=True)
class QueryScale:
    """Queries at position p are multiplied by 1 + beta * ln(1 + floor((p + offset) /
    original_length)), after rope (Ministral 3, Llama 4)."""

    beta: float
    original_length: int
    offset: int = 0
    """1: Llama 4 counts a token itself."""


@dataclass(frozen=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    """Multiplies q.k before softcap and softmax."""
    rope: RopeSpec
    q: LinearSpec
    k: LinearSpec | None
    """None: of a layer that reads the keys and values of `kv_layer`."""
    v: LinearSpec | None
    """None: values are what `k` gives, before its norm and rope (Gemma 4)."""
    o: LinearSpec
    q_norm: NormSpec | None = None
    """Before rope (Qwen3), unless `norm_after_rope`."""
    k_norm: NormSpec | None = None
    v_norm: NormSpec | None = None
    """Over each head's values (Gemma 4)."""
    qk_norm: QkNorm = "head"
    norm_after_rope: bool = False
    """Norms of q and k come after rope (Hunyuan); of `qk_norm` "head"."""
    query_scale: QueryScale | None = None
    window: int | None = None
    """A token sees itself and the window-1 tokens before it; None: all."""
    chunked: bool = False
    """With a window: a token sees those of its chunk of `window` positions instead (Llama 4)."""
    softcap: float | None = None
    """scores = softcap * tanh(scores / softcap)."""
    gate: LinearSpec | None = None
    """[Hq * D, H]: the result is multiplied by sigmoid(gate(x)) before `o` (Qwen3-Next)."""
    sinks: str | None = None
    """Tensor name, [num_heads]: one more logit of a head's softmax, without a value (gpt-oss)."""
    kv_layer: int | None = None
    """An earlier layer, whose keys and values are attended to (Gemma 4); None: the layer's own."""


@dataclass(frozen=True)
class IndexerSpec:
    """The lightning indexer of DeepSeek Sparse Attention (arXiv:2512.02556): which tokens a token
    attends to.

        q = rope(q(what attention's q reads))   [T, heads * head_dim]
        k = rope(k_norm(k(x)))                  [T, head_dim], which the cache keeps
        score = sum over heads of weights(x) * relu(q . k)

    The top_k tokens with the largest scores are selected (ties: the earlier ones), of those that a
    token sees; all while these are no more. Positive factors of a score change no order and are
    left out. Rope, which is the attention's, turns the first dimensions of a head.
    """

    num_heads: int
    head_dim: int
    top_k: int
    q: LinearSpec
    k: LinearSpec
    k_norm: NormSpec
    """A LayerNorm with a bias."""
    weights: LinearSpec
    """[num_heads, H]; multiplied in f32 and never quantised."""


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Multi-head latent attention (MLA, DeepSeek-V2, arXiv:2405.04434).

        q = q(norm(q_a(x)))                    [T, Hq * (nope + rope)], or q(x)
        c, k_rope = kv_a(x)                    [T, rank | rope]
        k_nope, v = kv_b(norm(c))              of each head [nope | value_dim]
        softmax(q . (k_nope, k_rope) * scale) . v

    The cache keeps norm(c) and the rotated k_rope.

    trtc never makes k_nope and v: the rows of kv_b that give k_nope multiply the queries instead,
    and those that give v multiply what attention gives, so that all heads attend to the latents
    themselves, as queries of one KV head do.
    """

    num_heads: int
    nope_dim: int
    """Dimensions of a head's query and key that rope does not turn. Those that it turns follow."""
    rope_dim: int
    value_dim: int
    rank: int
    """Of the latent."""
    scale: float
    """Multiplies q.k before softmax."""
    rope: RopeSpec
    q: LinearSpec
    kv_a: LinearSpec
    """[rank + rope_dim, H]."""
    kv_b: LinearSpec
    """[Hq * (nope_dim + value_dim), rank]. No product of its own, so it is not among the layer's
    linears; a quantised one is dequantised at build."""
    kv_norm: NormSpec
    """Of the latent."""
    o: LinearSpec
    q_a: LinearSpec | None = None
    """None: `q` reads the layer's input."""
    q_norm: NormSpec | None = None
    """Of what `q_a` gives."""
    query_scale: QueryScale | None = None
    indexer: IndexerSpec | None = None
    """None: a token attends to all tokens that it sees, or to what `selection_layer` selected."""
    selection_layer: int | None = None
    """An earlier layer with an indexer, whose selection is this layer's (GLM-5.2)."""

    @property
    def head_dim(self) -> int:
        """Of a query."""
        return self.nope_dim + self.rope_dim

    @property
    def width(self) -> int:
        """Elements that the cache keeps of a token."""
        return self.rank + self.rope_dim


@dataclass(frozen=True)
class ShortConvSpec:
    """A gated short convolution (LFM2): out_proj(C * conv(B * x)) with B, C, x of in_proj.

    `conv` is causal and depthwise: a channel's output is the sum of its last `taps` inputs, each
    by a weight of its own. Its tensor is [H, 1, taps], as of torch's Conv1d.
    """

    in_proj: LinearSpec
    """[3 * H, H]: rows of B, then of C, then of x."""
    out_proj: LinearSpec
    conv: str
    """Checkpoint prefix of the convolution's tensors."""
    channels: int
    taps: int
    has_bias: bool = False


@dataclass(frozen=True)
class GatedDeltaSpec:
    """A gated delta net (Qwen3-Next): a linear recurrence with a matrix as its state.

    q, k, v = split(silu(conv(qkv(x)))), where `conv` is causal and depthwise, without a bias, and
    out_proj(gated_norm(o, z(x))) with the o of plugins/gated_delta. Value heads share key heads, as
    attention's heads share KV heads. b(x) and a(x) are numbers of a head: how much is written, and
    how fast is forgotten. They are never quantised, and neither is a z of low rank.
    """

    qkv: LinearSpec | tuple[LinearSpec, LinearSpec, LinearSpec]
    """[2 * Hk * Dk + Hv * Dv, H]: rows of q, then of k, then of v. Or these three."""
    z: LinearSpec
    """[Hv * Dv, H]"""
    b: LinearSpec
    """[Hv, H]"""
    a: LinearSpec
    """[Hv * decays, H]"""
    out_proj: LinearSpec
    conv: str | tuple[str, str, str]
    """Checkpoint prefix of the convolution's tensor, [channels, 1, taps]; or of those of q, k and v
    apart."""
    taps: int
    a_log: str
    """Tensor name, [Hv]: forgetting is exp(-exp(a_log) * softplus(a + dt_bias))."""
    dt_bias: str
    """Tensor name, [Hv * decays]."""
    norm: NormSpec
    """Of each head's Dv values, before they are multiplied by gate(z)."""
    num_key_heads: int
    num_value_heads: int
    key_dim: int
    """Dk."""
    value_dim: int
    """Dv."""
    decays: int = 1
    """Of a head: one, or Dk, one for each of its key channels (Kimi-Linear)."""
    write_scale: float = 1.0
    """Of sigmoid(b); 2 where eigenvalues of the recurrence may be negative (OLMo Hybrid)."""
    gate: Literal["silu", "sigmoid"] = "silu"
    z_down: LinearSpec | None = None
    """[rank, H]: `z` reads what it gives; None: x."""
    a_down: LinearSpec | None = None
    """[rank, H]: `a` reads what it gives; None: x."""
    a_log_shape: tuple[int, ...] = ()
    """Of the tensor in the checkpoint; (): [Hv]."""
    conv_in_thirds: bool = False
    """The convolution's three tensors are equal parts of it, as Transformers saves them, not those
    of q, k and v."""

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return sum(self.parts)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Channels of q, of k and of v."""
        keys = self.num_key_heads * self.key_dim
        return keys, keys, self.num_value_heads * self.value_dim

    @property
    def projections(self) -> tuple[LinearSpec, ...]:
        """Those of q, k and v."""
        return self.qkv if isinstance(self.qkv, tuple) else (self.qkv,)

    @property
    def convolutions(self) -> tuple[tuple[str, int], ...]:
        """Prefix and channels of each of the convolution's tensors."""
        if isinstance(self.conv, tuple):
            third = -(-self.channels // 3)
            thirds = (third, third, self.channels - 2 * third)
            parts = thirds if self.conv_in_thirds else self.parts
            return tuple(zip(self.conv, parts, strict=True))
        return ((self.conv, self.channels),)

    @property
    def gate_linears(self) -> tuple[LinearSpec, ...]:
        """Those that are never quantised."""
        downs = tuple(one for one in (self.z_down, self.a_down) if one is not None)
        return (*downs, *(() if self.z_down is None else (self.z,)), self.b, self.a)


@dataclass(frozen=True)
class Mamba1Spec:
    """A state-space layer of Mamba: every channel has a state of its own.

    x = silu(conv(x(input))), where `conv` is causal and depthwise; B, C and the steps come of x
    itself, and out_proj(o) with the o of plugins/mamba1, which reads z(input) too. `time`, `b` and
    `c` are few rows of one tensor and, as `dt`, never quantised.
    """

    x: LinearSpec
    """[channels, H]"""
    z: LinearSpec
    """[channels, H]"""
    time: LinearSpec
    """[rank, channels]: steps = softplus(dt(time_norm(time(x))) + dt_bias)."""
    b: LinearSpec
    """[N, channels]"""
    c: LinearSpec
    """[N, channels]"""
    dt: LinearSpec
    """[channels, rank], without its bias."""
    out_proj: LinearSpec
    conv: str
    """Checkpoint prefix of the convolution's tensors: its weight is [channels, 1, taps]."""
    taps: int
    a_log: str
    """Tensor name, [channels, N]: a step t forgets exp(-exp(a_log) * t)."""
    dt_bias: str
    """Tensor name, [channels]."""
    skip: str
    """Tensor name, [channels]: what of x is added to the result (D)."""
    channels: int
    rank: int
    state_size: int
    """N."""
    time_norm: NormSpec | None = None
    """Of what `time`, `b` and `c` give (Jamba)."""
    b_norm: NormSpec | None = None
    c_norm: NormSpec | None = None
    has_bias: bool = False
    """Of the convolution."""

    @property
    def projections(self) -> tuple[LinearSpec, ...]:
        """Those of x."""
        return (self.time, self.b, self.c, self.dt)


@dataclass(frozen=True)
class Mamba2Spec:
    """A state-space layer of Mamba-2: a linear recurrence with a matrix as its state.

    x, B, C = split(silu(conv(xbc(x)))), where `conv` is causal and depthwise, and out_proj(o) with
    the o of plugins/mamba2, which reads z(x) and dt(x) too. Heads share B and C in groups, as
    attention's heads share KV heads.
    """

    z: LinearSpec
    """[heads * D, H]"""
    xbc: LinearSpec
    """[heads * D + 2 * groups * N, H]: rows of x, then of B, then of C."""
    dt: LinearSpec
    """[heads, H]"""
    out_proj: LinearSpec
    conv: str
    """Checkpoint prefix of the convolution's tensors: its weight is [channels, 1, taps]."""
    taps: int
    a_log: str
    """Tensor name, [heads]: a step t = softplus(dt + dt_bias) forgets exp(-exp(a_log) * t)."""
    dt_bias: str
    """Tensor name, [heads]."""
    skip: str
    """Tensor name, [heads]: what of x is added to the result (D)."""
    norm: NormSpec
    """Of each group's values, which were multiplied by silu(z) before."""
    num_heads: int
    head_dim: int
    num_groups: int
    state_size: int
    """N."""
    has_bias: bool = False
    """Of the convolution."""
    dt_min: float = 0.0
    """The least a step is."""
    dt_max: float | None = None
    """The most a step is; None: any."""

    @property
    def width(self) -> int:
        """Of all heads side by side."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return self.width + 2 * self.num_groups * self.state_size


RecurrentSpec = ShortConvSpec | GatedDeltaSpec | Mamba1Spec | Mamba2Spec
"""Mixers that keep a state of each sequence, the last inputs of a convolution among it."""
MixerSpec = AttentionSpec | LatentAttentionSpec | RecurrentSpec
"""What mixes tokens."""


@dataclass(frozen=True)
class DenseMlpSpec:
    """down(activation(gate(x)) * (up(x) + up_offset)); without a gate down(activation(up(x)))."""

    gate: LinearSpec | None
    up: LinearSpec
    down: LinearSpec
    activation: Activation
    limit: float | None = None
    """gate(x) is at most so much, and up(x) within plus and minus it. Of routed experts, as is
    `up_offset`, and the activation quick_gelu, x * sigmoid(1.702 x)."""
    up_offset: float = 0.0

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """In the order of use."""
        return (self.up, self.down) if self.gate is None else (self.gate, self.up, self.down)


@dataclass(frozen=True)
class ChoiceBias:
    """Added in f32 to the scores by which experts are chosen, and to nothing else."""

    tensor: str
    """Tensor name."""
    is_row: bool = False
    """Its shape is [1, E] (ERNIE), not [E]."""


@dataclass(frozen=True)
class RouterSpec:
    """Which experts a row of x goes to, and the weight of each.

    logits = x @ linear.T (+ its bias), in f32; scores = softmax or sigmoid of them. The `top_k`
    experts with the largest score + choice_bias are chosen (ties: the lower index), out of the
    best groups alone where there are groups. Weights are the scores of those chosen:

        renormalize:  scores / (sum of those chosen + epsilon) * scale
        else:         scores * scale

    Then each is multiplied by its expert's number in `expert_scale` (Gemma 4).
    A softmax over the logits of the chosen experts alone (gpt-oss, Granite) is that of all of them,
    renormalised.
    """

    linear: LinearSpec
    """[E, H]; may have a bias (gpt-oss)."""
    top_k: int
    score: RouterScore = "softmax"
    margin: float = 0.0
    """Of sparsemixer (Phi-MoE, arXiv:2409.12136), which has no bias and no groups: experts are
    chosen one after another, and the score of each is its softmax among those left whose logits l
    are near its own m, m - l <= margin * max(|l|, m)."""
    choice_bias: ChoiceBias | None = None
    """DeepSeek-V3's e_score_correction_bias."""
    num_groups: int = 1
    """Experts in equal groups of neighbours."""
    top_groups: int = 1
    """How many groups the experts of a row may come from."""
    group_score: GroupScore = "top2_sum"
    """By which groups are chosen."""
    renormalize: bool = True
    epsilon: float = 0.0
    scale: float = 1.0
    """routed_scaling_factor."""
    expert_scale: str | None = None
    """Tensor name, [E]."""
    weighs_inputs: bool = False
    """Weights multiply what experts read, in place of what they give (Llama 4)."""


@dataclass(frozen=True)
class BranchNorms:
    """Of routed experts beside a shared MLP, each with norms of its own (Gemma 4). The layer's
    `mlp_norm` is that before the shared MLP, and `mlp_post_norm` that of the sum."""

    router: NormSpec
    """Before the router, which reads the layer's x as the two below do."""
    experts: NormSpec
    """Before the experts."""
    experts_post: NormSpec
    shared_post: NormSpec


@dataclass(frozen=True)
class MoeMlpSpec:
    """The sum of a row's routed experts, each by its weight, and of an MLP that all rows share."""

    router: RouterSpec
    experts: tuple[DenseMlpSpec, ...]
    shared: DenseMlpSpec | None = None
    """Several shared experts are one MLP as wide as all of them."""
    shared_gate: LinearSpec | None = None
    """[1, H]: sigmoid(x @ shared_gate.T) multiplies what `shared` gives (Qwen2-MoE)."""
    latent: tuple[LinearSpec, LinearSpec] | None = None
    """[L, H] and [H, L]: before and after the routed experts, which then read and give L values of
    a row (Nemotron-3 Super)."""
    norms: BranchNorms | None = None
    """None: all of them read what the layer's `mlp_norm` gives."""
    fused_transposed: bool = False
    """Where the experts lie in two tensors, these are [E, H, 2 * I] and [E, I, H] (Llama 4)."""

    @property
    def latent_linears(self) -> tuple[LinearSpec, ...]:
        """In the order of use."""
        return self.latent or ()

    @property
    def routers(self) -> tuple[LinearSpec, ...]:
        """Linears that are multiplied in f32 and never quantised."""
        return (self.router.linear, *(() if self.shared_gate is None else (self.shared_gate,)))


@dataclass(frozen=True)
class LayerInputSpec:
    """How a layer takes its input of LayerInputsSpec (Gemma 3n, Gemma 4): after the MLP
    x += norm(projection(activation(gate(x)) * input))."""

    gate: LinearSpec
    """[width, H]."""
    projection: LinearSpec
    """[H, width]."""
    norm: NormSpec
    activation: Activation


@dataclass(frozen=True)
class LayerInputsSpec:
    """An input of every layer beside x, from the token and its embedding e:
    (norm(projection(e)) + table[token] * table_scale) * scale, in parts of `width` a layer.
    """

    table: str
    """Tensor name, [rows, layers * width]: a row of each token."""
    rows: int
    width: int
    projection: LinearSpec
    """[layers * width, H]; never quantised."""
    norm: NormSpec
    """Of the `width` values of each layer."""
    table_scale: float
    scale: float


@dataclass(frozen=True)
class LayerSpec:
    """x += post(mixer(pre(x))); x += post(mlp(pre(x))), where every norm is optional, and so is one
    of the two parts (Nemotron-H).

    Norms before: Llama. After: OLMo 2. Both: Gemma 2, GLM-4.
    Parallel (Cohere): x += post(mixer(pre(x))) + post(mlp(pre(x))), with the mixer's norm for both.
    Then what `input` says, then x *= scalar (Gemma 4).
    """

    mixer: MixerSpec | None
    mlp: DenseMlpSpec | MoeMlpSpec | None
    attention_norm: NormSpec | None = None
    mlp_norm: NormSpec | None = None
    attention_post_norm: NormSpec | None = None
    mlp_post_norm: NormSpec | None = None
    parallel: bool = False
    input: LayerInputSpec | None = None
    """Of a model with `layer_inputs`."""
    scalar: str | None = None
    """Tensor name, [1]: multiplies what the layer gives."""

    @property
    def attention(self) -> AttentionSpec:
        """Of a layer that attends."""
        assert isinstance(self.mixer, AttentionSpec), "the layer does not attend"
        return self.mixer

    @property
    def mlps(self) -> tuple[DenseMlpSpec, ...]:
        """Routed experts first."""
        if self.mlp is None:
            return ()
        if isinstance(self.mlp, DenseMlpSpec):
            return (self.mlp,)
        return (*self.mlp.experts, *(() if self.mlp.shared is None else (self.mlp.shared,)))

    @property
    def mixer_linears(self) -> tuple[LinearSpec, ...]:
        """In the order of use."""
        mixer = self.mixer
        if mixer is None:
            return ()
        if isinstance(mixer, ShortConvSpec):
            return (mixer.in_proj, mixer.out_proj)
        if isinstance(mixer, LatentAttentionSpec):
            before = () if mixer.q_a is None else (mixer.q_a,)
            index = () if mixer.indexer is None else (mixer.indexer.q, mixer.indexer.k)
            return (*before, mixer.q, mixer.kv_a, *index, mixer.o)
        if isinstance(mixer, GatedDeltaSpec):
            z = (mixer.z,) if mixer.z_down is None else ()
            return (*mixer.projections, *z, mixer.out_proj)
        if isinstance(mixer, Mamba1Spec):
            return (mixer.x, mixer.z, mixer.out_proj)
        if isinstance(mixer, Mamba2Spec):
            return (mixer.z, mixer.xbc, mixer.dt, mixer.out_proj)
        gate = () if mixer.gate is None else (mixer.gate,)
        keys = tuple(one for one in (mixer.k, mixer.v) if one is not None)
        return (mixer.q, *gate, *keys, mixer.o)


@dataclass(frozen=True)
class DecoderSpec:
    """A causal decoder: embedding, layers, final norm, lm_head."""

    family: str
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    embedding: str
    """Tensor name, [vocab_size, hidden_size]."""
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    lm_head: LinearSpec
    """Names the embedding's prefix when the embeddings are tied."""
    embedding_scale: float | None = None
    logit_softcap: float | None = None
    layer_inputs: LayerInputsSpec | None = None
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    ignored_tensors: tuple[str, ...] = field(default_factory=tuple)
    """Regular expressions of checkpoint tensors that are known and not needed."""
    other_names: tuple[tuple[str, str], ...] = ()
    """Parts of tensors' names, and what some checkpoints have in their place."""

    @property
    def attentions(self) -> tuple[tuple[int, AttentionSpec], ...]:
        """(layer, its attention) of every layer that attends."""
        return tuple(
            (index, layer.mixer)
            for index, layer in enumerate(self.layers)
            if isinstance(layer.mixer, AttentionSpec)
        )

    @property
    def latent_attentions(self) -> tuple[tuple[int, LatentAttentionSpec], ...]:
        """(layer, its attention) of every layer that attends to latents."""
        return tuple(
            (index, layer.mixer)
            for index, layer in enumerate(self.layers)
            if isinstance(layer.mixer, LatentAttentionSpec)
        )

    @property
    def indexers(self) -> tuple[IndexerSpec, ...]:
        """Of the layers that select tokens."""
        mixers = (mixer.indexer for _, mixer in self.latent_attentions)
        return tuple(indexer for indexer in mixers if indexer is not None)

    @property
    def mixtures(self) -> tuple[MoeMlpSpec, ...]:
        """The MLPs of the layers that have routed experts."""
        return tuple(layer.mlp for layer in self.layers if isinstance(layer.mlp, MoeMlpSpec))

    @property
    def keeps_states(self) -> bool:
        """Whether some layer keeps a state of each sequence: State in protos/kv.py."""
        return any(isinstance(layer.mixer, RecurrentSpec) for layer in self.layers)

    @property
    def rope_switch(self) -> int | None:
        """Tokens up to which a sequence uses longrope's short factors; None: one set of factors.

        Raises:
            UnsupportedError: layers switch at different lengths.
        """
        ropes = {attention.rope for _, attention in self.attentions}
        ropes |= {attention.rope for _, attention in self.latent_attentions}
        lengths = {rope.short_length for rope in ropes}
        if len(lengths) > 1:
            raise UnsupportedError(
                "layers switch between rotary factors at different lengths",
                field="config.json: rope_parameters",
            )
        return lengths.pop() if lengths else None

    @property
    def linears(self) -> tuple[LinearSpec, ...]:
        """Every linear but the routers and the lm_head, in the order of the layers."""
        found: list[LinearSpec] = []
        for layer in self.layers:
            found += layer.mixer_linears
            if isinstance(layer.mlp, MoeMlpSpec):
                found += layer.mlp.latent_linears
            for mlp in layer.mlps:
                found += mlp.linears
            if layer.input is not None:
                found += (layer.input.gate, layer.input.projection)
        return tuple(found)
