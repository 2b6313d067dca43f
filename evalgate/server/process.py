"""The embedded scoring server as a child process: started on a free loopback port, never left behind.

The child listens on a port that the kernel chose, takes a random key from its environment and reports its
progress on a pipe. It ends when its standard input closes, so it goes with us however we go.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from evalgate.errors import ServerError

KEY_VARIABLE = "EVALGATE_SERVER_KEY"
_STOP_SECONDS = 5.0
_ENDING_SECONDS = 1.0


def module_command(module: str, python: str | None = None) -> list[str]:
    """The start of an argument vector that runs a module of `serve` as `python -m` does, from its own place alone.

    `python -m serve` would look in the working directory first, and a measurement may run in a checkout that nobody has
    vouched for: a `serve.py` there must not be executed. The package's own folder comes last, so that it shadows
    nothing; it is there for a source tree that is not installed.

    python: another interpreter, which sees our `serve` and nothing else from here: our packages are not made for it.
    """
    import serve.wire

    root = str(Path(serve.wire.__file__).parents[1])
    if python is None:
        code = f"import runpy, sys; sys.path.append({root!r}); runpy.run_module({module!r}, None, '__main__', True)"
        return [sys.executable, "-P", "-c", code]
    code = (
        "import importlib.machinery, importlib.util, runpy, sys; "
        f"found = importlib.machinery.PathFinder.find_spec('serve', [{root!r}]); "
        "sys.modules['serve'] = importlib.util.module_from_spec(found); "
        "found.loader.exec_module(sys.modules['serve']); "
        f"runpy.run_module({module!r}, None, '__main__', True)"
    )
    return [python, "-P", "-c", code]


class EmbeddedServer:
    """A context manager: the server is up inside the block and gone after it.

    specs: what to load (SOURCE or SOURCE@CONVERSION). on_stage gets one phrase per stage of the start.
    options: further command-line options of `python -m serve`. python: another interpreter to run it with.
    Raises ServerError with the server's own sentence where a model cannot be loaded.
    """

    module = "serve"
    own_options: Sequence[str] = ("--long-texts",)  # documents are cut into windows only after they are tokenized

    def __init__(
        self,
        specs: Sequence[str],
        *,
        device: str | None = "auto",
        options: Sequence[str] = (),
        on_stage: Callable[[str], None] | None = None,
        python: str | None = None,
    ) -> None:
        self._python = python
        self._specs = list(specs)
        self._options = [*(["--device", device] if device is not None else []), *options]
        self._on_stage = on_stage or (lambda _: None)
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.key = secrets.token_urlsafe(32)
        self.port = 0
        self.failed: dict[str, str] = {}  # by spec, why --keep-going left it out
        self.killed = False  # whether a signal ended the child: another start may fare better
        self.no_room: list[str] = []  # specs that did not fit beside the models before them
        self.weights: dict[str, Any] | None = None  # how large a llama.cpp server's file is (serve.models.weights)

    @property
    def url(self) -> str:
        """Base URL of the running server."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._process.pid if self._process is not None else None

    def __enter__(self) -> EmbeddedServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the child and wait until it listens."""
        start = module_command(self.module, self._interpreter())
        read_end, write_end = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in stop)
        command = [*start, *self._specs, "--port", "0", *self.own_options, *self._options]
        command += ["--api-key-env", KEY_VARIABLE, "--announce-fd", str(write_end)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._log,  # fd 1 belongs to our one document
                stderr=self._log,
                pass_fds=(write_end,),
                env={**os.environ, KEY_VARIABLE: self.key},
                start_new_session=True,  # Ctrl-C reaches us only; we end the child
            )
        finally:
            os.close(write_end)
        try:
            with os.fdopen(read_end, "rb") as pipe:
                self._await_port(pipe)
        except BaseException:
            self.stop()
            raise

    def _interpreter(self) -> str | None:
        """The interpreter that was asked for. Raises UsageError for one that cannot run the server."""
        if self._python is None:
            return None
        from evalgate.server.interpreter import checked

        return checked(self._python)

    def stop(self) -> None:
        """End the child; returns when it is gone."""
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._log is not None:
            self._log.close()
            self._log = None

    def release(self) -> None:
        """Leave the running child to itself: one that was started with --outlive stays when this process ends."""
        process, self._process = self._process, None
        if process is not None:
            if process.stdin is not None:
                process.stdin.close()
            process.returncode = 0  # nobody waits for it
        if self._log is not None:
            self._log.close()
            self._log = None

    def failure(self, what: str) -> ServerError:
        """The error for a request that got no answer: says how the child ended and what it last wrote."""
        code = self._code()
        if code is None:
            return ServerError(f"the embedded server gave no answer ({what})")
        self.killed = code < 0
        if code == -9:
            return ServerError("the embedded server was killed, most likely for memory: use a smaller model or dtype")
        return ServerError(f"the embedded server ended with code {code}: {self.last_words() or what}")

    def _code(self) -> int | None:
        """The child's exit code, None while it runs. Its connections close a moment before it can be waited for."""
        if self._process is None:
            return None
        try:
            return self._process.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def last_words(self) -> str:
        """The last line that the child wrote."""
        if self._log is None:
            return ""
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 4096))
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return lines[-1].strip() if lines else ""

    def _await_port(self, pipe: IO[bytes]) -> None:
        """Read the child's announcements until it says its port."""
        buffer = b""
        while True:
            select.select([pipe], [], [])
            data = os.read(pipe.fileno(), 65536)
            if not data:
                if self._process is not None:
                    self._process.wait()
                raise self.failure("it closed its announcement pipe")
            buffer += data
            *lines, buffer = buffer.split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "error" in message:
                    raise ServerError(message["error"])
                if "port" in message:
                    self.port = int(message["port"])
                    return
                if "failed" in message:
                    self.failed, self.no_room = message["failed"], message["no_room"]
                elif "weights" in message:
                    self.weights = message["weights"]
                else:
                    self._on_stage(message["stage"])
