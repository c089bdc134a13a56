"""How many prompt tokens a step with decodes may have, so that decodes do not wait long."""

from trtc.runtime.scheduling.scheduler import StepLimits

_LEAST_TOKENS = 32
"""The least tokens of a step whose time is learnt from, and the least bound that is set."""
_LEAST_MEAN = 4
"""Tokens a sequence of such a step: decodes measure memory bandwidth, not arithmetic."""
_WEIGHT = 0.25
"""Of the last step in the mean speed."""


class Pace:
    """Learns an executor's speed from its steps. One thread uses it."""

    def __init__(self, limits: StepLimits, target_s: float) -> None:
        """Begin without knowing the executor.

        Args:
            limits: of any step.
            target_s: seconds that a step with decodes should take at most; prompts are cut to fit.
                0: they are not cut.
        """
        self._limits = limits
        self._target_s = target_s
        self._tokens_per_s = 0.0

    @property
    def limits(self) -> StepLimits:
        """Of the next step."""
        return self._limits

    def took(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """Learn from a step that is complete."""
        least = max(_LEAST_TOKENS, _LEAST_MEAN * num_sequences)
        if not self._target_s or num_tokens < least or seconds <= 0:
            return
        speed = num_tokens / seconds
        known = self._tokens_per_s or speed
        self._tokens_per_s = known + _WEIGHT * (speed - known)
        beside = max(_LEAST_TOKENS, int(self._tokens_per_s * self._target_s))
        self._limits = self._limits._replace(max_tokens_beside_decodes=beside)
