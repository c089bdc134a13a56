"""What formats cost a model: trtc's schemes beside other libraries, at equal text and metric.

    python -m examples.bench.accuracy [--model DIR] [--only NAME ...] [--tokens N]
                                      [--rival auto-round=PYTHON] [--rival llm-compressor=PYTHON]
                                      [--rival gptqmodel=PYTHON] [--rival llama.cpp=LIBRARY]

Linears of the decoder layers are quantised, and nothing else: embeddings and lm_head stay as they
are, but for rows of tables, which round the lm_head, the embeddings or both alone. The weights that
a library writes are put back into the model in f32 and run by Transformers, with activations
rounded where the format does so, against the unquantised model in f32. Bits are of the rounded
weights and scales, as checkpoints store them; for nvidia-modelopt's rows, with scales of 16 bits.
Calibration text is trtc's own; the measured text is Python source that is not in it: files of the
running Python's standard library.

Rows of nvidia-modelopt's own recipes, of llama.cpp's formats (`pip install gguf`), of AutoRound,
and of GPTQ by llm-compressor and GPTQModel are rivals. All that calibrate do so on the same tokens.
AutoRound, llm-compressor and GPTQModel run in Pythons of their own (`python -m venv DIR`, there
`pip install auto-round`, `llmcompressor` or `gptqmodel`), named by `--rival`; so is the library
that llama.cpp's k-quants are in (`llama_cpp/lib/libggml-base.so` of `pip install
llama-cpp-python`).
"""

import argparse
import copy
import ctypes
import functools
import json
import math
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from examples.bench import accuracy_rivals
from trtc.builder.checkpoint.reader import SafetensorsReader
from trtc.plugins.iq4 import values_of
from trtc.quant.accuracy import kl_divergence, log_softmax
from trtc.quant.calibrate import quantize_checkpoint
from trtc.quant.calibration_text import (
    MIN_TOKENS,
    WINDOW,
    Texts,
    TokenSet,
    default_calibration,
    tokenize,
)
from trtc.quant.checkpoint_search import recipe_search
from trtc.quant.experts import separate_experts
from trtc.quant.layer_source import WholeModel
from trtc.quant.layerwise import run_text
from trtc.quant.linears import quantizable_linears
from trtc.quant.prequantized import read_quantization
from trtc.quant.quiet import quiet_libraries
from trtc.quant.recipe import FormatRecipe
from trtc.quant.recipe_path import PathPoint
from trtc.quant.reference_model import load_model
from trtc.quant.rotation import rotated
from trtc.quant.scheme import SCHEMES, CheckpointQuantization, QuantizedLinear, Scheme
from trtc.quant.site_format import EMBEDDING, TABLE_FORMATS
from trtc.quant.site_format import TABLES as TABLES_SITES
from trtc.quant.table_rounding import round_table

PYLLAMA = Path(__file__).parents[1] / "models" / "pyllama"
HELDOUT_FILES = (
    *("argparse", "ast", "bisect", "calendar", "cmd", "configparser", "csv", "dataclasses"),
    *("difflib", "fractions", "heapq", "inspect", "pickle", "statistics"),
)
"""Modules of the standard library whose source is measured on."""
TRTC_SCHEMES = (
    *("int4", "int4_gptq", "int4_g64", "iq4", "iq4_g16", "int4_g32", "int4_awq", "int6_g128"),
    *("int8_sq", "int8_dynamic", "int8_hadamard", "fp8", "fp8_dynamic"),
)
TABLES = {"lm_head": (True, False), "embeddings": (False, True), "tables": (True, True)}
"""What rows of tables round: the lm_head, the embeddings."""
MIXED_BITS = (4.25, 4.5, 4.8, 5.0, 6.0)
"""Sizes of mixed recipes."""
MODELOPT_RECIPES: Mapping[str, Any] = {
    "modelopt max": "max",
    "modelopt mse": {"method": "mse"},
    "modelopt gptq": {"method": "gptq"},
}
RIVAL_LIBRARIES = {
    "auto-round 200": "auto-round",
    "llm-compressor gptq": "llm-compressor",
    "gptqmodel gptq": "gptqmodel",
}
"""Rows of libraries with a Python of their own."""
LLAMA_CPP = "llama.cpp"
K_QUANTS = ("IQ4_XS", "Q4_K", "Q5_K")
"""Formats of llama.cpp that take an importance matrix; `Q4_K_M` mixes Q4_K with Q6_K."""
_GROUP_BITS = 4 + 16 / 128
_CALIBRATION_TOKENS = 16_384
Float64s = NDArray[np.float64]


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    bits: float
    """Of a weight, scales included."""
    kl: float
    """Mean KL(unquantised || quantised) a token, in nats."""
    kl_error: float
    """Its standard error."""
    top1: float
    perplexity_ratio: float
    cpu_seconds: float
    """Of calibration."""


@dataclass(frozen=True)
class Quantized:
    """A model with the weights that a library made."""

    model: Any
    bits: float


class Judge:
    """Compares models with the unquantised one on held-out text."""

    def __init__(self, model_dir: Path, tokens: int) -> None:
        self._texts = held_out(model_dir, tokens)
        reference = load_model(model_dir, "float32")
        self._reference = list(self._log_probabilities(reference))

    def row(self, name: str, make: Callable[[], Quantized]) -> Row:
        began = _cpu_seconds()
        made = make()
        seconds = _cpu_seconds() - began
        divergence, agreed, lost = [], 0, 0.0
        pairs = zip(self._reference, self._log_probabilities(made.model), strict=True)
        for ids, (theirs, ours) in zip(self._texts.sequences, pairs, strict=True):
            at = (np.arange(len(ids) - 1), ids[1:])
            divergence.append(kl_divergence(theirs, ours))
            agreed += int((theirs.argmax(1) == ours.argmax(1)).sum())
            lost += float((theirs[at] - ours[at]).sum())
        kl = np.concatenate(divergence)
        return Row(
            name,
            made.bits,
            float(kl.mean()),
            float(kl.std() / math.sqrt(len(kl))),
            agreed / len(kl),
            math.exp(lost / len(kl)),
            seconds,
        )

    def _log_probabilities(self, model: Any) -> Iterator[Float64s]:
        """Of every window, those of all tokens but the first [tokens - 1, vocab]."""
        for ids in self._texts.sequences:
            with torch.inference_mode():
                logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :-1]
            yield log_softmax(logits.float().numpy())


def _cpu_seconds() -> float:
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def opened(model_dir: Path) -> Any:
    """The model in f32, for weights that a library makes: experts are linears of their own."""
    model = load_model(model_dir, "float32")
    separate_experts(model)
    return model


def held_out(model_dir: Path, tokens: int) -> TokenSet:
    library = Path(sysconfig.get_path("stdlib"))
    samples = tuple((library / f"{name}.py").read_text("utf-8") for name in HELDOUT_FILES)
    vocab_size = json.loads((model_dir / "config.json").read_text("utf-8"))["vocab_size"]
    texts = Texts("standard library", "", samples)
    return tokenize(
        texts, model_dir, vocab_size, window=WINDOW, max_tokens=tokens, min_tokens=WINDOW
    )


def of_recipes(model_dir: Path) -> Callable[[float], Quantized]:
    """What `--max-bits` makes; the search runs once, for the first of the rows."""

    @functools.cache
    def recipes() -> Mapping[float, FormatRecipe]:
        with recipe_search(model_dir, None, None, lambda step: None) as search:
            return {bits: search.within_bits(bits).recipe for bits in MIXED_BITS}

    return lambda bits: of_trtc(model_dir, recipes()[bits])


def of_whole_recipes(model_dir: Path) -> Callable[[float], Quantized]:
    """The same with the tables in the search, as builds have them; bits are of all weights."""

    @functools.cache
    def points() -> Mapping[float, PathPoint]:
        sites = (EMBEDDING,) if _is_tied(model_dir) else TABLES_SITES
        with recipe_search(model_dir, None, None, lambda step: None, sites) as search:
            return {bits: search.within_bits(bits) for bits in MIXED_BITS}

    def made(bits: float) -> Quantized:
        point = points()[bits]
        model = of_trtc(model_dir, point.recipe).model
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
        tables = point.recipe.tables
        for table, to in ((head, tables.lm_head), (embeddings, tables.embedding)):
            if to is not None and to.is_quantized:
                table.weight.data = round_table(table.weight.data, to).values()
        return Quantized(model, point.bits)

    return made


def _is_tied(model_dir: Path) -> bool:
    config = json.loads((model_dir / "config.json").read_text("utf-8"))
    return bool(config.get("tie_word_embeddings"))


def of_trtc(model_dir: Path, scheme: Scheme | FormatRecipe) -> Quantized:
    """A checkpoint of `trtc quantize`, read back as `trtc build` reads it."""
    with tempfile.TemporaryDirectory() as directory:
        output = Path(directory)
        quantize_checkpoint(model_dir, scheme, "bf16", None, output, lambda step: None)
        reader = SafetensorsReader(output)
        hf_quant = output / "hf_quant_config.json"
        found = read_quantization(
            json.loads((output / "config.json").read_text("utf-8")),
            json.loads(hf_quant.read_text("utf-8")) if hf_quant.is_file() else None,
            reader.tensors,
        )
        assert found is not None
        weights = {name: _dequantized(found, name, reader) for name in found.linears}
        kept = {name: reader.read(name) for name in reader.names if not _is_of(name, weights)}
        model = opened(model_dir)
        _fill(model, {**kept, **{f"{name}.weight": one for name, one in weights.items()}})
        _round_inputs(model, found, reader)
        linears = dict(quantizable_linears(model))
        assert weights.keys() <= linears.keys(), "experts are modules of their own"
        stored = sum(reader.read(name).nbytes for name in reader.names if _is_of(name, linears))
        count = sum(linear.weight.numel() for linear in linears.values())
    return Quantized(model, 8 * stored / count)


def _is_of(tensor: str, linears: Mapping[str, Any]) -> bool:
    prefix, _, name = tensor.rpartition(".")
    return prefix in linears and name not in ("bias", "weight_shape")


def _dequantized(found: CheckpointQuantization, prefix: str, reader: SafetensorsReader) -> Any:
    """[N, K] f32, as it acts on the linear's input, which `_round_inputs` rotates where it was."""
    linear = found.linears[prefix]
    parts = _parts(linear, reader)
    codes = values_of(parts["weight"]) if linear.weight == "iq4" else parts["weight"]
    weight = codes.astype(np.float32)
    repeats = weight.shape[1] // parts["weight_scale"].shape[1]
    values = weight * parts["weight_scale"].repeat(repeats, axis=1)
    if linear.is_scattered:
        values = values[:, np.argsort(parts["column_order"])]
    return values * parts.get("pre_quant_scale", np.float32(1))


def _parts(linear: QuantizedLinear, reader: SafetensorsReader) -> dict[str, Any]:
    """The canonical tensors of a linear."""
    return {
        name: source.function(*map(reader.read, source.names))
        if source.function
        else reader.read(source.names[0])
        for name, source in linear.tensors.items()
    }


def _round_inputs(model: Any, found: CheckpointQuantization, reader: SafetensorsReader) -> None:
    """Let linears round their inputs as the checkpoint says."""
    for name, linear in found.linears.items():
        if linear.dynamic or "input_scale" in linear.tensors:
            parts = _parts(linear, reader)
            scales = parts.get("pre_quant_scale", np.float32(1)), parts.get("input_scale")
            hook = _rounding(torch.int8 if linear.weight == "i8" else torch.float8_e4m3fn, *scales)
            module = model.get_submodule(name)
            if linear.hadamard:
                module.register_forward_pre_hook(_rotation(linear.hadamard))
            module.register_forward_pre_hook(hook)


def _rotation(block: int) -> Callable[..., Any]:
    """The weights of such a linear are over the block, so its input is not over a root."""
    return lambda module, inputs: (rotated(inputs[0], block) * block**0.5,)


def _rounding(code: torch.dtype, pre_scale: Any, static: Any) -> Callable[..., Any]:
    least, largest = (-128.0, 127.0) if code == torch.int8 else (-448.0, 448.0)
    factor = torch.as_tensor(pre_scale)

    def hook(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        x = inputs[0] * factor
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-10) / largest
        if static is not None:
            scale = torch.as_tensor(static)
        values = (x / scale).clamp(least, largest)
        codes = values.round() if code == torch.int8 else values.to(code).float()
        # The weights that the model has are for inputs without the factor.
        return (codes * scale / factor,)

    return hook


def _fill(model: Any, tensors: Mapping[str, Any]) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in tensors.items():
        if name in parameters:
            parameters[name].data.copy_(torch.from_numpy(np.array(tensor, np.float32)))


def of_tables(model_dir: Path, name: str, rounded: tuple[bool, bool]) -> Quantized:
    """The lm_head or the embeddings or both in a format, whether they are tied or not."""
    model, to = load_model(model_dir, "float32"), TABLE_FORMATS[name]
    head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    narrow = [
        round_table(table.weight.data, to).values() if is_rounded else table.weight.data.clone()
        for table, is_rounded in zip((head, embeddings), rounded, strict=True)
    ]
    for table, values in zip((head, embeddings), narrow, strict=True):
        table.weight = torch.nn.Parameter(values, requires_grad=False)
    return Quantized(model, to.num_bits(*head.weight.shape) / head.weight.numel())


def calibration(model_dir: Path) -> TokenSet:
    """What GPTQ calibrates on."""
    vocab_size = json.loads((model_dir / "config.json").read_text("utf-8"))["vocab_size"]
    return tokenize(
        default_calibration(),
        model_dir,
        vocab_size,
        window=WINDOW,
        max_tokens=_CALIBRATION_TOKENS,
        min_tokens=MIN_TOKENS,
    )


def of_modelopt(model_dir: Path, algorithm: Any) -> Quantized:
    """A weight-only recipe of nvidia-modelopt's, groups of 128, max or searched scales."""
    model = opened(model_dir)
    tokens = calibration(model_dir)
    with quiet_libraries():
        import modelopt.torch.quantization as mtq

        config = copy.deepcopy(mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG)
        config["algorithm"] = algorithm
        mtq.quantize(model, config, lambda model: run_text(WholeModel(model), tokens))
    return Quantized(model, _GROUP_BITS)


def of_llama_cpp(model_dir: Path) -> Quantized:
    """llama.cpp's Q4_0 by its own Python package: groups of 32, f16 scales, no calibration."""
    import gguf

    model = opened(model_dir)
    kind, stored, count = gguf.GGMLQuantizationType.Q4_0, 0, 0
    for _, linear in quantizable_linears(model):
        packed = gguf.quants.quantize(linear.weight.detach().numpy(), kind)
        linear.weight.data.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind)))
        stored, count = stored + packed.nbytes, count + linear.weight.numel()
    return Quantized(model, 8 * stored / count)


def of_k_quants(model_dir: Path, name: str, library: str | None) -> Quantized:
    """A format of llama.cpp's by its own C library, each input channel weighted by its mean square
    over the calibration text, as llama-imatrix finds it. All linears have the one format."""
    if library is None:
        raise ImportError(name=f"give --rival {LLAMA_CPP}=LIBRARY")
    import gguf

    ggml = ctypes.CDLL(library)
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    floats, size = ctypes.POINTER(ctypes.c_float), ctypes.c_int64
    types: list[Any] = [ctypes.c_int, floats, ctypes.c_void_p, size, size, size, floats]
    ggml.ggml_quantize_chunk.argtypes = types
    model = opened(model_dir)
    power = mean_squares(model, calibration(model_dir))
    kind, stored, count = gguf.GGMLQuantizationType[name], 0, 0
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    for path, linear in quantizable_linears(model):
        weight, importance = linear.weight.detach().numpy(), power[path].numpy()
        rows, columns = weight.shape
        packed = np.empty((rows, columns // block * block_bytes), np.uint8)
        source, imatrix = (one.ctypes.data_as(floats) for one in (weight, importance))
        written = ggml.ggml_quantize_chunk(
            kind.value, source, packed.ctypes.data, 0, rows, columns, imatrix
        )
        assert written == packed.nbytes
        linear.weight.data.copy_(torch.from_numpy(gguf.quants.dequantize(packed, kind)))
        stored, count = stored + packed.nbytes, count + linear.weight.numel()
    return Quantized(model, 8 * stored / count)


def mean_squares(model: Any, tokens: TokenSet) -> dict[str, torch.Tensor]:
    """Of the input channels of every linear [K] f32."""
    sums: dict[str, torch.Tensor] = {}

    def add(path: str) -> Callable[..., None]:
        def hook(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            squares = inputs[0].square().flatten(0, -2).sum(0)
            sums[path] = sums.get(path, torch.zeros_like(squares)) + squares

        return hook

    handles = [
        linear.register_forward_pre_hook(add(path)) for path, linear in quantizable_linears(model)
    ]
    run_text(WholeModel(model), tokens)
    for handle in handles:
        handle.remove()
    return {path: total / tokens.num_tokens for path, total in sums.items()}


def of_rival(model_dir: Path, library: str, python: str | None) -> Quantized:
    """What a library with a Python of its own makes: see examples/bench/accuracy_rivals.py."""
    if python is None:
        raise ImportError(name=f"give --rival {library}=PYTHON")
    with tempfile.TemporaryDirectory() as directory:
        tokens, weights = Path(directory) / "tokens.npy", Path(directory) / "weights.safetensors"
        np.save(tokens, np.stack(calibration(model_dir).sequences))
        script = accuracy_rivals.__file__
        command = [python, script, library, str(model_dir), str(tokens), str(weights)]
        # What a library prints is no part of the table.
        subprocess.run(command, check=True, stdout=sys.stderr)
        found = load_file(weights)
    model = opened(model_dir)
    for path, linear in quantizable_linears(model):
        linear.weight.data.copy_(found[f"{path}.weight"])
    return Quantized(model, _GROUP_BITS)


def makers(model_dir: Path, rivals: Mapping[str, str]) -> dict[str, Callable[[], Quantized]]:
    """What can be measured, by name.

    Args:
        rivals: paths of Pythons and of llama.cpp's library, by library.
    """
    ours = {name: lambda name=name: of_trtc(model_dir, SCHEMES[name]) for name in TRTC_SCHEMES}
    of_bits = of_recipes(model_dir)
    mixed = {f"mixed {bits}": lambda bits=bits: of_bits(bits) for bits in MIXED_BITS}
    of_all = of_whole_recipes(model_dir)
    mixed |= {f"whole {bits}": lambda bits=bits: of_all(bits) for bits in MIXED_BITS}
    modelopt = {
        name: lambda algorithm=algorithm: of_modelopt(model_dir, algorithm)
        for name, algorithm in MODELOPT_RECIPES.items()
    }
    tables = {
        f"{what} {name}": lambda name=name, which=which: of_tables(model_dir, name, which)
        for name, to in TABLE_FORMATS.items()
        for what, which in TABLES.items()
        if to.is_quantized
    }
    others = {
        row: lambda library=library: of_rival(model_dir, library, rivals.get(library))
        for row, library in RIVAL_LIBRARIES.items()
    }
    llama_cpp = {
        f"llama.cpp {name} imatrix": lambda name=name: of_k_quants(
            model_dir, name, rivals.get(LLAMA_CPP)
        )
        for name in K_QUANTS
    }
    q4_0 = {"llama.cpp Q4_0": lambda: of_llama_cpp(model_dir)}
    return {**ours, **mixed, **tables, **modelopt, **others, **q4_0, **llama_cpp}


def rival(given: str) -> tuple[str, str]:
    """LIBRARY=PATH of the command line."""
    library, _, path = given.partition("=")
    known = (*RIVAL_LIBRARIES.values(), LLAMA_CPP)
    if library not in known or not Path(path).is_file():
        raise argparse.ArgumentTypeError(
            f"{given!r} is not NAME=FILE with a name of {', '.join(known)}"
        )
    return library, path


def line(row: Row) -> str:
    return (
        f"| {row.name} | {row.bits:.3f} | {row.kl:.4f} ± {row.kl_error:.4f} | {row.top1:.1%} "
        f"| {row.perplexity_ratio:.3f} | {row.cpu_seconds:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=PYLLAMA)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="Rows; default: all.")
    parser.add_argument("--tokens", type=int, default=8192, help="Held-out tokens.")
    parser.add_argument(
        "--rival",
        type=rival,
        action="append",
        default=[],
        metavar="NAME=FILE",
        help="The Python that has a library, or llama.cpp's libggml-base.so.",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    available = makers(options.model, dict(options.rival))
    names = options.only or list(available)
    if unknown := set(names) - set(available):
        parser.error(f"no such row: {', '.join(sorted(unknown))}; rows: {', '.join(available)}")
    judge = Judge(options.model, options.tokens)
    print("| weights | bits | KL | top-1 | perplexity x | CPU s |\n|---|---|---|---|---|---|")
    for name in names:
        try:
            print(line(judge.row(name, available[name])), flush=True)
        except ImportError as error:
            print(f"| {name} | not installed: {error.name} | | | | |", flush=True)


if __name__ == "__main__":
    main()
