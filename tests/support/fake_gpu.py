"""A GPU made of host memory that keeps a GPU's rules (implements runtime.device.base.DriverDevice).

Work waits on the stream until someone synchronises, so whoever reads or overwrites too early gets
wrong bytes. Memory starts as NaN. Every address must lie in an allocation. Kernels are known by
their cubins and run by the operators' references, or by Triton's interpreter.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trtc.plugins.attention.split_kv import TENSORRT
from trtc.plugins.registry import REGISTRY
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.bundle import KernelFacts
from trtc.protos.errors import EnvironmentFault
from trtc.runtime.device.base import ALIGNMENT, Bytes, DriverKernel

Array = NDArray[Any]
Work = Callable[[], None]
STREAM = 77


@dataclass(frozen=True)
class CubinKernel:
    """What a cubin of the engine under test holds."""

    facts: KernelFacts
    page_size: int


RunKernel = Callable[[CubinKernel, dict[str, Any], tuple[int, int]], dict[str, Array]]
"""(kernel, arrays and scalars by parameter, grid) -> what each written array becomes."""


@dataclass
class FakeGpu:
    cubins: Mapping[str, CubinKernel] = field(default_factory=dict)
    """By SHA-256."""
    total_bytes: int = 1 << 30
    run_kernel: RunKernel | None = None
    """None: the references."""
    events: list[str] = field(default_factory=list)
    """What was put on the stream, in order, and what graphs were made."""
    refuse_capture: bool = False

    def __post_init__(self) -> None:
        self._memory: list[tuple[int, Array]] = []
        self._hosts: list[Bytes] = []
        self._queue: list[Work] = []
        self._recording: list[Work] | None = None
        self._graphs: dict[int, list[Work]] = {}
        self._functions: list[CubinKernel] = []
        self._thread = threading.get_ident()
        self.closed = False

    # DriverDevice

    @property
    def stream(self) -> int:
        return STREAM

    def make_current(self) -> None:
        self._thread = threading.get_ident()

    def free_bytes(self) -> int:
        return self.total_bytes - sum(array.nbytes for _, array in self._memory)

    def allocate(self, num_bytes: int) -> int:
        self._check_use()
        if num_bytes > self.free_bytes():
            raise EnvironmentFault("does not fit", field="--kv-bytes")
        array = np.full(max(1, num_bytes) + ALIGNMENT, 0xFF, np.uint8)
        address = -(-array.ctypes.data // ALIGNMENT) * ALIGNMENT
        begin = address - array.ctypes.data
        self._memory.append((address, array[begin : begin + max(1, num_bytes)]))
        return address

    def host_buffer(self, num_bytes: int) -> Bytes:
        self._check_use()
        self._hosts.append(np.full(num_bytes, 0xFF, np.uint8))
        return self._hosts[-1]

    def load_kernel(self, code: bytes, entry: str) -> int:
        self._check_use()
        kernel = self.cubins[hashlib.sha256(code).hexdigest()]
        assert kernel.facts.entry == entry
        self._functions.append(kernel)
        return len(self._functions) - 1

    def upload(self, address: int, source: Bytes) -> None:
        assert self._recording is None, "copies stay out of graphs: their sizes change"
        self._check_host(source)
        self.enqueue("upload", lambda: np.copyto(self.view(address, source.nbytes), source))

    def download(self, target: Bytes, address: int) -> None:
        self._check_host(target)
        self.enqueue("download", lambda: np.copyto(target, self.view(address, target.nbytes)))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self.enqueue(
            "copy",
            lambda: np.copyto(self.view(target, num_bytes), self.view(source, num_bytes)),
        )

    def zero(self, address: int, num_bytes: int) -> None:
        self.enqueue("zero", lambda: self.view(address, num_bytes).fill(0))

    def launch(
        self, kernel: DriverKernel, grid: tuple[int, int], arguments: Sequence[int | np.int32]
    ) -> None:
        known = self._functions[kernel.handle]
        facts = known.facts
        assert (kernel.num_threads, kernel.shared_bytes) == (facts.num_threads, facts.shared_bytes)
        named: dict[str, Any] = dict(zip(facts.parameters, arguments, strict=True))
        self.enqueue(f"launch {facts.op}", lambda: self._run(known, named, grid))

    def capture(self, work: Work) -> int | None:
        self._check_use()
        self._recording = []
        try:
            work()
        except EnvironmentFault:
            self._recording = None
            return None
        recorded, self._recording = self._recording, None
        if self.refuse_capture:
            return None
        handle = len(self._graphs) + 1000
        self._graphs[handle] = recorded
        self.events.append(f"captured {len(recorded)}")
        return handle

    def replay(self, graph: int) -> None:
        recorded = self._graphs[graph]

        def run() -> None:
            for work in recorded:
                work()

        self.enqueue("replay", run)

    def drop_graph(self, graph: int) -> None:
        self._check_use()
        del self._graphs[graph]
        self.events.append("dropped")

    def synchronize(self) -> None:
        self._check_use()
        assert self._recording is None, "the stream is being captured"
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def close(self) -> None:
        self._memory.clear()
        self.closed = True

    # The test's side.

    def opened(self) -> "FakeGpu":
        """The same GPU, opened again: what was closed is forgotten."""
        self.closed = False
        self.make_current()
        return self

    @property
    def is_capturing(self) -> bool:
        return self._recording is not None

    def enqueue(self, event: str, work: Work) -> None:
        """Put work on the stream, or into the graph that is being captured."""
        self._check_use()
        if self._recording is not None:
            self._recording.append(work)
        else:
            self.events.append(event)
            self._queue.append(work)

    def view(self, address: int, num_bytes: int) -> Array:
        """Device memory, which must be of one allocation."""
        for base, array in self._memory:
            if base <= address and address + num_bytes <= base + array.nbytes:
                return array[address - base : address - base + num_bytes]
        raise AssertionError(f"{num_bytes} bytes at {address:#x} are not the device's")

    def array(self, address: int, dtype: str, shape: Sequence[int]) -> Array:
        element = np.dtype(NUMPY_DTYPES[dtype])
        count = int(np.prod(shape))
        return self.view(address, count * element.itemsize).view(element).reshape(shape)

    def _check_use(self) -> None:
        assert not self.closed, "the device is closed"
        assert self._thread == threading.get_ident(), "the device is current on another thread"

    def _check_host(self, array: Bytes) -> None:
        assert any(np.shares_memory(array, host) for host in self._hosts), "not page-locked"

    def _run(self, kernel: CubinKernel, named: dict[str, Any], grid: tuple[int, int]) -> None:
        find = {
            "kv_write": self._write,
            "paged_attention": self._attention,
            "attention_split": self._split,
            "attention_combine": self._combine,
        }[kernel.facts.op]
        arrays = find(kernel, named, grid)
        for parameter in kernel.facts.parameters:
            is_scalar = isinstance(named[parameter], np.int32)
            assert is_scalar or int(named[parameter]) % 16 == 0, "kernels load 16 bytes at once"
        run = self.run_kernel or run_reference
        for name, values in run(kernel, arrays, grid).items():
            np.copyto(arrays[name], values)

    def _write(
        self, kernel: CubinKernel, named: dict[str, Any], grid: tuple[int, int]
    ) -> dict[str, Any]:
        facts = kernel.facts
        tokens = grid[0]
        assert grid[1] == 1
        slots = self.array(named["slots"], "i32", [tokens])
        width = int(facts.attributes["num_kv_heads"]) * int(facts.attributes["head_dim"])
        pages = int(slots.max()) // kernel.page_size + 1
        assert named["pool"] == named["pool_out"], "a pool has one address"
        return {
            "k": self.array(named["k"], facts.dtypes["k"], [tokens, width]),
            "v": self.array(named["v"], facts.dtypes["k"], [tokens, width]),
            "pool": self._pool(kernel, named["pool"], pages),
            "slots": slots,
            "k_scale": self.array(named["k_scale"], "f32", [1]),
            "v_scale": self.array(named["v_scale"], "f32", [1]),
            "pool_out": self._pool(kernel, named["pool_out"], pages),
        }

    def _attention(
        self, kernel: CubinKernel, named: dict[str, Any], grid: tuple[int, int]
    ) -> dict[str, Any]:
        facts = kernel.facts
        sequences, table_width = int(named["num_sequences"]), int(named["table_width"])
        starts = self.array(named["query_start"], "i32", [sequences + 1])
        tokens = int(starts[-1])
        tiles = [
            starts[b] // facts.rows + b + -(-(starts[b + 1] - starts[b]) // facts.rows)
            for b in range(sequences)
        ]
        contexts = self.array(named["context_lens"], "i32", [sequences])
        assert max(tiles) <= grid[0]
        assert grid[1] == int(facts.attributes["num_kv_heads"]) * _longest(facts, contexts, grid)
        table = self.array(named["page_table"], "i32", [sequences, table_width])
        used = [row[: -(-n // kernel.page_size)] for row, n in zip(table, contexts, strict=True)]
        pages = int(max(row.max() for row in used)) + 1
        width = int(facts.attributes["num_heads"]) * int(facts.attributes["head_dim"])
        return {
            "q": self.array(named["q"], facts.dtypes["q"], [tokens, width]),
            "pool": self._pool(kernel, named["pool"], pages),
            "query_start": starts,
            "context_lens": contexts,
            "page_table": table,
            "k_scale": self.array(named["k_scale"], "f32", [1]),
            "v_scale": self.array(named["v_scale"], "f32", [1]),
            "num_sequences": sequences,
            "table_width": table_width,
            "out": self.array(named["out"], facts.dtypes["q"], [tokens, width]),
        }

    def _split(
        self, kernel: CubinKernel, named: dict[str, Any], grid: tuple[int, int]
    ) -> dict[str, Any]:
        arrays = self._attention(kernel, named, grid)
        return arrays | self._splits(kernel, named, arrays["num_sequences"])

    def _combine(
        self, kernel: CubinKernel, named: dict[str, Any], grid: tuple[int, int]
    ) -> dict[str, Any]:
        facts, sequences = kernel.facts, int(named["num_sequences"])
        starts = self.array(named["query_start"], "i32", [sequences + 1])
        heads = int(facts.attributes["num_heads"])
        shape = [int(starts[-1]), heads * int(facts.attributes["head_dim"])]
        assert grid == (shape[0], -(-heads // facts.rows))
        return {
            "rows": self.array(named["rows"], facts.dtypes["rows"], shape),
            "query_start": starts,
            "context_lens": self.array(named["context_lens"], "i32", [sequences]),
            "num_sequences": sequences,
            "out": self.array(named["out"], facts.dtypes["rows"], shape),
            **self._splits(kernel, named, sequences),
        }

    def _splits(self, kernel: CubinKernel, named: dict[str, Any], sequences: int) -> dict[str, Any]:
        a = kernel.facts.attributes
        width = int(a["splits"]) * int(a["num_heads"])
        return {
            "partial": self.array(named["partial"], "f32", [sequences, width * int(a["head_dim"])]),
            "stats": self.array(named["stats"], "f32", [sequences, 2 * width]),
        }

    def _pool(self, kernel: CubinKernel, address: int, pages: int) -> Array:
        a = kernel.facts.attributes
        shape = (pages, 2, kernel.page_size, int(a["num_kv_heads"]), int(a["head_dim"]))
        return self.array(address, kernel.facts.dtypes["pool"], shape)


def run_reference(
    kernel: CubinKernel, arrays: dict[str, Any], grid: tuple[int, int]
) -> dict[str, Array]:
    """The operator's reference in the kernel's place."""
    op = REGISTRY[kernel.facts.op]
    inputs = {p.name: arrays.get(p.name) for p in op.inputs}
    for scale in {"k_scale", "v_scale"} & set(inputs):
        inputs[scale] = arrays[scale].reshape(())
    results = op.reference(**inputs, **kernel.facts.attributes)
    return {p.name: result for p, result in zip(op.outputs, results, strict=True)}


def _longest(facts: KernelFacts, contexts: Array, grid: tuple[int, int]) -> int:
    """Splits of a grid: enough for every sequence, and none that no sequence of it can have."""
    if "splits" not in facts.attributes:
        return 1
    window, most = int(facts.attributes["window"]), int(facts.attributes["splits"])
    needed = max(len(TENSORRT.ranges(int(context), window, most)) for context in contexts)
    given = grid[1] // int(facts.attributes["num_kv_heads"])
    assert needed <= given <= most
    return given
