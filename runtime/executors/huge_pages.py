"""Requests huge pages; if the system has none, small pages are used."""

import mmap
from contextlib import suppress


def advise_huge_pages(memory: mmap.mmap) -> None:
    """Use huge pages for memory of a mapping that is touched from now on.

    If the mapping is of a file, parts that are not in the page cache are read 2 MB at a time into
    huge pages, which this and later processes map with one page fault each, instead of one for each
    64 KB.
    """
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel that was built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
