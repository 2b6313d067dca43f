"""What each check does. A check returns its facts; it raises where something is missing or does not work."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from serve.errors import ScoringFailed
from serve.selftest import tiny
from serve.selftest.names import CONVERSIONS

Facts = dict[str, Any]
WINDOWS = ((9, 1), (33, 2), (17, 3))  # tokens, and the seed they are drawn with
MOST_DRIFT = 1e-2  # nats between two scorings of the same windows: more is no rounding


def run(name: str, place: Path, device: str) -> Facts:
    """The facts of the check of that name. place: a folder for what it writes."""
    if name in CONVERSIONS:
        return scored(f"{tiny.checkpoint(place)}{name}", device)
    return _CHECKS[name](place, device)


def scored(spec: str, device: str) -> Facts:
    """Load a model and score it twice, and once a window at a time.

    backend: the runner that it is served by. deviation: nats between that and the model's own forward.
    repeat_difference, batch_difference: largest differences of log-probabilities, nats.
    Raises LoadFailed, and ScoringFailed where two scorings have nothing in common.
    """
    import numpy as np

    from serve.config import EngineConfig, ModelSpec
    from serve.engine.pair import ScoreJob, ScoreWindow
    from serve.engine.runtime import ModelRuntime
    from serve.models.load import load_models

    (loaded,) = load_models([ModelSpec.parse(spec)], device=device)
    model = ModelRuntime(loaded, EngineConfig(device=device), kv_memory=1 << 24)
    windows = []
    for size, seed in WINDOWS:
        ids = np.random.default_rng(seed).integers(2, loaded.vocab_size, size)
        windows.append(ScoreWindow(tuple(map(int, ids)), tuple(range(1, size))))

    def nll(part: list[ScoreWindow]) -> Any:
        job = ScoreJob(None, [model], part, 1, on_end=lambda _: None)
        while not job.finished:
            job.advance()
        return job.columns()["cand_nll"].astype(np.float64)

    first, again, apart = nll(windows), nll(windows), np.concatenate([nll([window]) for window in windows])
    repeat, batch = float(np.abs(first - again).max()), float(np.abs(first - apart).max())
    if repeat > MOST_DRIFT:
        raise ScoringFailed(f"two scorings of the same text differ by {repeat:.2g} nats: its kernels do not work")
    return {
        "backend": model.backend,
        "load_mode": loaded.scheme or loaded.load_mode,
        "dtype": loaded.dtype,
        "deviation": model.deviation,
        "repeat_difference": repeat,
        "batch_difference": batch,
    }


def _torch(place: Path, device: str) -> Facts:
    import torch

    from serve.models.load import found_device

    found_device(device)
    cuda = torch.cuda.is_available()
    devices = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count() if cuda else 0)]
    return {
        "version": torch.__version__,
        "build": f"CUDA {torch.version.cuda}" if torch.version.cuda else "ROCm" if torch.version.hip else "CPU",
        "threads": torch.get_num_threads(),
        "cpu_kernels": torch.backends.cpu.get_cpu_capability(),
        "devices": [{"name": d.name, "memory": d.total_memory, "capability": f"{d.major}.{d.minor}"} for d in devices],
    }


def _transformers(place: Path, device: str) -> Facts:
    import transformers

    return {"version": transformers.__version__, "tokenizers": metadata.version("tokenizers")}


def _server(place: Path, device: str) -> Facts:
    import_module("serve.app")
    import_module("uvicorn")
    return {"version": metadata.version("fastapi")}


def _checkpoint(place: Path, device: str) -> Facts:
    return scored(str(tiny.checkpoint(place)), device)


def _torchao(place: Path, device: str) -> Facts:
    quantization = import_module("torchao.quantization")
    from transformers import TorchAoConfig

    config = TorchAoConfig(quantization.Int8WeightOnlyConfig())
    return {"version": metadata.version("torchao"), **_quantized(place, "torchao", config, device)}


def _bitsandbytes(place: Path, device: str) -> Facts:
    import_module("bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    return {"version": metadata.version("bitsandbytes"), **_quantized(place, "bitsandbytes", config, device)}


def _quantized(place: Path, name: str, config: Any, device: str) -> Facts:
    """Quantize the tiny model with a library of its own, store it, and score what is stored."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = place / name
    model = AutoModelForCausalLM.from_pretrained(
        tiny.checkpoint(place), quantization_config=config, dtype=torch.float32
    )
    model.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return scored(str(folder), device)


def _compressed_tensors(place: Path, device: str) -> Facts:
    import_module("compressed_tensors")
    folder = place / "compressed-tensors"
    write_fp8_dynamic(tiny.checkpoint(place), folder)
    tiny.save_tokenizer(folder)
    return {"version": metadata.version("compressed-tensors"), **scored(str(folder), device)}


def write_fp8_dynamic(source: Path, folder: Path) -> None:
    """Write a checkpoint as compressed-tensors' FP8_DYNAMIC, without its tokenizer, into a new folder.

    It needs no calibration: a scale an output channel, activations rounded a token at a time.
    """
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    tensors = {}
    for name, weight in load_file(source / "model.safetensors").items():
        tensors[name] = weight
        if name.endswith("proj.weight"):
            scale = weight.abs().amax(dim=1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
            tensors |= {name: (weight / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    shared = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**shared, "strategy": "channel", "dynamic": False},
        "input_activations": {**shared, "strategy": "token", "dynamic": True},
    }
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))


def _gguf(place: Path, device: str) -> Facts:
    facts = {"version": metadata.version("gguf")}
    return facts | scored(str(tiny.gguf_file(place, quantized=True)), device)


def _llama_cpp(place: Path, device: str) -> Facts:
    """Asked twice over HTTP for the likeliest tokens after a prompt."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(tiny.gguf_file(place, quantized=False))
    params.hostnames = ["127.0.0.1"]
    params.port, params.n_ctx, params.n_parallel = 0, tiny.CONTEXT, 1
    params.warmup = params.ui = False
    if device == "cpu":
        params.n_gpu_layers = 0
    server = xllamacpp.Server(params)
    prompt = list(range(2, 40))
    body = json.dumps({"prompt": prompt, "n_predict": 1, "temperature": 0, "n_probs": 10, "cache_prompt": False})
    found = []
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback never goes through a proxy
    for _ in range(2):
        url = f"{server.listening_address}/completion"
        request = urllib.request.Request(url, body.encode(), {"Content-Type": "application/json"})
        with opener.open(request, timeout=60) as reply:
            listed = json.load(reply)["completion_probabilities"][0]["top_logprobs"]
        found.append({entry["id"]: entry["logprob"] for entry in listed})
    if found[0].keys() != found[1].keys():
        raise ScoringFailed("llama.cpp lists other tokens when it is asked again: its kernels do not work")
    repeat = max(abs(found[0][token] - found[1][token]) for token in found[0])
    return {"version": metadata.version("xllamacpp"), "backend": "llama.cpp", "repeat_difference": repeat}


_CHECKS: dict[str, Callable[[Path, str], Facts]] = {
    "torch": _torch,
    "transformers": _transformers,
    "server": _server,
    "checkpoint": _checkpoint,
    "torchao": _torchao,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "gguf": _gguf,
    "llama.cpp": _llama_cpp,
}
