"""The examples that stand below the help of each command, by its words. Tests parse every one of them."""

from __future__ import annotations

EXAMPLES: dict[str, tuple[str, ...]] = {
    "kl": (
        "evalgate kl --ref demo --cand demo@int8 --cand demo@bf16 --limit 27",
        "evalgate kl --ref ./ckpt --cand model-Q4_K_M.gguf --data texts/ --out runs/q4",
    ),
    "agree": ("evalgate agree --ref ./ckpt --cand http://127.0.0.1:8000/v1#my-model --limit 16",),
    "ppl": ("evalgate ppl --model demo --model demo@int8 --data text.txt --windows llama.cpp",),
    "sweep": (
        "evalgate sweep --ref demo --cand demo@int8 --cand demo@bf16 --limit 27",
        "evalgate sweep list.toml --out sweeps/first",
    ),
    "gate": (
        "evalgate gate --policy 8bit --ref demo --cand demo@int8",
        "evalgate gate --max kl=0.01 --min top1=0.97 --run runs/first --junit gate.xml",
    ),
    "plan": ("evalgate plan runs/first --max kl=0.01 --max kl.p99=0.1 --power 0.9",),
    "slices": ("evalgate slices runs/first --metric kl --by position",),
    "diff": ("evalgate diff runs/first --candidate demo@int8 --domain code",),
    "compare": ("evalgate compare runs/first runs/second --metric kl",),
    "probe": ("evalgate probe http://127.0.0.1:8000/v1#my-model --tokenizer ./ckpt",),
    "verify": ("evalgate verify --ref ./ckpt --cand http://127.0.0.1:8000/v1#my-model --prompts 100",),
    "record": (
        "evalgate record --ref demo --limit 16 --out ref.trace",
        "evalgate record --ref demo --limit 16 --hidden --out hidden.trace",
        "evalgate record --ref demo --windows llama.cpp --format llama.cpp --data text.txt --out ref.kld",
    ),
    "show": ("evalgate show runs/first", "evalgate show runs/first --markdown"),
    "view": ("evalgate view", "evalgate view runs sweeps --port 8080 --open"),
    "serve": ("evalgate serve demo demo@int8 --port 8000",),
    "schema": ("evalgate schema summary",),
    "doctor": ("evalgate doctor", "evalgate doctor serve quant --json"),
    "cache info": ("evalgate cache info", "evalgate cache info --json"),
    "cache clear": ("evalgate cache clear",),
    "config": ("evalgate config", "evalgate config kl --json"),
    "policy check": ("evalgate policy check policy.toml --run runs/first",),
    "policy init": ("evalgate policy init --preset 8bit --out policy.toml",),
    "policy explain": ("evalgate policy explain 8bit",),
    "trace info": ("evalgate trace info ref.trace",),
    "trace verify": ("evalgate trace verify ref.trace",),
    "trace merge": ("evalgate trace merge a.trace b.trace --out both.trace",),
    "trace cut": ("evalgate trace cut ref.trace --positions 1000 --out small.trace",),
}


def epilog(words: str) -> str | None:
    """What stands below the help of a command; None where it has no examples."""
    return "\n".join(EXAMPLES.get(words, ())) or None
