"""Drives a dialect from scripted replies: no I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import orjson

from evalgate.core import Window
from evalgate.dialects.base import Reply, Request

WIRE = Path(__file__).parents[2] / "data" / "wire"
IDS = (2, 818, 5279, 529, 7001, 563, 9079, 236761)


def recorded(name: str) -> dict[str, Any]:
    return json.loads((WIRE / f"{name}.json").read_text())  # type: ignore[no-any-return]


def reply_of(body: Any, status: int = 200) -> Reply:
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    return Reply(status, {"content-type": "application/json"}, data)


def window_of(ids: tuple[int, ...] = IDS, score_from: int = 1, index: int = 3) -> Window:
    return Window(index, "doc", "test", ids, score_from, len(ids), (1,) * len(ids))


def drive(exchange: Generator[Any, Any, Any], answer: Callable[[Request], Reply]) -> tuple[Any, list[Request]]:
    """(what the generator returns, every request it made)."""
    asked: list[Request] = []
    try:
        requests = next(exchange)
        while True:
            assert isinstance(requests, tuple)
            asked += requests
            requests = exchange.send(tuple(answer(r) for r in requests))
    except StopIteration as stop:
        return stop.value, asked


class Words:
    """A vocabulary from id -> bytes."""

    def __init__(self, words: Mapping[int, bytes | str]) -> None:
        self.words = {i: w.encode() if isinstance(w, str) else w for i, w in words.items()}

    def bytes_of(self, token: int) -> bytes:
        return self.words[token]

    def ids_of(self, data: bytes) -> frozenset[int]:
        return frozenset(i for i, w in self.words.items() if w == data)


DEMO = Words(
    {
        2: "<bos>",
        818: "The",
        5279: " capital",
        529: " of",
        7001: " France",
        563: " is",
        9079: " Paris",
        236761: ".",
        184: "<h1>",
        198: "<strong>",
        255999: "<start_of_image>",
        236743: " ",
        1171: " first",
        861: " new",
        3207: " city",
        506: " the",
        4257: " South",
        496: " a",
        236764: ",",
        815: " has",
        532: " and",
        1030: " It",
        669: " The",
    }
)
