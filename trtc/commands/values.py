"""Values that a shell completes after an option."""

from collections.abc import Callable, Sequence

import click
from click.shell_completion import CompletionItem

Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def one_of(values: Sequence[str]) -> Complete:
    """For `shell_complete=`: those of `values` that begin as what was typed."""

    def complete(
        context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        return [CompletionItem(value) for value in values if value.startswith(incomplete)]

    return complete
