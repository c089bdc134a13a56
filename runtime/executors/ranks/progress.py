"""Tracks the progress of ranks, and whether all draw the same tokens. Without threads or clock."""

from trtc.runtime.executors.ranks.messages import Progress

_NOTHING = Progress(begun=0, ended=0, digest=0)


class StepBook:
    """Steps that rank 0 has launched and that are not known to be complete on all other ranks."""

    def __init__(self, num_others: int) -> None:
        self._progress = dict.fromkeys(range(1, num_others + 1), _NOTHING)
        self._begun: dict[int, float] = {}
        """Step -> time at which rank 0 launched it."""
        self._digests: dict[int, int] = {}
        """Step -> digest of the tokens that rank 0 drew up to it."""

    def begin(self, number: int, now: float) -> None:
        """Rank 0 launches a step; numbers increase."""
        self._begun[number] = now

    def end(self, number: int, digest: int) -> str:
        """Rank 0 has completed a step; returns the problem, or ""."""
        self._digests[number] = digest
        return next(filter(None, map(self._disagreement, self._progress)), "")

    def report(self, rank: int, progress: Progress) -> str:
        """Another rank reports its progress; returns the problem, or ""."""
        self._progress[rank] = progress
        problem = self._disagreement(rank)
        ended = min(one.ended for one in self._progress.values())
        self._begun = {number: at for number, at in self._begun.items() if number > ended}
        self._digests = {number: one for number, one in self._digests.items() if number >= ended}
        return problem

    def overdue(self, since: float) -> str:
        """Describes a step that was launched before `since` and is not complete; "": none."""
        number, asked_at = next(iter(self._begun.items()), (0, since))
        if asked_at >= since:
            return ""
        # If one rank has not begun, all others wait for it.
        idle = [rank for rank, one in self._progress.items() if one.begun < number]
        late = idle or [rank for rank, one in self._progress.items() if one.ended < number]
        ranks = " and ".join(map(str, late))
        return f"step {number} has not {'begun' if idle else 'ended'} on rank {ranks}"

    def _disagreement(self, rank: int) -> str:
        progress = self._progress[rank]
        if self._digests.get(progress.ended, progress.digest) == progress.digest:
            return ""
        return f"rank {rank} has drawn other tokens than rank 0, up to step {progress.ended}"
