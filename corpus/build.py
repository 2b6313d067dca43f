"""Builds the corpus that evalgate ships from the texts beside this file: `python corpus/build.py`.

corpus/v1/*.txt hold the documents of a domain, each under a line `%%%% DOMAIN/NAME | SOURCE`; a chat has its turns under
lines `--- ROLE`, the tools it offers under `--- tools`, and calls of tools under `--- call`. worked.py computes exercises.
The result does not depend on the machine: `--check` builds again and compares with what is shipped.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from itertools import combinations, zip_longest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import worked

from evalgate.corpora import shipped as store
from evalgate.corpora.corpus import build, digest

HERE = Path(__file__).parent
VERSION = 1
DOMAINS = ("prose", "code", "chat", "maths", "tools", "german", "spanish", "russian", "chinese")
HEADER = re.compile(r"^%%%% (?P<domain>[a-z]+)/(?P<name>\S+) \| (?P<source>\S+)$", re.M)
TURN = re.compile(r"^--- (?P<role>tools|call|system|user|assistant|tool)(?: (?P<name>\w+))?$", re.M)
SHINGLE = 8  # words; characters in Chinese
ALIKE = 0.2  # two documents may share at most this part of the shorter one's shingles

Row = dict[str, Any]


def main() -> None:
    """Build the corpus, or compare it with the one that is shipped."""
    parser = argparse.ArgumentParser(description="Build the corpus that evalgate ships.")
    parser.add_argument(
        "--check", action="store_true", help="write nothing: fail where the result is not what is shipped"
    )
    made = rows()
    check(made)
    raw = encoded(made)
    if parser.parse_args().check:
        if hashlib.sha256(raw).hexdigest() != store.manifest(VERSION).sha256:
            sys.exit("the shipped corpus is not the one that these texts make: run python corpus/build.py")
        return
    store.FOLDER.mkdir(exist_ok=True)
    place = store.FOLDER / f"v{VERSION}.jsonl.gz"
    place.write_bytes(gzip.compress(raw, 9, mtime=0))
    manifest = {
        "version": VERSION,
        "sha256": hashlib.sha256(raw).hexdigest(),
        "hash": "",
        "domains": dict(Counter(str(row["domain"]) for row in made)),
        "sources": dict(sorted(Counter(str(row["source"]) for row in made).items())),
    }
    write_manifest(manifest)  # reading the corpus checks the file against it
    manifest["hash"] = digest(build("corpus", store.read_shipped(VERSION)).documents)
    write_manifest(manifest)
    sys.stderr.write(f"wrote {place} ({place.stat().st_size:,} bytes, {len(made)} documents)\n")


def write_manifest(manifest: dict[str, Any]) -> None:
    """Write the manifest beside the corpus."""
    place = store.FOLDER / f"v{VERSION}.json"
    place.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def rows() -> list[Row]:
    """All documents: the domains take turns, and each domain's are in a fixed order that mixes its kinds."""
    found = [*written(), *computed()]
    by_domain = {
        domain: sorted((row for row in found if row["domain"] == domain), key=lambda row: _scatter(str(row["id"])))
        for domain in DOMAINS
    }
    turns = zip_longest(*by_domain.values())
    return [row for turn in turns for row in turn if row is not None]


def written() -> Iterator[Row]:
    """The documents in the text files."""
    for path in sorted((HERE / f"v{VERSION}").glob("*.txt")):
        text = path.read_text(encoding="utf-8")
        heads = list(HEADER.finditer(text))
        for head, after in zip_longest(heads, heads[1:]):
            body = text[head.end() : after.start() if after else len(text)].strip("\n")
            shown = _chat(body) if TURN.match(body) else {"text": body + "\n"}
            yield {
                "id": f"{head['domain']}/{head['name']}",
                "domain": head["domain"],
                "source": head["source"],
                **shown,
            }


def computed() -> Iterator[Row]:
    """The exercises."""
    for name, text in worked.exercises():
        yield {"id": f"maths/{name}", "domain": "maths", "source": "evalgate", "text": text}


def encoded(made: list[Row]) -> bytes:
    """The rows as JSON lines."""
    return "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in made).encode()


def check(made: list[Row]) -> None:
    """Refuse, by name, what must not be shipped: a name twice, text that is not NFC, blank ends, near-copies."""
    names = Counter(row["id"] for row in made)
    problems = [f"{name}: there twice" for name, count in names.items() if count > 1]
    for row in made:
        for text in _texts(row):
            if unicodedata.normalize("NFC", text) != text:
                problems.append(f"{row['id']}: not NFC")
            if any(c in text for c in "\r\0\ufeff\ufffd"):
                problems.append(f"{row['id']}: a character that does not belong there")
        if any(line != line.rstrip() for line in str(row.get("text", "")).split("\n")):
            problems.append(f"{row['id']}: blanks at the end of a line")
    problems += [f"{a} and {b} share {share:.0%} of their text" for a, b, share in alike(made)]
    if problems:
        sys.exit("\n".join(problems))


def alike(made: list[Row]) -> Iterator[tuple[str, str, float]]:
    """Pairs of documents that share more than ALIKE of the shorter one's shingles."""
    shingles = {str(row["id"]): _shingles("\n".join(_texts(row)), row["domain"] == "chinese") for row in made}
    for (a, left), (b, right) in combinations(shingles.items(), 2):
        share = len(left & right) / max(1, min(len(left), len(right)))
        if share > ALIKE:
            yield a, b, share


def _shingles(text: str, by_character: bool) -> set[tuple[str, ...]]:
    words = [c for c in text if c.isalnum()] if by_character else re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + SHINGLE]) for i in range(max(1, len(words) - SHINGLE + 1))}


def _texts(row: Row) -> list[str]:
    return [row["text"]] if "text" in row else [str(message["content"]) for message in row["messages"]]


def _scatter(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def _chat(body: str) -> Row:
    """Messages, and the tools where a chat offers some. Calls in one turn are answered in their order."""
    heads = list(TURN.finditer(body))
    messages: list[Row] = []
    tools: list[Row] = []
    waiting: list[str] = []
    for head, after in zip_longest(heads, heads[1:]):
        content = body[head.end() : after.start() if after else len(body)].strip("\n")
        if head["role"] == "tools":
            tools = [_tool(json.loads(line)) for line in content.splitlines()]
        elif head["role"] == "call":
            first = sum(len(message.get("tool_calls", ())) for message in messages) + 1
            calls = [
                {"id": f"call_{number}", "type": "function", "function": json.loads(line)}
                for number, line in enumerate(content.splitlines(), first)
            ]
            waiting = [str(call["id"]) for call in calls]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
        elif head["role"] == "tool":
            messages.append({"role": "tool", "content": content, "name": head["name"], "tool_call_id": waiting.pop(0)})
        else:
            messages.append({"role": head["role"], "content": content})
    return {"messages": messages, **({"tools": tools} if tools else {})}


def _tool(short: Row) -> Row:
    """A tool in OpenAI's form. short: its parameters as `name: [type, description]`, optional ones with `?`."""
    properties = {name.rstrip("?"): _parameter(*kind) for name, kind in short["parameters"].items()}
    required = [name for name in short["parameters"] if not name.endswith("?")]
    parameters = {"type": "object", "properties": properties, "required": required}
    return {
        "type": "function",
        "function": {"name": short["name"], "description": short["description"], "parameters": parameters},
    }


def _parameter(kind: str, description: str) -> Row:
    if kind.startswith("array of "):
        return {"type": "array", "items": {"type": kind.removeprefix("array of ")}, "description": description}
    return {"type": kind, "description": description}


if __name__ == "__main__":
    main()
