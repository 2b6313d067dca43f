"""The radix prefix cache: which token prefixes have their keys and values in pages.

A tree of token runs. A node holds `tokens`, one page per token, and the children that continue it; an
edge is found by its first token. The tree is one holder of every page in it (see pages.py).

Invariants: a child's first token is its key in `children`; len(tokens) == len(pages) >= 1 except at the
root; a node locked by a running sequence has locked ancestors; a locked node is never evicted.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from serve.engine.pages import PagePool


class Node:
    """One run of tokens. `locks` counts the sequences that read it or a descendant."""

    __slots__ = ("children", "locks", "pages", "parent", "tokens", "used")

    def __init__(self, tokens: tuple[int, ...], pages: list[int], parent: Node | None) -> None:
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.locks = 0
        self.used = 0


class Match(NamedTuple):
    """The longest cached prefix: its pages in order, and the node that ends it."""

    pages: list[int]
    node: Node


class RadixCache:
    """Prefixes over one PagePool. Time is a counter, so that eviction order never depends on a clock."""

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.root = Node((), [], None)
        self._clock = 0

    def match(self, tokens: Sequence[int]) -> Match:
        """Longest cached prefix of `tokens`; splits a node where the match ends inside it."""
        self._clock += 1
        node, pages, at = self.root, [], 0
        while at < len(tokens):
            child = node.children.get(tokens[at])
            if child is None:
                break
            same = _common(child.tokens, tokens, at)
            if same < len(child.tokens):
                child = self._split(child, same)
            child.used = self._clock
            pages.extend(child.pages)
            node, at = child, at + same
        return Match(pages, node)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> Node:
        """Put a prefix into the tree: tokens[i] has its keys and values in pages[i].

        What the tree already has is kept and the caller's copy is left to the caller; new pages are
        shared (the caller still holds its own reference). Returns the node that ends the prefix.
        """
        if len(tokens) != len(pages):
            raise ValueError(f"{len(tokens)} tokens but {len(pages)} pages")
        matched = self.match(tokens)
        at = len(matched.pages)
        if at == len(tokens):
            return matched.node
        new = Node(tuple(tokens[at:]), list(pages[at:]), matched.node)
        new.used = self._clock
        self.pool.share(new.pages)
        matched.node.children[new.tokens[0]] = new
        return new

    def lock(self, node: Node) -> None:
        """Keep the path from the root to `node` from being evicted."""
        at: Node | None = node
        while at is not None:
            at.locks += 1
            at = at.parent

    def unlock(self, node: Node) -> None:
        """Undo one lock."""
        at: Node | None = node
        while at is not None:
            if at.locks == 0:
                raise ValueError("a node was unlocked more often than it was locked")
            at.locks -= 1
            at = at.parent

    def evict(self, n: int) -> int:
        """Free at least n pages if that many can be freed, least recently used leaves first; returns how many."""
        heap = [(node.used, id(node), node) for node in self.nodes() if not node.children and not node.locks]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < n:
            _, _, node = heapq.heappop(heap)
            before = self.pool.free
            self.pool.release(node.pages)
            freed += self.pool.free - before
            parent = node.parent
            if parent is None:
                raise ValueError("the root cannot be evicted")
            del parent.children[node.tokens[0]]
            if parent is not self.root and not parent.children and not parent.locks:
                heapq.heappush(heap, (parent.used, id(parent), parent))
        return freed

    def clear(self) -> int:
        """Evict everything that no running sequence reads; returns the pages freed."""
        return self.evict(self.pool.capacity + 1)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    @property
    def tokens(self) -> int:
        """Tokens in the tree."""
        return sum(len(node.tokens) for node in self.nodes())

    def check_integrity(self) -> None:
        """Raise ValueError where an invariant of this module is broken."""
        seen: set[int] = set()
        for node in self.nodes():
            if not node.tokens or len(node.tokens) != len(node.pages):
                raise ValueError(f"a node has {len(node.tokens)} tokens and {len(node.pages)} pages")
            if node.parent is None or node.parent.children.get(node.tokens[0]) is not node:
                raise ValueError("a node is not its parent's child")
            if node.locks > node.parent.locks:
                raise ValueError("a node is locked more often than its parent")
            for page in node.pages:
                if page in seen:
                    raise ValueError(f"page {page} is in the tree twice")
                if self.pool.count(page) < 1:
                    raise ValueError(f"page {page} is in the tree but free")
                seen.add(page)

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` tokens; returns the upper part."""
        parent = node.parent
        if parent is None:
            raise ValueError("the root cannot be split")
        upper = Node(node.tokens[:at], node.pages[:at], parent)
        upper.locks, upper.used = node.locks, node.used
        parent.children[upper.tokens[0]] = upper
        node.tokens, node.pages, node.parent = node.tokens[at:], node.pages[at:], upper
        upper.children[node.tokens[0]] = node
        return upper


def _common(run: tuple[int, ...], tokens: Sequence[int], at: int) -> int:
    """Length of the common prefix of `run` and tokens[at:]."""
    n = min(len(run), len(tokens) - at)
    for i in range(n):
        if run[i] != tokens[at + i]:
            return i
    return n
