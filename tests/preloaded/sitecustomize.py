"""Run by every Python that a test starts: one that was to become a server becomes the stand-in of a fork."""

from __future__ import annotations

import os
import sys

ADDRESS = "EVALGATE_TESTS_PRELOADED"  # the preloaded process's socket; without it nothing happens here


def wanted() -> tuple[str, list[str]] | None:
    """The module of `serve` that this process was started to run, with its arguments."""
    words = sys.orig_argv
    for place, word in enumerate(words[1:-1], 1):
        following, rest = words[place + 1], words[place + 2 :]
        if word == "-m":
            return (following, rest) if following == "serve" else None
        if word == "-c":  # evalgate.server.process.module_command
            return ("serve", rest) if "run_module('serve'," in following else None
        if not word.startswith("-"):
            return None
    return None


def stand_in(module: str, arguments: list[str]) -> None:
    """Have a server forked, and end as it ends. Returns where the preloaded process cannot be what was wanted."""
    import array
    import json
    import signal
    import socket

    def inherited(number: int) -> bool:
        try:
            return number <= 2 or os.get_inheritable(number)
        except OSError:  # the listing's own
            return False

    open_now = os.listdir("/proc/self/fd")  # noqa: PTH208 (pathlib takes as long to import as all of this)
    descriptors = [number for name in open_now if inherited(number := int(name))]
    line = socket.socket(socket.AF_UNIX)
    line.connect(os.environ[ADDRESS])
    order = {"module": module, "arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}  # noqa: PTH109
    body = json.dumps({**order, "descriptors": descriptors}).encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
    line.sendmsg([len(body).to_bytes(4, "big")], rights)
    line.sendall(body)
    answer = line.makefile("r")
    pid = int(answer.readline() or 0)
    if not pid:
        line.close()
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: os.kill(pid, number))
    for number in descriptors:
        os.close(number)  # who holds their other ends has to do with the fork alone
    status = int(answer.readline() or signal.SIGKILL)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status))


if ADDRESS in os.environ and (found := wanted()):
    stand_in(*found)
