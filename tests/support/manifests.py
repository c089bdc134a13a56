"""A manifest of nothing in particular."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from tests.support.caches import uniform_layout
from trtc.builder.package import seal
from trtc.protos.manifest import (
    ByteLedger,
    Limits,
    Manifest,
    ModelFacts,
    SchemeFacts,
    TargetFacts,
)


def tiny_manifest(**fields: Any) -> Manifest:
    """Unsealed and without files; `fields` replace its own."""
    manifest = Manifest(
        trtc_version="0",
        model=ModelFacts(
            name="tiny",
            family="llama",
            architecture="LlamaForCausalLM",
            vocab_size=160,
            hidden_size=64,
            num_layers=2,
            num_parameters=1000,
            max_position_embeddings=256,
            bos_token_id=1,
            eos_token_ids=(2,),
            pad_token_id=0,
        ),
        scheme=SchemeFacts(
            name="fp32",
            kv_dtype="f32",
            source="inline",
            exact_activations=False,
            calibration_sha256=None,
        ),
        target=TargetFacts(kind="cpu", name="cpu:generic", archs=("generic",), toolchain="g++"),
        kv=uniform_layout(num_layers=2, page_size=8, num_kv_heads=2, head_dim=16, dtype="f32"),
        limits=Limits(max_batch_size=4, max_seq_len=128, max_num_tokens=64),
        ledger=ByteLedger(weights=0, activations=0, page=4096),
        has_tokenizer=False,
        files={},
    )
    return msgspec.structs.replace(manifest, **fields)


def write_engine(directory: Path, files: Mapping[str, str], **fields: Any) -> Path:
    """An engine directory as far as its manifest tells: sealed, with files of any content."""
    directory.mkdir(parents=True)
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(content)
    seal(directory, tiny_manifest(**fields))
    return directory
