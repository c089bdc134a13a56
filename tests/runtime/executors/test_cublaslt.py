"""What cuBLASLt is asked for, told by a stand-in for the library."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pytest

from trtc.protos.errors import EnvironmentFault
from trtc.runtime.executors.cuda.cublaslt import BiasAt, CublasLt, MatrixAt, ScalesAt

TILES = (24, 23, 209, 201)
"""Of what the stand-in offers, the best first."""
ONE_SCALE = ScalesAt(x=0x100, weight=0x200, of_rows=False)
SCALES_OF_ROWS = ScalesAt(x=0x100, weight=0x200, of_rows=True)


@dataclass
class StandIn:
    """Knows four ways to do any product, and writes down what is asked of it."""

    asked: list[str] = field(default_factory=list)
    described: dict[int, int] = field(default_factory=dict)
    product: tuple[Any, ...] = ()
    status: int = 0

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cublasLt"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.asked.append(name.removeprefix("cublasLt"))
            getattr(self, f"_{self.asked[-1]}", lambda *rest: None)(*arguments)
            return self.status

        return call

    def _MatmulDescSetAttribute(self, _: Any, attribute: int, value: Any, size: Any) -> None:
        assert size.value == ctypes.sizeof(value._obj)
        self.described[attribute] = value._obj.value

    def _MatmulAlgoGetHeuristic(self, *arguments: Any) -> None:
        *_, most, offers, count = arguments
        for offer, tile in zip(offers, TILES, strict=False):
            offer.algorithm[0] = tile
        count._obj.value = min(most, len(TILES))

    def _MatmulAlgoConfigGetAttribute(
        self, algorithm: Any, attribute: int, tile: Any, size: Any, written: Any
    ) -> None:
        assert (attribute, size.value) == (1, 4)
        tile._obj.value = algorithm._obj[0]

    def _Matmul(self, *arguments: Any) -> None:
        self.product = arguments

    @property
    def tile(self) -> int:
        return int(self.product[12]._obj[0])

    @property
    def share_of_residual(self) -> float:
        return float(self.product[7]._obj.value)


@pytest.fixture
def library() -> Any:
    return StandIn()


def multiply(
    product: CublasLt,
    *,
    rows: int = 4096,
    columns: int = 4096,
    scales: ScalesAt | None = ONE_SCALE,
    residual: int | None = None,
    bias: BiasAt | None = None,
    dtype: str = "f8e4m3",
) -> None:
    product.multiply(
        MatrixAt(0x1000, dtype, rows, 512, 512),
        MatrixAt(0x2000, dtype, columns, 512, 512),
        MatrixAt(0x3000, "bf16", rows, columns, columns),
        scales=scales,
        bias=bias,
        residual=None if residual is None else MatrixAt(residual, "bf16", rows, columns, columns),
        stream=7,
    )


def test_a_refusal_says_what_was_asked(library: Any) -> None:
    products = CublasLt(library, 0x10, 64)
    library.status = 15
    with pytest.raises(EnvironmentFault, match="status 15 of MatmulDescCreate"):
        multiply(products)


def test_a_shape_is_planned_once(library: Any) -> None:
    products = CublasLt(library, 0x10, 64)
    for residual in (None, 0x4000, 0x5000):
        multiply(products, residual=residual)
    assert library.asked.count("Matmul") == 3
    assert library.asked.count("MatmulAlgoGetHeuristic") == 1
    multiply(products, rows=64)
    assert library.asked.count("MatmulAlgoGetHeuristic") == 2


def test_the_residual_is_added_whole_or_not(library: Any) -> None:
    products = CublasLt(library, 0x10, 64)
    multiply(products)
    assert library.share_of_residual == 0
    multiply(products, residual=0x4000)
    assert library.share_of_residual == 1
    weight, x, added, out = (library.product[at].value for at in (3, 5, 8, 10))
    assert (weight, x, added, out) == (0x2000, 0x1000, 0x4000, 0x3000)
    assert library.product[15].value == 7


def test_scales_are_those_of_the_product(library: Any) -> None:
    products = CublasLt(library, 0x10, 64)
    multiply(products)
    assert (library.described[17], library.described[18]) == (0x200, 0x100)
    assert 31 not in library.described
    multiply(products, scales=SCALES_OF_ROWS)
    assert (library.described[31], library.described[32]) == (3, 3)


def test_a_bias_is_added_where_there_is_one(library: Any) -> None:
    products = CublasLt(library, 0x10, 64)
    multiply(products)
    assert 7 not in library.described
    multiply(products, bias=BiasAt(0x6000, "bf16"))
    assert [library.described[at] for at in (7, 8, 26)] == [4, 0x6000, 14]
    multiply(products, bias=BiasAt(0x7000, "bf16"))
    assert library.described[8] == 0x7000
    assert library.asked.count("MatmulAlgoGetHeuristic") == 2


@pytest.mark.parametrize(
    ("rows", "columns", "scales", "dtype", "tile"),
    [
        (4096, 28672, ONE_SCALE, "f8e4m3", 201),
        (4096, 4096, ONE_SCALE, "f8e4m3", 23),
        (512, 28672, ONE_SCALE, "f8e4m3", 24),
        (4096, 28672, SCALES_OF_ROWS, "f8e4m3", 24),
        (4096, 28672, None, "bf16", 24),
    ],
)
def test_tiles_that_were_measured_come_before_the_best_offer(
    library: Any, rows: int, columns: int, scales: ScalesAt | None, dtype: str, tile: int
) -> None:
    multiply(CublasLt(library, 0x10, 64), rows=rows, columns=columns, scales=scales, dtype=dtype)
    assert library.tile == tile
