"""Rendering chat templates: a model's own in this process, one that a request brings in a process with limits."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

from serve.errors import BadRequest

SECONDS = 5.0  # for one rendering
START_SECONDS = 60.0  # for the first one of a process, which imports its libraries
MOST_CHARACTERS = 4 << 20  # of one rendering


_NOTHING = (
    json.dumps({"chat": [], "template": "", "tools": None, "variables": {}, "prompt": False, "spans": False, "most": 0})
    + "\n"
).encode()


class Rendered(NamedTuple):
    """The text, and [start, end) in characters of the template's {% generation %} blocks where asked for."""

    text: str
    spans: list[tuple[int, int]]


def render_own(request: dict[str, Any]) -> Rendered:
    """Render a model's own template. `request`: chat, template, tools, variables, prompt, spans.

    Raises BadRequest where the template refuses the messages or makes too much text of them.
    """
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        texts, found = render_jinja_template(
            [request["chat"]],
            tools=request["tools"],
            chat_template=request["template"],
            return_assistant_tokens_mask=request["spans"],
            add_generation_prompt=request["prompt"],
            **request["variables"],
        )
    except Exception as error:  # a template is code: it may raise anything
        raise _refusal(
            str(error) if isinstance(error, TemplateError) else f"{type(error).__name__}: {error}"
        ) from error
    return Rendered(texts[0], [(start, end) for start, end in found[0]] if request["spans"] else [])


def render_foreign(request: dict[str, Any]) -> Rendered:
    """The same for a template from a request, within SECONDS and MOST_CHARACTERS."""
    answer = _child.ask({**request, "most": MOST_CHARACTERS})
    if "error" in answer:
        raise _refusal(answer["error"])
    return Rendered(answer["text"], [(start, end) for start, end in answer["spans"]])


def _refusal(why: str) -> BadRequest:
    return BadRequest(f"the chat template refuses these messages: {why}", param="messages")


class _Child:
    """One process, started at first use and again after one that had to be ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The child's answer to one request; an error of its own where the child ended or took too long."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            try:
                if self._process is None or self._process.poll() is not None:
                    self.end()
                    self._process = _start()
                    self._exchange(_NOTHING, START_SECONDS)  # imports do not count as rendering
                return self._exchange(line, SECONDS)
            except (OSError, TimeoutError, ValueError) as error:
                self.end()
                return {"error": "it takes too long" if isinstance(error, TimeoutError) else "it needs too much memory"}

    def _exchange(self, line: bytes, seconds: float) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise OSError("the process is gone")
        until = time.monotonic() + seconds
        writer = threading.Thread(target=_write, args=(process.stdin, line), daemon=True)
        writer.start()  # the child may answer nothing before it has read everything
        parts: list[bytes] = []
        while not parts or not parts[-1].endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError
            part = os.read(process.stdout.fileno(), 1 << 20)
            if not part:
                raise OSError("the process has ended")
            parts.append(part)
        answer: dict[str, Any] = json.loads(b"".join(parts))
        return answer

    def end(self) -> None:
        """End the process, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not read any more
                    pipe.close()


def _write(stream: Any, line: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):
        stream.write(line)
        stream.flush()


def _start() -> subprocess.Popen[bytes]:
    """Isolated, without torch, and without the environment's secrets."""
    root = str(Path(__file__).parents[2])
    code = f"import sys; sys.path.append({root!r}); from serve.models.template_child import main; main()"
    kept = {
        name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH", "VIRTUAL_ENV") if name in os.environ
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**kept, "USE_TORCH": "0", "USE_TF": "0", "HF_HUB_OFFLINE": "1"},
        start_new_session=True,
    )


_child = _Child()
atexit.register(_child.end)
