"""One long window of the demo model, in memory over the weights.

    python -m benchmarks.long_window [--size full] [--json FILE]

Scores a single window of 32,768 tokens (`--size full`) against the model rounded to int8: every thousandth position,
so that what is measured is the window and not its heads. Memory is the largest resident size over the loaded models.
"""

from __future__ import annotations

import json
import sys

from benchmarks import result, timing

_TOKENS = {"tiny": 2048, "quick": 8192, "full": 32768}
GOAL = 2048.0  # MiB over the weights


def main() -> None:
    options = result.parser(__doc__, runs=1).parse_args()
    tokens = _TOKENS[options.size]
    found = result.Result(name="long_window", size=options.size, settings={"tokens": tokens})
    runs = []
    for _ in range(options.runs):
        runs.append(timing.child("long_window", ["--child", str(tokens)]))
    found.figure("time", [run["seconds"] for run in runs], "s")
    found.figure("tokens of both models", [2 * tokens / run["seconds"] for run in runs], "tokens/s")
    found.figure("memory over the weights", [run["mib"] for run in runs], "MiB")
    found.ratio("memory over the weights to 2 GiB", [run["mib"] for run in runs], GOAL, better="lower", goal=1.0)
    found.publish(options)


def measure(tokens: int) -> dict[str, float]:
    """Seconds and peak of one window, in this process."""
    from serve.config import EngineConfig, ModelSpec
    from serve.engine import kernels
    from serve.engine.loop import Engine
    from serve.engine.pair import ScoreJob, ScoreWindow

    kernels.kernels()
    engine = Engine.load(
        [ModelSpec("demo"), ModelSpec("demo", "int8")], EngineConfig(device="cpu", kv_memory=128 << 20)
    )
    reference, candidate = engine.models.values()
    ids = tuple((7919 * place) % 262_144 for place in range(tokens))
    window = ScoreWindow(ids, tuple(range(1, tokens, 1000)))
    job = ScoreJob(reference, [candidate], [window], 10, on_end=lambda _: None)
    job.validate()

    def run() -> float:
        return timing.seconds(job.advance)

    seconds, mib = timing.memory_over(run)
    assert job.finished and len(job.columns()["kl"]) == len(window.positions)
    return {"seconds": seconds, "mib": mib}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(int(sys.argv[2]))))
    else:
        main()
