"""Build an engine and stream from it, in one Python process."""

import tempfile
from pathlib import Path

from examples.support import PROMPT, chosen_model
from trtc import build, open_engine


def main() -> None:
    model = chosen_model()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "engine"
        result = build(model=str(model), dtype="fp8", target="cpu", output=output)
        accuracy = result.manifest.accuracy
        if accuracy is not None:
            print(f"KL to the unquantised model {accuracy.kl:.4f}, top-1 {accuracy.top1:.1%}")
        with open_engine(output) as engine:
            for step in engine.generate(PROMPT, max_tokens=48, temperature=0.0):
                print(step.text, end="", flush=True)
            print()


if __name__ == "__main__":
    main()
