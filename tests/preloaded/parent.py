"""The preloaded process: imports what a server imports when the first one is wanted, and forks one for each order."""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ABOVE = 200  # descriptors that a fork keeps for itself lie above those that it was given
LIBRARIES = ("ATEN_", "CUDA", "DNNL_", "GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "ONEDNN_")
BY_IMPORTS = ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK")  # set by scikit-learn and its like, in a test as in here
HUB = ("HF_ENDPOINT", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """What libraries read of an environment while they are imported, so that a fork cannot have it otherwise."""
    return {
        name: value
        for name, value in environment.items()
        if (name.startswith(LIBRARIES) and name not in BY_IMPORTS) or name in HUB
    }


def next_order(listener: socket.socket) -> dict[str, Any]:
    """Wait for a process to fork; meanwhile, tell those that wait for forks how these ended.

    Returns, in the fork alone, what was ordered, with the `line` to its stand-in and the descriptors it was given.
    """
    ended, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    lines: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, ended, 0], [], [])
        if 0 in ready:  # only ever its end
            for pid in lines:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            sys.exit()
        if ended in ready:
            os.read(ended, 4096)
            while (found := _reaped()) is not None:
                _answer(lines.pop(found[0]), found[1])
        if listener in ready:
            line, _ = listener.accept()
            order = _read(line)
            pid = _forked() if read_at_import(order["env"]) == read_at_import(os.environ) else None
            if pid == 0:
                return {**order, "line": line}
            for number in order["given"]:
                os.close(number)
            with contextlib.suppress(OSError):
                line.sendall(b"%d\n" % (pid or 0))
            if pid is None:
                line.close()
            else:
                lines[pid] = line


def become(order: dict[str, Any]) -> None:
    """Make this fork what was ordered, all but running the module."""
    os.setsid()
    kept = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, ABOVE) for number in (*order["given"], order["line"].fileno())]
    os.closerange(0, ABOVE)
    for number, descriptor in zip(order["descriptors"], kept[:-1], strict=True):
        os.dup2(descriptor, number, inheritable=True)
        os.close(descriptor)
    threading.Thread(target=_die_with_stand_in, args=(kept[-1],), daemon=True).start()
    os.environ.clear()
    os.environ.update(order["env"])
    os.chdir(order["cwd"])
    sys.argv[:] = [order["module"], *order["arguments"]]


def _read(line: socket.socket) -> dict[str, Any]:
    given = array.array("i")
    head, rights, _, _ = line.recvmsg(4, socket.CMSG_SPACE(ABOVE * given.itemsize))
    for _, _, data in rights:
        given.frombytes(data)
    with line.makefile("rb") as file:
        order: dict[str, Any] = json.loads(file.read(int.from_bytes(head, "big")))
    return {**order, "given": list(given)}


def _forked() -> int:
    _imported()
    pid = os.fork()
    if not pid:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return pid


def _reaped() -> tuple[int, int] | None:
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _answer(line: socket.socket, status: int) -> None:
    with contextlib.suppress(OSError):  # the stand-in was killed, and its fork with it
        line.sendall(b"%d\n" % status)
    line.close()


def _imported() -> None:
    from serve.models.quiet import quiet

    with quiet():
        import transformers.models.auto.modeling_auto
        import transformers.models.auto.tokenization_auto
        import transformers.models.gemma3.modeling_gemma3
        import transformers.models.llama.modeling_llama  # noqa: F401
        import uvicorn.protocols.http.auto  # noqa: F401

        import serve.api.draining
        import serve.api.loading
        import serve.app
        import serve.engine.loop  # noqa: F401
        from serve.engine.kernels import kernels

        kernels()


def _die_with_stand_in(line: int) -> None:
    while os.read(line, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # not this folder
    ordered = next_order(socket.socket(fileno=int(sys.argv[1])))
    become(ordered)
    runpy.run_module(ordered["module"], None, "__main__", alter_sys=True)
