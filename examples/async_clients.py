"""Sixteen concurrent streams over one connection; each with its own seed."""

import asyncio
import tempfile
from pathlib import Path

from examples.support import PROMPT, chosen_model, serving
from trtc import AsyncClient, build


async def complete(client: AsyncClient, seed: int) -> str:
    generation = client.generate(PROMPT, max_tokens=24, temperature=0.8, seed=seed)
    text = ""
    async for piece in generation:
        text += piece.text
    return text


async def ask(address: str) -> None:
    async with AsyncClient(address) as client:
        texts = await asyncio.gather(*(complete(client, seed) for seed in range(16)))
        again = await complete(client, 0)
    for seed, text in enumerate(texts):
        print(f"{seed:2} {text!r}")
    assert again == texts[0], "one seed, one text, whatever else was in the batch"


def main() -> None:
    model = chosen_model()
    with tempfile.TemporaryDirectory() as folder:
        engine = Path(folder) / "engine"
        build(model=str(model), dtype="bf16", target="cpu", output=engine)
        with serving(engine) as address:
            asyncio.run(ask(address))


if __name__ == "__main__":
    main()
