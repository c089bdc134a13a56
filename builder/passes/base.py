"""What a pass is: a function of a module that says whether it changed anything."""

from typing import Protocol

from trtc.builder.module import Module


class Pass(Protocol):
    """A rewrite. `module` in, `(module, changed)` out; the one given is never altered."""

    @property
    def name(self) -> str: ...

    @property
    def requires(self) -> frozenset[str]:
        """Names of passes that must have run before."""
        ...

    def __call__(self, module: Module) -> tuple[Module, bool]: ...
