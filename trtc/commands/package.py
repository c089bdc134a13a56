"""`trtc package`: an engine becomes a model of another server."""

import json
import re
from pathlib import Path

import click

from trtc.commands.phases import phases
from trtc.protos.errors import OutputError, RequestError
from trtc.protos.outputs import OutputKind, new_directory
from trtc.runtime.frontends.triton.config import CONFIG_FILE, config_text
from trtc.runtime.frontends.triton.engines import EngineSet, read_engines
from trtc.runtime.frontends.triton.repository import (
    fill_version,
    packaged_engines,
    why_foreign_version,
)
from trtc.runtime.integrity.verify import verify_files

_MODEL = OutputKind(
    "a model that trtc packaged", lambda model: f"it has no {CONFIG_FILE}", "--name"
)
"""Only versions of a model are ever replaced."""
_VERSION = OutputKind("a version that trtc packaged", why_foreign_version, "--version")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@click.command()
@click.argument(
    "engines", nargs=-1, required=True, metavar="ENGINE...", type=click.Path(path_type=Path)
)
@click.argument("output", metavar="OUT", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["triton"]),
    default="triton",
    show_default=True,
    help="Whose model: NVIDIA's Triton Inference Server.",
)
@click.option("--name", help="What the server calls the model. Default: the checkpoint's name.")
@click.option(
    "--version",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Version of the model; others that are there stay.",
)
@click.option("--force", is_flag=True, help="Replace the version if it is there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(
    engines: tuple[Path, ...],
    output: Path,
    format_: str,
    name: str | None,
    version: int,
    force: bool,
    as_json: bool,
) -> None:
    """Put ENGINE into OUT, a model repository of Triton.

    Several engines of one model, each for another GPU type, become one model that takes the one
    for the GPU it finds. Existing clients of TensorRT-LLM's Triton backend need no change; see
    docs/triton.md.
    """
    with phases() as progress:
        progress("reading manifests")
        found = read_engines(engines)
        name = _model_name(name, found)
        _check_fits(output / name, name, found)
        for engine in found.engines:
            progress(f"hashing {engine.path}")
            verify_files(engine.path, engine.manifest)
        progress(f"writing {output / name}")
        _write(output, name, version, found, force=force)
    if as_json:
        click.echo(json.dumps({"repository": str(output), "model": name, "version": version}))
    else:
        where = output / name / str(version)
        click.echo(f"wrote {where}; serve it with tritonserver --model-repository {output}")


def _model_name(name: str | None, engines: EngineSet) -> str:
    wanted = engines.engines[0].manifest.model.name if name is None else name
    if not _NAME.fullmatch(wanted):
        raise RequestError(
            f"cannot be {wanted!r}",
            field="--name",
            remedy="Give letters, digits, _, . and -, not beginning with . or -",
        )
    return wanted


def _check_fits(model: Path, name: str, engines: EngineSet) -> None:
    """Versions share config.pbtxt, which an operator may have edited: it has to suit both."""
    if not (model / CONFIG_FILE).is_file():
        return
    before = packaged_engines(model)
    if before is None:
        problem = "is a model of which trtc packaged no version"
    elif config_text(name, before) != config_text(name, engines):
        problem = "has versions that need another config.pbtxt (max_batch_size, kinds of GPU)"
    else:
        return
    raise OutputError(
        problem, field=str(model), remedy="Choose another --name, or remove the model first"
    )


def _write(output: Path, name: str, version: int, engines: EngineSet, *, force: bool) -> None:
    """The version appears whole or not at all, and with it its model if that is new.

    It is written beside the repository, never within: Triton takes every directory for a model.
    """
    output = output.resolve()
    if output.is_mount():
        raise OutputError(
            "is a mount point, beside which nothing can be written",
            field=str(output),
            remedy="Give a directory inside it",
        )
    model = output / name
    if (model / CONFIG_FILE).is_file():
        with new_directory(model / str(version), _VERSION, force=force, beside=output) as made:
            fill_version(made, engines)
    else:
        with new_directory(model, _MODEL, force=force, beside=output) as made:
            (made / CONFIG_FILE).write_text(config_text(name, engines))
            (made / str(version)).mkdir()
            fill_version(made / str(version), engines)
