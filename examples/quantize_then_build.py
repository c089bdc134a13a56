"""Two stages: a quantised checkpoint in the unified Hugging Face layout, then an engine of it."""

import tempfile
from pathlib import Path

from examples.support import PROMPT, chosen_model, trtc


def main() -> None:
    model = chosen_model()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, engine = Path(folder) / f"{model.name}-int4", Path(folder) / "engine"
        trtc("quantize", "--model", model, "--dtype", "int4", "--output", checkpoint)
        trtc("build", "--model", checkpoint, "--reference", model, "--output", engine)
        trtc("generate", engine, "--prompt", PROMPT, "--max-tokens", "32", "--temperature", "0")


if __name__ == "__main__":
    main()
