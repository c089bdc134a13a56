"""runtime/device/cuda_driver.py through the real cuda-bindings, over a driver of host memory."""

from typing import Any

import pytest

from tests.support.driver_stub import run_over_driver


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_over_driver(tmp_path_factory.mktemp("libcuda"), "tests.tensorrt.driver_life")


def test_memory_is_aligned_counted_and_copied(life: dict[str, Any]) -> None:
    assert life["aligned"]
    assert life["taken"] == 2 * 256
    assert life["copied"] == [0.0, -9.0, 2.0], "two floats of y over those of x"


def test_the_stream_is_not_the_default_one(life: dict[str, Any]) -> None:
    assert life["stream"] > 2, "0, 1 and 2 are the default streams"


def test_kernels_get_their_addresses_and_scalars(life: dict[str, Any]) -> None:
    """y += -3 x, over a grid of 2 x 2 blocks of 16 threads."""
    assert life["once"] == [0.0, -3.0, -6.0]


def test_capturing_runs_nothing_and_replaying_all(life: dict[str, Any]) -> None:
    assert life["captured"] == life["once"]
    assert life["replayed"] == [0.0, -9.0, -18.0]
    assert life["refused"] == [None, None]


def test_events_come_when_work_is_done_and_at_once_when_awaited(life: dict[str, Any]) -> None:
    """Asked before it is set, four times while the driver says "not yet" twice, and once after."""
    assert life["come"] == [True, False, False, True, True, True]


def test_failures_are_named(life: dict[str, Any]) -> None:
    assert life["out_of_memory"].startswith("--kv-bytes: 1.07 GB do not fit the 0.07 GB of GPU")
    assert "cuModuleLoadData failed" in life["no_image"]
    assert "cuModuleGetFunction failed" in life["no_entry"]
    assert "cuDeviceGet failed" in life["no_device"]


def test_nothing_is_left_after_close(life: dict[str, Any]) -> None:
    assert life["alive"] > 0
    assert life["alive_after_close"] == 0
    assert all(told.startswith("the GPU is closed") for told in life["after_close"])


def test_the_driver_says_which_gpu_it_is(life: dict[str, Any]) -> None:
    assert life["sm"] == 89
