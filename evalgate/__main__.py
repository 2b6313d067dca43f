"""`python -m evalgate` is the `evalgate` command."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -m` puts the working directory first: a file there must not stand in for a module of ours or of a library
_HOME = Path(__file__).parents[1]
if sys.path and Path(sys.path[0] or ".").resolve() == Path.cwd() != _HOME and not sys.flags.safe_path:
    del sys.path[0]

from evalgate.cli import main  # noqa: E402 (after the path is safe)

if __name__ == "__main__":
    sys.exit(main())
