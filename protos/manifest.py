"""The engine manifest: the contract between the builder and the runtime.

`manifest.json` is written last. `digest` is the SHA-256 of the canonical JSON of everything else
in it, and `files` holds the SHA-256 of every other file of the engine, so one flipped bit anywhere
in the directory is found before anything is mapped or loaded.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from trtc.protos.errors import EngineCorruptError, EngineIncompatibleError
from trtc.protos.files import UnreadableError, decode_json, read_file
from trtc.protos.kv import CacheLayout, KvDType
from trtc.protos.numbers import Count, Index, Size, TokenId
from trtc.protos.record import Record, record_json
from trtc.protos.sampling import NO_DEFAULTS, SamplingDefaults

SCHEMA_VERSION = 8
STEP_ABI_VERSION = 3
MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.safetensors"
GRAPH_FILE = "graph.onnx"
PLAN_FILE = "plan.json"
TOKENIZER_DIR = "tokenizer"
REPORT_JSON = "report.json"
REPORT_HTML = "report.html"
SBOM_FILE = "sbom.cdx.json"
SIGNATURE_FILE = "manifest.sig"
"""Not listed in the manifest, which it signs."""
TACTICS_PREFIX = "tactics-"
"""Prefix of file names of tactic tables, in CUDA engines."""


def weights_files(tp: int) -> tuple[str, ...]:
    """The file of each rank's weights."""
    if tp == 1:
        return (WEIGHTS_FILE,)
    return tuple(f"weights.rank{rank}.safetensors" for rank in range(tp))


class ModelFacts(Record, frozen=True):
    name: str
    """Directory or hub name of the checkpoint, without its path."""
    family: str
    architecture: str
    """`architectures[0]` of config.json, as in Transformers."""
    vocab_size: Count
    hidden_size: Count
    num_layers: Count
    num_parameters: Size
    max_position_embeddings: Count
    bos_token_id: TokenId | None
    eos_token_ids: tuple[TokenId, ...]
    pad_token_id: TokenId | None
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    revision: str | None = None
    """Commit of a model from the Hugging Face hub."""


TableDType = Literal["f32", "bf16", "i8", "i6", "iq4", "iq4_g16"]


class SchemeFacts(Record, frozen=True):
    name: str
    """Name in quant/scheme.py: fp32, bf16, fp8, int8_sq, int4_awq, ..."""
    kv_dtype: KvDType
    source: str
    """`inline` when this build calibrated, else the imported format: modelopt, awq, gptq, ..."""
    exact_activations: bool
    calibration_sha256: str | None
    exact_weights: bool = False
    """Whether bf16 weights keep 16 bits on CPUs."""
    kept: tuple[str, ...] = ()
    """Linears that this build left in bf16, because of --keep, directly or by their site."""
    formats: dict[str, str] = msgspec.field(default_factory=dict)
    """The format of each site (quant/site_format.py), when this build followed a recipe."""
    lm_head: TableDType = "bf16"
    """What the lm_head's weights are: i8 in groups of 128, where a target narrows them by itself or
    was asked to, i6 in such groups, or 4-bit codes in groups of 32 or 16 (quant/site_format.py)."""
    embedding: TableDType = "bf16"
    """The same of the table of embeddings; where it is the lm_head's weight too, they are equal."""


class TargetFacts(Record, frozen=True, omit_defaults=True):
    kind: Literal["cpu", "cuda", "tensorrt", "tensorrt_rtx"]
    name: str
    """As given to --target, resolved: `cpu:x86-64-v4`."""
    archs: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    """ISA levels or SMs that this engine has code for, best first."""
    toolchain: str
    """Compiler and version, or driver/TensorRT/Triton versions."""
    plan_version: str = ""
    """Exact version of the library that made the plans, which alone can open them; "": no plans."""
    tp: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    """Tensor-parallel ranks, each a process with its own device. If there are several, `ledger`,
    `kv` and each of `weights_files` are those of one rank."""
    ep: bool = False
    """Whether a rank has some of the routed experts whole, and not its share of each."""

    @property
    def parallelism(self) -> str:
        """How several devices share the model; "": there is one."""
        if self.tp == 1:
            return ""
        kind = "tensor and expert parallelism" if self.ep else "tensor parallelism"
        return f"{self.tp} GPUs ({kind})"


class Limits(Record, frozen=True):
    max_batch_size: Count
    """Sequences in one step (B)."""
    max_seq_len: Count
    """Prompt and completion tokens of one sequence."""
    max_num_tokens: Count
    """Tokens in one step (T)."""
    rope_switch: int | None = None
    """For a model whose rotary factors depend on a sequence's length (longrope): tokens up to which
    a sequence uses the first rows of the rotary tables. Longer ones use the rows from this one on.
    None: one row per position."""

    @property
    def num_positions(self) -> int:
        """Rows of the rotary tables, which the step's `positions` index."""
        return self.max_seq_len + (self.rope_switch or 0)

    def position_offset(self, length: int) -> int:
        """Offset of the positions of a sequence that has `length` tokens after a step.

        Keys in the cache were rotated by one set of factors, so a sequence that grows beyond
        `rope_switch` is recomputed.
        """
        return self.rope_switch if self.rope_switch is not None and length > self.rope_switch else 0


class ByteLedger(Record, frozen=True):
    """Memory needs of the engine, so that the pool can be sized before anything is loaded."""

    weights: Size
    activations: Size
    page: Size


class LayerError(Record, frozen=True):
    """Error of one quantised linear against the unquantised one, on held-out text."""

    layer: str
    sqnr_db: float
    """Signal to quantisation noise of the linear's output, in decibels."""
    max_abs_error: float


class AccuracyFacts(Record, frozen=True):
    """Against the unquantised checkpoint; `kl` and `top1` are None when there was none to read."""

    text: str
    """Name of the text's file, `default` (the bundled text), or `model` if the model generated
    it."""
    text_sha256: str
    """SHA-256 of the file's bytes, or of the token ids if the model generated them."""
    tokens: Size
    """Number of measured positions, each with the token after it."""
    perplexity: float
    reference_perplexity: float | None
    kl: float | None
    """Mean KL(reference || engine) per token, in nats."""
    top1: float | None
    """Share of positions with the same most likely token."""
    measured_on: str
    """What was measured: the engine itself, by its target (`cpu:x86-64-v4`), or its CPU twin
    (`cpu:x86-64-v3 twin`)."""
    layers: tuple[LayerError, ...] = ()


class Canary(Record, frozen=True):
    """A prompt and the greedy tokens that were recorded for it at build."""

    prompt_ids: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1)]
    token_ids: Annotated[tuple[Index, ...], msgspec.Meta(min_length=1)]
    margins: tuple[float, ...] = ()
    """Logits by which each token led the second best; (): not recorded."""


_MAX_BYTES = 64 << 20
"""Most bytes of manifest.json; the hashes of a terabyte's chunks are a megabyte."""
CHUNK_BYTES = 64 << 20
"""Large files are hashed in chunks as well, so that a loader checks them on all cores."""


class FileFacts(Record, frozen=True):
    sha256: str
    """SHA-256 of the whole file."""
    bytes: Size
    chunks: tuple[str, ...] = ()
    """SHA-256 of each CHUNK_BYTES of a longer file; the last chunk may be shorter."""


class Provenance(Record, frozen=True):
    """Provenance: the sources and tools of an engine."""

    checkpoint: dict[str, str]
    """File name -> SHA-256, for the files of the checkpoint."""
    packages: dict[str, str]
    """Distribution -> version, for those that affect an engine."""
    options: dict[str, str]
    """Fields of the build request that differ from the defaults; for paths, the last part."""


class Manifest(Record, frozen=True, kw_only=True):
    schema_version: int = SCHEMA_VERSION
    step_abi_version: int = STEP_ABI_VERSION
    trtc_version: str
    model: ModelFacts
    scheme: SchemeFacts
    target: TargetFacts
    kv: CacheLayout
    limits: Limits
    ledger: ByteLedger
    has_tokenizer: bool
    answer_format: str | msgspec.UnsetType = msgspec.UNSET
    """The format of the model's reasoning and tool calls, a name in protos/answer_formats.py;
    absent: unknown or none."""
    dummy_weights: bool = False
    """Whether the engine has no weights, and random ones are used at load."""
    accuracy: AccuracyFacts | None = None
    canaries: tuple[Canary, ...] = ()
    canary_tolerance: float = 0.0
    """In logits. A canary's token after the first that led by less may differ on another machine,
    because of rounding; 0: all tokens must be equal."""
    provenance: Provenance | None = None
    files: dict[str, FileFacts]
    """POSIX path relative to the engine -> facts; every file but the manifest."""
    digest: str = ""

    @property
    def format_name(self) -> str:
        """Name of the answer format, or `none`."""
        from trtc.protos.answer_formats import NONE

        return NONE if self.answer_format is msgspec.UNSET else self.answer_format

    def sealed(self) -> "Manifest":
        """The same manifest with its digest filled in."""
        return msgspec.structs.replace(self, digest=self._content_digest())

    def to_json(self) -> bytes:
        return record_json(self)

    def _content_digest(self) -> str:
        blank = msgspec.structs.replace(self, digest="")
        return hashlib.sha256(msgspec.json.encode(blank, order="sorted")).hexdigest()


class _Versions(msgspec.Struct, frozen=True):
    schema_version: int
    step_abi_version: int


def read_manifest(engine: Path) -> Manifest:
    """Read and check `manifest.json`; callers check the hashes of other files.

    Raises:
        EngineCorruptError: missing, unreadable or altered manifest.
        EngineIncompatibleError: written for another schema or step ABI.
    """
    return decode_manifest(engine, manifest_bytes(engine))


def manifest_bytes(engine: Path) -> bytes:
    """`manifest.json` as it is on the disk.

    Raises:
        EngineCorruptError: missing or unreadable.
    """
    try:
        return read_file(engine / MANIFEST_FILE, _MAX_BYTES)
    except UnreadableError as error:
        raise EngineCorruptError(
            f"{MANIFEST_FILE} {error}",
            field=str(engine),
            remedy="Give a directory written by `trtc build`",
        ) from error


def decode_manifest(engine: Path, text: bytes) -> Manifest:
    """The manifest in the bytes of `manifest.json`; for errors see `read_manifest`."""
    path = engine / MANIFEST_FILE
    rebuild = "Build the engine again, or copy it again from where it was built"
    try:
        versions = decode_json(text, _Versions)
        for name, found, known in (
            ("schema_version", versions.schema_version, SCHEMA_VERSION),
            ("step_abi_version", versions.step_abi_version, STEP_ABI_VERSION),
        ):
            if found != known:
                raise EngineIncompatibleError(
                    f"the engine has {found}, this trtc reads {known}",
                    field=f"{MANIFEST_FILE}: {name}",
                    remedy="Build it with this trtc, or serve it with the one that built it",
                )
        manifest = decode_json(text, Manifest)
    except UnreadableError as error:
        raise EngineCorruptError(str(error), field=str(path), remedy=rebuild) from error
    if manifest.digest != manifest._content_digest():
        raise EngineCorruptError(
            "the content does not match its digest", field=f"{path}: digest", remedy=rebuild
        )
    _check_names(manifest)
    _check_canaries(manifest)
    _check_format(manifest)
    return manifest


def _check_format(manifest: Manifest) -> None:
    if manifest.answer_format is msgspec.UNSET:
        return
    from trtc.protos.answer_formats import ANSWER_FORMATS

    if manifest.format_name not in ANSWER_FORMATS:
        raise EngineIncompatibleError(
            f"is {manifest.format_name[:40]!r}, which this trtc does not know",
            field=f"{MANIFEST_FILE}: answer_format",
            remedy="Serve it with the trtc that built it, or build it with --format",
        )


def _check_names(manifest: Manifest) -> None:
    for name in manifest.files:
        parts = name.split("/")
        if "\0" in name or not {"", ".", ".."}.isdisjoint(parts):
            raise EngineCorruptError(f"{name!r} leads out of the engine", field=MANIFEST_FILE)


def _check_canaries(manifest: Manifest) -> None:
    """Check canaries, which run before a server is ready: invalid ones would fail in kernels."""
    vocab_size, max_seq_len = manifest.model.vocab_size, manifest.limits.max_seq_len
    for number, canary in enumerate(manifest.canaries):
        problem = ""
        if max(canary.prompt_ids + canary.token_ids) >= vocab_size:
            problem = f"has a token outside the vocabulary of {vocab_size}"
        elif len(canary.prompt_ids) + len(canary.token_ids) > max_seq_len:
            problem = f"is longer than max_seq_len, which is {max_seq_len}"
        elif canary.margins and len(canary.margins) != len(canary.token_ids):
            problem = f"has {len(canary.margins)} margins for {len(canary.token_ids)} tokens"
        if problem:
            raise EngineCorruptError(problem, field=f"{MANIFEST_FILE}: canaries[{number}]")
