"""The tables of tensors, and the page that explains them."""

import re
from pathlib import Path

from trtc.runtime.frontends.triton.settings import Settings
from trtc.runtime.tensors.table import INPUTS, OUTPUTS

PAGE = (Path(__file__).parents[3] / "docs" / "triton.md").read_text()


def test_the_page_explains_every_tensor_and_parameter() -> None:
    explained = set(re.findall(r"`([a-z_]+)`", PAGE))
    names = {tensor.name for tensor in (*INPUTS, *OUTPUTS)} | set(Settings().as_parameters())
    assert names <= explained


def test_names_stand_once() -> None:
    for tensors in (INPUTS, OUTPUTS):
        assert len({tensor.name for tensor in tensors}) == len(tensors)
