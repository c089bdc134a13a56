"""Triton functions that multiply with weights of any type.

Every number of 4, 6 and 8 bits is exact in bf16: a sum of products is as exact as with the weights
themselves. Scales multiply sums, a group of channels at a time; those of E2M1 weights may multiply
the weights themselves, which is exact in bf16 as well: E8M0 are powers of two, and E4M3 has four
bits where E2M1 has two.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import triton
import triton.language as tl

from trtc.plugins.iq4 import VALUES
from trtc.plugins.six_bits import LEAST
from trtc.protos.errors import UnsupportedError

_MIN_GROUP = 16
"""Channels that one product of the tensor cores sums."""
_MIN_DEPTH = 32
"""Channels of a block: with 16, products by `mma` of weights that were narrower than bf16 are wrong
(Triton 3.6 and 3.7, seen on sm_90)."""
_E2M1_GROUPS = (16, 32)
"""E2M1 weights that share a scale which multiplies them."""
IQ4_CODES = tl.constexpr(2)
"""The value of NIBBLES for codes of plugins/iq4.py."""
SIX_BITS = tl.constexpr(3)
"""The value of NIBBLES for layout split of plugins/six_bits.py."""
E2M1_POWERS = tl.constexpr(4)
"""The value of NIBBLES for E2M1 weights whose scales are E8M0, and lie as those of others do."""
E2M1_UNITS = tl.constexpr(5)
"""The same of E4M3 scales in the unit of a row; the last of NIBBLES."""
_SPECIAL = {"iq4": IQ4_CODES.value, "i6": SIX_BITS.value}
_SIX_LEAST = tl.constexpr(LEAST)
_IQ4_LEAST = tl.constexpr(VALUES[0])
_DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""By code."""


def _words(values: Sequence[int]) -> tuple[int, ...]:
    """By code, how much more each number is than the least, a byte each."""
    least = min(values)
    parts = (values[4 * i : 4 * i + 4] for i in range(4))
    return tuple(int.from_bytes(bytes(one - least for one in part), "little") for part in parts)


_IQ4_WORDS = _words(VALUES)
_IQ4_LOW = tl.constexpr(_IQ4_WORDS[1] << 32 | _IQ4_WORDS[0])
_IQ4_HIGH = tl.constexpr(_IQ4_WORDS[3] << 32 | _IQ4_WORDS[2])


def _codes_in_bf16(values: Sequence[int], unit: float) -> str:
    """Two numbers of each of four bytes. Two words of the table have eight bytes, of which `prmt`
    takes four by four codes; the upper bit of a code says which of the two results is its byte.
    0x4300 | n is the bf16 128 + n; so much is subtracted again, times the unit."""
    words = _words(values)
    one, minus = (
        int(np.float32(number).view(np.uint32) >> 16) * 0x10001
        for number in (unit, unit * (min(values) - 128))
    )
    return f"""{{
        .reg .b32 index, which, low, high, first, second, one, minus;
        and.b32 index, $4, 0x77777777;
        shr.u32 which, $4, 1;
        lop3.b32 which, which, 0x44444444, 0x32103210, 0xEA;
        prmt.b32 low, {words[0]}, {words[1]}, index;
        prmt.b32 high, {words[2]}, {words[3]}, index;
        prmt.b32 first, low, high, which;
        shr.u32 index, index, 16;
        shr.u32 which, which, 16;
        prmt.b32 low, {words[0]}, {words[1]}, index;
        prmt.b32 high, {words[2]}, {words[3]}, index;
        prmt.b32 second, low, high, which;
        mov.b32 one, 0x{one:08X};
        mov.b32 minus, {minus};
        prmt.b32 $0, first, 0x43434343, 0x4240;
        prmt.b32 $1, second, 0x43434343, 0x4240;
        prmt.b32 $2, first, 0x43434343, 0x4341;
        prmt.b32 $3, second, 0x43434343, 0x4341;
        fma.rn.bf16x2 $0, $0, one, minus;
        fma.rn.bf16x2 $1, $1, one, minus;
        fma.rn.bf16x2 $2, $2, one, minus;
        fma.rn.bf16x2 $3, $3, one, minus;
        }}"""


_BF16_IQ4 = tl.constexpr(_codes_in_bf16(VALUES, 1.0))
_BF16_E2M1 = tl.constexpr(_codes_in_bf16(_DOUBLED_E2M1, 0.5))


def _six_bits_in_bf16() -> str:
    """Four numbers of each of four bytes: pairs are moved beside the low bits of a code, which all
    bytes of a word have at once; 0x4300 | code is the bf16 128 + code."""
    low = ("mov.b32 low, $8;", "shr.u32 low, $8, 4;", "mov.b32 low, $9;", "shr.u32 low, $9, 4;")
    pairs = (
        "shl.b32 pairs, $10, 4;",
        "shl.b32 pairs, $10, 2;",
        "mov.b32 pairs, $10;",
        "shr.u32 pairs, $10, 2;",
    )
    minus = 0xC300 - LEAST
    lines = [
        ".reg .b32 low, pairs, one, minus;",
        "mov.b32 one, 0x3F803F80;",
        f"mov.b32 minus, {minus << 16 | minus};",
    ]
    for number in range(4):
        first, second = f"${2 * number}", f"${2 * number + 1}"
        lines += [
            low[number],
            pairs[number],
            "and.b32 pairs, pairs, 0x30303030;",
            "lop3.b32 low, low, 0x0F0F0F0F, pairs, 0xEA;",
            f"prmt.b32 {first}, low, 0x43434343, 0x4140;",
            f"prmt.b32 {second}, low, 0x43434343, 0x4342;",
            f"fma.rn.bf16x2 {first}, {first}, one, minus;",
            f"fma.rn.bf16x2 {second}, {second}, one, minus;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


_BF16_SIX = tl.constexpr(_six_bits_in_bf16())


def weight_constants(
    attributes: Mapping[str, int | float | str], most: int, *, has_unit: bool = False
) -> dict[str, int]:
    """How a kernel reads the weights of a site: constants of `product` and `weight_tile`.

    Args:
        attributes: of the operator: weight_dtype, group_size and layout.
        most: channels that a program may multiply at once.
        has_unit: whether scales are bytes in the unit of a row.

    Raises:
        UnsupportedError: groups of a size that the tensor cores do not sum apart.
    """
    weight, group = str(attributes["weight_dtype"]), int(attributes["group_size"])
    nibbles = _SPECIAL.get(weight, int(weight in ("i4", "u4")))
    if weight == "f4e2m1":
        nibbles = _scales_of_e2m1(has_unit)
    return {
        "GROUP": group,
        "NIBBLES": nibbles,
        "SIGNED": weight == "i4",
        "TILES": attributes["layout"] == "tiles",
        "BLOCK_K": _depth_block(group, most),
    }


def e2m1_constants(
    attributes: Mapping[str, int | float | str], most: int, *, has_unit: bool
) -> dict[str, int]:
    """The same of a `product` of E2M1 weights whose scales do not divide sums: `e2m1_tile`.

    Raises:
        UnsupportedError: groups of another size than _E2M1_GROUPS.
    """
    group = int(attributes["group_size"])
    if group not in _E2M1_GROUPS:
        raise UnsupportedError(
            f"{group} E2M1 weights share a scale, and kernels know {_E2M1_GROUPS}",
            field="group_size",
        )
    # Scales come four at a time.
    depth, nibbles = _depth_block(4 * group, most), _scales_of_e2m1(has_unit)
    return {"GROUP": group, "NIBBLES": nibbles, "SIGNED": False, "TILES": False, "BLOCK_K": depth}


def _scales_of_e2m1(has_unit: bool) -> int:
    """The value of NIBBLES."""
    scales: int = (E2M1_UNITS if has_unit else E2M1_POWERS).value
    return scales


def _depth_block(group_size: int, most: int) -> int:
    """Channels that are multiplied at once: up to `most`, of one group, or of two small ones."""
    block = math.gcd(group_size, most) if group_size else most
    if block < _MIN_DEPTH and group_size != _MIN_GROUP:
        raise UnsupportedError(
            f"{group_size} input channels share a scale, and kernels sum {_MIN_GROUP}, or a "
            f"multiple of {_MIN_DEPTH}",
            field="group_size",
            remedy=f"Quantise in groups of {_MIN_GROUP}, or a multiple of {_MIN_DEPTH}, channels",
        )
    return max(block, _MIN_DEPTH)


@triton.jit
def product(
    x_rows,
    is_row,
    weight,
    weight_scale,
    weight_zero,
    column,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    NIBBLES: tl.constexpr,
    SIGNED: tl.constexpr,
    TILES: tl.constexpr,
    OPERAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    E2M1: tl.constexpr = False,
    x_scales=None,
    WEIGHTS_FIRST: tl.constexpr = False,
):
    """[BLOCK_M, BLOCK_N] f32 sums of x * (weight - zero) * scale over DEPTH channels.

    Args:
        x_rows: [BLOCK_M] addresses of rows of x, which are zeros where not `is_row`.
        weight: with weight_scale and weight_zero (or None) [columns, DEPTH] and [columns, groups].
        column: [BLOCK_N] i64, the rows of `weight` that give the columns of the result.
        GROUP: channels that share a scale, a multiple of BLOCK_K or its half; 0: all of them.
        NIBBLES: channels are two a byte, the first in the low half, in two's complement if SIGNED;
            IQ4_CODES: codes of plugins/iq4.py. SIX_BITS: weight is in layout split. E2M1_POWERS,
            E2M1_UNITS: E2M1, and how bytes are scales.
        TILES: weight, scales and zeros are in the order of plugins/tiles.py, else row-major.
        OPERAND: the type that x and weights are multiplied in, which has their numbers.
        E2M1: nibbles are E2M1, and bytes of weight_scale, row-major in whole words, multiply them:
            `e2m1_tile`.
        x_scales: [BLOCK_M] addresses of the scales of each row of x, one for each GROUP; None: x
            has none.
        WEIGHTS_FIRST: the weights are the first operand of the tensor cores, which WGMMA takes from
            registers: what nibbles were converted to need not pass through shared memory.
    """
    SUM: tl.constexpr = tl.int32 if OPERAND.is_int8() else tl.float32
    # Groups in a block, whose products are summed apart: x has zeros for the other's channels.
    PARTS: tl.constexpr = 2 if GROUP > 0 and GROUP < BLOCK_K and not E2M1 else 1
    FIRST: tl.constexpr = BLOCK_N if WEIGHTS_FIRST else BLOCK_M
    SECOND: tl.constexpr = BLOCK_M if WEIGHTS_FIRST else BLOCK_N
    sums = tl.zeros([FIRST, SECOND], SUM)
    for begin in tl.range(0, DEPTH, BLOCK_K, num_stages=STAGES):
        k = begin + tl.arange(0, BLOCK_K)
        inside = is_row[:, None]
        if DEPTH % BLOCK_K != 0:
            inside = inside & (k < DEPTH)[None, :]
        x_tile = tl.load(x_rows[:, None] + k[None, :], mask=inside, other=0.0).to(OPERAND)
        if E2M1:
            tile = e2m1_tile(
                weight, weight_scale, column, begin, DEPTH, GROUP, NIBBLES, BLOCK_K, OPERAND
            )
        else:
            zeros = None
            if weight_zero is not None:
                zeros = group_values(weight_zero, column, begin, DEPTH, GROUP, TILES)[:, None]
                if PARTS > 1:
                    others = group_values(weight_zero, column, begin + GROUP, DEPTH, GROUP, TILES)
                    zeros = tl.where((k < begin + GROUP)[None, :], zeros, others[:, None])
            tile = weight_tile(
                weight, zeros, column, begin, DEPTH, BLOCK_K, NIBBLES, SIGNED, TILES, OPERAND
            )
        if GROUP > 0 and not E2M1:
            for number in tl.static_range(PARTS):
                group = begin + number * GROUP
                x_part = x_tile
                if PARTS > 1:
                    is_of_group = (k >= group) & (k < group + GROUP)
                    x_part = tl.where(is_of_group[None, :], x_tile, tl.zeros_like(x_tile))
                scales = group_scales(weight_scale, column, group, DEPTH, GROUP, TILES, NIBBLES)
                if WEIGHTS_FIRST:
                    part = tl.dot(tile, x_part.T, input_precision="ieee")
                else:
                    part = tl.dot(x_part, tile.T, input_precision="ieee")
                part *= along(scales, WEIGHTS_FIRST)
                if x_scales is not None:
                    by_row = tl.load(x_scales + group // GROUP, mask=is_row, other=0.0)
                    part *= along(by_row, not WEIGHTS_FIRST)
                sums += part
        else:
            if WEIGHTS_FIRST:
                first, second = tile, x_tile.T
            else:
                first, second = x_tile, tile.T
            if not OPERAND.is_fp8e4nv():
                sums = tl.dot(first, second, sums, input_precision="ieee", out_dtype=SUM)
            else:
                # Tensor cores keep fewer bits of an E4M3 sum than f32 has: a long one loses them.
                sums += tl.dot(first, second)
    sums = sums.to(tl.float32)
    if GROUP == 0 and weight_scale is not None:
        scales = group_values(weight_scale, column, 0, DEPTH, GROUP, TILES)
        sums = sums * along(scales, WEIGHTS_FIRST)
    return tl.trans(sums) if WEIGHTS_FIRST else sums


@triton.jit
def along(scales, FIRST_AXIS: tl.constexpr):
    """Scales of the first or the second axis of a product."""
    return scales[:, None] if FIRST_AXIS else scales[None, :]


@triton.jit
def weight_tile(
    weight,
    zeros,
    column,
    begin,
    DEPTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NIBBLES: tl.constexpr,
    SIGNED: tl.constexpr,
    TILES: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Channels begin ... begin + BLOCK_K of some rows of a weight, less their zero points.

    Args:
        zeros: [BLOCK_N, 1] or [BLOCK_N, BLOCK_K]; None: there are none.

    Returns:
        [BLOCK_N, BLOCK_K] in the type OPERAND. Channels after DEPTH are finite.
    """
    PACK: tl.constexpr = 2 if NIBBLES else 1
    WIDTH: tl.constexpr = BLOCK_K // PACK
    if NIBBLES == SIX_BITS:
        tile = six_bit_tile(weight, column, begin, DEPTH, BLOCK_K, OPERAND)
    elif TILES:
        # Rows of 128 channels, 16 a tile; BLOCK_K divides 128.
        ROW: tl.constexpr = 128 // PACK
        rows = weight + column // 16 * (16 * DEPTH // PACK) + column % 16 * ROW
        at = begin // 128 * (16 * ROW) + begin % 128 // PACK + tl.arange(0, WIDTH)
        tile = tl.load(rows[:, None] + at[None, :])
    else:
        rows = weight + column * (DEPTH // PACK)
        at = begin // PACK + tl.arange(0, WIDTH)
        if DEPTH // PACK % WIDTH == 0:
            tile = tl.load(rows[:, None] + at[None, :])
        else:
            tile = tl.load(
                rows[:, None] + at[None, :], mask=(at < DEPTH // PACK)[None, :], other=0.0
            )
    if NIBBLES and NIBBLES != SIX_BITS:
        if NIBBLES == IQ4_CODES:
            even, odd = iq4_numbers(tile, OPERAND)
        elif NIBBLES >= E2M1_POWERS:
            even, odd = e2m1_numbers(tile, OPERAND)
        else:
            even, odd = nibbles(tile, SIGNED, OPERAND)
        tile = tl.reshape(tl.join(even, odd), column.shape[0], BLOCK_K)
    tile = tile.to(OPERAND)
    if zeros is not None:
        tile = tile - zeros.to(OPERAND)
    elif NIBBLES and BLOCK_K <= 32 and column.shape[0] >= 128:
        # Triton would lay out operands by the 4 bits that they had in memory, which it cannot
        # compile for WGMMA with so few channels of so many columns. It looks for them behind unary
        # operations alone.
        tile = tile + 0.0
    return tile


@triton.jit
def six_bit_tile(
    weight,
    column,
    begin,
    DEPTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """The same of weights in layout split; BLOCK_K divides a unit."""
    # Units of 128 channels are three planes of 32 bytes.
    at = begin // 128 * 96 + tl.arange(0, BLOCK_K // 4)
    if BLOCK_K < 128:
        at += begin % 128 // 4
    planes = (weight + column * (DEPTH // 4 * 3))[:, None] + at[None, :]
    first, second, high = tl.load(planes), tl.load(planes + 32), tl.load(planes + 64)
    a, b, c, d = six_bit_numbers(first, second, high, OPERAND)
    tile = tl.join(tl.join(a, c), tl.join(b, d))
    return tl.reshape(tile, column.shape[0], BLOCK_K)


@triton.jit
def six_bit_numbers(first, second, high, OPERAND: tl.constexpr):
    """Of bytes of the three planes of a unit four channels each, in the type OPERAND."""
    if OPERAND.is_bf16():
        a, b, c, d = bf16_six(first, second, high)
    else:
        a = six_bit_number(first, high).to(OPERAND)
        b = six_bit_number(first >> 4, high >> 2).to(OPERAND)
        c = six_bit_number(second, high >> 4).to(OPERAND)
        d = six_bit_number(second >> 4, high >> 6).to(OPERAND)
    return a, b, c, d


@triton.jit
def six_bit_number(low, high):
    """i32 of the low four bits of one byte and the low two of another."""
    code = (low & 15).to(tl.int32) | ((high & 3).to(tl.int32) << 4)
    return code + _SIX_LEAST


@triton.jit
def bf16_six(first, second, high):
    """See `_six_bits_in_bf16`."""
    return tl.inline_asm_elementwise(
        _BF16_SIX.value,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r",
        [first, second, high],
        dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def group_values(
    values, column, begin, DEPTH: tl.constexpr, GROUP: tl.constexpr, TILES: tl.constexpr
):
    """The scale or zero point of each column [BLOCK_N] for the group that channel `begin` is in.

    Loaded as a column, so that as many threads as there are rows load one each: alone in a row,
    the tensor would have the layout of a product's columns, and a few threads load them all.
    """
    GROUPS: tl.constexpr = (DEPTH + GROUP - 1) // GROUP if GROUP > 0 else 1
    group = begin // GROUP if GROUP > 0 else 0
    if GROUP > 0 and DEPTH % (2 * GROUP) != 0:
        # A block's second group may be after the last.
        group = tl.minimum(group, GROUPS - 1)
    if TILES:
        at = column // 16 * (16 * GROUPS) + group * 16 + column % 16
    else:
        at = column * GROUPS + group
    return tl.sum(tl.load(values + at[:, None] + tl.arange(0, 1)[None, :]), 1)


@triton.jit
def group_scales(
    scales,
    column,
    begin,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    TILES: tl.constexpr,
    NIBBLES: tl.constexpr,
):
    """The same of scales, in f32; bytes are those of plugins/iq4.py, in their unit, or as NIBBLES
    says."""
    found = group_values(scales, column, begin, DEPTH, GROUP, TILES)
    if scales.dtype.element_ty == tl.uint8:
        if NIBBLES == E2M1_POWERS:
            found = e8m0_scale(found)
        elif NIBBLES == E2M1_UNITS:
            found = e4m3_scale(found)
        else:
            found = iq4_scale(found)
    return found


@triton.jit
def e8m0_scale(byte):
    """The powers of two f32 that exponents are; that of 0 is a subnormal, of bf16 as well."""
    bits = tl.maximum(byte.to(tl.int32) << 23, 0x400000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e4m3_scale(byte):
    """The scales f32 that bytes of E4M3 are: times 2^-120 where their bits lie in an f32."""
    code = byte.to(tl.int32)
    bits = ((code & 128) << 24) | ((code & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def iq4_scale(byte):
    """The scales f32 that bytes of plugins/iq4.py are, in their unit."""
    code = byte.to(tl.int32)
    bits = ((code & 128) << 24) | ((code & 127) << 19) | (120 << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1_tile(
    weight,
    scales,
    column,
    begin,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    NIBBLES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Channels begin ... begin + BLOCK_K of some rows of E2M1 weights, times their scales, which
    NIBBLES says what they are.

    Both are row-major; rows of scales are whole words, of four groups each, and BLOCK_K divides a
    word's channels. Returns as `weight_tile`.
    """
    BLOCK_N: tl.constexpr = column.shape[0]
    WIDTH: tl.constexpr = BLOCK_K // 2
    at = begin // 2 + tl.arange(0, WIDTH)
    addresses = (weight + column * (DEPTH // 2))[:, None] + at[None, :]
    if DEPTH // 2 % WIDTH == 0:
        packed = tl.load(addresses)
    else:
        packed = tl.load(addresses, mask=(at < DEPTH // 2)[None, :], other=0)
    byte = bytes_of_words(scales, column, begin, DEPTH, GROUP, BLOCK_K)
    factor = (e4m3_scale(byte) if NIBBLES == E2M1_UNITS else e8m0_scale(byte)).to(OPERAND)
    PARTS: tl.constexpr = factor.shape[1]
    spread = tl.broadcast_to(factor[:, :, None], BLOCK_N, PARTS, WIDTH // PARTS)
    spread = tl.reshape(spread, BLOCK_N, WIDTH)
    if OPERAND.is_bf16():
        even, odd = bf16_e2m1(packed, spread)
    else:
        even = f32_e2m1(packed & 15).to(OPERAND) * spread
        odd = f32_e2m1(packed >> 4).to(OPERAND) * spread
    return tl.reshape(tl.join(even, odd), BLOCK_N, BLOCK_K)


@triton.jit
def bytes_of_words(
    scales, column, begin, DEPTH: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr
):
    """[BLOCK_N, groups of the block] i32."""
    WORD: tl.constexpr = 4 * GROUP
    WORDS: tl.constexpr = (DEPTH + WORD - 1) // WORD
    # Loads of words can be on their way while a block before is multiplied, those of bytes not.
    at = scales.to(tl.pointer_type(tl.int32)) + column * WORDS + begin // WORD
    word = tl.load(at[:, None] + tl.arange(0, 1)[None, :])
    byte = begin // GROUP % 4 + tl.arange(0, BLOCK_K // GROUP)
    return (word >> (byte * 8)[None, :]) & 255


@triton.jit
def f32_e2m1(code):
    """Exponent and mantissa where an f32 has them are the number times 2^-126, subnormals too."""
    wide = code.to(tl.int32)
    bits = ((wide & 8) << 28) | ((wide & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def bf16_e2m1(packed, factor):
    """The low and the high halves of bytes, which are E2M1, times a bf16 for each byte.

    As f32_e2m1: the bits of a number times 2^-126, multiplied by 0x7E80, which is 2^126.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 first, second, sign, zero;
        prmt.b32 first, $4, 0, 0x4140;
        prmt.b32 second, $4, 0, 0x4342;
        shl.b32 sign, first, 12;
        and.b32 sign, sign, 0x80008000;
        shl.b32 $0, first, 6;
        lop3.b32 $0, $0, 0x01C001C0, sign, 0xEA;
        shl.b32 sign, second, 12;
        and.b32 sign, sign, 0x80008000;
        shl.b32 $1, second, 6;
        lop3.b32 $1, $1, 0x01C001C0, sign, 0xEA;
        shl.b32 sign, first, 8;
        and.b32 sign, sign, 0x80008000;
        shl.b32 $2, first, 2;
        lop3.b32 $2, $2, 0x01C001C0, sign, 0xEA;
        shl.b32 sign, second, 8;
        and.b32 sign, sign, 0x80008000;
        shl.b32 $3, second, 2;
        lop3.b32 $3, $3, 0x01C001C0, sign, 0xEA;
        mov.b32 first, 0x7E807E80;
        mov.b32 zero, 0x80008000;
        fma.rn.bf16x2 $0, $0, first, zero;
        fma.rn.bf16x2 $1, $1, first, zero;
        fma.rn.bf16x2 $2, $2, first, zero;
        fma.rn.bf16x2 $3, $3, first, zero;
        fma.rn.bf16x2 $0, $0, $5, zero;
        fma.rn.bf16x2 $1, $1, $6, zero;
        fma.rn.bf16x2 $2, $2, $5, zero;
        fma.rn.bf16x2 $3, $3, $6, zero;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r",
        [packed, factor],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def e2m1_numbers(packed, OPERAND: tl.constexpr):
    """The numbers of E2M1 in the low and the high halves of bytes, in the type OPERAND."""
    if OPERAND.is_bf16():
        even, odd = bf16_e2m1_codes(packed)
    else:
        even = f32_e2m1(packed & 15).to(OPERAND)
        odd = f32_e2m1(packed >> 4).to(OPERAND)
    return even, odd


@triton.jit
def iq4_numbers(packed, OPERAND: tl.constexpr):
    """The numbers of the codes in the low and the high halves of bytes, in the type OPERAND."""
    if OPERAND.is_bf16():
        even, odd = bf16_iq4(packed)
    else:
        even = iq4_number(packed & 15).to(OPERAND)
        odd = iq4_number(packed >> 4).to(OPERAND)
    return even, odd


@triton.jit
def iq4_number(code):
    """i32 of codes, from the bytes of two words of 64 bits."""
    LOW: tl.constexpr = _IQ4_LOW
    HIGH: tl.constexpr = _IQ4_HIGH
    word = tl.where(
        code < 8, tl.full(code.shape, LOW, tl.int64), tl.full(code.shape, HIGH, tl.int64)
    )
    return ((word >> ((code & 7).to(tl.int64) * 8)) & 255).to(tl.int32) + _IQ4_LEAST


@triton.jit
def bf16_iq4(packed):
    """See `_codes_in_bf16`."""
    return tl.inline_asm_elementwise(
        _BF16_IQ4.value,
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def bf16_e2m1_codes(packed):
    """See `_codes_in_bf16`."""
    return tl.inline_asm_elementwise(
        _BF16_E2M1.value,
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def nibbles(packed, SIGNED: tl.constexpr, OPERAND: tl.constexpr):
    """The low and the high halves of bytes as numbers of the type OPERAND."""
    if OPERAND.is_bf16():
        even, odd = bf16_nibbles(packed, SIGNED)
    else:
        even = (packed & 15).to(tl.int8)
        odd = (packed >> 4).to(tl.int8)
        if SIGNED:
            even = (even ^ 8) - 8
            odd = (odd ^ 8) - 8
        even = even.to(OPERAND)
        odd = odd.to(OPERAND)
    return even, odd


@triton.jit
def bf16_nibbles(packed, SIGNED: tl.constexpr):
    """0x4300 | n is the bf16 128 + n. Two's complement with its sign flipped is the number + 8."""
    FLIP: tl.constexpr = 0x43084308 if SIGNED else 0x43004300
    MINUS: tl.constexpr = 0xC308C308 if SIGNED else 0xC300C300
    return tl.inline_asm_elementwise(
        f"""{{
        .reg .b32 high, one, minus;
        mov.b32 one, 0x3F803F80;
        mov.b32 minus, {MINUS};
        shr.u32 high, $4, 4;
        prmt.b32 $0, $4, 0, 0x4140;
        prmt.b32 $1, $4, 0, 0x4342;
        prmt.b32 $2, high, 0, 0x4140;
        prmt.b32 $3, high, 0, 0x4342;
        lop3.b32 $0, $0, 0x000F000F, {FLIP}, 0x6A;
        lop3.b32 $1, $1, 0x000F000F, {FLIP}, 0x6A;
        lop3.b32 $2, $2, 0x000F000F, {FLIP}, 0x6A;
        lop3.b32 $3, $3, 0x000F000F, {FLIP}, 0x6A;
        fma.rn.bf16x2 $0, $0, one, minus;
        fma.rn.bf16x2 $1, $1, one, minus;
        fma.rn.bf16x2 $2, $2, one, minus;
        fma.rn.bf16x2 $3, $3, one, minus;
        }}""",
        "=&r,=&r,=&r,=&r,r",
        [packed],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
