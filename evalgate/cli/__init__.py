"""The command line: options in, one block or one JSON document out, an exit code a script can act on."""

from __future__ import annotations

from evalgate.cli.app import main

__all__ = ["main"]
