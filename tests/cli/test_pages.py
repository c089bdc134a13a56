"""Reference pages say what the commands and the server say of themselves."""

import re
from pathlib import Path

import pytest

from tests.support import cli_page
from trtc.runtime.service.exposition import Exposition
from trtc.runtime.service.metrics import LOOP_READINGS, ServerMetrics

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_the_command_line_is_current() -> None:
    assert cli_page.PAGE.read_text() == cli_page.page(), "run python -m tests.support.cli_page"


def test_the_page_of_metrics_lists_every_metric_and_no_other() -> None:
    """By the names that Prometheus reads: counters end in _total."""
    metrics = ServerMetrics()
    metrics.watch_loops(dict)
    families = {
        family.name + ("_total" if family.type == "counter" else ""): family.documentation
        for family in Exposition(metrics).registry.collect()
    }
    families |= {
        f"trtc_{row.name}" + ("_total" if row.is_counter else ""): row.help for row in LOOP_READINGS
    }
    rows = re.findall(r"^\| `(trtc_\w+)` \| (\w+) \| (.+?) \|", page("metrics.md"), re.MULTILINE)
    assert {name: text for name, _, text in rows} == families


@pytest.mark.parametrize("name", sorted(path.name for path in DOCS.glob("*.md")))
def test_links_between_pages_lead_somewhere(name: str) -> None:
    for target in re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", page(name)):
        assert (DOCS / target).is_file(), target


def page(name: str) -> str:
    return (DOCS / name).read_text()
