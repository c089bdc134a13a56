"""A launch plan: the tensor maps that its kernels take."""

from pathlib import Path

from trtc.protos.launch_plan import (
    LAUNCHES_FILE,
    TILE_MAP_BYTES,
    Address,
    CallLaunches,
    CallVariant,
    GridAxis,
    KernelCall,
    LaunchPlan,
    SamplingPlan,
    StepBlock,
    TileMap,
    launches_json,
    read_launches,
)

GRID = GridAxis()


def kernel_call(*maps: TileMap) -> KernelCall:
    return KernelCall(kernel=0, arguments=(), grid=(GRID, GRID, GRID), overlaps=True, maps=maps)


def plan_of(*works: KernelCall) -> LaunchPlan:
    variants = tuple(CallVariant(kind="any", max_rows=8, work=(work,)) for work in works)
    return LaunchPlan(
        sm=90,
        split_keys=256,
        max_splits=64,
        kernels=(),
        calls=(CallLaunches(site="a", rows="tokens", variants=variants),),
        sampling=SamplingPlan(stages={}, tensors={}, bytes=16),
        step=StepBlock(offsets={}, num_elements=4, table_width=1, max_rows=2),
        arena_bytes=64,
        scratch_bytes=32,
    )


def map_at(offset: int) -> TileMap:
    address = Address(space="weights", offset=offset)
    return TileMap(address=address, sizes=(256, 8), strides=(256,), box=(128, 8))


def test_a_map_that_several_kernels_take_is_made_once() -> None:
    plan = plan_of(kernel_call(map_at(0), map_at(64)), kernel_call(), kernel_call(map_at(64)))
    assert plan.tile_maps() == (map_at(0), map_at(64))
    without = plan_of(kernel_call())
    assert plan.fixed_bytes(5) - without.fixed_bytes(5) == 2 * TILE_MAP_BYTES


def test_maps_are_read_back_and_an_older_plan_has_none(tmp_path: Path) -> None:
    plan = plan_of(kernel_call(map_at(0)), kernel_call())
    content = launches_json(plan)
    (tmp_path / LAUNCHES_FILE).write_bytes(content)
    assert read_launches(tmp_path) == plan
    older = launches_json(plan_of(kernel_call())).replace(b'"maps":[],', b"")
    assert b"maps" not in older
    (tmp_path / LAUNCHES_FILE).write_bytes(older)
    assert read_launches(tmp_path).tile_maps() == ()


def test_an_older_plan_leaves_nothing_out(tmp_path: Path) -> None:
    plan = plan_of(kernel_call())
    older = launches_json(plan).replace(b'"least_splits":0,', b"")
    assert b"least_splits" not in older
    (tmp_path / LAUNCHES_FILE).write_bytes(older)
    assert read_launches(tmp_path) == plan
