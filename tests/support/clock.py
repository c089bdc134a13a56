"""A clock that the test moves."""


class Clock:
    """Seconds, as `time.monotonic` gives them."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
