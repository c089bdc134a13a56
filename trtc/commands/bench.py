"""`trtc bench`: time to first token, time between tokens and throughput under load."""

import asyncio
import json
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from trtc.commands.phases import phases
from trtc.commands.remote import Credentials, connection_options, credentials
from trtc.protos.errors import RequestError
from trtc.runtime.bench.load import ServerTarget, Shape, Target, local_target, run_load
from trtc.runtime.bench.measure import Load, Measurement, Spread
from trtc.runtime.client import AsyncClient
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.engine.opening import open_handle
from trtc.runtime.requests.model_info import ModelInfo


@click.command()
@click.argument("engine", required=False, type=click.Path(path_type=Path))
@click.option("--url", metavar="HOST:PORT", help="Measure a running server instead.")
@click.option("--model", default="", help="With --url: engine name.")
@click.option(
    "--concurrency", default="1,4,16", show_default=True, help="Requests at once: closed loop."
)
@click.option("--rate", default="", help="Arrivals a second, Poisson: open loop, instead.")
@click.option("--input-len", type=click.IntRange(1), default=128, show_default=True)
@click.option("--output-len", type=click.IntRange(1), default=64, show_default=True)
@click.option("--requests", type=click.IntRange(1), help="Requests a load; 4 for each at once.")
@click.option("--warmup", type=click.IntRange(0), default=2, show_default=True, help="Requests.")
@click.option(
    "--seed",
    type=int,
    help="Of prompts and arrivals. Default: another one each time, so that a server's prefix "
    "cache never knows the prompts.",
)
@connection_options
@click.option("--threads", type=click.IntRange(1), help="CPU threads.")
@click.option("--kv-bytes", type=click.IntRange(1), help="Bytes of KV pool.")
@click.option("--dummy-weights", is_flag=True, help="Fill in random weights.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    engine: Path | None,
    url: str | None,
    model: str,
    concurrency: str,
    rate: str,
    input_len: int,
    output_len: int,
    requests: int | None,
    warmup: int,
    seed: int | None,
    tls: bool,
    tls_ca: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    api_key_file: Path | None,
    threads: int | None,
    kv_bytes: int | None,
    dummy_weights: bool,
    as_json: bool,
) -> None:
    """Measure an engine in this process, or a running server with --url."""
    if (engine is None) == (url is None):
        raise RequestError("give exactly one of them", field="ENGINE, --url")
    loads = _loads(concurrency, rate, requests)
    shape = Shape(input_len, output_len, secrets.randbits(31) if seed is None else seed)
    access = credentials(
        tls=tls, tls_ca=tls_ca, tls_cert=tls_cert, tls_key=tls_key, api_key_file=api_key_file
    )
    config = EngineConfig(num_threads=threads, kv_bytes=kv_bytes, dummy_weights=dummy_weights)
    with phases() as progress:
        info, measurements = asyncio.run(
            _measure(engine, url, access, model, config, loads, shape, warmup, progress)
        )
    if as_json:
        click.echo(json.dumps(_document(engine, url, info, shape, measurements)))
    else:
        _show(info, shape, measurements)


async def _measure(
    engine: Path | None,
    url: str | None,
    access: Credentials,
    model: str,
    config: EngineConfig,
    loads: Sequence[Load],
    shape: Shape,
    warmup: int,
    progress: Callable[[str], None],
) -> tuple[ModelInfo, list[Measurement]]:
    if engine is not None:
        async with local_target(engine, config, open_handle) as target:
            return await _run_all(target, loads, shape, warmup, progress)
    assert url is not None
    async with AsyncClient(url, **access) as client:
        return await _run_all(ServerTarget(client, model), loads, shape, warmup, progress)


async def _run_all(
    target: Target,
    loads: Sequence[Load],
    shape: Shape,
    warmup: int,
    progress: Callable[[str], None],
) -> tuple[ModelInfo, list[Measurement]]:
    """Each load gets prompts of its own, so that no one finds another's in the prefix cache."""
    info = await target.info()
    if warmup:
        progress(f"warming up {info.name}: {warmup} requests")
        unlike = Shape(shape.input_len, shape.output_len, shape.seed - 1)
        await run_load(target, Load(warmup, concurrency=1), unlike)
    measurements = []
    for number, load in enumerate(loads):
        progress(f"{number + 1}/{len(loads)} {load.name}: {load.num_requests} requests")
        own = Shape(shape.input_len, shape.output_len, shape.seed + number * 1_000_003)
        measurements.append(await run_load(target, load, own))
    return info, measurements


def _loads(concurrency: str, rate: str, requests: int | None) -> list[Load]:
    if rate:
        rates = _numbers(rate, "--rate")
        return [Load(requests or max(16, round(each * 10)), rate=each) for each in rates]
    levels = [int(each) for each in _numbers(concurrency, "--concurrency")]
    return [Load(requests or max(8, 4 * each), concurrency=each) for each in levels]


def _numbers(text: str, option: str) -> list[float]:
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    whole = option == "--rate" or all(number == int(number) for number in numbers)
    if not numbers or not whole or any(not 0 < number < 1e6 for number in numbers):
        raise RequestError(
            f"{text!r} is not a list of positive numbers", field=option, remedy="Give 1,4,16"
        )
    return numbers


def _document(
    engine: Path | None,
    url: str | None,
    info: ModelInfo,
    shape: Shape,
    measurements: Sequence[Measurement],
) -> dict[str, Any]:
    return {
        "model": info.name,
        "target": info.target,
        "engine": str(engine) if engine is not None else None,
        "url": url,
        "input_len": shape.input_len,
        "output_len": shape.output_len,
        "seed": shape.seed,
        "loads": [one.as_json() for one in measurements],
    }


def _show(info: ModelInfo, shape: Shape, measurements: Sequence[Measurement]) -> None:
    """Fits 80 columns, so that logs stay readable."""
    table = Table(
        title=f"{info.name}, {info.scheme} on {info.target}\n"
        f"{shape.input_len} tokens in, {shape.output_len} out; ms at p50/p95/p99",
        caption=f"seed {shape.seed}",
        box=box.SIMPLE,
    )
    open_loop = measurements[0].load.rate is not None
    table.add_column("a second" if open_loop else "at once", justify="right")
    for name in ("first token", "each next", "whole", "tok/s", "req/s"):
        table.add_column(name, justify="right")
    for one in measurements:
        table.add_row(
            f"{one.load.rate if open_loop else one.load.concurrency:g}",
            *(_spread(spread) for spread in (one.ttft_ms, one.itl_ms, one.e2e_ms)),
            f"{one.output_tokens_per_s:.1f}",
            f"{one.requests_per_s:.2f}",
        )
    console = Console()
    console.print(table)
    for one in measurements:
        if one.scheduler is not None:
            console.print(
                f"{one.load.rate or one.load.concurrency:g}: the scheduler took "
                f"{one.scheduler.ms_a_step:.2f} ms a step, {one.scheduler.share:.1%} of the time"
            )
    for one in measurements:
        for status, count in one.failures.items():
            console.print(f"{count} of {one.load.num_requests} requests failed: {status}")


def _spread(spread: Spread) -> str:
    return "/".join(_milliseconds(value) for value in (spread.p50, spread.p95, spread.p99))


def _milliseconds(value: float) -> str:
    """Three digits are enough."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
