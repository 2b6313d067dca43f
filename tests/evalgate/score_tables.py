"""Token-score tables made from full distributions by slow loops, with the figures that they must give."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from evalgate.table import schema as table_schema


@dataclass(frozen=True)
class Case:
    """p and q [n, V] float64 rows of one candidate, the actual tokens, and where each row comes from."""

    p: np.ndarray
    q: np.ndarray
    token: list[int]
    bytes: list[int]
    document: list[str]
    domain: list[str]
    window: list[int]
    position: list[int]


def make_case(seed: int = 0, *, windows_per_document: tuple[int, ...] = (2, 1, 3), length: int = 7, vocab: int = 11):
    rng = np.random.default_rng(seed)
    document, domain, window, position = [], [], [], []
    index = 0
    for d, count in enumerate(windows_per_document):
        for _ in range(count):
            for i in range(1, length + d):
                document.append(f"doc{d}")
                domain.append("prose" if d % 2 == 0 else "code")
                window.append(index)
                position.append(i)
            index += 1
    n = len(window)
    logits = rng.normal(0, 2, (n, vocab))
    other = logits + rng.normal(0, 0.5, (n, vocab))
    p, q = (np.exp(x) / np.exp(x).sum(1, keepdims=True) for x in (logits, other))
    token = [int(rng.integers(vocab)) for _ in range(n)]
    return Case(p, q, token, [int(rng.integers(1, 5)) for _ in range(n)], document, domain, window, position)


def top(row, k):
    return sorted(range(len(row)), key=lambda v: (-row[v], v))[:k]


def kl(a, b):
    return math.fsum(x * (math.log(x) - math.log(y)) for x, y in zip(a, b, strict=True))


def entropy(a):
    return -math.fsum(x * math.log(x) for x in a)


def margin(a):
    first, second = top(a, 2)
    return math.log(a[first]) - math.log(a[second])


def columns(case: Case, *, candidate: str = "cand", k: int = 4) -> dict[str, list]:
    rows = range(len(case.window))
    m = [(case.p[i] + case.q[i]) / 2 for i in rows]
    data: dict[str, list] = {
        "candidate": [candidate] * len(rows),
        "domain": case.domain,
        "document": case.document,
        "window": case.window,
        "position": case.position,
        "token": case.token,
        "bytes": case.bytes,
    }
    for side, dist in (("ref", case.p), ("cand", case.q)):
        data[f"{side}_nll"] = [-math.log(dist[i][case.token[i]]) for i in rows]
        data[f"{side}_entropy"] = [entropy(dist[i]) for i in rows]
        data[f"{side}_top1"] = [top(dist[i], 1)[0] for i in rows]
        data[f"{side}_margin"] = [margin(dist[i]) for i in rows]
        data[f"{side}_rank"] = [1 + top(dist[i], len(dist[i])).index(case.token[i]) for i in rows]
    data["kl"] = [kl(case.p[i], case.q[i]) for i in rows]
    data["reverse_kl"] = [kl(case.q[i], case.p[i]) for i in rows]
    data["js"] = [(kl(case.p[i], m[i]) + kl(case.q[i], m[i])) / 2 for i in rows]
    data["tv"] = [math.fsum(abs(case.p[i] - case.q[i])) / 2 for i in rows]
    data["regret"] = [math.log(max(case.p[i])) - math.log(case.p[i][top(case.q[i], 1)[0]]) for i in rows]
    data["topk_overlap"] = [len(set(top(case.p[i], k)) & set(top(case.q[i], k))) / k for i in rows]
    data["ref_rank_of_cand_top1"] = [1 + top(case.p[i], 99).index(top(case.q[i], 1)[0]) for i in rows]
    data["cand_rank_of_ref_top1"] = [1 + top(case.q[i], 99).index(top(case.p[i], 1)[0]) for i in rows]
    return data


def table(data: dict[str, list], *, pair: bool = True) -> pa.Table:
    schema = table_schema(pair=pair)
    return pa.table({f.name: pa.array(data[f.name], f.type) for f in schema}, schema=schema)


def replaced(whole: pa.Table, name: str, **values: object) -> pa.Table:
    """Drop column `name` and add the given float32 columns."""
    whole = whole.drop_columns([name])
    for key, value in values.items():
        whole = whole.append_column(key, pa.array(value, pa.float32()))
    return whole
