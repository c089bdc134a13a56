"""Recipes of the bundled models, written by hand, and a text that their formats are found on."""

import json
from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

from trtc.quant.calibration_text import CALIBRATION_TEXT

SITES = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")


def all_sites(num_layers: int) -> list[str]:
    """Of a Llama."""
    return [f"model.layers.{layer}.{site}" for layer in range(num_layers) for site in SITES]


def in_turn(num_layers: int, *formats: str) -> dict[str, str]:
    """Sites get the formats by turns."""
    return dict(zip(all_sites(num_layers), cycle(formats), strict=False))


def write_recipe(path: Path, sites: Mapping[str, str]) -> Path:
    path.write_text(json.dumps({"trtc_recipe": 1, "sites": sites}))
    return path


def short_text(directory: Path) -> Path:
    """The beginning of the text that ships with trtc: little more than the least that a calibration
    takes, whose time is that of its tokens."""
    path = directory / "short.txt"
    path.write_text(CALIBRATION_TEXT.read_text()[:14_000])
    return path
