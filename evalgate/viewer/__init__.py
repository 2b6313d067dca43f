"""`evalgate view`: many runs and sweeps in a browser, on this machine alone.

`found` looks for them, `pages` draws them, and `server` answers a browser. Nothing is written, and no file is read
out but those that runs and sweeps are made of.
"""

from evalgate.viewer.server import Viewer

__all__ = ["Viewer"]
