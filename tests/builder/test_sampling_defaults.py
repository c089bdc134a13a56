"""generation_config.json becomes the manifest's sampling defaults."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.manifests import tiny_manifest
from trtc.builder.checkpoint.checkpoint import open_checkpoint
from trtc.builder.checkpoint.sampling_defaults import sampling_defaults
from trtc.protos.errors import CheckpointError
from trtc.protos.manifest import Manifest
from trtc.protos.sampling import NO_DEFAULTS, SamplingDefaults


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, NO_DEFAULTS),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": None},
            SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95),
        ),
        (
            {"repetition_penalty": 1, "max_new_tokens": 512, "top_k": -1, "min_p": 0},
            SamplingDefaults(repetition_penalty=1.0, max_tokens=512, top_k=0, min_p=0.0),
        ),
        (
            {"do_sample": False, "temperature": 0.9, "top_p": 0.6},
            SamplingDefaults(temperature=0.0, top_p=0.6),
        ),
    ],
)
def test_what_the_file_says_is_read(config: dict[str, Any], expected: SamplingDefaults) -> None:
    assert sampling_defaults(config, "generation_config.json") == expected


@pytest.mark.parametrize(
    "config",
    [
        {"temperature": -1},
        {"temperature": "warm"},
        {"top_p": 1.5},
        {"top_p": 0},
        {"top_k": 2.5},
        {"top_k": -2},
        {"repetition_penalty": 0},
        {"max_new_tokens": True},
        {"max_new_tokens": 2**40},
    ],
)
def test_a_value_out_of_range_is_named(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"^generation_config\.json: .*out of range"):
        sampling_defaults(config, "generation_config.json")


def test_a_checkpoint_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert open_checkpoint(str(tmp_path)).sampling_defaults == NO_DEFAULTS
    (tmp_path / "generation_config.json").write_text(json.dumps({"top_k": 7}))
    assert open_checkpoint(str(tmp_path)).sampling_defaults == SamplingDefaults(top_k=7)


def test_a_manifest_keeps_them_and_refuses_forged_ones() -> None:
    manifest = tiny_manifest()
    defaults = SamplingDefaults(temperature=0.6, max_tokens=9)
    model = msgspec.structs.replace(manifest.model, sampling_defaults=defaults)
    text = msgspec.structs.replace(manifest, model=model).to_json()
    assert msgspec.json.decode(text, type=Manifest).model.sampling_defaults == defaults
    forged = text.replace(b'"temperature": 0.6', b'"temperature": -3')
    assert forged != text
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        msgspec.json.decode(forged, type=Manifest)
