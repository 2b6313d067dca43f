"""The back ends, tried in a child process: what imports, loads a tiny model and repeats (serve.selftest)."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import util
from typing import IO, Any, Literal

from packaging.utils import canonicalize_name
from pydantic import BaseModel

from evalgate.core import counted
from evalgate.doctor.packages import Extra
from evalgate.server.process import module_command
from serve.wire import TRIED_CONVERSIONS

SECONDS = 300.0  # for one check, imports included: a slow disk takes long to read torch
# Which package each check needs besides those of the server, so that the extra that brings it can be named.
NEEDS = {
    "gguf": "gguf",
    "torchao": "torchao",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "llama.cpp": "xllamacpp",
}
_CONVERSIONS = {f"@{name}": package for name, package in TRIED_CONVERSIONS.items()}
_ENDING_SECONDS = 5.0  # between the child's last line and its end
_LEAD = ("transformers", "server", "torch", "checkpoint")


class Check(BaseModel):
    """What a check found. status: "ok", "missing" (says: the install line), "broken" (says: why), or "untried" (says:
    what else is broken).

    facts: as serve.selftest.checks gives them.
    """

    name: str
    status: Literal["ok", "missing", "broken", "untried"]
    says: str
    facts: dict[str, Any]


def check_backends(extras: Sequence[Extra], *, device: str = "auto", seconds: float = SECONDS) -> list[Check]:
    """Every check in order. A library that ends the child, or never answers, is broken; the others go on in a new one.

    Checks whose packages are not installed are not tried.
    """
    absent = {package.name for extra in extras for package in extra.packages if package.installed is None}
    names = [*_LEAD, *_CONVERSIONS, *NEEDS]
    needed = NEEDS | {name: package for name, package in _CONVERSIONS.items() if package is not None}
    found = {name: _missing(name, package, extras) for name, package in needed.items() if package in absent}
    found |= {name: _missing(name, name, extras) for name in ("torch", "transformers") if name in absent}
    if not {"torch", "transformers"}.isdisjoint(found):  # nothing of the server runs
        found |= {name: _missing(name, "torch", extras) for name in names if name not in found}
    while left := [name for name in names if name not in found]:
        found |= _tried(left, extras, device=device, seconds=seconds)
        if found["torch"].status == "broken":
            said = "torch does not work, or not on this device"
            others = [name for name in names if name not in found and name != "llama.cpp"]
            found |= {name: Check(name=name, status="untried", says=said, facts={}) for name in others}
    return [found[name] for name in names]


def _tried(names: Sequence[str], extras: Sequence[Extra], *, device: str, seconds: float) -> dict[str, Check]:
    """What one child found, of at least one of the checks."""
    found: dict[str, Check] = {}
    begun, why = names[0], ""
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [*module_command("serve.selftest"), *names, "--device", device],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C reaches us only; we end the child
        )
        try:
            for line in _lines(child, seconds):
                if "begin" in line:
                    begun = line["begin"]
                else:
                    found[line["check"]] = _check(line, extras)
                    if line["check"] == "torch" and not line["ok"]:  # the others would fail for the same reason
                        break
        except TimeoutError:
            why = f"it gave no answer for {seconds:g} seconds"
        finally:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()
        if begun not in found:
            found[begun] = _broken(begun, why or _ending(child.returncode, log))
    return found


def _lines(child: subprocess.Popen[bytes], seconds: float) -> Iterator[dict[str, Any]]:
    """The child's JSON lines until it closes its output, and then its exit code is known; TimeoutError where it is
    silent for so many seconds."""
    assert child.stdout is not None
    buffer = b""
    while True:
        if not select.select([child.stdout], [], [], seconds)[0]:
            raise TimeoutError
        data = os.read(child.stdout.fileno(), 1 << 16)
        if not data:
            with suppress(subprocess.TimeoutExpired):
                child.wait(_ENDING_SECONDS)
            return
        *lines, buffer = (buffer + data).split(b"\n")
        for line in lines:
            yield json.loads(line)


def _check(line: dict[str, Any], extras: Sequence[Extra]) -> Check:
    """What a line of the child says."""
    name, facts = line["check"], {k: v for k, v in line.items() if k not in ("check", "ok", "missing", "why")}
    if line["ok"]:
        return Check(name=name, status="ok", says=_summary(facts), facts=facts)
    if "missing" not in line:
        return _broken(name, line["why"])
    module = str(line["missing"]).partition(".")[0]
    here = util.find_spec(module) is not None  # a part of it is what cannot be found: the package is damaged
    return _broken(name, f"there is no module {line['missing']}") if here else _missing(name, module, extras)


def _summary(facts: dict[str, Any]) -> str:
    """The facts that a reader looks for, as words."""
    said = [str(facts[key]) for key in ("version", "build") if facts.get(key)]
    if facts.get("threads"):
        said.append(f"{counted(facts['threads'], 'thread')}, {facts['cpu_kernels']}")
    said += [f"{device['name']}, {device['memory'] / 2**30:.0f} GiB" for device in facts.get("devices", ())]
    if "repeat_difference" in facts:
        off = facts["repeat_difference"]
        said.append("loads and repeats exactly" if not off else f"loads and repeats to {off:.2g} nats")
    if facts.get("batch_difference"):
        said.append(f"other batches differ by up to {facts['batch_difference']:.1e} nats")
    return ", ".join(said)


def _missing(name: str, package: str, extras: Sequence[Extra]) -> Check:
    """The line for what is not installed: that of the smallest extra that brings it, where one does."""
    wanted = canonicalize_name(package)
    bringing = [extra for extra in extras if wanted in {canonicalize_name(p.name) for p in extra.packages}]
    line = min(bringing, key=lambda extra: len(extra.packages)).install if bringing else f"pip install {package}"
    return Check(name=name, status="missing", says=line, facts={})


def _broken(name: str, why: str) -> Check:
    return Check(name=name, status="broken", says=why, facts={})


def _ending(code: int, log: IO[bytes]) -> str:
    """How the child ended, in words, and what it last wrote."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(0, size - 4096))
    lines = log.read().decode(errors="replace").strip().splitlines()
    signals = {int(one): one.name for one in signal.Signals}
    how = f"it ended the process ({signals.get(-code, f'signal {-code}' if code < 0 else f'exit code {code}')})"
    return f"{how}: {lines[-1].strip()}" if lines else how
