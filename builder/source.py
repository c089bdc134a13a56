"""The model that a build works on: unquantised, quantised before or by this build, or dummy
weights."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from trtc.builder.checkpoint.checkpoint import Checkpoint, open_checkpoint
from trtc.builder.checkpoint.dummy import DUMMY, dummy_checkpoint
from trtc.builder.checkpoint.reader import SafetensorsReader
from trtc.builder.checkpoint.verify import (
    check_tensors,
    settle_embeddings,
    settle_experts,
    settle_names,
    settle_prefix,
)
from trtc.builder.families.own import load_family
from trtc.builder.families.registry import checkpoint_spec
from trtc.builder.recipes import TensorReader
from trtc.builder.request import DEFAULT_MAX_SEQ_LEN, KV_DTYPES, BuildRequest
from trtc.builder.spec import DecoderSpec
from trtc.builder.tables import has_tied_embeddings, table_formats
from trtc.protos.errors import RequestError, UnsupportedError
from trtc.protos.kv import KvDType
from trtc.quant.formats.fp4 import with_fp4_activations, without_fp4
from trtc.quant.prequantized import read_quantization
from trtc.quant.recipe import FormatRecipe, read_recipe
from trtc.quant.scheme import (
    BUILDABLE,
    MIXED,
    CheckpointQuantization,
    Scheme,
    scheme_named,
    without_dynamic_activations,
)
from trtc.quant.site_format import DEFAULT_TABLES, TableFormats

_DEFAULT_DTYPE = "bf16"


@dataclass(frozen=True)
class ModelSource:
    """The inputs of the graph: spec, weights and scheme."""

    checkpoint: Checkpoint
    spec: DecoderSpec
    scheme: Scheme
    kv_dtype: KvDType
    max_seq_len: int
    reader: TensorReader
    quantization: CheckpointQuantization | None
    recipe: FormatRecipe | None = None
    """What the scheme consists of, when a recipe was given."""
    unknown_tensors: tuple[str, ...] = ()
    """Tensors of the checkpoint that the model has no use for; the engine has none of them."""
    tables: TableFormats = DEFAULT_TABLES
    """What the request or the recipe asks of the lm_head and the embeddings."""
    separate_spec: DecoderSpec | None = None
    """With experts in tensors of their own, where the checkpoint has those of a layer in two."""

    @property
    def calibrated_spec(self) -> DecoderSpec:
        """Of the checkpoint that calibration writes."""
        return self.separate_spec or self.spec

    def for_target(self, *, rounds_rows: bool, multiplies_fp4: bool) -> "ModelSource":
        """As a target builds it: one that does not quantise activations by row leaves those of a
        checkpoint that came so in bf16, and one without FP4 arithmetic those of NVFP4. One with
        it has no other products of E2M1 weights."""
        found = self.quantization
        if found is None or found.source == DUMMY:
            return self
        if not rounds_rows:
            found = without_dynamic_activations(found)
        found = with_fp4_activations(found) if multiplies_fp4 else without_fp4(found)
        return dataclasses.replace(self, quantization=found, scheme=found.scheme)

    def release(self) -> None:
        """Give the checkpoint's pages back: from here on the engine's own weights are read."""
        if isinstance(self.reader, SafetensorsReader):
            self.reader.release()

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """Every scheme that a target has to run: of a mixed one, its parts too."""
        if self.recipe is not None:
            return (self.scheme, *self.recipe.parts)
        if self.scheme.name != MIXED or self.quantization is None:
            return (self.scheme,)
        linears = self.quantization.linears.values()
        parts = dict.fromkeys((linear.weight, linear.group_size) for linear in linears)
        dtype = self.scheme.dtype
        own = (Scheme(MIXED, dtype, weight, dtype, group) for weight, group in parts)
        return (self.scheme, *own)

    def following(self, recipe: FormatRecipe) -> "ModelSource":
        """With the formats that a search has found; of linears there may be none."""
        found = recipe.tables.tied() if has_tied_embeddings(self.spec) else recipe.tables
        tables = TableFormats(
            found.lm_head or self.tables.lm_head, found.embedding or self.tables.embedding
        )
        if not recipe.is_quantized:
            return dataclasses.replace(self, tables=tables)
        return dataclasses.replace(self, tables=tables, recipe=recipe, scheme=recipe.scheme)

    @property
    def needs_calibration(self) -> bool:
        return self.scheme.calibration is not None and self.quantization is None


def open_source(request: BuildRequest) -> ModelSource:
    """Find the model, understand its config and check its tensors' names and shapes.

    Raises:
        CheckpointError, UnsupportedError, RequestError: as the parts say.
    """
    checkpoint = open_checkpoint(request.model, request.revision, weights=not request.dummy_weights)
    max_seq_len = request.max_seq_len or _default_max_seq_len(checkpoint)
    own = None if request.family is None else load_family(request.family)
    spec = checkpoint_spec(checkpoint, max_seq_len, own)
    if request.dummy_weights:
        scheme = scheme_named(request.dtype or _DEFAULT_DTYPE)
        dummy, quantization = dummy_checkpoint(spec, scheme)
        return ModelSource(
            checkpoint,
            spec,
            scheme,
            _kv_dtype(request, scheme, quantization),
            max_seq_len,
            dummy,
            quantization,
            tables=table_formats(request, spec, scheme, None),
        )
    reader = checkpoint.open_weights()
    quantization = read_quantization(checkpoint.config, checkpoint.hf_quant_config, reader.tensors)
    spec = settle_names(settle_embeddings(settle_prefix(spec, reader), reader), reader)
    separate, spec = spec, settle_experts(spec, reader)
    recipe = None if request.recipe is None else _recipe(request.recipe, quantization)
    scheme = _scheme(request, quantization) if recipe is None else recipe.scheme
    if quantization is None and scheme.name not in (*BUILDABLE, MIXED):
        raise UnsupportedError(
            f"trtc reads {scheme.name} checkpoints and does not make them",
            field="--dtype",
            remedy=f"Use one of {', '.join(BUILDABLE)}, or give a checkpoint that is quantised so",
        )
    return ModelSource(
        checkpoint,
        spec,
        scheme,
        _kv_dtype(request, scheme, quantization),
        max_seq_len,
        reader,
        quantization,
        recipe,
        check_tensors(spec, reader, quantization),
        table_formats(request, spec, scheme, recipe),
        separate,
    )


def calibrated_source(source: ModelSource, directory: Path) -> ModelSource:
    """The same model, read from the unified checkpoint that calibration wrote."""

    checkpoint = open_checkpoint(str(directory))
    reader = checkpoint.open_weights()
    quantization = read_quantization(checkpoint.config, checkpoint.hf_quant_config, reader.tensors)
    spec = settle_names(settle_embeddings(source.calibrated_spec, reader), reader)
    spec = settle_experts(spec, reader)
    check_tensors(spec, reader, quantization)
    return dataclasses.replace(source, spec=spec, reader=reader, quantization=quantization)


def _default_max_seq_len(checkpoint: Checkpoint) -> int:
    longest = checkpoint.config.get("max_position_embeddings")
    return min(longest, DEFAULT_MAX_SEQ_LEN) if isinstance(longest, int) else DEFAULT_MAX_SEQ_LEN


def _recipe(path: Path, quantization: CheckpointQuantization | None) -> FormatRecipe:
    recipe = read_recipe(path)
    if quantization is not None:
        raise RequestError(
            "the checkpoint is quantised already",
            field="--recipe",
            remedy="Leave it out, or give the unquantised checkpoint",
        )
    return recipe


def _scheme(request: BuildRequest, quantization: CheckpointQuantization | None) -> Scheme:
    if quantization is None:
        scheme = scheme_named(request.dtype or _DEFAULT_DTYPE)
        if request.keep and scheme.calibration is None:
            raise RequestError(
                f"--dtype {scheme.name} quantises nothing", field="--keep", remedy="Leave it out"
            )
        return scheme
    if request.dtype is not None and request.dtype != quantization.scheme.name:
        raise RequestError(
            f"is {request.dtype}, but the checkpoint is quantised as {quantization.scheme.name} "
            f"({quantization.source})",
            field="--dtype",
            remedy="Leave it out, or give the unquantised checkpoint",
        )
    if request.calib is not None:
        raise RequestError(
            "the checkpoint is quantised already", field="--calib", remedy="Leave it out"
        )
    if request.keep:
        raise RequestError(
            "the checkpoint is quantised already, and the unquantised weights are not in it",
            field="--keep",
            remedy="Give the unquantised checkpoint",
        )
    return quantization.scheme


def _kv_dtype(
    request: BuildRequest, scheme: Scheme, quantization: CheckpointQuantization | None
) -> KvDType:
    if request.kv_dtype is not None:
        return KV_DTYPES[request.kv_dtype]
    declared = None if quantization is None else quantization.kv_dtype
    return declared or scheme.dtype
