"""Drives a dialect or a probe over a channel: requests out, replies in, until it returns."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from evalgate.dialects.base import Reply, Request
from evalgate.endpoints.budget import Purse
from evalgate.endpoints.channel import Channel

T = TypeVar("T")


def drive(
    exchange: Generator[tuple[Request, ...], tuple[Reply, ...], T], channel: Channel, purse: Purse | None = None
) -> T:
    """What the generator returns; `purse` pays for the requests, None = they are free.

    Raises what the generator and the purse raise, and EndpointDown where a request gets no answer.
    """
    try:
        requests = next(exchange)
        while True:
            requests = exchange.send(channel.send_all(requests, purse))
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        exchange.close()
