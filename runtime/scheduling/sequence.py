"""One sequence on its way through the scheduler.

token_ids   [ prompt ............ | output ....... ] pending
computed    [ in the KV pool ....... )  next chunk
pages       [ 8 | 2 | 9 | 4 ]             of each group of the cache layout

"Computed" includes the tokens of steps in flight. "Pending" are the tokens that these steps draw:
the executor has them, and the host does not yet.
"""

import enum
from collections.abc import Iterator
from collections.abc import Sequence as Items

from trtc.runtime.requests.request import FinishReason, GenerationRequest
from trtc.runtime.requests.token_masks import takes_drafts
from trtc.runtime.scheduling.prefix_cache import Node

Rank = tuple[float, int, int]


class Status(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Sequence:
    """Tokens, pages and status of one sequence; only SchedulerState changes it."""

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
        "request",
        "scores_prompt",
        "state_pages",
        "status",
        "stop_ids",
        "takes_drafts",
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
        """Number of its request, unique in the loop; forks share it."""
        self.namespace = request.namespace
        self.index = 0
        self.order = order
        """Key among the waiting sequences of its client, smaller first; see `rank_of`."""
        self.rank: Rank = order
        """Key among running sequences, smaller first; set at the first admission, then constant."""
        self.token_ids = list(request.prompt_ids)
        self.num_prompt = len(request.prompt_ids)
        self.max_tokens = self.num_prompt + request.max_tokens
        """Length at which the sequence ends, prompt included."""
        eos = frozenset() if request.ignore_eos else eos_token_ids
        self.stop_ids = eos.union(request.stop_token_ids)
        self.takes_drafts = not request.sampling.has_penalty and (
            request.masks is None or takes_drafts(request.masks)
        )
        """Whether a step can draw several of its tokens: not if a draw depends on the tokens
        before by penalties, or by masks that are not computed for drafts."""
        self.scores_prompt = request.prompt_logprobs is not None
        """Whether each token of the prompt needs logits, until the last one is computed."""
        self.num_samples = request.n
        """Tokens to draw when all known ones are computed: n until the sequence has forked."""
        self.num_computed = 0
        self.num_pending = 0
        self.drafts: Items[int] = ()
        """Tokens that may follow its last one, for the next step to verify."""
        self.num_drafted = 0
        """Drafts that the step in flight verifies."""
        self.state_pages: Items[int] = ()
        """In models with states, pages to which rows of the step in flight write their states: rows
        that verify drafts, or the last row if its token may be discarded."""
        self.drafted_at = 0
        """Length of its output when drafts were last verified."""
        self.num_missed_drafts = 0
        """Consecutive steps with drafts, up to the last one, in which none was accepted."""
        self.is_held = False
        """Whether it skips steps until its mask is ready."""
        self.pages: list[list[int]] = []
        """Page table of each group; []: not running."""
        self.num_released: list[int] = []
        """For each group, how many of the first pages it has released, because no later token
        attends to them."""
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
        """The most drafts that the next step may verify, after a token that may be pending. 0 if
        the sequence takes none, and before the first output token."""
        length = len(self.token_ids) + self.num_pending
        if (
            self.num_drafted
            or self.is_held
            or not self.takes_drafts
            or len(self.token_ids) == self.num_prompt
            or length - self.num_computed != 1
        ):
            return 0
        return self.max_tokens - length - 1

    def held_pages(self) -> Iterator[list[int]]:
        """The pages that it holds, by group, and those of `state_pages`."""
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
    """Priority with ageing, as a key that never changes.

    A request of one priority higher ranks as if it had arrived `ageing_s` seconds earlier. So a
    waiting request is overtaken only by requests that arrive within a bounded time: no starvation.
    """
    return (arrival - priority * ageing_s, number, 0)
