"""How far each rank is, and whether all draw the same: no threads and no clock of its own."""

from trtc.runtime.executors.ranks.messages import Progress

_NOTHING = Progress(begun=0, ended=0, digest=0)


class StepBook:
    """Steps that rank 0 has asked for, until every other rank is known to have ended them."""

    def __init__(self, num_others: int) -> None:
        self._progress = dict.fromkeys(range(1, num_others + 1), _NOTHING)
        self._begun: dict[int, float] = {}
        """When rank 0 asked for a step."""
        self._digests: dict[int, int] = {}
        """Of all that rank 0 drew up to a step."""

    def begin(self, number: int, now: float) -> None:
        """Rank 0 asks for a step; numbers grow."""
        self._begun[number] = now

    def end(self, number: int, digest: int) -> str:
        """Rank 0 has ended a step; what is wrong, or ""."""
        self._digests[number] = digest
        return next(filter(None, map(self._disagreement, self._progress)), "")

    def report(self, rank: int, progress: Progress) -> str:
        """Another rank says how far it is; what is wrong, or ""."""
        self._progress[rank] = progress
        problem = self._disagreement(rank)
        ended = min(one.ended for one in self._progress.values())
        self._begun = {number: at for number, at in self._begun.items() if number > ended}
        self._digests = {number: one for number, one in self._digests.items() if number >= ended}
        return problem

    def overdue(self, since: float) -> str:
        """What was asked for before `since` and is not done; "": nothing."""
        number, asked_at = next(iter(self._begun.items()), (0, since))
        if asked_at >= since:
            return ""
        # All wait for one that has not begun, and none of them ends.
        idle = [rank for rank, one in self._progress.items() if one.begun < number]
        late = idle or [rank for rank, one in self._progress.items() if one.ended < number]
        ranks = " and ".join(map(str, late))
        return f"step {number} has not {'begun' if idle else 'ended'} on rank {ranks}"

    def _disagreement(self, rank: int) -> str:
        progress = self._progress[rank]
        if self._digests.get(progress.ended, progress.digest) == progress.digest:
            return ""
        return f"rank {rank} has drawn other tokens than rank 0, up to step {progress.ended}"
