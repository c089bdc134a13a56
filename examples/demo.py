"""The whole road: build an fp8 engine from the bundled checkpoint, serve it, stream from it."""

import tempfile
from pathlib import Path

from examples.support import PROMPT, chosen_model, serving, trtc


def main() -> None:
    model = chosen_model()
    if model.is_relative_to(Path.cwd()):
        model = model.relative_to(Path.cwd())
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "engine"
        trtc("build", "--model", model, "--dtype", "fp8", "--target", "cpu", "--output", engine)
        trtc("inspect", engine)
        with serving(engine) as address:
            port = address.rpartition(":")[2]
            trtc(
                "client",
                "--port",
                port,
                "--prompt",
                PROMPT,
                "--max-tokens",
                "64",
                "--temperature",
                "0",
            )
    print("\nThe demo is done: that text came from the engine, over gRPC.")


if __name__ == "__main__":
    main()
