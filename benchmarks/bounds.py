"""Certain ends against servers that round their log-probabilities: how often one is wrong, and what it costs.

    python -m benchmarks.bounds [--positions 100000] [--kl 1e-4] [--top-k 20] [--seed 0]

Each position has a pair of whole distributions of the KL asked for. Both sides print the reference's likeliest ids on
one grid. An end that lies on the wrong side of the exact value is a violation; there must be none. "uncounted" is the
share of positions where KL's lower end would be wrong if the rounded values were taken as exact.
"""

from __future__ import annotations

import argparse

from tests.evalgate.traces.rounded_pairs import violations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=100_000)
    parser.add_argument("--kl", type=float, default=1e-4)
    parser.add_argument("--top-k", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(f"{options.positions:,} positions, KL {options.kl:g} nats, k = {options.top_k}, seed {options.seed}")
    print(f"{'grid':12}{'KL':>6}{'TV':>6}{'JS':>6}{'uncounted':>11}{'mean kl_low':>13}{'TV width':>10}")
    every = violations(options.positions, kl=options.kl, k=options.top_k, seed=options.seed)
    for grid, found in every.items():
        share = found.kl_uncounted / found.positions
        print(
            f"{grid:12}{found.kl:6d}{found.tv:6d}{found.js:6d}{share:11.1%}{found.kl_low:13.2e}{found.tv_width:10.4f}"
        )


if __name__ == "__main__":
    main()
