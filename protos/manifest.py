"""The engine manifest: the only thing the builder and the runtime both know.

`manifest.json` is written last. `digest` is the SHA-256 of the canonical JSON of everything else
in it, and `files` holds the SHA-256 of every other file of the engine, so one flipped bit anywhere
in the directory is found before anything is mapped or loaded.
"""

import hashlib
from pathlib import Path
from typing import Literal

import msgspec

from trtc.protos.errors import EngineCorruptError, EngineIncompatibleError

SCHEMA_VERSION = 3
STEP_ABI_VERSION = 2
MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.safetensors"
GRAPH_FILE = "graph.onnx"
PLAN_FILE = "plan.json"
TOKENIZER_DIR = "tokenizer"
REPORT_JSON = "report.json"
REPORT_HTML = "report.html"


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A frozen, strictly decoded record."""


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
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_parameters: int
    max_position_embeddings: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


class SchemeFacts(Record, frozen=True):
    name: str
    """Name in quant/scheme.py: fp32, bf16, fp8, int8_sq, int4_awq, ..."""
    kv_dtype: Literal["f32", "bf16", "f8e4m3"]
    source: str
    """`inline` when this build calibrated, else the imported format: modelopt, awq, gptq, ..."""
    exact_activations: bool
    calibration_sha256: str | None
    lm_head: Literal["f32", "bf16", "i8"] = "bf16"
    """Element type of the lm_head's weights: i8 where the CPU target narrowed them."""


class TargetFacts(Record, frozen=True, omit_defaults=True):
    kind: Literal["cpu", "cuda", "tensorrt", "tensorrt_rtx"]
    name: str
    """As given to --target, resolved: `cpu:x86-64-v4`."""
    archs: tuple[str, ...]
    """ISA levels or SMs that this engine holds code for, best first."""
    toolchain: str
    """Compiler and version, or driver/TensorRT/Triton versions."""
    plan_version: str = ""
    """Exact version of the library that made the plans, which alone can open them; "": no plans."""
    tp: int = 1
    """Ranks of tensor parallelism, each a process with a device of its own. Of more than one,
    `ledger` and `kv` are one rank's, and so is each of `weights_files`."""


class KvGeometry(Record, frozen=True):
    """Pool of one layer: [num_pages, 2, page_size, num_kv_heads, head_dim]; 0 is K, 1 is V."""

    num_layers: int
    page_size: int
    num_kv_heads: int
    head_dim: int
    dtype: Literal["f32", "bf16", "f8e4m3"]

    @property
    def layer_page_bytes(self) -> int:
        """Bytes of one page of one layer."""
        element = {"f32": 4, "bf16": 2, "f8e4m3": 1}[self.dtype]
        return 2 * self.page_size * self.num_kv_heads * self.head_dim * element

    @property
    def page_bytes(self) -> int:
        """Bytes of one page across all layers."""
        return self.num_layers * self.layer_page_bytes


class Limits(Record, frozen=True):
    max_batch_size: int
    """Sequences in one step (B)."""
    max_seq_len: int
    """Prompt and completion tokens of one sequence."""
    max_num_tokens: int
    """Tokens in one step (T)."""


class ByteLedger(Record, frozen=True):
    """What the engine will take, so that the pool can be sized in bytes before anything loads."""

    weights: int
    activations: int
    page: int


class LayerError(Record, frozen=True):
    """How far one quantised linear is from the unquantised one, on held-out text."""

    layer: str
    sqnr_db: float
    """Signal to quantisation noise of the linear's output, in decibels."""
    max_abs_error: float


class AccuracyFacts(Record, frozen=True):
    """Against the unquantised checkpoint; `kl` and `top1` are None when there was none to read."""

    text_sha256: str
    tokens: int
    perplexity: float
    reference_perplexity: float | None
    kl: float | None
    """Mean KL(reference || engine) a token, in nats."""
    top1: float | None
    """Share of positions with the same most likely token."""
    measured_on: str
    """What ran: `cpu:x86-64-v4`, or the CPU twin of a GPU engine."""
    layers: tuple[LayerError, ...] = ()


class Canary(Record, frozen=True):
    """A prompt and the greedy tokens that the engine gave for it at build."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]


CHUNK_BYTES = 64 << 20
"""Large files are hashed in chunks as well, so that a loader checks them on all cores."""


class FileFacts(Record, frozen=True):
    sha256: str
    """Of the whole file, as `sha256sum` gives it."""
    bytes: int
    chunks: tuple[str, ...] = ()
    """SHA-256 of every CHUNK_BYTES of a file that is longer; the last chunk may be shorter."""


class Manifest(Record, frozen=True, kw_only=True):
    schema_version: int = SCHEMA_VERSION
    step_abi_version: int = STEP_ABI_VERSION
    trtc_version: str
    model: ModelFacts
    scheme: SchemeFacts
    target: TargetFacts
    kv: KvGeometry
    limits: Limits
    ledger: ByteLedger
    has_tokenizer: bool
    dummy_weights: bool = False
    """True when weights are not in the engine and random ones are filled in at load."""
    accuracy: AccuracyFacts | None = None
    canaries: tuple[Canary, ...] = ()
    files: dict[str, FileFacts]
    """POSIX path relative to the engine -> facts; every file but the manifest."""
    digest: str = ""

    def sealed(self) -> "Manifest":
        """The same manifest with its digest filled in."""
        return msgspec.structs.replace(self, digest=self._content_digest())

    def to_json(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self, order="sorted"), indent=1) + b"\n"

    def _content_digest(self) -> str:
        blank = msgspec.structs.replace(self, digest="")
        return hashlib.sha256(msgspec.json.encode(blank, order="sorted")).hexdigest()


class _Versions(msgspec.Struct, frozen=True):
    schema_version: int
    step_abi_version: int


def read_manifest(engine: Path) -> Manifest:
    """Read and check `manifest.json`; whoever opens the other files checks their hashes.

    Raises:
        EngineCorruptError: missing, unreadable or altered manifest.
        EngineIncompatibleError: written for another schema or step ABI.
    """
    path = engine / MANIFEST_FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        raise EngineCorruptError(
            f"cannot read {MANIFEST_FILE} ({error.strerror})",
            field=str(engine),
            remedy="Give a directory written by `trtc build`",
        ) from error
    rebuild = "Build the engine again, or copy it again from where it was built"
    try:
        versions = msgspec.json.decode(text, type=_Versions)
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
        manifest = msgspec.json.decode(text, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise EngineCorruptError(str(error), field=str(path), remedy=rebuild) from error
    if manifest.digest != manifest._content_digest():
        raise EngineCorruptError(
            "the content does not match its digest", field=f"{path}: digest", remedy=rebuild
        )
    return manifest
