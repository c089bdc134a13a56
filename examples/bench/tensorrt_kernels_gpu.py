"""Run the kernels of TensorRT bundles on a GPU without TensorRT, from the bundles' own code.

    python -m examples.bench.tensorrt_kernels_gpu make DIR [--sm 90]   anywhere, with triton
    python examples/bench/tensorrt_kernels_gpu.py run DIR [BUNDLE ...] with torch, on that GPU

`make` compiles a grid of specialisations (head sizes, group sizes, windows, softcaps, element
types) as `trtc build --target tensorrt:sm_90` does; `run` loads cubin and PTX of such a directory
or of a bundle through the CUDA driver, compares with a plain float32 reference, checks that a
sequence's rows are the same bits alone and in a batch, and measures a decode and a prefill step.
attention_split runs with its attention_combine after it, tactic by tactic, as one attention, and is
timed at long contexts beside paged_attention.
`run` needs torch and nothing of trtc. Exit status 1: something was wrong.
"""

import argparse
import ctypes
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RECIPE = "recipe.json"
PAGE_SIZE = 16
MAX_SEQ_LEN = 32768
SPLIT_KEYS = 256
"""trtc.plugins.attention.split_kv.TENSORRT.keys: `run` imports nothing of trtc."""
TORCH_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f8e4m3": "float8_e4m3fn"}
TOLERANCES = {"f32": 1e-5, "f16": 1 / 512, "bf16": 1 / 128}
"""Of a row's largest absolute value."""
MIXED = ((1, 1), (300, 1), (77, 77), (150, 40), (5, 0), (1000, 3), (129, 129), (5000, 1), (64, 1))
"""(context after the step, new tokens) of each sequence."""


def make(directory: Path, sm: int) -> None:
    """Compile the grid and write a recipe like a bundle's."""
    from trtc.builder.targets.gpu.triton import compile_kernel
    from trtc.plugins.attention.split_kv import TENSORRT
    from trtc.plugins.attention.tensorrt_tiles import TACTICS, block_q
    from trtc.plugins.attention_combine import tensorrt_kernel as attention_combine
    from trtc.plugins.attention_split import tensorrt_kernel as attention_split
    from trtc.plugins.kv_write import tensorrt_kernel as kv_write
    from trtc.plugins.paged_attention import tensorrt_kernel as paged_attention

    shapes = [
        # heads, kv heads, head_dim, window, softcap, q type, pool type
        (32, 8, 128, 0, 0.0, "bf16", "bf16"),
        (32, 8, 128, 0, 0.0, "bf16", "f8e4m3"),
        (32, 8, 128, 0, 0.0, "f16", "f16"),
        (32, 8, 64, 0, 0.0, "bf16", "bf16"),
        (32, 32, 80, 0, 0.0, "bf16", "bf16"),
        (32, 32, 96, 100, 0.0, "bf16", "bf16"),
        (28, 4, 128, 0, 0.0, "bf16", "bf16"),
        (16, 8, 256, 128, 50.0, "bf16", "bf16"),
        (16, 8, 256, 0, 50.0, "bf16", "f8e4m3"),
        (32, 1, 128, 0, 0.0, "bf16", "bf16"),
        (8, 2, 128, 33, 0.0, "f32", "f32"),
    ]
    directory.mkdir(parents=True, exist_ok=True)
    kernels: list[dict[str, Any]] = []

    def add(op: str, dtypes: Mapping[str, str], attributes: Mapping[str, Any], tactic: int) -> None:
        if op == "kv_write":
            source, rows = kv_write.kernel(dtypes, attributes, PAGE_SIZE), 1
        elif op == "attention_combine":
            source = attention_combine.kernel(dtypes, attributes, PAGE_SIZE, tactic)
            rows = attention_combine.heads(source)
        else:
            kernel = attention_split.kernel if op == "attention_split" else paged_attention.kernel
            source = kernel(dtypes, attributes, PAGE_SIZE, tactic)
            rows = block_q(source)
        compiled = compile_kernel(source, sm)
        stem = f"{op}-{len(kernels)}"
        (directory / f"{stem}.ptx").write_bytes(compiled.ptx)
        (directory / f"{stem}.cubin").write_bytes(compiled.cubin)
        kernels.append(
            {
                "op": op,
                "dtypes": dict(dtypes),
                "attributes": dict(attributes),
                "tactic": tactic,
                "entry": compiled.entry,
                "parameters": [parameter.name for parameter in compiled.parameters],
                "num_threads": compiled.num_threads,
                "shared_bytes": compiled.shared_bytes,
                "rows": rows,
                "ptx": f"{stem}.ptx",
                "cubin": f"{stem}.cubin",
            }
        )
        print(f"{stem}: {len(compiled.cubin)} bytes, {compiled.shared_bytes} shared")

    for heads, kv_heads, head_dim, window, softcap, dtype, pool in shapes:
        add(
            "kv_write",
            {"k": dtype, "pool": pool},
            {"num_kv_heads": kv_heads, "head_dim": head_dim},
            1,
        )
        attributes = {
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "scale": head_dim**-0.5,
            "window": window,
            "softcap": softcap,
        }
        in_splits = {**attributes, "splits": TENSORRT.most(MAX_SEQ_LEN, window)}
        shared = {name: in_splits[name] for name in ("num_heads", "head_dim", "window", "splits")}
        for tactic in TACTICS:
            add("paged_attention", {"q": dtype, "pool": pool}, attributes, tactic)
            add("attention_split", {"q": dtype, "pool": pool}, in_splits, tactic)
            add("attention_combine", {"rows": dtype}, shared, tactic)
    recipe = {"sm": sm, "pool": {"page_size": PAGE_SIZE}, "kernels": kernels}
    (directory / RECIPE).write_text(json.dumps(recipe, indent=1))


class Driver:
    """The few calls of libcuda that are needed; torch's context is current."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")

    def function(self, code: bytes, entry: str) -> ctypes.c_void_p:
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(code))
        self._call("cuModuleGetFunction", ctypes.byref(function), module, entry.encode())
        return function

    def launch(
        self,
        function: ctypes.c_void_p,
        grid: tuple[int, int],
        kernel: Mapping[str, Any],
        arguments: Sequence[Any],
        stream: int,
    ) -> None:
        values = [
            ctypes.c_int32(value) if isinstance(value, int) else ctypes.c_uint64(value.data_ptr())
            for value in arguments
        ]
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.byref(value), ctypes.c_void_p) for value in values)
        )
        self._call(
            "cuLaunchKernel",
            function,
            *(grid[0], grid[1], 1),
            *(kernel["num_threads"], 1, 1),
            kernel["shared_bytes"],
            ctypes.c_void_p(stream),
            pointers,
            None,
        )

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.cuda, name)(*arguments)
        if status:
            raise RuntimeError(f"{name} failed with CUresult {status}")


@dataclass
class Step:
    """A ragged batch on the GPU."""

    q: Any
    pool: Any
    query_start: Any
    context_lens: Any
    page_table: Any
    sequences: Sequence[tuple[int, int]]


def make_step(kernel: Mapping[str, Any], page_size: int, sequences: Any, seed: int = 0) -> Step:
    """Pages in random order; what no sequence has written is NaN."""
    import torch

    generator = torch.Generator("cuda").manual_seed(seed)
    a = kernel["attributes"]
    widths = [-(-context // page_size) for context, _ in sequences]
    num_pages = sum(widths) + 2
    order = torch.randperm(num_pages, generator=generator, device="cuda").int()
    shape = (num_pages, 2, page_size, a["num_kv_heads"], a["head_dim"])
    values = torch.randn(shape, generator=generator, device="cuda")
    table = torch.zeros((len(sequences), max(widths)), dtype=torch.int32, device="cuda")
    begin = 0
    for index, ((context, _), width) in enumerate(zip(sequences, widths, strict=True)):
        table[index, :width] = order[begin : begin + width]
        begin += width
        if context % page_size:
            values[int(table[index, width - 1]), :, context % page_size :] = math.nan
    values[order[begin:].long()] = math.nan
    starts = [0]
    for _, new in sequences:
        starts.append(starts[-1] + new)
    width = a.get("num_heads", a["num_kv_heads"]) * a["head_dim"]
    q = torch.randn((starts[-1], width), generator=generator, device="cuda")
    ints: dict[str, Any] = {"dtype": torch.int32, "device": "cuda"}
    return Step(
        q=q.to(torch_type(kernel["dtypes"].get("q", kernel["dtypes"].get("k")))),
        pool=values.to(torch_type(kernel["dtypes"]["pool"])),
        query_start=torch.tensor(starts, **ints),
        context_lens=torch.tensor([context for context, _ in sequences], **ints),
        page_table=table,
        sequences=sequences,
    )


def torch_type(name: str) -> Any:
    import torch

    return getattr(torch, TORCH_TYPES[name])


def attention_reference(
    step: Step, a: Mapping[str, Any], page_size: int, k_scale: float, v_scale: float
) -> Any:
    """float32, one sequence at a time."""
    import torch

    heads, kv_heads, head_dim = a["num_heads"], a["num_kv_heads"], a["head_dim"]
    out = torch.zeros(step.q.shape, device="cuda")
    row = 0
    for index, (context, new) in enumerate(step.sequences):
        if not new:
            continue
        pages = step.page_table[index, : -(-context // page_size)].long()
        found = step.pool[pages].float().transpose(0, 1).flatten(1, 2)[:, :context]
        keys, values = (one.repeat_interleave(heads // kv_heads, 1) for one in found)
        queries = step.q[row : row + new].float().view(new, heads, head_dim)
        scores = torch.einsum("qhd,khd->hqk", queries, keys * k_scale) * a["scale"]
        if a["softcap"]:
            scores = a["softcap"] * torch.tanh(scores / a["softcap"])
        position = torch.arange(context - new, context, device="cuda")[:, None]
        key = torch.arange(context, device="cuda")[None]
        hidden = key > position
        if a["window"]:
            hidden |= key <= position - a["window"]
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        result = torch.einsum("hqk,khd->qhd", weights, values * v_scale)
        out[row : row + new] = result.reshape(new, -1)
        row += new
    return out


class Runner:
    """Launches one kernel of a recipe, and after attention_split its attention_combine."""

    def __init__(
        self,
        driver: Driver,
        kernel: Mapping[str, Any],
        code: bytes,
        page_size: int,
        combine: tuple[Mapping[str, Any], bytes] | None = None,
    ) -> None:
        import torch

        self.driver, self.kernel, self.page_size = driver, kernel, page_size
        self.function = driver.function(code, kernel["entry"])
        self.combine = None
        if combine is not None:
            self.combine = (combine[0], driver.function(combine[1], combine[0]["entry"]))
        self.sums: dict[str, Any] = {}
        self.rows: Any = None
        scale = (0.37, 1.7) if kernel["dtypes"].get("pool") == "f8e4m3" else (1.0, 1.0)
        self.scales = scale
        self.k_scale = torch.tensor([scale[0]], device="cuda")
        self.v_scale = torch.tensor([scale[1]], device="cuda")

    def attend(self, step: Step, out: Any) -> None:
        a, sequences = self.kernel["attributes"], len(step.sequences)
        tiles = -(-len(step.q) // self.kernel["rows"]) + sequences
        arguments = {
            "q": step.q,
            "pool": step.pool,
            "query_start": step.query_start,
            "context_lens": step.context_lens,
            "page_table": step.page_table,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "num_sequences": sequences,
            "table_width": step.page_table.shape[1],
            "out": out,
        }
        if self.combine is None:
            self._launch(self.function, self.kernel, (tiles, a["num_kv_heads"]), arguments)
            return
        rows = self._scratch(step)
        keys = step.page_table.shape[1] * self.page_size
        most = min(a["splits"], -(-keys // SPLIT_KEYS))
        grid = (tiles, most * a["num_kv_heads"])
        self._launch(self.function, self.kernel, grid, arguments | self.sums | {"out": rows})
        kernel, function = self.combine
        programs = -(-a["num_heads"] // kernel["rows"])
        grid = (len(step.q), programs)
        self._launch(function, kernel, grid, arguments | self.sums | {"rows": rows})

    def _scratch(self, step: Step) -> Any:
        """Room for rows that are whole, partial sums and their stats; NaN when first made."""
        import torch

        a = self.kernel["attributes"]
        heads = len(step.sequences) * a["splits"] * a["num_heads"]
        if not self.sums or self.sums["stats"].numel() != 2 * heads:
            self.sums = {
                name: torch.full((heads * width,), math.nan, device="cuda")
                for name, width in (("partial", a["head_dim"]), ("stats", 2))
            }
        if self.rows is None or self.rows.shape != step.q.shape:
            self.rows = torch.full_like(step.q, math.nan)
        return self.rows

    def _launch(
        self,
        function: ctypes.c_void_p,
        kernel: Mapping[str, Any],
        grid: tuple[int, int],
        arguments: Mapping[str, Any],
    ) -> None:
        import torch

        ordered = [arguments[name] for name in kernel["parameters"]]
        stream = torch.cuda.current_stream().cuda_stream
        self.driver.launch(function, grid, kernel, ordered, stream)

    def write(self, k: Any, v: Any, pool: Any, slots: Any) -> None:
        arguments = {
            "k": k,
            "v": v,
            "pool": pool,
            "slots": slots,
            "k_scale": self.k_scale,
            "v_scale": self.v_scale,
            "pool_out": pool,
        }
        self._launch(self.function, self.kernel, (len(k), 1), arguments)


def check_attention(runner: Runner) -> tuple[float, bool]:
    """(largest error as a share of its row's largest value, rows independent of the batch)."""
    import torch

    kernel = runner.kernel
    step = make_step(kernel, runner.page_size, MIXED)
    out = torch.full_like(step.q, math.nan)
    runner.attend(step, out)
    expected = attention_reference(step, kernel["attributes"], runner.page_size, *runner.scales)
    size = expected.abs().amax(1, keepdim=True)
    error = float(((out.float() - expected).abs() / size).max())
    independent = True
    row = 0
    for index, (context, new) in enumerate(MIXED):
        alone = Step(
            q=step.q[row : row + new].contiguous(),
            pool=step.pool,
            query_start=torch.tensor([0, new], dtype=torch.int32, device="cuda"),
            context_lens=step.context_lens[index : index + 1].contiguous(),
            page_table=step.page_table[index : index + 1].contiguous(),
            sequences=[(context, new)],
        )
        if new:
            single = torch.full_like(alone.q, math.nan)
            runner.attend(alone, single)
            independent &= bool(torch.equal(single, out[row : row + new]))
        row += new
    return error, independent


def check_write(runner: Runner) -> int:
    """How many elements of the pool differ in any bit from the reference."""
    import torch

    kernel = runner.kernel
    a = kernel["attributes"]
    generator = torch.Generator("cuda").manual_seed(1)
    tokens, pages, page_size = 333, 64, runner.page_size
    shape = (tokens, a["num_kv_heads"] * a["head_dim"])
    dtype, pool_type = torch_type(kernel["dtypes"]["k"]), torch_type(kernel["dtypes"]["pool"])
    k, v = (
        (60 * torch.randn(shape, generator=generator, device="cuda")).to(dtype) for _ in range(2)
    )
    slots = torch.randperm(pages * page_size, generator=generator, device="cuda")[:tokens].int()
    size = (pages, 2, page_size, a["num_kv_heads"], a["head_dim"])
    pool = torch.randn(size, generator=generator, device="cuda").to(pool_type)
    expected = pool.clone()
    for which, (rows, scale) in enumerate(((k, runner.k_scale), (v, runner.v_scale))):
        scaled = rows.float() / scale
        if kernel["dtypes"]["pool"] == "f8e4m3":
            scaled = scaled.clamp(-448, 448)
        placed = scaled.to(pool_type).view(tokens, *size[3:])
        bytes_of = expected.view(torch.uint8)
        bytes_of[slots.long() // page_size, which, slots.long() % page_size] = placed.view(
            torch.uint8
        )
    runner.write(k, v, pool, slots)
    torch.cuda.synchronize()
    return int((pool.view(torch.uint8) != expected.view(torch.uint8)).sum())


def milliseconds(runner: Runner, step: Step) -> float:
    """Median of 20 launches."""
    import torch

    out = torch.empty_like(step.q)
    times: list[float] = []
    for _ in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        runner.attend(step, out)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times[5:])[10]


def speed(runner: Runner) -> str:
    """A decode step of 64 sequences at 2048 tokens, and a prefill of 4 x 2048."""
    a = runner.kernel["attributes"]
    decode = make_step(runner.kernel, runner.page_size, [(2048, 1)] * 64)
    seconds = milliseconds(runner, decode) / 1e3
    length = min(2048, a["window"] or 2048)
    read = 64 * length * 2 * a["num_kv_heads"] * a["head_dim"] * decode.pool.element_size()
    prefill = make_step(runner.kernel, runner.page_size, [(2048, 2048)] * 4)
    prefill_seconds = milliseconds(runner, prefill) / 1e3
    line = f"decode {seconds * 1e3:6.3f} ms {read / seconds / 1e9:5.0f} GB/s"
    line += f"  prefill {prefill_seconds * 1e3:7.3f} ms"
    if not a["window"]:
        flops = 4 * 2 * 2 * a["num_heads"] * a["head_dim"] * 2048 * 2049 / 2
        line += f" {flops / prefill_seconds / 1e12:5.0f} TFLOP/s"
    return line


def long_contexts(runner: Runner) -> str:
    """Decode steps of few sequences, where one program a KV head leaves most of a GPU idle."""
    if runner.kernel["attributes"]["window"]:
        return ""
    times = [
        f"{batch}x{context // 1024}K {milliseconds(runner, step) * 1e3:.0f}"
        for batch, context in ((1, 2048), (1, 32768), (8, 8192))
        for step in [make_step(runner.kernel, runner.page_size, [(context, 1)] * batch)]
    ]
    return "  us: " + ", ".join(times)


def run(directories: Sequence[Path]) -> int:
    import torch

    torch.cuda.init()  # type: ignore[no-untyped-call]
    torch.zeros(1, device="cuda")
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    print(f"{name}, sm_{capability[0]}{capability[1]}, torch {torch.__version__}")
    driver = Driver()
    failures = 0
    for directory in directories:
        recipe = json.loads((directory / RECIPE).read_text())
        page_size = recipe["pool"]["page_size"]
        for kernel in recipe["kernels"]:
            if kernel["op"] != "attention_combine":  # checked after its attention_split
                combine = combine_of(kernel, recipe["kernels"])
                failures += not run_kernel(driver, directory, kernel, page_size, combine)
    print(f"{failures} failures")
    return 1 if failures else 0


def combine_of(
    kernel: Mapping[str, Any], kernels: Sequence[Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """The attention_combine that takes what an attention_split leaves."""
    if kernel["op"] != "attention_split":
        return None
    for one in kernels:
        if (
            one["op"] == "attention_combine"
            and one["tactic"] == kernel["tactic"]
            and one["dtypes"]["rows"] == kernel["dtypes"]["q"]
            and one["attributes"].items() <= kernel["attributes"].items()
        ):
            return one
    raise ValueError(f"{kernel['cubin']}: the recipe has no attention_combine for it")


def run_kernel(
    driver: Driver,
    directory: Path,
    kernel: Mapping[str, Any],
    page_size: int,
    combine: Mapping[str, Any] | None,
) -> bool:
    """One line of the table for the cubin; the PTX must do the same."""
    a, types = kernel["attributes"], kernel["dtypes"]
    label = f"{kernel['op']}/{kernel['tactic']} " + "/".join(types.values())
    if kernel["op"] == "kv_write":
        label += f" H{a['num_kv_heads']} D{a['head_dim']}"
    else:
        label += f" H{a['num_heads']}/{a['num_kv_heads']} D{a['head_dim']}"
        label += f" w{a['window']} c{a['softcap']:g}"
    results = []
    for kind in ("cubin", "ptx"):
        code = (directory / kernel[kind]).read_bytes() + b"\0"
        second = None
        if combine is not None:
            second = (combine, (directory / combine[kind]).read_bytes() + b"\0")
        runner = Runner(driver, kernel, code, page_size, second)
        if kernel["op"] == "kv_write":
            wrong = check_write(runner)
            results.append((wrong == 0, f"{wrong} bytes differ"))
        else:
            error, independent = check_attention(runner)
            good = error <= TOLERANCES[types["q"]] and independent
            batch = "bit-equal alone" if independent else "DEPENDS ON THE BATCH"
            results.append((good, f"error {error:.2e}, {batch}"))
            if kind == "cubin":
                timed = speed(runner) + long_contexts(runner)
    good = all(one for one, _ in results)
    text = (
        results[0][1] if results[0][1] == results[1][1] else " | ptx: ".join(r for _, r in results)
    )
    tail = f"  {timed}" if kernel["op"] != "kv_write" else ""
    print(f"{'ok ' if good else 'BAD'} {label:<48} {text}{tail}", flush=True)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make")
    making.add_argument("directory", type=Path)
    making.add_argument("--sm", type=int, default=90)
    running = commands.add_parser("run")
    running.add_argument("directories", type=Path, nargs="+")
    arguments = parser.parse_args()
    if arguments.command == "make":
        make(arguments.directory, arguments.sm)
        return 0
    return run(arguments.directories)


if __name__ == "__main__":
    sys.exit(main())
