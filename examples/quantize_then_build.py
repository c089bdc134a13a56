"""Two stages: a quantised checkpoint in the unified Hugging Face layout, then an engine of it."""

import tempfile
from pathlib import Path

from examples.support import MODEL, PROMPT, trtc


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoint, engine = Path(folder) / "pyllama-int4", Path(folder) / "engine"
        trtc("quantize", "--model", MODEL, "--dtype", "int4", "--output", checkpoint)
        trtc("build", "--model", checkpoint, "--reference", MODEL, "--output", engine)
        trtc("generate", engine, "--prompt", PROMPT, "--max-tokens", "32", "--temperature", "0")


if __name__ == "__main__":
    main()
