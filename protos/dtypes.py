"""Element types: one table of their names in every format that trtc reads or writes."""

from typing import Literal, NamedTuple

DTypeName = Literal["f32", "bf16", "f16", "f8e4m3", "f4e2m1", "i8", "i4", "u4", "i32", "u8"]


class DType(NamedTuple):
    """One element type and its spelling in each format that trtc reads or writes."""

    name: DTypeName
    bits: int
    safetensors: str
    """dtype field of a safetensors header; sub-byte types travel as U8."""
    onnx: int
    """onnx.TensorProto.DataType."""
    cpp: str
    """Type of an element, or of the byte that holds sub-byte elements, in plugins/cpu/types.hpp;
    "": the CPU target has none."""

    def num_bytes(self, num_elements: int) -> int:
        """Bytes of `num_elements` packed elements, rounded up."""
        return (num_elements * self.bits + 7) // 8


DTYPES: dict[str, DType] = {
    dtype.name: dtype
    for dtype in (
        DType("f32", 32, "F32", 1, "float"),
        DType("bf16", 16, "BF16", 16, "trtc::bf16"),
        DType("f16", 16, "F16", 10, "trtc::f16"),
        DType("f8e4m3", 8, "F8_E4M3", 17, "trtc::f8e4m3"),
        DType("f4e2m1", 4, "U8", 23, "trtc::f4e2m1x2"),
        DType("i8", 8, "I8", 3, "std::int8_t"),
        DType("i4", 4, "U8", 22, "trtc::i4x2"),
        DType("u4", 4, "U8", 21, "trtc::u4x2"),
        DType("i32", 32, "I32", 6, "std::int32_t"),
        DType("u8", 8, "U8", 2, "std::uint8_t"),
    )
}

BY_ONNX: dict[int, DType] = {dtype.onnx: dtype for dtype in DTYPES.values()}
