"""Streamed weights: the columns of models in memory to the last bit, within a limit, and resumed after a kill."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers as t

from serve.config import EngineConfig, ModelSpec, Reading
from serve.engine.loop import Engine
from serve.engine.pair import Columns, ScoreJob, ScoreWindow
from serve.engine.streamed import StreamedHead
from serve.engine.streamedjobs import announce, forget
from serve.errors import LoadFailed, ServeError
from serve.models.source import resolve
from serve.models.stream import WeightStream
from tests.serve.architectures import tokens
from tests.serve.tiny_models import byte_level, gpt2, llama, mixtral

WINDOWS = [ScoreWindow(tokens(n, seed=n), tuple(range(1, n))) for n in (20, 30, 9, 33, 48, 2)]
BATCH = 64


def tied() -> Any:
    return llama(tie_word_embeddings=True)


def wide() -> Any:
    """A head far larger than the layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
    return t.LlamaForCausalLM(t.LlamaConfig(vocab_size=20000, max_position_embeddings=64, **sizes)).eval()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EVALGATE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    known: dict[str, str] = {}

    def save(make: Callable[[], Any]) -> str:
        name = make.__name__
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            make().save_pretrained(folder, max_shard_size="60KB")
            byte_level().save_pretrained(folder)
            known[name] = str(folder)
        return known[name]

    return save


def engine(folder: str, memory: str, specs: tuple[str, ...] = ("", "@int8"), **more: Any) -> Engine:
    config = EngineConfig(device="cpu", memory=memory, **{"max_batch_tokens": BATCH, "tile_bytes": 32 << 10} | more)
    needed = {} if memory == "1GiB" else {"return_value": 1 << 60}  # streamed, even where the tiny models would fit
    with patch("serve.models.room.needed", **needed) if needed else nullcontext():
        return Engine.load([ModelSpec.parse(folder + spec) for spec in specs], config)


def job_of(made: Engine, windows: list[ScoreWindow] = WINDOWS, **more: Any) -> ScoreJob:
    models = list(made.models.values())
    job = ScoreJob(models[0], models[1:], windows, 10, on_end=lambda _: None, top_k=4, **more)
    job.validate()
    return job


def scored(made: Engine, windows: list[ScoreWindow] = WINDOWS, **more: Any) -> Columns:
    job = job_of(made, windows, **more)
    while not job.finished:
        announce(job)
        job.advance()
    forget(job)
    return job.columns()


def same(left: Columns, right: Columns) -> None:
    assert left.keys() == right.keys() and len(left["kl"])
    for name, values in left.items():
        assert np.array_equal(values, right[name]), name


@pytest.mark.parametrize(
    ("make", "memory", "specs"),
    [
        (llama, "500KiB", ("", "@int8", "@bf16")),
        (tied, "400KiB", ("", "@q8_0")),
        (gpt2, "600KiB", ("", "@int8")),
        (mixtral, "900KiB", ("", "@int8")),
    ],
    ids=["two candidates", "tied head", "position embeddings", "experts"],
)
def test_columns_are_those_of_models_in_memory(
    saved: Callable[..., str], make: Callable[[], Any], memory: str, specs: tuple[str, ...]
) -> None:
    folder = saved(make)
    streamed = engine(folder, memory, specs)
    assert all(model.streamed is not None for model in streamed.models.values())
    batch = next(iter(streamed.models.values())).config.max_batch_tokens
    assert batch == BATCH
    resident = engine(folder, "1GiB", specs)
    assert all(model.streamed is None for model in resident.models.values())
    same(scored(streamed), scored(resident))
    for one, other in zip(streamed.models.values(), resident.models.values(), strict=True):
        assert one.loaded.weights_hash == other.loaded.weights_hash and one.loaded.scheme == other.loaded.scheme
        assert one.loaded.weights == other.loaded.weights and one.backend == "packed, weights streamed"


def test_a_pass_serves_all_batches_and_leaves_nothing(saved: Callable[..., str], cache: Path) -> None:
    made = engine(saved(llama), "300KiB")
    reads: list[str] = []
    for model in made.models.values():
        streamed = model.streamed
        assert streamed is not None
        read = streamed.stream.read
        for stage, piece in zip(streamed.stages, streamed.stream.pieces, strict=True):
            stage.read = lambda piece=piece, read=read: (reads.append(piece.name), read(piece))[1]  # type: ignore[misc]
    scored(made)
    assert sorted(reads) == 2 * ["model.layers.0"] + 2 * ["model.layers.1"]
    for model in made.models.values():
        assert model.streamed is not None
        weights = model.streamed.stream
        assert all(weights._meta(key).is_meta for piece in weights.pieces for key in piece.keys)
        assert all(p.is_meta for name, p in model.loaded.model.named_parameters() if ".layers." in name)
    assert not [path for path in cache.rglob("*") if path.is_file() and "streams" in path.parts]


def test_experts_one_by_one(saved: Callable[..., str]) -> None:
    """A layer that does not fit is read expert by expert; the numbers are those of the same kernels in memory."""
    folder = saved(mixtral)
    made = engine(folder, "260KiB", tile_bytes=8 << 10, max_batch_tokens=64)
    first = next(iter(made.models.values()))
    assert first.streamed is not None and len(first.streamed.stages) == 2 * (1 + 4)
    resident = engine(folder, "1GiB", tile_bytes=8 << 10, max_batch_tokens=first.config.max_batch_tokens)
    for model in resident.models.values():
        model.loaded.model.set_experts_implementation("eager")
        model.rows_per_tile = first.rows_per_tile
    same(scored(made), scored(resident))


def test_a_head_in_blocks(saved: Callable[..., str]) -> None:
    folder = saved(wide)
    made = engine(folder, "2300KiB", tile_bytes=160 << 10)
    first = next(iter(made.models.values()))
    assert first.streamed is not None and not first.streamed.plan.whole_head
    assert first.streamed.plan.block < first.streamed.stream.head.shape[0] * first.streamed.stream.head.row_bytes
    resident = engine(folder, "1GiB", tile_bytes=160 << 10)
    for model in resident.models.values():
        model.rows_per_tile = first.rows_per_tile
    got, want = scored(made), scored(resident)
    for name, values in want.items():
        assert np.allclose(values, got[name], rtol=1e-4, atol=1e-4), name


def test_long_windows_go_through_each_layer_in_chunks(saved: Callable[..., str]) -> None:
    """As they do in memory, where every layer's keys and values are kept."""
    folder = saved(llama)
    long = [ScoreWindow(tokens(60, seed=3), (3, 17, 40, 59)), WINDOWS[0]]
    same(scored(engine(folder, "300KiB", max_batch_tokens=64), long), scored(engine(folder, "1GiB"), long))
    streamed = engine(folder, "250KiB", max_batch_tokens=16)
    for model in streamed.models.values():
        assert model.streamed is not None and model.streamed.plan.batch == 16
    same(scored(streamed, long), scored(engine(folder, "1GiB", max_batch_tokens=16), long))


def test_hidden_rows_in_a_file_between_layers(saved: Callable[..., str]) -> None:
    folder = saved(llama)
    made = engine(folder, "300KiB")
    assert all(model.streamed is not None and model.streamed.plan.spill for model in made.models.values())
    # a pack whose rows are large enough to be written
    windows = [ScoreWindow(tokens(64, seed=n), (5, 63)) for n in range(16)]
    for model in made.models.values():
        model.config = EngineConfig(max_batch_tokens=1024)
    resident = engine(folder, "1GiB", max_batch_tokens=1024)
    same(scored(made, windows), scored(resident, windows))


def test_lanes_share_a_pass(saved: Callable[..., str]) -> None:
    """As they share the windows of models in memory: the same groups of windows, each with the same threads."""
    folder, threads = saved(llama), torch.get_num_threads()
    windows = [ScoreWindow(tokens(64, seed=n), (5, 63)) for n in range(16)]
    torch.set_num_threads(2)
    try:
        made = engine(folder, "8MiB", max_batch_tokens=1024)
        job = job_of(made, windows)
        announce(job)
        for model in made.models.values():
            assert model.streamed is not None
            assert [len(each.groups) for each in model.streamed.rows._expected.values()] == [2]
        same(scored(made, windows), scored(engine(folder, "1GiB", max_batch_tokens=1024), windows))
    finally:
        torch.set_num_threads(threads)


def test_one_window_at_a_time(saved: Callable[..., str]) -> None:
    """The noise of batch shapes asks for every window by itself, in one pass too."""
    made = engine(saved(llama), "300KiB", ("",))
    (model,) = made.models.values()
    job = ScoreJob(model, [model], WINDOWS, 10, on_end=lambda _: None, apart=True)
    while not job.finished:
        announce(job)
        job.advance()
    assert job.columns()["kl"].max() < 1e-6
    assert model.streamed is not None and model.streamed.rows.computed == 3 + len(WINDOWS) - 1  # one is a batch


def test_a_killed_job_resumes_after_what_was_computed(
    saved: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reference's rows are on disk when the candidate's pass is cut short: a new engine computes the latter
    alone."""
    folder = saved(llama)
    want = scored(engine(folder, "1GiB"))
    first = engine(folder, "300KiB")
    reference, candidate = first.models.values()
    assert reference.streamed is not None and candidate.streamed is not None

    def cut(_: Any) -> Any:
        raise ServeError("the disk is gone")

    monkeypatch.setattr(candidate.streamed.stages[1], "read", lambda: cut(0))
    job = job_of(first)
    announce(job)
    with pytest.raises(ServeError, match="the disk is gone"):
        job.advance()
    assert all(not stage.here and not stage.inside for stage in candidate.streamed.stages)
    second = engine(folder, "300KiB")
    same(scored(second), want)
    computed = [model.streamed.rows.computed for model in second.models.values() if model.streamed is not None]
    assert computed == [0, 3]


def test_damaged_rows_are_computed_again(saved: Callable[..., str], cache: Path) -> None:
    made = engine(saved(llama), "300KiB")
    job = job_of(made)
    announce(job)
    job.advance()
    files = [path for path in (cache / "streams").rglob("*") if path.is_file()]
    assert len(files) == 2 * 3
    files[0].write_bytes(files[0].read_bytes()[:-1] + b"x")
    files[1].write_bytes(b"")
    again = engine(saved(llama), "300KiB")
    same(scored(again), scored(engine(saved(llama), "1GiB")))


def test_a_limit_below_one_layer_names_the_least_that_works(saved: Callable[..., str]) -> None:
    folder = saved(llama)
    with pytest.raises(
        LoadFailed, match=r"--memory 40 KiB is too little .* and with what .* (\d+) KiB is the least"
    ) as e:
        engine(folder, "40KiB", ("",))
    least = int(str(e.value).split(" KiB is the least")[0].rsplit(" ", 1)[1])
    engine(folder, f"{least}KiB", ("",))


@pytest.mark.parametrize("option", [{"deterministic": True}, {"logits": "model"}])
def test_options_that_need_the_whole_model_are_refused(saved: Callable[..., str], option: dict[str, Any]) -> None:
    with pytest.raises(LoadFailed, match=r"needs the whole model in memory and .* is streamed: leave it out"):
        engine(saved(llama), "300KiB", **option)


def test_a_file_that_is_cut_while_it_is_read(saved: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "cut"
    llama().save_pretrained(folder)
    byte_level().save_pretrained(folder)
    made = engine(str(folder), "300KiB")
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(
        ServeError, match=r"'.*model.safetensors' ends before byte .*: it was cut while it was being read"
    ):
        scored(made)


def test_missing_and_cut_shards_are_named_at_the_start(saved: Callable[..., str], tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "shards"
    shutil.copytree(saved(llama), folder)
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[:-8])
    with pytest.raises(LoadFailed, match=rf"{shards[1].name}' has .* bytes and its header describes .*: it was cut"):
        engine(str(folder), "300KiB")
    shards[1].unlink()
    with pytest.raises(LoadFailed, match=rf"{shards[1].name}"):
        engine(str(folder), "300KiB")


def test_what_is_missing_or_left_over_is_named(saved: Callable[..., str], tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "other"
    shutil.copytree(saved(llama), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    with pytest.raises(LoadFailed, match=r"lacks model.layers.2.* and 6 more \(9 in all\)"):
        engine(str(folder), "300KiB")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    with pytest.raises(LoadFailed, match=r"has weights that its architecture does not use: model.layers.1"):
        engine(str(folder), "100KiB")


def test_pickles_and_quantized_checkpoints_are_refused(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = {**config, "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(LoadFailed, match=r"is quantized \(bitsandbytes\), whose layers are unpacked only when all"):
        engine(str(tmp_path), "100KiB")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(LoadFailed, match="is a pickle, whose layers cannot be read one by one"):
        from serve.models.skeleton import read_skeleton

        read_skeleton(resolve(str(tmp_path), Reading(allow_pickle=True)), device="cpu")


def test_not_a_number_is_found_as_it_is_read(saved: Callable[..., str], tmp_path: Path) -> None:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = torch.nan
    model.save_pretrained(tmp_path)
    byte_level().save_pretrained(tmp_path)
    with pytest.raises(LoadFailed, match=r"has NaN or infinity in 'model.layers.1.mlp.up_proj.weight'"):
        scored(engine(str(tmp_path), "300KiB", ("", "@int8")))


def test_heads_are_let_go_when_a_body_runs(saved: Callable[..., str]) -> None:
    made = engine(saved(llama), "400KiB")
    scored(made)
    heads = [model.head for model in made.models.values() if isinstance(model.head, StreamedHead)]
    assert len(heads) == 2 and all(head._held is not None for head in heads if head._plan.whole_head)
    StreamedHead.let_all_go()
    assert all(head._held is None for head in heads)


def test_prompt_logprobs_of_a_streamed_model(saved: Callable[..., str]) -> None:
    """A forward by itself is a pass by itself."""
    made, resident = engine(saved(llama), "300KiB", ("",)), engine(saved(llama), "1GiB", ("",))
    from serve.engine.runner import Segment

    ids = list(tokens(12, seed=1))
    (one,), (other,) = made.models.values(), resident.models.values()
    assert torch.equal(one.runner.forward(ids, [Segment(0, 12)]), other.runner.forward(ids, [Segment(0, 12)]))


def test_pieces_are_what_a_whole_load_holds(saved: Callable[..., str]) -> None:
    from serve.models import conversions
    from serve.models.load import load_models
    from serve.models.skeleton import read_skeleton

    folder = saved(mixtral)
    for name in (None, "bf16", "int4-g16"):
        (whole,) = load_models([ModelSpec(folder, name)], device="cpu")
        state = whole.model.state_dict()
        for split in (1 << 40, 1):
            conversion = conversions.find(name) if name else None
            skeleton = read_skeleton(resolve(folder), device="cpu")
            stream = WeightStream(skeleton, conversion, name=folder, device="cpu", split_above=split)
            assert len(stream.pieces) == (2 if split > 1 else 10)
            for piece in stream.pieces:
                for key, tensor in stream.read(piece).items():
                    want = state[key] if piece.expert is None else state[key][piece.expert : piece.expert + 1]
                    assert tensor.dtype == want.dtype and torch.equal(tensor, want), key


def test_gguf_files_are_dequantized_as_they_are_read(tmp_path: Path) -> None:
    """Layers, embedding rows and the head: what a whole load holds, and so the columns."""
    from tests.gguf_files import write_llama

    path = write_llama(llama(), byte_level(), tmp_path / "tiny.gguf", q8_0="o_proj")
    made, resident = engine(str(path), "500KiB"), engine(str(path), "1GiB")
    assert all(model.streamed is not None for model in made.models.values())
    same(scored(made), scored(resident))
    for one, other in zip(made.models.values(), resident.models.values(), strict=True):
        assert one.loaded.weights == other.loaded.weights and one.loaded.load_mode == other.loaded.load_mode
