"""Drives a dialect or a probe over a channel: requests out, replies in, until it returns."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from evalgate.dialects.base import Reply, Request
from evalgate.endpoints.channel import Channel

T = TypeVar("T")


def drive(exchange: Generator[tuple[Request, ...], tuple[Reply, ...], T], channel: Channel) -> T:
    """What the generator returns. Raises what it raises, and EndpointDown where a request gets no answer."""
    try:
        requests = next(exchange)
        while True:
            requests = exchange.send(channel.send_all(requests))
    except StopIteration as stop:
        result: T = stop.value
        return result
    finally:
        exchange.close()
