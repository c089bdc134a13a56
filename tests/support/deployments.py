"""The files of examples/deploy, and the servers that they start."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import yaml

from trtc.cli import cli

DEPLOY = Path(__file__).parents[2] / "examples" / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
KSERVE = DEPLOY / "kserve"


def documents(*paths: Path) -> list[dict[str, Any]]:
    return [one for path in paths for one in yaml.safe_load_all(path.read_text())]


def merged(base: Any, patch: Any) -> Any:
    """As Kubernetes merges a patch: lists of named things by their names."""
    if isinstance(base, dict) and isinstance(patch, dict):
        return {
            **base,
            **{key: merged(base[key], one) if key in base else one for key, one in patch.items()},
        }
    if isinstance(base, list) and isinstance(patch, list) and base and "name" in base[0]:
        named = {one["name"]: one for one in base}
        for one in patch:
            named[one["name"]] = merged(named.get(one["name"], {}), one)
        return list(named.values())
    return patch


@dataclass(frozen=True)
class Started:
    """A server that a file starts, and how it is ended."""

    file: str
    arguments: tuple[str, ...]
    """Of `trtc`."""
    pod: Mapping[str, Any] | None = None
    """Its pod's specification; None: it is started otherwise."""
    grace_s: float | None = None
    """From SIGTERM, or what comes before it, to SIGKILL; None: it is not for this file to say."""

    @property
    def options(self) -> dict[str, Any]:
        """Of `trtc serve`, as the command line reads them; fails where it refuses them."""
        name, *rest = self.arguments
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        with command.make_context(name, list(rest)) as context:
            return dict(context.params)

    @property
    def container(self) -> Mapping[str, Any]:
        assert self.pod is not None
        (container,) = self.pod["containers"]
        assert isinstance(container, dict)
        return container


def _deployment(file: str, document: Mapping[str, Any]) -> Started:
    pod = document["spec"]["template"]["spec"]
    arguments = tuple(pod["containers"][0]["args"])
    return Started(file, arguments, pod, pod["terminationGracePeriodSeconds"])


def _runtime(path: Path) -> Started:
    (document,) = documents(path)
    (service,) = documents(KSERVE / "inference-service.yaml")
    pod = {key: document["spec"][key] for key in ("containers", "volumes")}
    grace = service["spec"]["predictor"]["terminationGracePeriodSeconds"]
    return Started(path.name, tuple(pod["containers"][0]["args"]), pod, grace)


def _unit() -> Started:
    text = (DEPLOY / "systemd" / "trtc.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    (grace,) = re.findall(r"^TimeoutStopSec=(.*)$", text, re.MULTILINE)
    return Started("trtc.service", tuple(command.split()[1:]), grace_s=float(grace))


def instructions() -> list[tuple[str, str]]:
    """Of the Containerfile: name and rest, without comments."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2].strip()) for line in lines]


def _container() -> Started:
    found = dict(instructions())
    arguments = [*json.loads(found["ENTRYPOINT"])[1:], *json.loads(found["CMD"])]
    return Started("Containerfile", tuple(arguments))


def started() -> Iterator[Started]:
    """Every server that examples/deploy starts."""
    (base,) = documents(KUBERNETES / "base" / "deployment.yaml")
    (patch,) = documents(KUBERNETES / "cuda" / "gpu.yaml")
    yield _deployment("base", base)
    yield _deployment("cuda", merged(base, patch))
    yield _runtime(KSERVE / "serving-runtime.yaml")
    yield _runtime(KSERVE / "serving-runtime-grpc.yaml")
    yield _unit()
    yield _container()


STARTED = tuple(started())
PODS = tuple(one for one in STARTED if one.pod is not None)
