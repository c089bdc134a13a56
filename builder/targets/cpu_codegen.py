"""Plan -> engine.cpp: tables of calls over kernels specialised to this model's shapes.

Calls with the same operator, static extents, attributes and element types share one configuration
and one instance of the kernel, so compile time grows with the kinds of layer, not with the layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from trtc.plugins.cpu.emit import config_struct
from trtc.plugins.op import FusedOp
from trtc.protos.dtypes import DTYPES
from trtc.protos.manifest import STEP_ABI_VERSION
from trtc.protos.plan import Argument, Call, Plan, max_rows
from trtc.protos.step import GRAPH_INPUTS

_STEP_NUMBERS = {one.name: number for number, one in enumerate(GRAPH_INPUTS)}
_STEP_TABLES = {one.name for one in GRAPH_INPUTS if one.is_table}
_EXTENT_ENUM = {
    "T": "kTokens",
    "B": "kSequences",
    "R": "kLogitRows",
    "P": "kTableWidth",
    "num_pages": "kPages",
}
_KIND_ENUM = {
    "buffer": "kBuffer",
    "weight": "kWeight",
    "step": "kStep",
    "pool": "kPool",
    "logits": "kLogits",
}
_MAX_ARGUMENTS = 24
_MAX_EXTENTS = 6


@dataclass(frozen=True)
class _Kind:
    """What calls must have in common to share a kernel's code."""

    operator: str
    attributes: tuple[tuple[str, int | float | str], ...]
    static_axes: tuple[tuple[str, int], ...]
    dtypes: tuple[tuple[str, str], ...]
    """Parameter -> element type, of the parameters that are present."""


def generate(plan: Plan, plan_digest: str, operators: Mapping[str, FusedOp]) -> str:
    """The C++ source of an engine.

    Args:
        plan_digest: SHA-256 of plan.json, compiled in so that the loader can tell a mismatch.
    """
    kinds = list(dict.fromkeys(_kind_of(call) for call in plan.calls))
    used = sorted({kind.operator for kind in kinds})
    return "\n".join(
        [
            "// Written by trtc. One kernel instance for each kind of call, and tables of calls.",
            '#include "cpu/engine.hpp"',
            *(f'#include "{name}/cpu.hpp"' for name in used),
            "",
            "namespace trtc {",
            *(_no_scratch(name) for name in used),
            "}  // namespace trtc",
            "",
            "namespace {",
            "",
            "using trtc::engine::Extent;",
            "using trtc::engine::Kind;",
            "",
            *(
                _kernel(number, kind, operators[kind.operator], plan)
                for number, kind in enumerate(kinds)
            ),
            _scratch(plan, kinds, operators),
            _step_inputs(),
            *_tables(plan, kinds, operators),
            _plan_record(plan, plan_digest),
            "}  // namespace",
            "",
            "TRTC_EXPORT_ENGINE(kPlan)",
            "",
        ]
    )


def _kind_of(call: Call) -> _Kind:
    return _Kind(
        operator=call.operator,
        attributes=tuple(sorted(call.attributes.items())),
        static_axes=tuple(sorted((n, v) for n, v in call.axes.items() if isinstance(v, int))),
        dtypes=tuple((argument.parameter, argument.dtype) for argument in call.arguments),
    )


def _kernel(number: int, kind: _Kind, operator: FusedOp, plan: Plan) -> str:
    """A configuration and the function that gives the kernel its arguments."""
    views = [f"v[{slot}]" for slot in range(len(operator.parameters))]
    extents = [f"n[{index}]" for index in range(len(operator.row_axes))]
    config = config_struct(
        f"C{number}",
        operator,
        axes=dict(kind.static_axes),
        attributes=dict(kind.attributes),
        dtypes=dict(kind.dtypes),
        page_size=plan.kv.page_size,
    )
    return (
        f"{config}\n"
        f"void call_{number}"
        "(trtc::Context& context, const trtc::View* v, const std::int64_t* n) {\n"
        f"  trtc::{operator.name}<C{number}>(context, {{{', '.join(views + extents)}}});\n"
        "}\n"
    )


def _scratch(plan: Plan, kinds: Sequence[_Kind], operators: Mapping[str, FusedOp]) -> str:
    """The largest scratch area of any kernel, which depends on the number of threads."""
    wanted = []
    for number, kind in enumerate(kinds):
        row_axis = operators[kind.operator].row_axes[0]
        rows = max(
            max_rows(str(call.axes[row_axis]), plan.limits)
            for call in plan.calls
            if _kind_of(call) == kind
        )
        wanted.append(
            f"      trtc::{kind.operator}_scratch<C{number}>(std::int64_t{{{rows}}}, num_threads),"
        )
    return "\n".join(
        [
            "std::size_t scratch_bytes(int num_threads) {",
            "  std::size_t largest = 0;",
            "  for (const std::size_t bytes : {",
            *wanted,
            "  }) {",
            "    if (bytes > largest) largest = bytes;",
            "  }",
            "  return largest;",
            "}",
            "",
        ]
    )


def _no_scratch(operator: str) -> str:
    """Kernels that need no scratch declare none; an ellipsis loses to any real declaration."""
    return f"template <class C> std::size_t {operator}_scratch(...) {{ return 0; }}"


def _step_inputs() -> str:
    """The members of the step that arguments name by number; the struct begins with them in this
    order, as its callers lay it out."""
    struct = "trtc_engine_step_t"
    return "\n".join(
        [
            "constexpr trtc::engine::StepInput kStepInputs[] = {",
            *(f"    &{struct}::{one.name},  // [{', '.join(one.shape)}]" for one in GRAPH_INPUTS),
            "};",
            *(
                f"static_assert(offsetof({struct}, {one.name}) == {number} * sizeof(void*));"
                for number, one in enumerate(GRAPH_INPUTS)
            ),
            f"static_assert(offsetof({struct}, num_tokens) == sizeof kStepInputs);",
            "",
        ]
    )


def _tables(
    plan: Plan, kinds: Sequence[_Kind], operators: Mapping[str, FusedOp]
) -> tuple[str, str]:
    """The flat table of arguments, and the table of calls that points into it."""
    numbers = {kind: number for number, kind in enumerate(kinds)}
    offsets = {buffer.name: buffer.offset for buffer in plan.buffers}
    offsets |= {weight.name: weight.offset for weight in plan.weights}
    arguments: list[str] = []
    calls: list[str] = []
    for call in plan.calls:
        operator = operators[call.operator]
        slots = {p.name: slot for slot, p in enumerate(operator.parameters)}
        assert len(slots) <= _MAX_ARGUMENTS
        assert len(operator.row_axes) <= _MAX_EXTENTS
        first = len(arguments)
        arguments += [
            _argument(slots[argument.parameter], argument, offsets) for argument in call.arguments
        ]
        calls.append(
            f"    {{call_{numbers[_kind_of(call)]}, {first}, {len(call.arguments)}, "
            f"{{{', '.join(_extents(call, operator))}}}}},  // {call.site}"
        )
    return (
        "\n".join(["constexpr trtc::engine::Argument kArguments[] = {", *arguments, "};", ""]),
        "\n".join(["constexpr trtc::engine::Call kCalls[] = {", *calls, "};", ""]),
    )


def _argument(slot: int, argument: Argument, offsets: Mapping[str, int]) -> str:
    index, group = argument.index, 0
    stride = argument.row_stride
    offset = argument.column_offset * DTYPES[argument.dtype].bits // 8
    if argument.kind == "step":
        index, group = _STEP_NUMBERS[argument.name], argument.index
        stride = -1 if argument.name in _STEP_TABLES else 1
    elif argument.kind in ("buffer", "weight"):
        offset += offsets[argument.name]
    return (
        f"    {{{slot}, Kind::{_KIND_ENUM[argument.kind]}, {index}, {group}, {offset}, "
        f"{stride}}},"
        f"  // {argument.parameter} = {argument.name}"
    )


def _extents(call: Call, operator: FusedOp) -> list[str]:
    """The enum of each row axis; an axis that happens to be static has no place in the step."""
    found = [f"Extent::{_EXTENT_ENUM[str(call.axes[axis])]}" for axis in operator.row_axes]
    return found + ["Extent::kCount"] * (_MAX_EXTENTS - len(found))


def _plan_record(plan: Plan, plan_digest: str) -> str:
    limits = plan.limits
    sizes = (
        limits.max_num_tokens,
        limits.max_batch_size,
        limits.max_seq_len,
        limits.num_positions,
        plan.kv.page_size,
        plan.vocab_size,
        len(plan.kv.groups),
    )
    return "\n".join(
        [
            "constexpr trtc::engine::Plan kPlan = {",
            "    kCalls,",
            f"    {len(plan.calls)},",
            "    kArguments,",
            "    kStepInputs,",
            "    scratch_bytes,",
            f"    {{{', '.join(map(str, sizes))}}},",
            f'    {{{STEP_ABI_VERSION}, TRTC_ISA, "{plan_digest}", '
            f"{plan.weights_bytes}, {plan.arena_bytes}}},",
            "};",
            "",
        ]
    )
