"""`trtc serve`: engines over gRPC, metrics and probes over HTTP."""

import asyncio
import logging
import time
from pathlib import Path

import click

from trtc.protos.errors import RequestError
from trtc.runtime.server.app import Server, ServerConfig, engine_sources
from trtc.runtime.server.limits import ServiceLimits
from trtc.runtime.server.opening import open_handle
from trtc.runtime.wire.channel import ServerTls

_DEFAULTS = ServerConfig(engines=())
_LIMITS = ServiceLimits()


@click.command()
@click.argument("engines", nargs=-1, required=True, metavar="[NAME=]ENGINE...")
@click.option("--host", default=_DEFAULTS.host, show_default=True, help="Address to listen on.")
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    default=_DEFAULTS.grpc_port,
    show_default=True,
    help="Port for gRPC; 0 for any free one.",
)
@click.option(
    "--http-port",
    type=click.IntRange(0, 65535),
    default=_DEFAULTS.http_port,
    show_default=True,
    help="Port for /metrics, /healthz and /readyz; 0 for any free one.",
)
@click.option("--no-http", is_flag=True, help="Open no HTTP port.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads, an engine.")
@click.option("--kv-bytes", type=click.IntRange(1), help="Bytes of KV pool, an engine.")
@click.option(
    "--step-target",
    type=click.FloatRange(0),
    default=_DEFAULTS.step_target_s,
    show_default=True,
    help="Seconds that a step should take at most while others wait for their next tokens: prompts "
    "are cut to fit. Longer: more tokens a second; 0: never cut.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(1),
    default=_DEFAULTS.max_queue,
    show_default=True,
    help="Requests that may wait, an engine.",
)
@click.option(
    "--max-streams",
    type=click.IntRange(1),
    default=_LIMITS.max_streams,
    show_default=True,
    help="Generate calls open at once.",
)
@click.option(
    "--max-prompt-bytes",
    type=click.IntRange(1),
    default=_LIMITS.max_prompt_bytes,
    show_default=True,
    help="Bytes of a text prompt.",
)
@click.option("--no-prefix-cache", is_flag=True, help="Compute every prompt from its start.")
@click.option(
    "--dummy-weights", is_flag=True, help="Fill engines built without weights with random ones."
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(0),
    default=_DEFAULTS.drain_timeout_s,
    show_default=True,
    help="Seconds that running requests get after SIGTERM.",
)
@click.option("--tls-cert", type=click.Path(path_type=Path), help="PEM certificate chain.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="PEM private key.")
@click.option(
    "--tls-client-ca", type=click.Path(path_type=Path), help="PEM roots; clients must be signed."
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
def command(
    engines: tuple[str, ...],
    host: str,
    grpc_port: int,
    http_port: int,
    no_http: bool,
    threads: int | None,
    kv_bytes: int | None,
    step_target: float,
    max_queue: int,
    max_streams: int,
    max_prompt_bytes: int,
    no_prefix_cache: bool,
    dummy_weights: bool,
    drain_timeout: float,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    log_level: str,
) -> None:
    """Serve engines over gRPC until SIGTERM or Ctrl-C, which let running requests end."""
    _log_to_stderr(log_level)
    config = ServerConfig(
        engines=engine_sources(engines),
        host=host,
        grpc_port=grpc_port,
        http_port=None if no_http else http_port,
        tls=_tls(tls_cert, tls_key, tls_client_ca),
        limits=ServiceLimits(max_streams=max_streams, max_prompt_bytes=max_prompt_bytes),
        step_target_s=step_target,
        max_queue=max_queue,
        prefix_cache=not no_prefix_cache,
        num_threads=threads,
        kv_bytes=kv_bytes,
        dummy_weights=dummy_weights,
        drain_timeout_s=drain_timeout,
    )
    asyncio.run(_serve(config))


async def _serve(config: ServerConfig) -> None:
    await Server(config, opener=open_handle).run()


def _tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise RequestError(
            "is missing",
            field="--tls-cert" if cert is None else "--tls-key",
            remedy="TLS needs --tls-cert and --tls-key",
        )
    return ServerTls(cert, key, client_ca)


def _log_to_stderr(level: str) -> None:
    """One line an event, in UTC: `2026-01-31T12:00:00Z INFO trtc.server phase=open ...`."""
    formatter = logging.Formatter(
        "%(asctime)sZ %(levelname)s %(name)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])
