"""Asks the system for huge pages. Where it has none, small ones do."""

import mmap
from contextlib import suppress


def advise_huge_pages(memory: mmap.mmap) -> None:
    """Have what is touched of a mapping from now on come in huge pages.

    Of a file, what is not in the page cache yet is read 2 MB at a time into pages that this and
    later processes map whole: a page fault for each, where small ones are one for each 64 KB.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
