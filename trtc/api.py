"""`trtc.build` and `trtc.open_engine`: the command line's work, from Python."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.requests.keywords import names_checked
from trtc.runtime.requests.request_defaults import GenerationConfig

if TYPE_CHECKING:
    from trtc.builder.pipeline import BuildResult
    from trtc.protos.progress import Progress


@names_checked
def build(
    model: str | Path,
    output: str | Path,
    *,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    target: str | None = None,
    force: bool = False,
    revision: str | None = None,
    calib: str | Path | None = None,
    recipe: str | Path | None = None,
    keep: Sequence[str] = (),
    eval_text: str | Path | None = None,
    eval_tokens: int | None = None,
    max_kl: float | None = None,
    max_bits: float | None = None,
    max_bytes: int | str | None = None,
    reference: str | None = None,
    exact_activations: bool = False,
    exact_lm_head: bool = False,
    lm_head_dtype: str | None = None,
    embedding_dtype: str | None = None,
    exact_weights: bool = False,
    dummy_weights: bool = False,
    max_batch_size: int = 64,
    max_seq_len: int | None = None,
    max_num_tokens: int = 512,
    page_size: int | None = None,
    answer_format: str | None = None,
    grammars: Sequence[str] = (),
    tp: int = 1,
    ep: bool = False,
    family: str | Path | None = None,
    progress: "Progress" = lambda step: None,
    num_threads: int | None = None,
) -> "BuildResult":
    """Compile a checkpoint into an engine directory and measure it.

    Args:
        model: a checkpoint directory, or a name on the Hugging Face hub.
        output: where the engine goes; it appears whole or not at all.
        dtype: scheme of weights and activations, such as `fp8`; None: bf16, or the checkpoint's own
            when it is quantised.
        kv_dtype: fp32, bf16, fp8, int8 or int4; None: that of the activations, or what the
            checkpoint declares.
        target: `cpu[:isa,...]`, `cuda:sm_90`, `tensorrt:sm_90` or `tensorrt-rtx:sm_89[,sm_120]`;
            None: the best for this machine.
        force: replace an engine that is there already.
        revision: branch, tag or commit of a model on the hub; None: its main branch.
        calib: file of calibration text, or `"a.jsonl:0.5,b.txt"`: several, with their shares of the
            tokens; None: the text that ships with trtc.
        recipe: file with a format for every site of the model, instead of `dtype`.
        keep: `GLOB=bf16` each: linears, by their names in Transformers, that calibration does not
            quantise.
        eval_text: file of text that accuracy is measured on; None: the text that ships with trtc.
        eval_tokens: tokens that accuracy is measured on; None: 4096, 0: nothing is measured, and no
            canaries are recorded.
        max_kl: nats a token; more, against the unquantised model, fails the build. Without `dtype`
            and `recipe`, the smallest recipe that keeps to it is found.
        max_bits: bits a weight, scales included, for which the best recipe is found.
        max_bytes: bytes of the engine's weights, such as `"5GB"`, for which the best recipe is
            found; with `tp`, of one GPU's.
        reference: the unquantised checkpoint, to measure one against that came quantised.
        exact_activations: 4-bit and E4M3 weights multiply the scheme's activations on CPUs, not
            dynamic int8 ones.
        exact_lm_head: the lm_head of a quantised model keeps the activations' type.
        lm_head_dtype: bf16, int8_g128, int6_g128, iq4 or iq4_g16; None: as the target has it. Where
            embeddings are tied, of the table that both are.
        embedding_dtype: the same of the table of embeddings; None: bf16.
        exact_weights: bf16 weights keep all 16 bits on CPUs, not 12.
        dummy_weights: write plan and kernels only; random weights are filled in at load.
        max_batch_size: sequences that a step computes at most.
        max_seq_len: tokens of a sequence at most, its prompt included; None: what the model can do,
            at most 4096.
        max_num_tokens: tokens that a step computes at most.
        page_size: tokens of a KV page, a power of two from 8 to 4096. Default: 16, or as many as
            make a page as large as the states of a sequence.
        answer_format: how the model writes thoughts and calls of tools, such as `hermes`; None: as
            its chat template shows.
        grammars: `NAME=FILE` or `NAME=KIND:FILE` each: grammars that requests may name.
        tp: GPUs that the model is spread over, by tensor parallelism.
        ep: each of them has some of the routed experts whole: expert parallelism.
        family: Python file with a function `family(config, max_seq_len)` that describes the model
            (`trtc.families`); None: by its architecture. The file is run.
        progress: called with each step of the work: a text with attributes `done`, `total` and
            `unit`, None where they are not known.
        num_threads: CPU threads that measure the engine; None: the usable cores.

    Raises:
        UserError: an option, the checkpoint or the output is at fault.
        EnvironmentFault: this machine lacks something, such as a C++ compiler.
        TypeError: an argument that is not one of these; it names the nearest.
    """
    from trtc.builder.grammar_files import parse_grammars
    from trtc.builder.pipeline import build as build_engine
    from trtc.builder.request import BuildRequest
    from trtc.protos.byte_size import parse_bytes
    from trtc.runtime.engine.probe import Probe

    request = BuildRequest(
        model=str(model),
        output=Path(output),
        revision=revision,
        dtype=dtype,
        kv_dtype=kv_dtype,
        target=target,
        force=force,
        calib=calib,
        max_kl=max_kl,
        max_bits=max_bits,
        max_bytes=parse_bytes(max_bytes, "max_bytes") if isinstance(max_bytes, str) else max_bytes,
        recipe=None if recipe is None else Path(recipe),
        keep=(keep,) if isinstance(keep, str) else tuple(keep),
        eval_text=None if eval_text is None else Path(eval_text),
        eval_tokens=eval_tokens,
        exact_activations=exact_activations,
        exact_lm_head=exact_lm_head,
        lm_head_dtype=lm_head_dtype,
        embedding_dtype=embedding_dtype,
        exact_weights=exact_weights,
        dummy_weights=dummy_weights,
        max_batch_size=max_batch_size,
        max_seq_len=max_seq_len,
        max_num_tokens=max_num_tokens,
        page_size=page_size,
        reference=reference,
        answer_format=answer_format,
        grammars=parse_grammars((grammars,) if isinstance(grammars, str) else grammars),
        tp=tp,
        ep=ep,
        family=None if family is None else Path(family),
    )
    return build_engine(request, probe=Probe(num_threads), progress=progress)


@names_checked
def open_engine(
    engine: str | Path,
    *,
    num_threads: int | None = None,
    kv_bytes: int | None = None,
    kv_host_bytes: int = 0,
    dummy_weights: bool = False,
    generation_config: GenerationConfig = "model",
    draft: Literal["ngram"] | None = None,
    draft_tokens: int = 4,
) -> LocalEngine:
    """Open an engine in this process.

    Args:
        engine: directory written by `build`.
        num_threads: CPU threads; None: the usable cores.
        kv_bytes: memory of the KV pool; None: enough for a full batch, if there is room.
        kv_host_bytes: memory for cached prefixes that the KV pool has no room for: they are copied
            back when a prompt begins with them. 0: they are computed again.
        dummy_weights: fill in random weights, for an engine that was built without any.
        generation_config: whose sampling defaults requests get: those of the model's
            generation_config.json, or trtc's own.
        draft: speculative decoding: what proposes the draft tokens that a step verifies. "ngram"
            (prompt lookup): the tokens that followed the same tokens earlier in the sequence.
            Outputs keep their distribution, and on CPUs their tokens; answers that quote their
            prompts or themselves take fewer steps.
        draft_tokens: draft tokens of a sequence in a step, at most.

    Raises:
        UnsupportedError: `draft`, for an engine that verifies none.
        EngineError: the directory is damaged, or not for this machine.
        EnvironmentFault: too little memory, or the code does not load.
        RequestError, UnsupportedError: `kv_host_bytes` is too little for one page, or the engine
            keeps no pages on the host.
    """
    return LocalEngine.open(
        engine,
        num_threads=num_threads,
        kv_bytes=kv_bytes,
        kv_host_bytes=kv_host_bytes,
        dummy_weights=dummy_weights,
        generation_config=generation_config,
        draft=draft,
        draft_tokens=draft_tokens,
    )
