"""The load of examples/bench/soak.py: it goes through a real server, and it can fail."""

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from examples.bench import soak
from examples.bench.served import TrtcServer, trtc_server
from tests.support.engines import build_tiny
from tests.support.models import tiny_checkpoint
from trtc.protos.manifest import read_manifest

QUARTERS = [soak.Reading(seconds, rss=1 << 30, gpu=0) for seconds in range(4)]


def grown(last: soak.Reading) -> list[soak.Reading]:
    return [*QUARTERS[:-1], last]


@pytest.mark.parametrize(
    ("tally", "readings", "pages_left", "said"),
    [
        (soak.Tally(completed=1), QUARTERS, 0, []),
        (soak.Tally(), QUARTERS, 0, ["no request was completed"]),
        (
            soak.Tally(completed=1, failures=Counter({"INTERNAL: x": 2})),
            QUARTERS,
            0,
            ["2 x INTERNAL: x"],
        ),
        (soak.Tally(completed=1), QUARTERS, 3, ["3 KV pages were not given back"]),
        (
            soak.Tally(completed=1),
            grown(soak.Reading(3, rss=(1 << 30) + (65 << 20), gpu=0)),
            0,
            ["memory of the process grew from 1,073,741,824 to 1,141,899,264 bytes"],
        ),
        (soak.Tally(completed=1), grown(soak.Reading(3, (1 << 30) + (63 << 20), 0)), 0, []),
        (
            soak.Tally(completed=1),
            [soak.Reading(at, 1, gpu=(at + 1) << 30) for at in range(2)],
            0,
            ["memory of the GPU grew from 1,073,741,824 to 2,147,483,648 bytes"],
        ),
    ],
)
def test_what_is_wrong_is_said(
    tally: soak.Tally, readings: list[soak.Reading], pages_left: float, said: list[str]
) -> None:
    assert soak.problems(tally, readings, pages_left) == said


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("soak")
    build_tiny(tiny_checkpoint("llama", directory / "model"), directory / "engine")
    return directory / "engine"


def test_a_server_that_preempts_passes(engine: Path) -> None:
    pool = 12 * read_manifest(engine).kv.page_bytes
    with trtc_server(engine, "--kv-bytes", str(pool)) as served:
        tally, wrong = asyncio.run(soak.soak(served, seconds=4, streams=8, seed=1))
        assert soak.metrics(served)["trtc_num_preemptions_total"] > 0
    assert wrong == []
    assert tally.completed > 20
    assert tally.cancelled > 0


def test_a_server_that_dies_does_not_pass(engine: Path) -> None:
    async def killed(served: TrtcServer) -> list[str]:
        load = asyncio.create_task(soak.soak(served, seconds=60, streams=4, seed=1))
        await asyncio.sleep(1)
        served.server.process.kill()
        return (await load)[1]

    with trtc_server(engine) as served:
        wrong = asyncio.run(killed(served))
    assert wrong[-1] == "the server ended with -9"
    assert any("UnavailableError" in problem for problem in wrong)
