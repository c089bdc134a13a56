"""Limits the prompt tokens of a step that also decodes, so that decodes do not wait long."""

from trtc.runtime.scheduling.scheduler import StepLimits

_LEAST_TOKENS = 32
"""Steps with fewer tokens are not measured, and the limit is never smaller."""
_LEAST_MEAN = 4
"""Least mean of tokens per sequence of a measured step: decodes are bound by memory bandwidth, not
arithmetic."""
_WEIGHT = 0.25
"""Weight of the last step in the moving average of speed."""


class Pace:
    """Estimates an executor's speed from its steps. Not thread-safe."""

    def __init__(self, limits: StepLimits, target_s: float) -> None:
        """
        Args:
            limits: limits of any step.
            target_s: seconds that a step with decodes should take at most; prompts are cut to fit.
                0: they are not cut.
        """
        self._limits = limits
        self._target_s = target_s
        self._tokens_per_s = 0.0

    @property
    def limits(self) -> StepLimits:
        """Limits of the next step."""
        return self._limits

    def took(self, num_tokens: int, num_sequences: int, seconds: float) -> None:
        """Update the estimate with a completed step."""
        least = max(_LEAST_TOKENS, _LEAST_MEAN * num_sequences)
        if not self._target_s or num_tokens < least or seconds <= 0:
            return
        speed = num_tokens / seconds
        known = self._tokens_per_s or speed
        self._tokens_per_s = known + _WEIGHT * (speed - known)
        beside = max(_LEAST_TOKENS, int(self._tokens_per_s * self._target_s))
        self._limits = self._limits._replace(max_tokens_beside_decodes=beside)
