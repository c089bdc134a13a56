"""trtc's side of a measurement on a GPU: `python -m examples.bench.peers.trtc_gpu_worker`, a GpuJob
on stdin. Through scheduler and engine loop, without gRPC, as `trtc bench ENGINE` does."""

import asyncio
from pathlib import Path

from examples.bench.peers.failures import RunFailed
from examples.bench.peers.gpu_work import GpuJob, measure, read_gpu_job
from examples.bench.peers.jobs import answer
from trtc.runtime.bench.load import LocalTarget, Shape, local_target, run_load
from trtc.runtime.bench.measure import Load
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.engine.opening import open_handle


async def answer_figures(job: GpuJob) -> None:
    config = EngineConfig(dummy_weights=job.weights == "random", prefix_cache=False)
    async with local_target(Path(job.model), config, open_handle) as target:
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(_answer_figures, Engine(target, loop), job)


def _answer_figures(engine: "Engine", job: GpuJob) -> None:
    for figure in measure(engine.timed, job):
        answer(figure)


class Engine:
    """An opened engine, used from beside the event loop that it runs on."""

    def __init__(self, target: LocalTarget, loop: asyncio.AbstractEventLoop) -> None:
        self._target = target
        self._loop = loop
        self._seed = 0

    def timed(self, requests: int, input_len: int, output_len: int) -> float:
        self._seed += 1
        load = Load(requests, concurrency=requests)
        shape = Shape(input_len, output_len, self._seed)
        run = run_load(self._target, load, shape)
        found = asyncio.run_coroutine_threadsafe(run, self._loop).result()
        if found.failures or found.output_tokens != requests * output_len:
            raise RunFailed(f"{found.output_tokens} tokens, {found.failures}")
        return found.seconds


def main() -> None:
    asyncio.run(answer_figures(read_gpu_job()))


if __name__ == "__main__":
    main()
