"""The radix prefix cache: which token prefixes have their keys and values in pages, and what they predicted.

A tree of token runs. A node holds `tokens`, one page per token, the children that continue it, and the scores
of what its tokens predicted; an edge is found by its first token. The tree is one holder of every page in
it (see pages.py).

Invariants: a child's first token is its key in `children`; len(tokens) == len(pages) >= 1 except at the
root; a node locked by a running sequence has locked ancestors; a locked node is never evicted; `score_bytes`
is the sum over all kept scores and at most `score_limit` after every call.
"""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from serve.engine.pages import PagePool
from serve.engine.prefixes import common
from serve.engine.scores import Kept


class Node:
    """One run of tokens. `locks` counts the sequences that read it or a descendant; scores[i] is after tokens[i]."""

    __slots__ = ("children", "locks", "pages", "parent", "scores", "tokens", "used")

    def __init__(self, tokens: tuple[int, ...], pages: array[int], parent: Node | None) -> None:
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.children: dict[int, Node] = {}
        self.scores: dict[int, Kept] = {}
        self.locks = 0
        self.used = 0

    @property
    def score_bytes(self) -> int:
        """Bytes of its kept scores."""
        return sum(kept.bytes for kept in self.scores.values())


class Match(NamedTuple):
    """The longest cached prefix: its pages in order, the nodes that hold it, and the last of them (or the root)."""

    pages: array[int]
    path: tuple[Node, ...]
    node: Node

    def scores(self) -> Iterator[tuple[int, Kept]]:
        """(position of a token in the prefix, kept scores of the token after it)."""
        at = 0
        for node in self.path:
            for offset, kept in node.scores.items():
                if at + offset < len(self.pages):
                    yield at + offset, kept
            at += len(node.tokens)


class RadixCache:
    """Prefixes over one PagePool. Time is a counter, so that eviction order never depends on a clock."""

    def __init__(self, pool: PagePool, *, score_limit: int = 1 << 26) -> None:
        """score_limit: bytes of kept scores; beyond it those of the least recently used nodes are dropped."""
        self.pool = pool
        self.root = Node((), array("q"), None)
        self.score_limit = score_limit
        self.score_bytes = 0
        self._clock = 0

    def match(self, tokens: Sequence[int]) -> Match:
        """Longest cached prefix of `tokens`. It may end inside its last node; nothing is changed but the clock."""
        self._clock += 1
        wanted = tuple(tokens)
        node, pages, at = self.root, array("q"), 0
        path = []
        while at < len(wanted):
            child = node.children.get(wanted[at])
            if child is None:
                break
            same = common(child.tokens, wanted[at : at + len(child.tokens)])
            child.used = self._clock
            pages.extend(child.pages[:same])
            path.append(child)
            node, at = child, at + same
            if same < len(child.tokens):
                break
        return Match(pages, tuple(path), node)

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> None:
        """Put a prefix into the tree: tokens[i] has its keys and values in pages[i].

        What the tree already has is kept and the caller's copy is left to the caller; new pages are
        shared (the caller still holds its own reference).
        """
        if len(tokens) != len(pages):
            raise ValueError(f"{len(tokens)} tokens but {len(pages)} pages")
        matched = self.match(tokens)
        at = len(matched.pages)
        if at == len(tokens):
            return
        node = self._cut(matched)
        new = Node(tuple(tokens[at:]), array("q", pages[at:]), node)
        new.used = self._clock
        self.pool.share(new.pages)
        node.children[new.tokens[0]] = new

    def keep_scores(self, tokens: Sequence[int], scores: Mapping[int, Kept]) -> None:
        """Keep scores[i], of the token after tokens[: i + 1], where the tree has them."""
        matched = self.match(tokens)
        at = 0
        for node in matched.path:
            end = min(at + len(node.tokens), len(matched.pages))
            here = scores.keys() if len(scores) < end - at else range(at, end)
            for position in here:
                kept = scores.get(position)
                if kept is None or not at <= position < end:
                    continue
                old = node.scores.get(position - at)
                new = kept if old is None else old.joined(kept)
                node.scores[position - at] = new
                self.score_bytes += new.bytes - (old.bytes if old else 0)
            at = end
        if self.score_bytes > self.score_limit:
            self._trim_scores()

    def lock(self, match: Match) -> Node:
        """Keep a matched prefix, and no more than that, from being evicted; returns the node to unlock.

        Splits the last node where the match ends inside it. The match must be the tree's latest.
        """
        last = self._cut(match)
        at: Node | None = last
        while at is not None:
            at.locks += 1
            at = at.parent
        return last

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
        # Leaves only: a parent becomes a leaf, and a candidate, when its last child has gone.
        heap = [(node.used, id(node), node) for node in self.nodes() if not node.children and not node.locks]
        heapq.heapify(heap)
        freed = 0
        while heap and freed < n:
            _, _, node = heapq.heappop(heap)
            before = self.pool.free
            self.pool.release(node.pages)
            freed += self.pool.free - before
            self._drop_scores(node)
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
            if not all(0 <= offset < len(node.tokens) for offset in node.scores):
                raise ValueError("a node keeps a score after a token that it does not have")
            for page in node.pages:
                if page in seen:
                    raise ValueError(f"page {page} is in the tree twice")
                if self.pool.count(page) < 1:
                    raise ValueError(f"page {page} is in the tree but free")
                seen.add(page)
        held = sum(node.score_bytes for node in self.nodes())
        if held != self.score_bytes or held > self.score_limit:
            raise ValueError(f"{held} bytes of scores are kept, {self.score_bytes} booked, {self.score_limit} allowed")

    def _cut(self, match: Match) -> Node:
        """The node that ends exactly where the match does."""
        beyond = sum(len(node.tokens) for node in match.path) - len(match.pages)
        return self._split(match.node, len(match.node.tokens) - beyond) if beyond else match.node

    def _split(self, node: Node, at: int) -> Node:
        """Cut `node` after `at` tokens; returns the upper part.

        The upper part is the new node and `node` keeps the rest: sequences that hold `node` locked read all of it, and
        unlock it by walking up to the root. So the object that they hold must stay the lower end, and the new parent
        takes over its lock count, because every one of those locks now passes through it.
        """
        parent = node.parent
        if parent is None:
            raise ValueError("the root cannot be split")
        upper = Node(node.tokens[:at], node.pages[:at], parent)
        upper.locks, upper.used = node.locks, node.used
        # scores and pages are counted from a node's own first token
        upper.scores = {offset: kept for offset, kept in node.scores.items() if offset < at}
        node.scores = {offset - at: kept for offset, kept in node.scores.items() if offset >= at}
        parent.children[upper.tokens[0]] = upper
        node.tokens, node.pages, node.parent = node.tokens[at:], node.pages[at:], upper
        upper.children[node.tokens[0]] = node
        return upper

    def _trim_scores(self) -> None:
        """Drop the scores of the least recently used nodes until a quarter of the limit is free again."""
        for node in sorted((node for node in self.nodes() if node.scores), key=lambda node: node.used):
            if self.score_bytes <= self.score_limit * 3 // 4:
                return
            self._drop_scores(node)

    def _drop_scores(self, node: Node) -> None:
        self.score_bytes -= node.score_bytes
        node.scores = {}
