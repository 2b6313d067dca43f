"""Servers of tests without the seconds of imports: each is forked off a process that has torch and the server imported.

What a test starts as `python -m serve`, itself or through a command of evalgate, finds `sitecustomize.py` of this
folder on PYTHONPATH. That hands arguments, environment and descriptors to the preloaded process (`parent.py`), which
forks, and stays as the fork's stand-in: it passes signals on, ends as the fork ends, and takes the fork with it. Where
the environment differs in what libraries read while they are imported, and in tests that use the fixture `own_process`,
a child starts as it does for a user.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.preloaded.sitecustomize import ADDRESS

HERE = Path(__file__).parent


@contextlib.contextmanager
def preloaded() -> Iterator[None]:
    """Servers that are started inside the block are forked. The imports begin with the first one."""
    if ADDRESS in os.environ or not Path("/proc/self/fd").is_dir():  # a worker of the process that opened the block
        yield
        return
    before = dict(os.environ)
    # In /tmp, whatever TMPDIR says: a socket's path has room for a hundred characters.
    with (
        tempfile.TemporaryDirectory(prefix="preloaded-", dir="/tmp") as folder,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        address = str(Path(folder, "socket"))
        listener.bind(address)
        listener.listen(128)
        command = [sys.executable, str(HERE / "parent.py"), str(listener.fileno())]
        parent = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], start_new_session=True)
        os.environ[ADDRESS] = address
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), before.get("PYTHONPATH")]))
        try:
            yield
        finally:
            assert parent.stdin is not None
            parent.stdin.close()  # it ends with us, however we end
            parent.wait()
            for name in (ADDRESS, "PYTHONPATH"):
                os.environ.pop(name)
                if name in before:
                    os.environ[name] = before[name]
