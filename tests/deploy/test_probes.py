"""A server answers what the manifests ask it."""

from dataclasses import replace
from pathlib import Path

import aiohttp
import msgspec

from tests.support.aio import asynchronous
from tests.support.deployments import KUBERNETES, PODS, documents
from tests.support.servers import CONFIG, echo_server
from trtc.runtime.requests.principal import Scope
from trtc.runtime.service.access import AccessConfig
from trtc.runtime.service.api_keys import ApiKey, KeyFile, Tenant, hash_of


@asynchronous
async def test_probes_need_no_key_and_scrapes_need_one_of_their_own(tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    scraper = Tenant(keys=(ApiKey("key", hash_of("secret")),), scopes=(Scope.METRICS,))
    keys.write_bytes(msgspec.json.encode(KeyFile(tenants={"prometheus": scraper})))
    paths = {
        one.container[probe]["httpGet"]["path"]
        for one in PODS
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
        if probe in one.container
    }
    assert paths == {"/healthz", "/readyz"}
    (monitor,) = documents(KUBERNETES / "pod-monitor.yaml")
    (scrape,) = monitor["spec"]["podMetricsEndpoints"]
    config = replace(CONFIG, access=AccessConfig(keys))
    async with echo_server(config=config) as server, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.http_port}"
        for path in paths:
            async with session.get(url + path) as answer:
                assert answer.status == 200
        bearer = {"Authorization": f"{scrape['authorization']['type']} secret"}
        for headers, status in (({}, 401), (bearer, 200)):
            async with session.get(url + scrape["path"], headers=headers) as answer:
                assert answer.status == status
        server.server.service.drain()
        ready = PODS[0].container["readinessProbe"]["httpGet"]["path"]
        async with session.get(url + ready) as answer:
            assert answer.status == 503, "it drains"
