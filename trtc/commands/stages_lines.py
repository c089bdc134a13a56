"""What an engine of plans runs for a step, for a terminal."""

from collections.abc import Iterator

from trtc.protos.stages import Launch, Segment, Stages
from trtc.protos.units import size


def stages_lines(stages: Stages) -> Iterator[str]:
    """Every plan and launch in order, and where tensors that go between them are."""
    launches = sum(isinstance(stage, Launch) for stage in stages.stages)
    yield (
        f"{len(stages.plans)} plans, {launches} launches, {size(stages.arena_bytes)} between them"
    )
    for profile in stages.profiles:
        extents = " ".join(
            f"{axis}={low}..{high}" for axis, (low, _, high) in profile.extents.items()
        )
        yield f"profile {profile.name:8} {extents}"
    places = {one.name: f"arena@{one.offset}" for one in stages.buffers}
    for number, stage in enumerate(stages.stages):
        yield ""
        yield from _stage(number, stage, places)


def _stage(number: int, stage: Segment | Launch, places: dict[str, str]) -> Iterator[str]:
    if isinstance(stage, Segment):
        yield f"{number:4} plan             {stage.plan}"
        named = [("in", name) for name in stage.inputs] + [("out", name) for name in stage.outputs]
    else:
        yield f"{number:4} {stage.op:16} {stage.site}"
        named = list(stage.arguments.items())
    for parameter, name in named:
        yield f"       {parameter:14} {places.get(name, ''):14} {name}".rstrip()
