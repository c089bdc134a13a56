"""What keeps a figure from being measured. Workers import this: it needs nothing."""


class Unavailable(Exception):
    """A contestant that cannot take part here; the message says why."""


class RunFailed(Exception):
    """A command or server that did not do what it was started for."""
