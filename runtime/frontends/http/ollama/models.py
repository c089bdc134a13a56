"""Information about engines in the shape of Ollama's models."""

from datetime import UTC, datetime

from trtc.runtime.engine.handle import EngineHandle
from trtc.runtime.frontends.http.ollama.answers import Details, Listed, Loaded, Shown
from trtc.runtime.frontends.http.ollama.request_inputs import OPTION_NAMES

NEVER = "2262-04-11T23:47:16Z"
"""When engines expire: the last second that fits a client's 64-bit nanoseconds."""
_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


def listed(handle: EngineHandle, modified_at: str) -> Listed:
    return Listed(
        name=handle.name,
        model=handle.name,
        modified_at=modified_at,
        size=sum(one.bytes for one in handle.manifest.files.values()),
        digest=handle.manifest.digest,
        details=_details(handle),
    )


def loaded(handle: EngineHandle) -> Loaded:
    manifest = handle.manifest
    ledger, target = manifest.ledger, manifest.target
    of_rank = ledger.weights + ledger.activations + ledger.page * handle.num_pages
    size = of_rank * target.tp
    return Loaded(
        name=handle.name,
        model=handle.name,
        size=size,
        digest=manifest.digest,
        details=_details(handle),
        expires_at=NEVER,
        size_vram=0 if target.kind == "cpu" else size,
        context_length=manifest.limits.max_seq_len,
    )


def shown(handle: EngineHandle, modified_at: str) -> Shown:
    info, model = handle.info(), handle.manifest.model
    defaults = {OPTION_NAMES[name]: value for name, value in info.sampling_defaults.items()}
    if info.default_max_tokens is not None:
        defaults["num_predict"] = info.default_max_tokens
    return Shown(
        parameters="\n".join(f"{name} {value}" for name, value in defaults.items()),
        details=_details(handle),
        model_info={
            "general.architecture": model.family,
            "general.parameter_count": model.num_parameters,
            f"{model.family}.block_count": model.num_layers,
            f"{model.family}.context_length": info.max_seq_len,
            f"{model.family}.embedding_length": model.hidden_size,
            f"{model.family}.vocab_size": model.vocab_size,
        },
        capabilities=["completion"],
        modified_at=modified_at,
    )


def timestamp() -> str:
    """Now."""
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _details(handle: EngineHandle) -> Details:
    model = handle.manifest.model
    return Details(
        family=model.family,
        families=[model.family],
        parameter_size=_counted(model.num_parameters),
        quantization_level=handle.manifest.scheme.name,
    )


def _counted(number: int) -> str:
    """A number such as `8.0B`, in Ollama's format."""
    for unit, name in _UNITS:
        if number >= unit:
            return f"{number / unit:.1f}{name}"
    return str(number)
