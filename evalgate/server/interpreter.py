"""Another Python interpreter for the scoring child: whether it has what the server needs, before it is started."""

from __future__ import annotations

import json
import shutil
import subprocess
from functools import cache
from pathlib import Path

from evalgate.errors import UsageError

LEAST = (3, 11)
# module -> package, of what the server imports; numba only makes it faster
NEEDS = {
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "pydantic": "pydantic",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "jinja2": "jinja2",
    "prometheus_client": "prometheus-client",
    "xxhash": "xxhash",
    "filelock": "filelock",
    "platformdirs": "platformdirs",
}
_SECONDS = 60
_ASK = (
    "import importlib.util, json, sys; "
    "print(json.dumps([list(sys.version_info[:2]), [n for n in {names!r} if importlib.util.find_spec(n) is None]]))"
)


@cache
def checked(python: str) -> str:
    """The interpreter's path, absolute. Nothing that it would import is run here.

    Raises UsageError where it is not there, is not Python, is too old, or lacks packages: then with the line that
    installs them.
    """
    found = shutil.which(str(Path(python).expanduser()))
    if found is None:
        raise UsageError(f"--python {python} is not a program: give the path of an interpreter, such as env/bin/python")
    path = str(Path(found).absolute())  # not resolved: a link into a virtual environment is what makes it one
    try:
        asked = subprocess.run(
            [path, "-I", "-c", _ASK.format(names=list(NEEDS))], capture_output=True, timeout=_SECONDS, check=True
        )
        version, absent = json.loads(asked.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise UsageError(
            f"--python {python} does not answer as a Python interpreter ({type(error).__name__})"
        ) from None
    if tuple(version) < LEAST:
        raise UsageError(
            f"--python {python} is Python {version[0]}.{version[1]}: the scoring server needs 3.11 or newer"
        )
    if absent:
        packages = " ".join(NEEDS[name] for name in absent)
        raise UsageError(f"--python {python} lacks {', '.join(absent)}: {path} -m pip install {packages}")
    return path
