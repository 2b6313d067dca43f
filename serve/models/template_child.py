"""The process that renders templates of requests: a template is code, and may ask for any memory and time.

One JSON document a line in and out. Its parent, `templates`, ends it when it takes too long.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

ROOM = 256 << 20  # bytes of address space beyond what the libraries take


def main() -> None:
    """Answer requests until standard input ends."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from transformers.utils.chat_template_utils import render_jinja_template

    with open("/proc/self/statm") as sizes:  # noqa: PTH123 (before anything else is imported)
        now = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + ROOM, now + ROOM))
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line), render_jinja_template)), file=out, flush=True)


def _answer(asked: dict[str, Any], render: Any) -> dict[str, Any]:
    try:
        texts, spans = render(
            [asked["chat"]],
            tools=asked["tools"],
            chat_template=asked["template"],
            return_assistant_tokens_mask=asked["spans"],
            add_generation_prompt=asked["prompt"],
            **asked["variables"],
        )
        if len(texts[0]) > asked["most"]:
            return {"error": f"it makes {len(texts[0])} characters, and {asked['most']} are possible"}
        return {"text": texts[0], "spans": [list(span) for span in spans[0]] if asked["spans"] else []}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except Exception as error:  # a template is code: it may raise anything
        return {"error": (str(error) or type(error).__name__)[:500]}
