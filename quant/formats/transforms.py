"""Rotations that a compressed-tensors checkpoint declares as its transform_config.

    {"config_groups": {NAME: {"type": "hadamard", "head_dim": BLOCK, "apply": [
        {"location": "input", "targets": [...], "ignore": [...]},
        {"location": "weight_input", "targets": [...], "ignore": [...], "inverse": true}]}}}

BLOCK input channels together are multiplied by Sylvester's matrix over the root of its size:
`weight_input` in the weights, which are stored so, and `input` in what they multiply. The matrix is
its own inverse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trtc.quant.formats.listed import ALL_LINEARS, ListedModules
from trtc.quant.formats.stored import expect, mapping, unsupported

TRANSFORMS = "transform_config"
_BLOCKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
_GROUP_FIELDS = {"type", "head_dim", "apply", "randomize", "requires_grad", "precision"}
_INPUT, _WEIGHT = "input", "weight_input"


def declared_rotation(block: int, ignored: Sequence[str]) -> dict[str, Any]:
    """The transform_config of a checkpoint whose linears but `ignored` are rotated."""
    modules = {"targets": [ALL_LINEARS], "ignore": list(ignored)}
    apply = [
        {"location": _INPUT, "inverse": False, **modules},
        {"location": _WEIGHT, "inverse": True, **modules},
    ]
    group = {"type": "hadamard", "head_dim": block, "randomize": False, "apply": apply}
    return {"config_groups": {"hadamard": group}}


@dataclass(frozen=True)
class Rotation:
    """A group of linears that are rotated alike."""

    block: int
    targets: ListedModules
    ignored: ListedModules

    def names(self, prefix: str) -> bool:
        named = self.targets.names(prefix) or self.targets.names(ALL_LINEARS)
        return named and not self.ignored.names(prefix)


@dataclass(frozen=True)
class Rotations:
    """What a transform_config says."""

    groups: tuple[Rotation, ...]

    def block_of(self, prefix: str) -> int:
        """Input channels of a linear that are rotated together; 0: none are.

        Raises:
            UnsupportedError: several groups name it.
        """
        blocks = [group.block for group in self.groups if group.names(prefix)]
        if len(blocks) > 1:
            raise unsupported(TRANSFORMS, prefix, "one rotation of a linear's input")
        return blocks[0] if blocks else 0


def read_rotations(config: Mapping[str, Any]) -> Rotations:
    """The rotations of a quantization_config; none where it declares no transforms.

    Raises:
        UnsupportedError: transforms of other kinds, with the field named.
    """
    transforms = mapping(config, TRANSFORMS)
    if unknown := set(transforms) - {"config_groups"}:
        raise unsupported(TRANSFORMS, sorted(unknown), "config_groups")
    groups = mapping(transforms, "config_groups", f"{TRANSFORMS}.")
    return Rotations(tuple(_rotation(name, groups) for name in groups))


def _rotation(name: str, groups: Mapping[str, Any]) -> Rotation:
    where = f"{TRANSFORMS}.config_groups."
    group = mapping(groups, name, where)
    if unknown := set(group) - _GROUP_FIELDS:
        raise unsupported(where + name, sorted(unknown), ", ".join(sorted(_GROUP_FIELDS)))
    for field, *known in (
        ("type", "hadamard"),
        ("randomize", False, None),
        ("precision", "torch.float32", "float32", None),
        ("head_dim", *_BLOCKS),
    ):
        expect({f"{where}{name}.{field}": group.get(field)}, f"{where}{name}.{field}", *known)
    steps = group.get("apply")
    found = {_location(step): step for step in steps} if isinstance(steps, list) else {}
    if set(found) != {_INPUT, _WEIGHT} or len(found) != len(steps or ()):
        raise unsupported(f"{where}{name}.apply", steps, f"one {_INPUT} and one {_WEIGHT}")
    lists = [(step.get("targets"), step.get("ignore") or []) for step in found.values()]
    if lists[0] != lists[1]:
        raise unsupported(f"{where}{name}.apply", steps, "both for the same modules")
    modules = {f"{where}{name}.{field}": _listed(found[_INPUT], field) for field in _LISTS}
    targets, ignored = (ListedModules(modules, field) for field in modules)
    return Rotation(group["head_dim"], targets, ignored)


_LISTS = ("targets", "ignore")


def _location(step: Any) -> object:
    is_known = isinstance(step, Mapping) and set(step) <= {"location", "inverse", *_LISTS}
    location = step.get("location") if is_known else None
    return location if isinstance(location, str) else None


def _listed(step: Mapping[str, Any], field: str) -> Any:
    """One name is a list of one."""
    value = step.get(field)
    return [value] if isinstance(value, str) else value
