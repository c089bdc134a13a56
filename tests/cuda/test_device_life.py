"""runtime/executors/cuda/gpu_device.py through the real cuda-bindings, over a driver of host
memory."""

from typing import Any

import pytest

from tests.support.driver_stub import run_over_driver


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_over_driver(tmp_path_factory.mktemp("libcuda"), "tests.cuda.device_life")


def test_memory_is_filled_in_pieces_or_with_zeros(life: dict[str, Any]) -> None:
    assert life["uploaded"] == [0.0, 1.0, 2.0]
    assert life["allocated"] == [0.0, 0.0, 0.0]
    assert life["staged"], "five pieces through four stages"
    assert life["copied"] == [-6.0, 1.0, 2.0]


def test_kernels_get_addresses_and_may_overlap(life: dict[str, Any]) -> None:
    """y += -3 x, over a grid of 2 x 1 x 2 blocks of 16 threads."""
    assert life["once"] == [0.0, -3.0, -6.0]
    assert life["overlapping"] == 1


def test_graphs_run_from_any_thread_and_are_dropped(life: dict[str, Any]) -> None:
    assert life["captured"] == life["once"]
    assert life["from_another_thread"] == [[0.0, -6.0, -12.0]]
    assert life["dropped"] == 1


def test_downloads_keep_their_bytes_when_later_ones_land(life: dict[str, Any]) -> None:
    assert life["kept"] == 1


def test_a_copy_on_the_stream_of_copies_is_found_by_what_comes_after(life: dict[str, Any]) -> None:
    assert life["sent_early"] == [3.0039215087890625] * 3  # 0x40404040


def test_bytes_are_scattered_and_gathered_over_many_stages(life: dict[str, Any]) -> None:
    """The last copy of a place counts, and nothing beside the places changes."""
    assert life["gathered"]
    assert life["beside"]


def test_what_products_want_is_made_during_a_capture(life: dict[str, Any]) -> None:
    """A scale once a row, and a bias rounded to bf16: ties to even."""
    assert life["scales"] == [0.25] * 4
    assert life["bias"] == [0x3F80, 0x3F80, 0x3F82, 0xC02D]
    assert life["made_once"]
    assert life["products"] == 2


def test_tensor_maps_lie_one_after_another(life: dict[str, Any]) -> None:
    assert life["map"] == [2, 16, 64, 3, 128, 64, 2]


def test_too_little_memory_is_told(life: dict[str, Any]) -> None:
    assert life["out_of_memory"].startswith("--kv-bytes: 1.07 GB do not fit the 0.0")


def test_a_membership_ends_when_no_graph_refers_to_it(life: dict[str, Any]) -> None:
    """NCCL waits for graphs that captured its work, and would for good."""
    assert life["graphs_of_a_rank_that_ends"] == [1, 0]


def test_nothing_is_left_after_close(life: dict[str, Any]) -> None:
    assert life["alive"] > 0
    assert life["alive_after_close"] == 0
