"""Dashboards, alerts and scalers ask for what a server really measures, by labels that it has."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import promql_parser as promql
import pytest

from tests.support.deployments import DEPLOY, KUBERNETES, documents
from trtc.runtime.engine.loop import LoopStats
from trtc.runtime.service.exposition import Exposition
from trtc.runtime.service.metrics import ServerMetrics

RULES = DEPLOY / "prometheus" / "trtc.rules.yaml"
DASHBOARD = json.loads((DEPLOY / "grafana" / "trtc.json").read_text())
GIVEN_BY_PROMETHEUS = {"instance", "job", "le"}
_SUFFIXES = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "gauge": ("",)}


def series() -> dict[str, set[str]]:
    """Name of every series of a server -> its labels."""
    metrics = ServerMetrics()
    metrics.watch_loops(lambda: {"m": LoopStats()})
    found: dict[str, set[str]] = {}
    labels = {one.name: set(one.label_names) for one in metrics.families}
    for family in Exposition(metrics).registry.collect():
        for suffix in _SUFFIXES[family.type]:
            found[family.name + suffix] = labels.get(family.name, {"model_name"})
    return found


SERIES = series()


def expressions() -> Iterator[tuple[str, str]]:
    """Where each is, and what it says."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield f"panel {panel['title']} {target['refId']}", target["expr"]
    (rules,) = documents(RULES)
    for group in rules["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    (scaled,) = documents(KUBERNETES / "autoscaling.yaml")
    for trigger in scaled["spec"]["triggers"]:
        yield f"trigger {trigger['name']}", trigger["metadata"]["query"]


EXPRESSIONS = dict(expressions())


def selectors(node: Any) -> Iterator[Any]:
    """Every selector within an expression."""
    if isinstance(node, promql.VectorSelector):
        yield node
    for name in ("expr", "lhs", "rhs", "param", "vector_selector", "vs"):
        if (inner := getattr(node, name, None)) is not None:
            yield from selectors(inner)
    for inner in getattr(node, "args", ()):
        yield from selectors(inner)


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_expressions_ask_for_series_that_there_are(where: str) -> None:
    text = EXPRESSIONS[where].replace("$__rate_interval", "1m")
    found = list(selectors(promql.parse(text)))
    names = len(re.findall(r"\btrtc_", text)) - text.count("trtc_version")
    assert len(found) == names, "a selector was overlooked"
    for one in found:
        assert one.name in SERIES
        wanted = {matcher.name for matcher in one.matchers.matchers}
        assert wanted <= SERIES[one.name] | GIVEN_BY_PROMETHEUS


def test_a_dashboard_asks_for_the_variables_that_it_has() -> None:
    names = {one["name"] for one in DASHBOARD["templating"]["list"]}
    assert names == {"datasource", "model", "instance"}
    for one in DASHBOARD["templating"]["list"][1:]:
        assert "label_values(trtc_engine_ready" in one["definition"]
    assert "trtc_engine_ready" in SERIES


def test_panels_are_numbered_and_lie_side_by_side() -> None:
    panels = DASHBOARD["panels"]
    assert len({one["id"] for one in panels}) == len(panels)
    places = [
        {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        for at in (one["gridPos"] for one in panels)
    ]
    assert sum(map(len, places)) == len(set().union(*places))
    assert all(x < 24 for place in places for x, _ in place)


def test_alerts_say_what_is_wrong_and_how_bad() -> None:
    (rules,) = documents(RULES)
    for rule in rules["groups"][0]["rules"]:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_the_rules_right_and_fires_them() -> None:
    subprocess.run(["promtool", "check", "rules", RULES], check=True)
    subprocess.run(
        ["promtool", "test", "rules", "trtc.rules.test.yaml"], cwd=RULES.parent, check=True
    )
