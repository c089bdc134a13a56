"""What contestants are given to do: the same token counts, drawn from the same seeds."""

import random
from dataclasses import dataclass

FIRST_ORDINARY_ID = 4
"""Ids below are special tokens of the bundled tokenizer."""


@dataclass(frozen=True)
class Work:
    """Token counts of all workloads, and the vocabulary that prompts are drawn from."""

    vocab: int
    prompt_len: int = 512
    """Of decodes, prefills and streams."""
    decode_len: int = 64
    """New tokens while decode is timed."""
    streams: int = 16
    stream_len: int = 128
    """New tokens of a stream."""
    turns: int = 8
    system_len: int = 1000
    """The prompt that all turns of a chat share."""
    turn_len: int = 32
    """What a user adds each turn."""
    reply_len: int = 64
    start_len: int = 16
    """The prompt of a cold start: what is timed there is the start."""

    def prompts(self, count: int, length: int, seed: int) -> list[list[int]]:
        rng = random.Random(f"{seed} {count} {length}")
        ids = range(FIRST_ORDINARY_ID, self.vocab)
        return [rng.choices(ids, k=length) for _ in range(count)]

    def warmup(self) -> list[int]:
        """A prompt that no measured one begins like."""
        return self.prompts(1, self.prompt_len, -1)[0]

    def chat(self, seed: int) -> list[list[int]]:
        """What is added before each reply; the first turn brings the system prompt."""
        turns = self.prompts(self.turns, self.turn_len, seed)
        (system,) = self.prompts(1, self.system_len, seed)
        return [system + turns[0], *turns[1:]]

    @property
    def chat_len(self) -> int:
        """Tokens of the whole conversation."""
        return self.system_len + self.turns * (self.turn_len + self.reply_len)
