"""The slots of the paged KV cache: who holds which.

A page holds one token (all layers), so that a cached prefix can be shared up to its last token. Pages
are counted, not owned: a sequence and the radix tree may hold the same page.
"""

from __future__ import annotations

from collections.abc import Iterable


class OutOfPages(Exception):
    """Fewer pages are free than were asked for."""


class PagePool:
    """Page ids 0..capacity-1 with a reference count each.

    Invariant: a page is on the free list exactly when its count is 0.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._count = [0] * capacity
        self._free = list(range(capacity - 1, -1, -1))  # popped from the end: ascending runs for a fresh pool

    @property
    def free(self) -> int:
        """Pages without a holder."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages with a holder."""
        return self.capacity - len(self._free)

    def take(self, n: int) -> list[int]:
        """Hand out n pages, each with a count of 1. Raises OutOfPages and takes none if fewer are free."""
        if n > len(self._free):
            raise OutOfPages(f"{n} pages asked for, {len(self._free)} free")
        if n == 0:
            return []
        pages = self._free[-n:][::-1]
        del self._free[-n:]
        for page in pages:
            self._count[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one holder to each page."""
        for page in pages:
            if self._count[page] == 0:
                raise ValueError(f"page {page} is free and cannot be shared")
            self._count[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove one holder from each page; a page without holders is free again."""
        for page in pages:
            count = self._count[page] - 1
            if count < 0:
                raise ValueError(f"page {page} was released more often than it was held")
            self._count[page] = count
            if count == 0:
                self._free.append(page)

    def count(self, page: int) -> int:
        """Holders of one page."""
        return self._count[page]

    def check_integrity(self) -> None:
        """Raise ValueError unless the free list and the counts agree."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise ValueError("a page is on the free list twice")
        for page, count in enumerate(self._count):
            if (count == 0) != (page in free):
                raise ValueError(f"page {page} has {count} holders and is {'' if page in free else 'not '}free")
