"""KL estimated from a trace against the exact mean: bias, root mean squared error, and whether the stated error holds.

    python -m benchmarks.trace_estimator [--positions 200] [--recordings 100] [--vocabulary 1000] [--seed 0]

Each reference is recorded many times with other draws. The truth is summed over whole rows in float64. K: ids kept
exactly. M: draws a position. "within 2 errors" is the share of recordings whose mean is that near the truth, which is
95 % for a normal error that is stated right.

quantized: every logit moved by a normal number of s.d. 0.06. unrelated: another reference. leaked token: quantized, but
for 20 % of the candidate's probability, which lies on an unlikely id. flat: both nearly even over the vocabulary.
"""

from __future__ import annotations

import argparse

from tests.evalgate.traces.estimator_pairs import PAIRS, qualities


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=200)
    parser.add_argument("--recordings", type=int, default=100)
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{options.positions} positions of {options.vocabulary} ids, {options.recordings} recordings of each pair")
    print("| pair | true mean KL | K | M | bias | rmse | stated error | within 2 errors |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in PAIRS:
        for k in (0, 8, 64):
            every = qualities(
                kind,
                k=k,
                draws=(1, 16),
                positions=options.positions,
                vocabulary=options.vocabulary,
                recordings=options.recordings,
                seed=options.seed,
            )
            for m, found in every.items():
                bias = f"{100 * found.bias / found.truth:+.2f} % ± {100 * found.bias_error / found.truth:.2f}"
                share = f"{100 * found.rmse / found.truth:.2f} %"
                stated = f"{100 * found.stated / found.truth:.2f} %"
                print(f"| {kind} | {found.truth:.4f} | {k} | {m} | {bias} | {share} | {stated} | {found.inside:.0%} |")


if __name__ == "__main__":
    main()
