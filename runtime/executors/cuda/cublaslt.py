"""GEMMs by cuBLASLt, through its C interface.

cuBLAS is column-major, so a row-major out [M, N] is its D [N, M], the weight its A, transposed, and
x its B.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from trtc.protos.errors import EnvironmentFault

_TYPES = {"f32": 0, "bf16": 14, "f8e4m3": 28}
"""cudaDataType_t."""
_COMPUTE_F32 = 68
"""cublasComputeType_t: sums in f32, and products of f32 without TF32."""
_TRANS_A, _EPILOGUE, _BIAS, _A_SCALE, _B_SCALE = 3, 7, 8, 17, 18
_FAST_SUMS, _BIAS_TYPE, _A_SCALE_MODE, _B_SCALE_MODE = 25, 26, 31, 32
"""cublasLtMatmulDescAttributes_t."""
_ADD_BIAS = 4
"""CUBLASLT_EPILOGUE_BIAS."""
_TRANSPOSED = 1
_SCALE_OF_ROWS = 3
"""CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F: one scale per row of A and per column of B."""
_WORKSPACE_BYTES, _ALIGNMENT_OF_A = 1, 5
"""cublasLtMatmulPreferenceAttributes_t; the alignments of B, C and D come after A's."""
_TILE = 1
"""cublasLtMatmulAlgoConfigAttributes_t."""
_MOST_ALIGNMENT = 256
_CHOICES = 8
_MANY_ROWS, _MANY_COLUMNS = 1024, 6144
_TILES = {"wide": (201, 197), "narrow": (23, 24)}
"""For E4M3 GEMMs of many rows with one scale per tensor: tiles (cublasLtMatmulTile_t) that were up
to 8% faster on a hot H200 than the first heuristic result of cuBLASLt 13.1. If a version does not
have them, its first result is used."""


class _Algorithm(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class MatrixAt:
    """A row-major matrix by its address."""

    address: int
    dtype: str
    rows: int
    columns: int
    stride: int
    """Elements from one row to the next."""

    @property
    def alignment(self) -> int:
        return min(_MOST_ALIGNMENT, self.address & -self.address)


@dataclass(frozen=True)
class ScalesAt:
    """Addresses of f32 scales: of all of x and all of the weight, or of each row of both."""

    x: int
    weight: int
    of_rows: bool


@dataclass(frozen=True)
class BiasAt:
    """Address of a vector with one value per column of out, aligned to 16 bytes.

    Its type is that of out, or bf16 for E4M3 inputs.
    """

    address: int
    dtype: str


@dataclass(frozen=True)
class _Plan:
    """The cuBLASLt plan of one problem shape."""

    description: ctypes.c_void_p
    layouts: tuple[ctypes.c_void_p, ...]
    """Of A, B, C and D."""
    algorithm: _Algorithm


class CublasLt:
    """cuBLASLt on the device that is current when this is made."""

    def __init__(self, library: ctypes.CDLL, workspace: int, workspace_bytes: int) -> None:
        """
        Args:
            library: libcublasLt.
            workspace: address of memory for one GEMM at a time.

        Raises:
            EnvironmentFault: the library refuses the device.
        """
        self._library = library
        self._workspace = ctypes.c_void_p(workspace)
        self._workspace_bytes = workspace_bytes
        self._handle = ctypes.c_void_p()
        self._plans: dict[object, _Plan] = {}
        self._call("Create", ctypes.byref(self._handle))

    def multiply(
        self,
        x: MatrixAt,
        weight: MatrixAt,
        out: MatrixAt,
        *,
        scales: ScalesAt | None,
        bias: BiasAt | None,
        residual: MatrixAt | None,
        stream: int,
    ) -> None:
        """Enqueue out = x @ weight.T (times the scales) (+ residual) (+ bias), rounded once.

        x [M, K] and weight [N, K] are of one type: f32, bf16, or f8e4m3 with scales. The residual
        is of the type of out [M, N] and may be out.
        """
        added = residual or out
        plan = self._plan(x, weight, added, out, scales, bias)
        if scales is not None:
            self._set(plan.description, _A_SCALE, ctypes.c_uint64(scales.weight))
            self._set(plan.description, _B_SCALE, ctypes.c_uint64(scales.x))
        if bias is not None:
            self._set(plan.description, _BIAS, ctypes.c_uint64(bias.address))
        one, share = ctypes.c_float(1), ctypes.c_float(0 if residual is None else 1)
        a, b, c, d = plan.layouts
        self._call(
            "Matmul",
            *(self._handle, plan.description, ctypes.byref(one)),
            *(ctypes.c_void_p(weight.address), a, ctypes.c_void_p(x.address), b),
            ctypes.byref(share),
            *(ctypes.c_void_p(added.address), c, ctypes.c_void_p(out.address), d),
            ctypes.byref(plan.algorithm.algorithm),
            *(self._workspace, ctypes.c_size_t(self._workspace_bytes), ctypes.c_void_p(stream)),
        )

    def close(self) -> None:
        self._plans.clear()
        self._call("Destroy", self._handle)

    def _plan(
        self,
        x: MatrixAt,
        weight: MatrixAt,
        added: MatrixAt,
        out: MatrixAt,
        scales: ScalesAt | None,
        bias: BiasAt | None,
    ) -> _Plan:
        """The plan of a shape; computed once, independent of addresses."""
        matrices = (weight, x, added, out)
        key = (
            *((one.dtype, one.rows, one.columns, one.stride, one.alignment) for one in matrices),
            scales is not None and scales.of_rows,
            bias is not None and bias.dtype,
        )
        if key not in self._plans:
            description = self._describe(scales, bias)
            layouts = tuple(self._layout(one) for one in matrices)
            offers = self._offers(description, layouts, matrices)
            algorithm = self._pick(offers, matrices, scales)
            self._plans[key] = _Plan(description, layouts, algorithm)
        return self._plans[key]

    def _describe(self, scales: ScalesAt | None, bias: BiasAt | None) -> ctypes.c_void_p:
        description = ctypes.c_void_p()
        self._call("MatmulDescCreate", ctypes.byref(description), _COMPUTE_F32, _TYPES["f32"])
        self._set(description, _TRANS_A, ctypes.c_int32(_TRANSPOSED))
        if scales is not None:
            self._set(description, _FAST_SUMS, ctypes.c_int8(1))
            self._set(description, _A_SCALE, ctypes.c_uint64(scales.weight))
            self._set(description, _B_SCALE, ctypes.c_uint64(scales.x))
            if scales.of_rows:
                self._set(description, _A_SCALE_MODE, ctypes.c_int32(_SCALE_OF_ROWS))
                self._set(description, _B_SCALE_MODE, ctypes.c_int32(_SCALE_OF_ROWS))
        if bias is not None:
            self._set(description, _EPILOGUE, ctypes.c_uint32(_ADD_BIAS))
            self._set(description, _BIAS, ctypes.c_uint64(bias.address))
            self._set(description, _BIAS_TYPE, ctypes.c_int32(_TYPES[bias.dtype]))
        return description

    def _layout(self, matrix: MatrixAt) -> ctypes.c_void_p:
        layout = ctypes.c_void_p()
        self._call(
            "MatrixLayoutCreate",
            *(ctypes.byref(layout), _TYPES[matrix.dtype]),
            *(ctypes.c_uint64(matrix.columns), ctypes.c_uint64(matrix.rows)),
            ctypes.c_int64(matrix.stride),
        )
        return layout

    def _pick(
        self, offers: Sequence[_Algorithm], matrices: Sequence[MatrixAt], scales: ScalesAt | None
    ) -> _Algorithm:
        rows, columns = matrices[1].rows, matrices[0].rows
        if scales is not None and not scales.of_rows and rows >= _MANY_ROWS:
            tiles = [self._tile(one) for one in offers]
            for wanted in _TILES["wide" if columns >= _MANY_COLUMNS else "narrow"]:
                if wanted in tiles:
                    return offers[tiles.index(wanted)]
        return offers[0]

    def _tile(self, offer: _Algorithm) -> int:
        tile, written = ctypes.c_uint32(), ctypes.c_size_t()
        self._call(
            "MatmulAlgoConfigGetAttribute",
            *(ctypes.byref(offer.algorithm), _TILE, ctypes.byref(tile)),
            *(ctypes.c_size_t(ctypes.sizeof(tile)), ctypes.byref(written)),
        )
        return tile.value

    def _offers(
        self,
        description: ctypes.c_void_p,
        layouts: Sequence[ctypes.c_void_p],
        matrices: Sequence[MatrixAt],
    ) -> list[_Algorithm]:
        """Algorithms by cuBLASLt's heuristic, best first."""
        preference = ctypes.c_void_p()
        self._call("MatmulPreferenceCreate", ctypes.byref(preference))
        limits = {_WORKSPACE_BYTES: ctypes.c_uint64(self._workspace_bytes)} | {
            _ALIGNMENT_OF_A + number: ctypes.c_uint32(one.alignment)
            for number, one in enumerate(matrices)
        }
        for attribute, value in limits.items():
            self._call(
                "MatmulPreferenceSetAttribute",
                *(
                    preference,
                    attribute,
                    ctypes.byref(value),
                    ctypes.c_size_t(ctypes.sizeof(value)),
                ),
            )
        offers, count = (_Algorithm * _CHOICES)(), ctypes.c_int()
        self._call(
            "MatmulAlgoGetHeuristic",
            *(self._handle, description, *layouts, preference, _CHOICES),
            *(offers, ctypes.byref(count)),
        )
        self._call("MatmulPreferenceDestroy", preference)
        if count.value == 0:
            raise EnvironmentFault("it knows no way to do a product", field="cuBLASLt")
        return list(offers[: count.value])

    def _set(
        self, description: ctypes.c_void_p, attribute: int, value: "ctypes._SimpleCData[int]"
    ) -> None:
        self._call(
            "MatmulDescSetAttribute",
            *(description, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value))),
        )

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"cublasLt{name}")(*arguments)
        if status:
            raise EnvironmentFault(f"status {status} of {name}", field="cuBLASLt")
