"""Drafters that know what sequences will draw, and say so as often as not."""

import random
from collections.abc import Sequence as Items

from tests.support.driver import solo_outputs
from trtc.runtime.executors.echo import EchoOptions
from trtc.runtime.sampling.sampler import Int32s
from trtc.runtime.scheduling.sequence import Sequence


class Guesser:
    """Drafts of random lengths, right up to a random place (implements Drafter)."""

    def __init__(self, options: EchoOptions, seed: int = 0) -> None:
        self._options = options
        self._rng = random.Random(seed)
        self._known: dict[str, list[list[int]]] = {}

    def propose(self, sequence: Sequence, history: Int32s, most: int) -> Items[int]:
        if sequence.index == 0:  # a fork's others are placed with the next step
            assert history.tolist() == sequence.token_ids
        output = self.answer(sequence)
        drafts = output[sequence.num_output : sequence.num_output + self._rng.randint(0, most)]
        right = self._rng.randint(0, 2 * len(drafts))
        return [
            token if at < right else (token + 1) % self._options.vocab_size
            for at, token in enumerate(drafts)
        ]

    def answer(self, sequence: Sequence) -> list[int]:
        """All that a sequence will draw."""
        request = sequence.request
        if request.request_id not in self._known:
            self._known[request.request_id] = solo_outputs(request, self._options)
        return self._known[request.request_id][sequence.index]


class Replaying:
    """Drafts what a loop's requests were answered before, by their numbers, right up to a random
    place (implements Drafter)."""

    def __init__(self, answers: Items[Items[int]], vocab_size: int) -> None:
        self._answers = answers
        self._vocab_size = vocab_size
        self._rng = random.Random(0)

    def propose(self, sequence: Sequence, history: Int32s, most: int) -> Items[int]:
        answer = self._answers[sequence.number]
        drafts = list(answer[sequence.num_output : sequence.num_output + most])
        right = self._rng.randint(0, len(drafts))
        wrong = [(token + 1) % self._vocab_size for token in drafts[right:]]
        return drafts[:right] + wrong
