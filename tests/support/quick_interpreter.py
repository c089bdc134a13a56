"""Triton's interpreter without what it works out anew for every operation.

A program of a kernel is thousands of operations on small arrays, and the operations themselves are
a small part of its time: the rest goes to types, shapes and constants, which are the same for every
program. Triton is asked for each once. Results stay the same to the last bit.

For a process that only interprets.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_IN_NUMPY: Mapping[str, Callable[..., Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
}
"""Triton's names."""


def make_quick() -> None:
    """Patch this process's Triton."""
    from triton.language import core
    from triton.runtime import interpreter

    interpreter._patch_lang = _once_a_module(interpreter._patch_lang, interpreter._LangPatchScope)
    interpreter._patch_attr = _patch_attribute
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    interpreter.TensorHandle.__init__ = _make_handle(interpreter._validate_np_data_size)
    core._unwrap_if_constexpr = _unwrap(core._unwrap_if_constexpr, core)
    core.block_type.__init__ = _make_block_once(core.block_type.__init__, core)
    core.block_type.with_element_ty = _with_element(core.block_type.with_element_ty)
    core.block_type.to_ir = lambda self, builder: self
    core.tensor.__init__ = _make_tensor(core)
    core.tensor.__getitem__ = _index(core.tensor.__getitem__, core)
    semantic = interpreter.TritonSemantic
    semantic.scalar_constant = _constant_once(semantic.scalar_constant)
    semantic.binary_op_type_checking_impl = _operands(semantic.binary_op_type_checking_impl, core)
    semantic.broadcast_impl_value = _in_one_shape(semantic.broadcast_impl_value)
    semantic.binary_op_sanitize_overflow_impl = _check_overflow


def _once_a_module(patch: Any, scope: Any) -> Callable[[Any], Any]:
    """Triton's patch of its language, for good: its own comes with every call of a function and
    goes with the launch."""
    patched: set[str] = set()

    def once(function: Any) -> Any:
        if function.__module__ not in patched:
            patched.add(function.__module__)
            patch(function)
        return scope()

    return once


def _patch_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A function of the language that knows its semantics, without the two wrappers that pass
    them on."""
    from triton.runtime.interpreter import interpreter_semantic

    function = inspect.unwrap(member)

    def call(*arguments: Any, **options: Any) -> Any:
        options["_semantic"] = interpreter_semantic
        return function(*arguments, **options)

    scope.set_attr(owner, name, call)


def _by_name(numpy_type: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """Triton's function, which makes its table for every operation, asked once for each type."""
    known: dict[str, np.dtype[Any]] = {}

    def type_of(asked: Any) -> np.dtype[Any]:
        scalar = asked.scalar
        if scalar.is_ptr():
            return np.dtype(np.uint64)
        if scalar.name not in known:
            known[scalar.name] = numpy_type(scalar)
        return known[scalar.name]

    return type_of


def _make_handle(is_valid: Callable[[Array, Any], bool]) -> Callable[..., None]:
    """An array with its type, whose sizes are compared once for each pair of types."""
    valid: set[tuple[int, str]] = set()

    def make_handle(self: Any, data: Array, dtype: Any, attr: Any = None) -> None:
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        pair = data.itemsize, dtype.name
        if pair not in valid:
            assert is_valid(data, dtype), f"{data.dtype} for {dtype}"
            valid.add(pair)

    return make_handle


def _unwrap(unwrap: Callable[[Any], Any], core: Any) -> Callable[[Any], Any]:
    """What Triton asks of every operand, the commonest kinds first."""
    plain = frozenset((core.tensor, core.dtype, int, float, bool, type(None)))

    def unwrapped(one: Any) -> Any:
        kind = type(one)
        if kind in plain:
            return one
        return one.value if kind is core.constexpr else unwrap(one)

    return unwrapped


def _make_block_once(make_block: Any, core: Any) -> Callable[..., None]:
    """The type of a block of elements, which knows the shape of its arrays and of its tensors."""
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}

    def make_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        pointer = element_ty.is_ptr() and (element_ty.const, element_ty.address_space)
        sizes = tuple([core._unwrap_if_constexpr(size) for size in shape])
        known = (element_ty.name, pointer, sizes)
        if known not in blocks:
            make_block(self, element_ty, shape)
            self.sizes, self.shape_of_tensor = sizes, _shape_of_tensor(sizes, core)
            blocks[known] = dict(vars(self))
        vars(self).update(blocks[known])

    return make_block_once


def _shape_of_tensor(sizes: tuple[int, ...], core: Any) -> tuple[Any, Any]:
    """(shape, number of elements), as Triton wraps them."""
    shape = core.tuple([core.constexpr(size) for size in sizes])
    return shape, core.constexpr(math.prod(sizes))


def _with_element(with_element: Any) -> Callable[[Any, Any], Any]:
    known: dict[tuple[str, str], Any] = {}

    def with_element_ty(self: Any, element: Any) -> Any:
        pair = self.name, element.name
        if pair not in known:
            known[pair] = with_element(self, element)
        return known[pair]

    return with_element_ty


def _make_tensor(core: Any) -> Callable[[Any, Any, Any], None]:
    scalar = _shape_of_tensor((), core)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = type.shape_of_tensor if type.is_block() else scalar

    return make_tensor


def _index(index: Any, core: Any) -> Any:
    """A block with axes of one element more: x[:, None]."""
    whole = slice(None)

    def indexed(self: Any, slices: Any, _semantic: Any) -> Any:
        places = slices if isinstance(slices, tuple) else (slices,)
        if not self.type.is_block() or any(one is not None and one != whole for one in places):
            return index(self, slices, _semantic=_semantic)
        handle = self.handle
        data = handle.data[places]
        block = core.block_type(self.dtype, list(data.shape))
        return core.tensor(type(handle)(data, handle.dtype), block)

    return core.builtin(indexed)


def _constant_once(make_constant: Any) -> Callable[..., Any]:
    """A number as a tensor, which nobody writes to."""
    known: dict[tuple[Any, ...], Any] = {}

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        key = type(value), value, dtype.name
        if key not in known:
            known[key] = make_constant(self, value, dtype)
        return known[key]

    return constant


def _operands(legalize: Any, core: Any) -> Callable[..., tuple[Any, Any]]:
    """Both operands of an operation on elements, in the type in which it is computed. Their types
    have one shape; their arrays get it by the operation itself, as numpy broadcasts them."""
    known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def kind(operand: Any) -> Any:
        is_tensor = isinstance(operand, core.tensor)
        return operand.type.name if is_tensor else (type(operand), operand)

    def operands(self: Any, left: Any, right: Any, *rules: Any) -> tuple[Any, Any]:
        key = kind(left), kind(right), rules
        if key not in known:
            both = zip((left, right), legalize(self, left, right, *rules), strict=True)
            known[key] = tuple(type_or_constant(given, found) for given, found in both)
        first, second = known[key]
        return prepared(self, left, first), prepared(self, right, second)

    def type_or_constant(given: Any, found: Any) -> Any:
        """The type that an operand gets; of a number the tensor, whose array has one element."""
        if isinstance(given, core.tensor):
            return found.type
        handle = found.handle
        number = handle.data.reshape(-1)[:1].copy()
        return core.tensor(type(handle)(number, handle.dtype), found.type)

    def prepared(self: Any, given: Any, wanted: Any) -> Any:
        if isinstance(wanted, core.tensor):
            return wanted
        if given.type.name == wanted.name:
            return given
        return core.tensor(self.cast(given, wanted.scalar).handle, wanted)

    return operands


def _in_one_shape(broadcast: Any) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """Both tensors, with all elements of the shape that they have together."""
    known: dict[tuple[str, str], tuple[Any, ...]] = {}

    def in_one_shape(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
        pair = left.type.name, right.type.name
        if pair not in known:
            known[pair] = tuple(one.type for one in broadcast(self, left, right))
        first, second = known[pair]
        return _spread(left, first), _spread(right, second)

    return in_one_shape


def _spread(tensor: Any, wanted: Any) -> Any:
    handle = tensor.handle
    if tensor.type.name == wanted.name and (
        not wanted.is_block() or handle.data.shape == wanted.sizes
    ):
        return tensor
    data = np.empty(wanted.sizes, handle.data.dtype)
    data[...] = handle.data
    return type(tensor)(type(handle)(data, handle.dtype), wanted)


def _check_overflow(self: Any, left: Any, right: Any, operation: Any) -> None:
    """That an integer of fewer than 64 bits holds a sum, difference or product; Triton's own
    computes that by eight operations of its language."""
    scalar = left.type.scalar
    if scalar.int_bitwidth >= 64:
        return
    wide = _IN_NUMPY[operation.__name__](left.handle.data, right.handle.data, dtype=np.int64)
    if wide.size:
        lowest, highest = scalar.get_int_min_value(), scalar.get_int_max_value()
        assert lowest <= wide.min() and wide.max() <= highest, (
            f"int{scalar.int_bitwidth} overflow of {operation.__name__}"
        )
