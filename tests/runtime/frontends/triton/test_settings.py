"""Parameters of config.pbtxt, as an operator may leave, edit and mistype them."""

import pytest

from trtc.protos.errors import RequestError
from trtc.runtime.frontends.triton.settings import Settings, read_settings


def test_what_is_written_is_read_back() -> None:
    settings = Settings(
        exclude_input_in_output=False,
        enable_kv_cache_reuse=False,
        cancellation_check_period_ms=7,
        max_queue=9,
        num_threads=3,
        kv_bytes=1 << 40,
        kv_cache_host_memory_bytes=1 << 41,
    )
    assert read_settings(settings.as_parameters()) == settings
    assert read_settings(Settings().as_parameters()) == Settings()


def test_nothing_said_is_the_default() -> None:
    assert read_settings({}) == read_settings({"kv_bytes": "", "max_queue": " "}) == Settings()


def test_triton_has_parameters_of_its_own() -> None:
    assert read_settings({"FORCE_CPU_ONLY_INPUT_TENSORS": "yes"}) == Settings()


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("kv_byte", "1", "is unknown. Known are .*kv_bytes"),
        ("kv_bytes", "1e9", "is '1e9'. Give a number"),
        ("num_threads", "0", "is '0'. Give a number from 1"),
        ("max_queue", "-1", "Give a number"),
        ("enable_kv_cache_reuse", "yes", "Give true or false"),
        ("exclude_input_in_output", "2", "Give true or false"),
    ],
)
def test_a_wrong_parameter_is_named(name: str, value: str, remedy: str) -> None:
    with pytest.raises(RequestError, match=rf"config\.pbtxt: parameters\.{name}: .*{remedy}"):
        read_settings({name: value})
