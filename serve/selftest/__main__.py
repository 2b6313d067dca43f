"""`python -m serve.selftest CHECK...`: see the package."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from serve.errors import ServeError
from serve.selftest.names import CHECKS


def main(argv: list[str] | None = None) -> int:
    """Run the checks and print their lines; 0 whatever they find, for the lines say it."""
    parser = argparse.ArgumentParser(prog="python -m serve.selftest", description="Whether what is installed works.")
    parser.add_argument("checks", nargs="+", choices=CHECKS, metavar="CHECK", help=", ".join(CHECKS))
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ...")
    options = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    lines = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # some libraries print on import, from C too
    with tempfile.TemporaryDirectory(prefix="evalgate-selftest-") as place:
        os.environ["EVALGATE_CACHE"] = place  # what a load caches goes with the models
        for name in options.checks:
            print(json.dumps({"begin": name}), file=lines)
            print(json.dumps({"check": name, **found(name, Path(place), options.device)}), file=lines)
    lines.close()
    return 0


def found(name: str, place: Path, device: str) -> dict[str, Any]:
    """What one check found: `ok` with its facts; or `missing`, a module's name; or `why` it fails, in a sentence."""
    try:
        from serve.models.quiet import quiet
        from serve.selftest import checks

        with quiet():
            return {"ok": True, **checks.run(name, place, device)}
    except ModuleNotFoundError as error:
        return {"ok": False, "missing": error.name or str(error)}
    except ServeError as error:
        return {"ok": False, "why": error.message}
    except Exception as error:
        said = " ".join(str(error).split())
        return {"ok": False, "why": f"{type(error).__name__}: {said}"[:500]}


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # llama.cpp's threads do not end by themselves
