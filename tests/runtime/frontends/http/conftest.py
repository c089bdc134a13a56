"""What tests of several files share."""

from collections.abc import Iterator

import pytest

from tests.support.library_process import Libraries, libraries


@pytest.fixture(scope="session")
def process() -> Iterator[Libraries]:
    """It takes seconds to import all libraries."""
    with libraries() as opened:
        yield opened
