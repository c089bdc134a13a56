"""The request for a build: frozen, and checked before any work."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trtc.builder.cache import PAGE_SIZES
from trtc.builder.grammar_files import GrammarFile
from trtc.protos.answer_formats import answer_format
from trtc.protos.errors import RequestError
from trtc.protos.kv import KvDType
from trtc.quant.calibration_mixture import parse_calibration
from trtc.quant.calibration_text import MIN_EVAL_TOKENS
from trtc.quant.keep import KEPT_DTYPE, parse_keep
from trtc.quant.scheme import BUILDABLE, scheme_named
from trtc.quant.site_format import TABLE_FORMATS, TableFormats

KV_DTYPES: dict[str, KvDType] = {
    "fp32": "f32",
    "bf16": "bf16",
    "fp8": "f8e4m3",
    "int8": "i8",
    "int4": "i4",
}
"""`--kv-dtype` -> element type of the pool."""
DEFAULT_MAX_SEQ_LEN = 4096
"""At most, when `max_seq_len` is not given and the model could do more, which the build says."""
_MIN_BITS, _MAX_BITS = 4.125, 16.0
"""What the narrowest and the widest format of a site take."""
_RANKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class BuildRequest:
    """Everything that decides an engine's bytes, and where they go."""

    model: str
    """A checkpoint directory, or a name on the Hugging Face hub."""
    output: Path
    revision: str | None = None
    """Branch, tag or commit of a model on the hub; None: its main branch."""
    dtype: str | None = None
    """A name of quant/scheme.py; None: bf16, or the checkpoint's own when it is quantised."""
    kv_dtype: str | None = None
    """A key of KV_DTYPES; None: that of the activations, or what the checkpoint declares."""
    target: str | None = None
    """`cpu[:isa,...]`, `tensorrt:sm_90` or `tensorrt-rtx:sm_89[,sm_120]`; None: the best for this
    machine."""
    force: bool = False
    """Replace an engine that is there already."""
    calib: str | Path | None = None
    """Calibration text: a file, or `FILE:SHARE,...`; None: the text that ships with trtc."""
    max_kl: float | None = None
    """Nats a token, against the unquantised model. More fails the build; where nothing says how
    linears are stored, the build finds a recipe that keeps to it."""
    max_bits: float | None = None
    """Bits a weight of linears and tables, scales included: the build finds the recipe."""
    max_bytes: int | None = None
    """Of the engine's weights; of one rank, if there are several. The build finds the recipe."""
    recipe: Path | None = None
    """A file with a format for every site (quant/recipe.py), instead of a scheme."""
    keep: tuple[str, ...] = ()
    """`GLOB=bf16`: linears, by their names in Transformers, that calibration does not quantise."""
    eval_text: Path | None = None
    """Text that accuracy is measured on; None: the text that ships with trtc."""
    eval_tokens: int | None = None
    """Tokens that accuracy is measured on, spread evenly over the text; None: 4096. 0: nothing is
    measured, and no canaries are recorded."""
    exact_activations: bool = False
    """4-bit and E4M3 weights multiply the scheme's activations on CPUs, not dynamic int8 ones."""
    exact_lm_head: bool = False
    """The lm_head of a quantised model keeps the activations' type, whatever the target."""
    lm_head_dtype: str | None = None
    """A format of quant/site_format.py's TABLE_FORMATS; None: as the target has it. Where
    embeddings are tied, of the table that both are."""
    embedding_dtype: str | None = None
    """The same of the table of embeddings."""
    exact_weights: bool = False
    """bf16 weights keep all 16 bits on CPUs, instead of 12 that round the smallest."""
    dummy_weights: bool = False
    """Write plan and kernels only; random weights are filled in at load."""
    max_batch_size: int = 64
    max_seq_len: int | None = None
    max_num_tokens: int = 512
    page_size: int | None = None
    """Tokens of a KV page; None: 16, or as many as make a page as large as a sequence's states."""
    reference: str | None = None
    """The unquantised checkpoint, to measure a checkpoint against that came quantised."""
    answer_format: str | None = None
    """How the model writes thoughts and calls, by a name of protos/answer_formats.py; None: as its
    chat template shows."""
    grammars: tuple[GrammarFile, ...] = ()
    """Grammars that the engine holds, for requests that name them."""
    family: Path | None = None
    """A Python file with the family of the model, instead of the one by its architecture."""
    tp: int = 1
    """GPUs that the model is spread over, by tensor parallelism."""
    ep: bool = False
    """Each of these GPUs has some of the routed experts whole: expert parallelism."""

    def check(self) -> None:
        """Refuse what no model could satisfy.

        Raises:
            RequestError: an option is out of range, or contradicts another.
            UnsupportedError: no such scheme.
        """
        for field, value in (
            ("--max-batch-size", self.max_batch_size),
            ("--max-num-tokens", self.max_num_tokens),
            ("--max-seq-len", self.max_seq_len if self.max_seq_len is not None else 1),
        ):
            if value < 1:
                raise RequestError(f"is {value}", field=field, remedy="Give at least 1")
        if self.max_num_tokens < self.max_batch_size:
            raise RequestError(
                f"{self.max_num_tokens} tokens a step cannot serve {self.max_batch_size} sequences",
                field="--max-num-tokens",
                remedy="Give at least as many as --max-batch-size",
            )
        if self.page_size is not None and self.page_size not in PAGE_SIZES:
            raise RequestError(
                f"is {self.page_size}",
                field="--page-size",
                remedy=f"Use one of {', '.join(map(str, PAGE_SIZES))}",
            )
        if self.tp not in _RANKS:
            raise RequestError(
                f"is {self.tp}", field="--tp", remedy=f"Use one of {', '.join(map(str, _RANKS))}"
            )
        if self.ep and self.tp == 1:
            raise RequestError(
                "experts are spread over the GPUs of --tp, and there is one",
                field="--ep",
                remedy="Give --tp 2, 4 or 8, or leave --ep out",
            )
        if self.kv_dtype is not None and self.kv_dtype not in KV_DTYPES:
            raise RequestError(
                f"is {self.kv_dtype!r}",
                field="--kv-dtype",
                remedy=f"Use one of {', '.join(KV_DTYPES)}",
            )
        if self.answer_format is not None:
            answer_format(self.answer_format)
        self._check_quantisation()

    def _check_quantisation(self) -> None:
        parse_keep(self.keep)
        if self.calib is not None:
            parse_calibration(self.calib)
        self._check_tables()
        if self.recipe is not None:
            self._check_recipe()
        if self.keep and self.dummy_weights:
            raise RequestError(
                "dummy weights are of one scheme", field="--keep", remedy="Leave one of the two out"
            )
        self._check_size()
        if self.dtype is not None:
            scheme = scheme_named(self.dtype)
            if self.calib is not None and scheme.name in BUILDABLE and scheme.calibration is None:
                raise RequestError(
                    f"{scheme.name} needs no calibration", field="--calib", remedy="Leave it out"
                )
        self._check_evaluation()

    @property
    def has_size(self) -> bool:
        """Whether the build is to find a recipe of a size."""
        return self.max_bits is not None or self.max_bytes is not None

    @property
    def tables(self) -> TableFormats:
        """What is asked of the lm_head and the embeddings."""
        head = KEPT_DTYPE if self.exact_lm_head else self.lm_head_dtype
        return TableFormats(
            None if head is None else TABLE_FORMATS[head],
            None if self.embedding_dtype is None else TABLE_FORMATS[self.embedding_dtype],
        )

    def _check_tables(self) -> None:
        for field, name in (
            ("--lm-head-dtype", self.lm_head_dtype),
            ("--embedding-dtype", self.embedding_dtype),
        ):
            if name is not None and name not in TABLE_FORMATS:
                raise RequestError(
                    f"is {name!r}", field=field, remedy=f"Use one of {', '.join(TABLE_FORMATS)}"
                )
        if self.exact_lm_head and self.lm_head_dtype not in (None, KEPT_DTYPE):
            raise RequestError(
                "keeps it in bf16, and --lm-head-dtype does not",
                field="--exact-lm-head",
                remedy="Leave one of the two out",
            )

    def _check_size(self) -> None:
        """Refuse budgets that are out of range, or say how large the engine is beside others."""
        if self.max_bytes is not None and self.max_bytes < 1:
            raise RequestError(
                f"is {self.max_bytes}", field="--max-bytes", remedy="Give 1 or more, as in 5GB"
            )
        if self.max_bits is not None and not _MIN_BITS <= self.max_bits <= _MAX_BITS:
            raise RequestError(
                f"is {self.max_bits}",
                field="--max-bits",
                remedy=f"Give {_MIN_BITS} to {_MAX_BITS:g} bits a weight",
            )
        budget = "--max-bits" if self.max_bits is not None else "--max-bytes"
        others = {
            "--dtype": self.dtype,
            "--keep": self.keep or None,
            "--dummy-weights": self.dummy_weights or None,
        }
        for field, value in others.items() if self.has_size else ():
            if value is not None:
                raise RequestError(
                    f"says how linears are stored, and {budget} has the build find that",
                    field=field,
                    remedy="Leave one of the two out",
                )

    def _check_recipe(self) -> None:
        """Refuse what says beside the recipe how linears are stored."""
        others = {
            "--dtype": self.dtype,
            "--keep": self.keep or None,
            "--dummy-weights": self.dummy_weights or None,
            "--max-bits": self.max_bits,
            "--max-bytes": self.max_bytes,
        }
        for field, value in others.items():
            if value is not None:
                raise RequestError(
                    "says how linears are stored, and so does --recipe"
                    if field != "--dummy-weights"
                    else "are of one scheme",
                    field=field,
                    remedy="Leave one of the two out",
                )

    def _check_evaluation(self) -> None:
        if self.max_kl is not None and not (self.max_kl >= 0 and math.isfinite(self.max_kl)):
            raise RequestError(f"is {self.max_kl}", field="--max-kl", remedy="Give 0 or more")
        if self.eval_tokens and self.eval_tokens < MIN_EVAL_TOKENS:
            raise RequestError(
                f"is {self.eval_tokens}, too few to mean anything",
                field="--eval-tokens",
                remedy=f"Give at least {MIN_EVAL_TOKENS}, or 0 to measure nothing",
            )
        measured = {"--max-kl": self.max_kl, "--eval-text": self.eval_text}
        if self.eval_tokens == 0:
            _refuse_given(measured, "--eval-tokens 0")
        if self.dummy_weights:
            options = {
                **measured,
                "--calib": self.calib,
                "--eval-tokens": self.eval_tokens,
                "--reference": self.reference,
            }
            _refuse_given(options, "--dummy-weights")


def _refuse_given(options: Mapping[str, object], other: str) -> None:
    """Refuse options that ask for a measurement beside `other`, which rules it out."""
    for field, value in options.items():
        if value is not None:
            raise RequestError(
                f"there is nothing to measure with {other}",
                field=field,
                remedy="Leave one of the two out",
            )
