"""The grid that printed log-probabilities lie on."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from evalgate.dialects.base import Reply, Request
from evalgate.dialects.findings import Question
from evalgate.probe.probe import probe
from evalgate.probe.quantum import Quantum, coarsest, quantum_of, rounding_cost
from tests.evalgate.dialects import fakes as servers
from tests.evalgate.dialects.drive import drive, reply_of
from tests.evalgate.dialects.fakes import WORDS

VALUES = -np.random.default_rng(0).exponential(3.0, size=60)
GRIDS = {
    "decimal-1": (lambda v: round(v, 1), Quantum("decimal", 1)),
    "decimal-4": (lambda v: round(v, 4), Quantum("decimal", 4)),
    "float16": (lambda v: float(np.float16(v)), Quantum("float16")),
    "bfloat16": (lambda v: float(torch.tensor(v, dtype=torch.bfloat16)), Quantum("bfloat16")),
    "float32": (lambda v: float(np.float32(v)), Quantum("float32")),
    "float32, shortest digits": (lambda v: float(str(np.float32(v))), Quantum("float32")),
    "float64": (float, None),
}


@pytest.mark.parametrize("grid", GRIDS)
def test_the_grid_is_found_and_its_half_step_holds(grid: str) -> None:
    rounded, expected = GRIDS[grid]
    values = [rounded(float(v)) for v in VALUES]
    assert quantum_of(values) == expected
    if expected is not None:
        moved = [abs(r - v) for r, v in zip(values, VALUES, strict=True)]
        steps = [expected.half_step(r) for r in values]
        assert all(m <= s * (1 + 1e-9) for m, s in zip(moved, steps, strict=True))
        assert sum(m > s / 8 for m, s in zip(moved, steps, strict=True)) > len(VALUES) / 4


def test_too_few_values_tell_nothing() -> None:
    assert quantum_of([-0.5, -1.0, -1.5] * 9) is None
    assert quantum_of([]) is None


def test_what_rounding_costs() -> None:
    """Two positions of one grid, by hand: the masses e**v, each of which may be off by half a step in the exponent."""
    step, positions = 5e-4, [[-0.5, -1.5], [-0.25]]
    cost = rounding_cost(Quantum("decimal", 3), positions)
    masses = [[math.exp(v) for v in values] for values in positions]
    width = [sum(p * (math.exp(step) - math.exp(-step)) for p in values) for values in masses]
    hidden = [sum(p * (math.exp(step) - 1 - step) for p in values) for values in masses]
    assert cost is not None
    assert cost.tv == pytest.approx(sum(width) / 2, rel=1e-9)
    assert cost.kl == pytest.approx(sum(hidden) / 2, rel=1e-6)
    assert str(cost) == (
        "TV is known 0.0008 less closely at each position, and a KL up to about 1e-07 nats cannot be told from 0"
    )


@pytest.mark.parametrize("quantum", [None, Quantum("float32")])
def test_float32_costs_nothing(quantum: Quantum | None) -> None:
    assert rounding_cost(quantum, [[-0.5]]) is None


def test_half_steps_of_what_is_not_finite_and_of_zero() -> None:
    for quantum in (Quantum("decimal", 4), Quantum("float16"), Quantum("bfloat16")):
        steps = quantum.half_steps([-math.inf, 0.0, -1.0])
        assert steps[0] == 0.0 and 0.0 < steps[1] <= steps[2] == quantum.half_step(-1.0)


def test_the_coarsest_of_several() -> None:
    assert coarsest([None, Quantum("float32"), Quantum("bfloat16"), Quantum("decimal", 4)]) == Quantum("bfloat16")
    assert coarsest([None]) is None


def test_the_certificate_has_it() -> None:
    fake = servers.vllm(step=0.0)

    def coarse(request: Request) -> Reply:
        reply = fake.answer(request)
        return reply_of(json.loads(reply.body, parse_float=lambda text: round(float(text), 3)), reply.status)

    question = Question("m", (5, 9, 12, 7, 22, 18, 3), "w5 w9 w12", local_ids=(5, 9, 12), vocabulary=WORDS)
    certificate, _ = drive(probe(question), coarse)
    assert certificate.quantum == Quantum("decimal", 3)
    assert json.loads(json.dumps(certificate.to_dict()))["quantum"] == {"kind": "decimal", "decimals": 3}
    plain, _ = drive(probe(question), fake.answer)
    assert plain.quantum is None
