"""Fabricated sweeps: the leaderboard of seeded token-score tables, no model involved."""

from __future__ import annotations

from typing import Any

from evalgate.leaderboard import Leaderboard
from evalgate.stats.leaderboard import Contender, leaderboard
from evalgate.store.runs import Run
from tests.evalgate.sample_run import source, summary, token_table

SIZES = {"bf16": 536_000_000, "Q8_0": 285_000_000, "int8": 440_000_000, "Q4_0": 152_000_000, "Q2_K": 130_000_000}


def scaled(name: str, factor: float, *, moved: int = 0, documents: int = 12) -> Any:
    """The scores of one candidate, its divergences `factor` times those of the sample run, `moved` positions later."""
    import numpy as np
    import pyarrow as pa

    table = token_table((name,), documents=documents)
    for column in ("kl", "reverse_kl", "js"):
        place = table.schema.get_field_index(column)
        values = np.roll(table.column(column).to_numpy(), moved) * factor
        table = table.set_column(place, table.schema.field(column), pa.array(values).cast(pa.float32()))
    return table


def run_of(name: str, factor: float, moved: int = 0, **facts: str) -> Run:
    """A run of one candidate, whose source has these facts besides."""
    table = scaled(name, factor, moved=moved)
    document = summary(table, reference=source("demo"), notes=[])
    one = document.comparisons[0]
    own = one.model_copy(update={"candidate": one.candidate.model_copy(update={"extra": facts})})
    return Run(document.model_copy(update={"comparisons": [own]}), table, {})


def facts_of(size: int, parameters: int = 268_000_000) -> dict[str, str]:
    return {
        "weights_bytes": str(size),
        "parameters": str(parameters),
        "weights_counted": "tensors of the GGUF file",
        "weights_types": f"Q4_K {size - 10}, F32 10",
    }


def board() -> Leaderboard:
    """Six candidates: two that are tied, one that could not be measured, all measured ones with a size."""
    found = [
        Contender(name, name, run_of(name, factor, moved, **facts_of(SIZES[name])), folder=f"runs/{name}", speed=speed)
        for name, factor, moved, speed in (
            ("Q8_0", 0.2, 0, 912.5),
            ("bf16", 0.1, 0, 1234.0),
            ("int8", 0.201, 100, 850.0),
            ("Q4_0", 1.0, 0, None),
            ("Q2_K", 6.0, 0, 33.3),
        )
    ]
    found.append(Contender("nf4", "models/nf4", reason="'models/nf4' needs bitsandbytes: pip install it"))
    return leaderboard(found, confidence=0.95, seconds=12.5)
