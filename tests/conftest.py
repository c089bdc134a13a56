"""Settings that hold for every test."""

import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.late_iris import make_iri_syntax_late

_YOUNG_OBJECTS = 50_000

# A test machine has few cores, and the suite runs in two processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Importing what the tests import makes millions of objects, all of which stay.
gc.disable()
make_iri_syntax_late()

settings.register_profile(
    "trtc",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("trtc")


def pytest_configure(config: pytest.Config) -> None:
    """Engines of the same code are compiled once a run: workers share $CXX and its cache."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None or "TRTC_TESTS_CXX" in os.environ:
        return  # a worker, or a machine without a compiler, which the tests that need one say
    cache = tempfile.TemporaryDirectory(prefix="trtc-tests-cxx-")
    config.add_cleanup(cache.cleanup)
    os.environ["TRTC_TESTS_CXX"] = compiler
    os.environ["TRTC_TESTS_CXX_CACHE"] = cache.name
    os.environ["CXX"] = str(Path(__file__).parent / "support" / "caching_cxx")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests go first, so that workers end together: each takes whole files.

    A GPU test without a GPU is skipped with its reason, never passed.
    """
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
    for item in items:
        if item.get_closest_marker("gpu") and not os.path.exists("/dev/nvidiactl"):  # noqa: PTH110 (a device node)
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU on this machine"))


def pytest_collection_finish() -> None:
    """Collections of garbage begin, seldom: each would visit objects of every library."""
    gc.set_threshold(_YOUNG_OBJECTS, 20, 20)
    gc.enable()


@pytest.fixture(autouse=True)
def no_objects_stay_frozen() -> Iterator[None]:
    """Commands of trtc's own programs freeze what there is for good, and here run in a process that
    goes on: other tests count frozen objects, or what a collection finds."""
    yield
    gc.unfreeze()
