"""Which file of a Hugging Face checkpoint has which tensor."""

import json
from pathlib import Path

from safetensors import safe_open

INDEX = "model.safetensors.index.json"


def tensor_files(model_dir: Path) -> dict[str, Path]:
    """Each tensor's file."""
    index = model_dir / INDEX
    if index.is_file():
        named = json.loads(index.read_text("utf-8"))["weight_map"]
        return {name: model_dir / file for name, file in named.items()}
    found: dict[str, Path] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= dict.fromkeys(file.keys(), path)
    return found
