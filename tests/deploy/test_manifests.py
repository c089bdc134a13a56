"""What Kubernetes, systemd and container engines are given is valid, safe, and what trtc takes."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.support.deployments import (
    DEPLOY,
    KSERVE,
    KUBERNETES,
    PODS,
    STARTED,
    Started,
    documents,
    instructions,
    merged,
)
from trtc.runtime.service.audit import CLOSE_S
from trtc.runtime.service.engine_lifecycle import FAREWELL_S

VERSION = kubernetes_validate.latest_version()
BASE = documents(*sorted((KUBERNETES / "base").glob("*.yaml")))
RESOURCES = {f"{one['kind']} {one['metadata']['name']}": one for one in BASE if "metadata" in one}


def named(one: Started) -> str:
    return one.file


@pytest.mark.parametrize("name", RESOURCES)
def test_resources_have_kubernetes_own_schema(name: str) -> None:
    kubernetes_validate.validate(RESOURCES[name], VERSION, strict=True)


@pytest.mark.parametrize("started", PODS, ids=named)
def test_pods_have_kubernetes_own_schema(started: Started) -> None:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": started.pod}
    kubernetes_validate.validate(pod, VERSION, strict=True)


def test_a_misspelt_field_is_not_valid() -> None:
    misspelt = merged(RESOURCES["Deployment trtc"], {"spec": {"replica": 1}})
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(misspelt, VERSION, strict=True)


def test_kustomizations_name_their_files() -> None:
    for path in KUBERNETES.glob("*/kustomization.yaml"):
        (found,) = documents(path)
        for name in (*found["resources"], *(one["path"] for one in found.get("patches", ()))):
            assert (path.parent / name).exists()
    listed = set(documents(KUBERNETES / "base" / "kustomization.yaml")[0]["resources"])
    assert listed | {"kustomization.yaml"} == {one.name for one in (KUBERNETES / "base").iterdir()}


def _name(one: Mapping[str, Any]) -> str:
    return str(one["name"])


def _of(pod: Mapping[str, Any]) -> dict[str, Any]:
    """A pod whose lists are in one order, without the image's tag."""
    (container,) = pod["containers"]
    mounts = sorted(container["volumeMounts"], key=_name)
    image = container["image"].partition(":")[0]
    return {
        **pod,
        "volumes": sorted(pod["volumes"], key=_name),
        "containers": [{**container, "image": image, "volumeMounts": mounts}],
    }


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("started", PODS[:2], ids=named)
def test_kubectl_builds_what_the_other_tests_look_at(started: Started) -> None:
    command = ["kubectl", "kustomize", str(KUBERNETES / started.file)]
    built = subprocess.run(command, capture_output=True, check=True).stdout
    (found,) = (one for one in yaml.safe_load_all(built) if one["kind"] == "Deployment")
    assert _of(found["spec"]["template"]["spec"]) == _of(started.pod or {})


@pytest.mark.parametrize("started", STARTED, ids=named)
def test_the_command_line_takes_the_arguments(started: Started) -> None:
    options = started.options
    assert len(options["engines"]) == 1
    assert options["host"] == "0.0.0.0"
    assert bool(options["api_keys"]) != options["allow_anonymous"]


@pytest.mark.parametrize("started", [one for one in STARTED if one.grace_s], ids=named)
def test_a_server_has_drained_before_it_is_killed(started: Started) -> None:
    """Its phases at their longest: runtime/server/app.py's `close`."""
    farewells = 4  # of engines, of streams that were ended, of each of two frontends
    needed = started.options["drain_timeout"] + farewells * FAREWELL_S + CLOSE_S
    if started.pod is not None:
        hook = started.container.get("lifecycle", {}).get("preStop", {})
        needed += hook.get("sleep", {}).get("seconds", 0)
    assert started.grace_s is not None and started.grace_s >= needed + 10


@pytest.mark.parametrize("started", PODS, ids=named)
def test_containers_can_do_no_more_than_serve(started: Started) -> None:
    container, pod = started.container, started.pod or {}
    of_both: dict[str, Any] = {**pod.get("securityContext", {}), **container["securityContext"]}
    assert of_both["runAsNonRoot"] is True and of_both["runAsUser"] == 10001
    assert of_both["readOnlyRootFilesystem"] is True
    assert of_both["allowPrivilegeEscalation"] is False and of_both["privileged"] is False
    assert of_both["capabilities"] == {"drop": ["ALL"]}
    assert of_both["seccompProfile"] == {"type": "RuntimeDefault"}
    mounts = {one["name"]: one for one in container["volumeMounts"]}
    for volume in pod["volumes"]:
        if "emptyDir" in volume:
            assert "sizeLimit" in volume["emptyDir"]
        else:
            assert mounts[volume["name"]]["readOnly"] is True
    for kind in ("requests", "limits"):
        assert {"cpu", "memory"} <= set(container["resources"][kind])
    assert container["resources"]["requests"] == container["resources"]["limits"]


def test_pods_have_no_token_of_the_cluster() -> None:
    (service,) = documents(KSERVE / "inference-service.yaml")
    assert service["spec"]["predictor"]["automountServiceAccountToken"] is False
    for one in PODS[:2]:
        assert one.pod and one.pod["automountServiceAccountToken"] is False


@pytest.mark.parametrize("started", PODS, ids=named)
def test_ports_are_those_that_the_server_opens(started: Started) -> None:
    container, options = started.container, started.options
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    opened = {"http": options["http_port"], "grpc": options["grpc_port"]}
    opened |= {"http1": options["http_port"], "h2c": options["grpc_port"]}
    assert all(opened[name] == port for name, port in ports.items())
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        if probe in container:
            port = container[probe]["httpGet"]["port"]
            assert ports.get(port, port) == options["http_port"]


def test_services_and_policies_choose_these_pods_and_ports() -> None:
    deployment = RESOURCES["Deployment trtc"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    ports = {one["name"]: one["containerPort"] for one in PODS[0].container["ports"]}
    assert deployment["selector"]["matchLabels"] == labels
    for name in ("Service trtc", "Service trtc-headless"):
        service = RESOURCES[name]["spec"]
        assert service["selector"] == labels
        assert all(ports[one["targetPort"]] == one["port"] for one in service["ports"])
    assert RESOURCES["PodDisruptionBudget trtc"]["spec"]["selector"]["matchLabels"] == labels
    policy = RESOURCES["NetworkPolicy trtc"]["spec"]
    assert policy["podSelector"]["matchLabels"] == labels
    assert {one["port"] for one in policy["ingress"][0]["ports"]} == set(ports)
    (pool,) = documents(KUBERNETES / "inference-pool.yaml")
    assert pool["spec"]["selector"]["matchLabels"] == labels
    assert [one["number"] for one in pool["spec"]["targetPorts"]] == [ports["http"]]
    (monitor,) = documents(KUBERNETES / "pod-monitor.yaml")
    assert monitor["spec"]["selector"]["matchLabels"] == labels
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] in ports
    (scaled,) = documents(KUBERNETES / "autoscaling.yaml")
    assert scaled["spec"]["scaleTargetRef"]["name"] == "trtc"


def test_the_container_is_built_of_what_is_there_and_runs_as_nobody() -> None:
    rows = instructions()
    for name, rest in rows:
        if name == "COPY" and not rest.startswith("--from"):
            assert all((DEPLOY.parents[1] / one).exists() for one in rest.split()[:-1]), rest
    found = dict(rows)
    assert found["USER"] == "10001:10001"
    options = STARTED[-1].options
    assert found["EXPOSE"].split() == [str(options["http_port"]), str(options["grpc_port"])]
    assert f"127.0.0.1:{options['http_port']}/healthz" in found["HEALTHCHECK"]


def test_the_containerfile_follows_hadolint() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    subprocess.run([hadolint, DEPLOY / "Containerfile"], check=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_reads_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "trtc.service").read_text()
    there = tmp_path / "trtc.service"
    there.write_text(unit.replace("/opt/trtc/bin/trtc", sys.executable))
    found = subprocess.run(
        ["systemd-analyze", "verify", there], capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stderr) == (0, "")
