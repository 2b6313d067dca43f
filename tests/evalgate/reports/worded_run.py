"""A fabricated run whose tokens have texts: five domains, three scripts, of any size. No model is involved."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pyarrow as pa

from evalgate.store.alternatives import schema
from evalgate.store.runs import Run
from evalgate.summary import Noise, StoredFigure
from evalgate.table import column, score_columns
from tests.evalgate.sample_run import source, summary

TEXTS = {
    "prose": "The lighthouse keeper had counted every wave since spring, or so he claimed; nobody believed him. "
    "At night the lamp turned slowly, and ships far out answered with a single long note.\n\n"
    "“Seventeen thousand,” he said, “and not one of them the same as the other.” ",
    "code": "def mean(values: list[float]) -> float:\n    total = sum(values)\n\treturn total / len(values)\n\n"
    "for i, row in enumerate(table.rows):\n    if row['kl'] >= 0.01:\n        print(f\"{i}: {row['kl']:.4f}\")\n",
    "chat": "<|im_start|>user\nHow many moons does Mars have?<|im_end|>\n<|im_start|>assistant\n"
    "Mars has two moons: Phobos and Deimos. Both were found in 1877.<|im_end|>\n",
    "arabic": "كان حارس المنارة يعدّ الأمواج منذ الربيع، ولم يصدّقه أحد في القرية الصغيرة. في الليل يدور الضوء ببطء. ",
    "japanese": "灯台守は春から波を数えていたと言ったが、誰も信じなかった。夜になると灯りがゆっくりと回った。",
}
_TOKEN = re.compile(r"<\|\w+\|>|\n+|\t| ?[A-Za-z]{1,6}| ?[\u0600-\u06ff]{1,4}|[\u3040-\u9fff]{1,2}| ?\d+| ?[^\w\s]+|\s")
LISTED = 10


def worded_run(
    positions: int = 3000,
    *,
    candidates: tuple[str, ...] = ("demo@int8",),
    documents: int = 30,
    window: int = 120,
    kind: str = "kl",
    lists: int = 40,
    extra: tuple[str, ...] = (),
    measured_floor: bool = True,
    seed: int = 0,
) -> Run:
    """A run of about so many positions a candidate. lists: how many of the worst have both sides' likeliest tokens.
    extra: texts of tokens that stand in the first window. measured_floor: the run measured its noise floor."""
    random = np.random.default_rng(seed)
    texts, ids = vocabulary(extra)
    per = max(positions // documents, 4)
    names = list(TEXTS)
    token = np.concatenate([_document(ids[names[d % len(names)]], per, d) for d in range(documents)])
    token[: len(extra)] = [texts.index(text) for text in extra]
    n = len(token)
    which = np.repeat(np.arange(documents), per)
    place = np.tile(np.arange(per), documents)
    windows_each = -(-per // window)
    columns = {
        "domain": _coded(which % len(names), names),
        "document": _coded(which, [f"{names[d % len(names)]}/{d:03d}" for d in range(documents)]),
        "window": which * windows_each + place // window,
        "position": place % window + 1,
        "token": token,
        "bytes": np.array(
            [0 if text.startswith("<|") else max(len(text.encode("utf-8", "surrogatepass")), 1) for text in texts]
        )[token],
    }
    entropy = random.gamma(1.3, 1.2, n)
    effect = np.exp(random.normal(0, 0.5, documents))[which] * np.array([1.0, 1.8, 0.7, 2.6, 1.3])[which % len(names)]
    ref_nll = random.exponential(entropy + 0.05)
    tables = []
    for number, name in enumerate(candidates):
        scores = _scores(random, effect, entropy, ref_nll, token, len(texts), 0.0015 * 4.0**number)
        if kind == "ppl":
            scores = {key: scores[key] for key in score_columns(pair=False)}
        given = {"candidate": _coded(np.zeros(n, int), [name]), **columns, **scores}
        tables.append(pa.table({key: column(key, value) for key, value in given.items()}))
    table = pa.concat_tables(tables).unify_dictionaries()
    reference = source("demo", kl_floor=1.3e-5) if kind != "ppl" else None
    document = summary(table, kind=kind, reference=reference)
    if measured_floor and kind == "kl":
        document = _with_floor(document)
    manifest = {"request": {"kind": kind}, "files": {"tokens.parquet": {"bytes": 12, "sha256": "0" * 64, "rows": n}}}
    return with_lists(
        Run(document, table, manifest, token_texts=dict(enumerate(texts))), lists if kind == "kl" else 0, random
    )


def vocabulary(extra: tuple[str, ...] = ()) -> tuple[list[str], dict[str, np.ndarray]]:
    """The texts of all tokens, and the ids of each domain's text in order."""
    places: dict[str, int] = {}
    ids = {
        name: np.array([places.setdefault(found, len(places)) for found in _TOKEN.findall(text)])
        for name, text in TEXTS.items()
    }
    for text in extra:
        places.setdefault(text, len(places))
    return list(places), ids


def with_lists(run: Run, count: int, random: np.random.Generator) -> Run:
    """The run with both sides' likeliest tokens at the worst positions of each candidate."""
    if not count:
        return run
    rows: list[dict[str, object]] = []
    texts = len(run.token_texts or ())
    for name in run.table.column("candidate").unique().to_pylist():
        part = run.table.filter(pa.compute.equal(run.table.column("candidate").cast("string"), name))
        worst = np.sort(np.argsort(-part.column("kl").to_numpy(), kind="stable")[:count])
        for row in worst.tolist():
            given = {key: part.column(key)[row].as_py() for key in ("candidate", "window", "position")}
            for side in ("ref", "cand"):
                first = part.column(f"{side}_top1")[row].as_py()
                others = [int(i) for i in random.permutation(texts) if i != first][: LISTED - 1]
                p = np.sort(random.dirichlet(np.full(LISTED + 1, 0.4)))[::-1][:LISTED]
                given[f"{side}_top_ids"] = [first, *others]
                given[f"{side}_top_logprobs"] = np.log(np.maximum(p, 1e-9)).tolist()
            rows.append(given)
    return replace(run, alternatives_table=pa.Table.from_pylist(rows, schema=schema()))


def _document(ids: np.ndarray, length: int, start: int) -> np.ndarray:
    return np.resize(np.roll(ids, -7 * start), length)


def _coded(codes: np.ndarray, names: list[str]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(names))


def _scores(random, effect, entropy, ref_nll, token, size, scale) -> dict[str, np.ndarray]:
    n = len(token)
    kl = np.minimum(scale * effect * (0.2 + entropy) * random.lognormal(-1.0, 1.7, n), 20.0)
    step = random.normal(0, np.sqrt(2 * kl)) + kl / 3
    differs = random.random(n) < np.minimum(np.sqrt(kl) * 0.8, 0.9)
    ref_rank = np.where(random.random(n) < np.exp(-ref_nll), 1, random.integers(2, 40, n))
    ref_top1 = np.where(ref_rank == 1, token, random.integers(0, size, n))
    cand_top1 = np.where(differs, random.integers(0, size, n), ref_top1)
    same = cand_top1 == ref_top1
    return {
        "ref_nll": ref_nll,
        "ref_entropy": entropy,
        "ref_top1": ref_top1,
        "ref_margin": random.exponential(1.0, n),
        "ref_rank": ref_rank,
        "cand_nll": np.maximum(ref_nll + step, 0.0),
        "cand_entropy": np.maximum(entropy + random.normal(0, 0.3, n) * np.sqrt(kl), 0.0),
        "cand_top1": cand_top1,
        "cand_margin": random.exponential(1.0, n),
        "cand_rank": np.where(differs, random.integers(1, 60, n), ref_rank),
        "kl": kl,
        "reverse_kl": kl * random.lognormal(0, 0.2, n),
        "js": np.minimum(kl / 4, 0.69),
        "tv": np.minimum(np.sqrt(kl / 2), 1.0),
        "regret": np.where(same, 0.0, random.exponential(0.3, n)),
        "topk_overlap": np.clip(1 - random.exponential(np.sqrt(kl)), 0, 1),
        "ref_rank_of_cand_top1": np.where(same, 1, random.integers(2, 9, n)),
        "cand_rank_of_ref_top1": np.where(same, 1, random.integers(2, 9, n)),
    }


def _with_floor(document):
    figure = StoredFigure(value=2.4e-5, low=1.9e-5, high=3.1e-5, se=None, method="clustered-t")
    excess = StoredFigure(value=0.003, low=0.002, high=0.004, se=None, method="clustered-t")
    noise = Noise(
        conditions=["demo: batches of 1", "demo@int8: batches of 1"],
        windows=8,
        positions=900,
        figures={"kl": {"mean": figure}},
        excess={"kl": {"mean": excess}},
    )
    comparisons = [one.model_copy(update={"noise": noise}) for one in document.comparisons]
    return document.model_copy(update={"comparisons": comparisons})
