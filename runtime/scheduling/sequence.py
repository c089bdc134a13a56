"""One sequence on its way through the scheduler.

token_ids   [ prompt ............ | output ....... ] pending
computed    [ in the KV pool ....... )  next chunk
pages       [ 8 | 2 | 9 | 4 ]             of each group of the cache layout

"Computed" counts what the steps in flight compute. "Pending" are the tokens that they draw, known
to the executor and not yet to the host.
"""

import enum
from collections.abc import Iterator
from collections.abc import Sequence as Items

from trtc.runtime.requests.request import FinishReason, GenerationRequest
from trtc.runtime.scheduling.prefix_cache import Node

Rank = tuple[float, int, int]


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens, pages and place of one sequence; only the scheduler's state changes it."""

    __slots__ = (
        "cached_prompt_tokens",
        "drafted_at",
        "drafts",
        "index",
        "is_held",
        "lanes",
        "max_tokens",
        "namespace",
        "node",
        "num_cached_pages",
        "num_computed",
        "num_drafted",
        "num_missed_drafts",
        "num_pending",
        "num_prompt",
        "num_released",
        "num_samples",
        "number",
        "order",
        "pages",
        "position_offset",
        "rank",
        "reads_output",
        "request",
        "scores_prompt",
        "state_pages",
        "status",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: GenerationRequest,
        *,
        number: int,
        order: Rank,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.request = request
        self.number = number
        """Of its request, unique in the loop; forks share it."""
        self.namespace = request.namespace
        self.index = 0
        self.order = order
        """Among the waiting sequences of its client, smaller first; see `rank_of`."""
        self.rank: Rank = order
        """Among running sequences, smaller first; set when it is admitted first, then constant."""
        self.token_ids = list(request.prompt_ids)
        self.num_prompt = len(request.prompt_ids)
        self.max_tokens = self.num_prompt + request.max_tokens
        """Length at which the sequence ends, prompt included."""
        eos = frozenset() if request.ignore_eos else eos_token_ids
        self.stop_ids = eos.union(request.stop_token_ids)
        self.reads_output = request.sampling.has_penalty or request.masks is not None
        """Whether its draws depend on its own output: penalties, masks."""
        self.scores_prompt = request.prompt_logprobs is not None
        """Whether each token of the prompt needs logits, until the last one is computed."""
        self.num_samples = request.n
        """Tokens to draw when all known ones are computed: n until the sequence has forked."""
        self.num_computed = 0
        self.num_pending = 0
        self.drafts: Items[int] = ()
        """Tokens that may follow its last one, for the next step to verify."""
        self.num_drafted = 0
        """Drafts that the step in flight checks: pending like the token that it draws anyway."""
        self.state_pages: Items[int] = ()
        """Where rows of the step in flight leave their states, in models with states: those that
        check drafts, or the last one if its draw may be taken back."""
        self.drafted_at = 0
        """Length of its output when drafts were checked last."""
        self.num_missed_drafts = 0
        """Steps, up to the last with drafts, of which no draft was right."""
        self.is_held = False
        """Whether it skips steps until its mask is ready."""
        self.pages: list[list[int]] = []
        """Of each group, as the page table has them; []: not running."""
        self.num_released: list[int] = []
        """Of each group, how many of the first pages it no longer holds: no later token looks back
        there."""
        self.position_offset = 0
        """Added to its positions while it runs: see Limits.position_offset."""
        self.node: Node | None = None
        """Prefix-tree node of the last cached page; None: not running."""
        self.num_cached_pages = 0
        self.lanes: list[int] = []
        """The first is its own; the others are kept for its forks."""
        self.status = Status.WAITING
        self.cached_prompt_tokens: int | None = None
        """Prompt tokens found in the prefix cache at the first admission; None: not yet."""

    @property
    def lane(self) -> int:
        """Row of the loop's tables."""
        return self.lanes[0]

    @property
    def num_remaining(self) -> int:
        """Tokens that the next step could compute; 0: the last one is pending, and ends it."""
        length = len(self.token_ids) + self.num_pending
        return length - self.num_computed if length < self.max_tokens else 0

    @property
    def most_drafts(self) -> int:
        """Drafts that could count now, behind a token that may be pending. What depends on tokens
        that are not certain is not drafted, nor before the first token."""
        length = len(self.token_ids) + self.num_pending
        if (
            self.num_drafted
            or self.is_held
            or self.reads_output
            or len(self.token_ids) == self.num_prompt
            or length - self.num_computed != 1
        ):
            return 0
        return self.max_tokens - length - 1

    def held_pages(self) -> Iterator[list[int]]:
        """Of each group, the pages that it holds, and those of `state_pages`."""
        for pages, first in zip(self.pages, self.num_released, strict=True):
            yield pages[first:] if first else pages
        if self.state_pages:
            yield list(self.state_pages)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def fork(self, index: int, lane: int) -> "Sequence":
        """Another sequence of the same request that continues from the same tokens and pages."""
        child = Sequence.__new__(Sequence)
        for name in self.__slots__:
            setattr(child, name, getattr(self, name))
        child.index = index
        child.order = (self.order[0], self.order[1], index)
        child.rank = (self.rank[0], self.rank[1], index)
        child.token_ids = list(self.token_ids)
        child.pages = [list(pages) for pages in self.pages]
        child.num_released = list(self.num_released)
        child.lanes = [lane]
        child.num_samples = 1
        return child

    def finish_reason(self) -> FinishReason | None:
        """Why the last token ends the sequence, or None."""
        if self.token_ids[-1] in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.token_ids) >= self.max_tokens else None


def rank_of(priority: int, arrival: float, number: int, ageing_s: float) -> Rank:
    """Priority with ageing as one order that never changes.

    All requests age alike: after `ageing_s` seconds a request weighs as much as one with a
    priority higher by one that comes then. So a step of priority is worth an earlier arrival, and
    whoever waits is overtaken only by requests that come within a bounded time: no starvation.
    """
    return (arrival - priority * ageing_s, number, 0)
