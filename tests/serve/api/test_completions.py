"""Completions beyond the matrix: echo and offsets, stops, seeds, named ids, batches, streams, refusals."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.serve.api.test_completions_matrix import joined_legacy
from tests.serve.serving import Served, ranked, served
from tests.serve.tiny_models import byte_level
from tests.stuck import STUCK

TEXT = "hello wörld 日本"
IDS = [262, 223, 290, 40, 77]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as found:
        yield found


@pytest.fixture(scope="module")
def with_bos() -> Iterator[Served]:
    with served(tokenizer=byte_level(bos=True)) as found:
        yield found


def test_echo_of_text_and_offsets(server: Served, with_bos: Served) -> None:
    for at, added in ((server, 0), (with_bos, 1)):
        choice = at.complete(prompt=TEXT, max_tokens=4, logprobs=0, echo=True, seed=3, ignore_eos=True)["choices"][0]
        logprobs, prompt = choice["logprobs"], at.tokenizer.encode(TEXT, add_special_tokens=False)
        assert choice["text"].startswith(TEXT)
        assert logprobs["token_ids"][added : added + len(prompt)] == prompt
        assert logprobs["token_logprobs"][0] is None and None not in logprobs["token_logprobs"][1:]
        offsets = logprobs["text_offset"]
        assert offsets[: added + 1] == [0] * (added + 1)  # an added BOS has no width
        assert offsets == sorted(offsets) and offsets[added + len(prompt)] == len(TEXT)
        data = b"".join(map(bytes, logprobs["bytes"][added : added + len(prompt)]))
        assert data.decode() == TEXT
        for i, start in enumerate(offsets[added : added + len(prompt)]):
            before = b"".join(map(bytes, logprobs["bytes"][added : added + i]))
            assert start == len(before.decode("utf-8", "ignore"))
    assert (
        with_bos.complete(prompt=TEXT, max_tokens=0, echo=True, logprobs=0, add_special_tokens=False)["choices"][0][
            "logprobs"
        ]["tokens"][0]
        != "<s>"
    )


def test_prompt_forms_agree(server: Served) -> None:
    ids = server.tokenizer.encode(TEXT, add_special_tokens=False)
    fields: dict[str, Any] = {"max_tokens": 3, "temperature": 0, "logprobs": 2, "echo": True}
    replies = [
        server.complete(prompt=p, **fields)["choices"] for p in (TEXT, [TEXT], ids, [ids], [TEXT, TEXT], [ids, IDS])
    ]
    first = replies[0][0]
    for reply in replies:
        assert reply[0]["text"] == first["text"]
        assert reply[0]["logprobs"]["token_ids"] == first["logprobs"]["token_ids"]
        assert reply[0]["logprobs"]["text_offset"] == first["logprobs"]["text_offset"]
        assert reply[0]["logprobs"]["token_logprobs"][1:] == pytest.approx(
            first["logprobs"]["token_logprobs"][1:], abs=1e-5
        )
    assert [c["index"] for c in replies[-1]] == [0, 1]


def test_score_only(server: Served) -> None:
    reply = server.complete(prompt=IDS, max_tokens=0, prompt_logprobs=0)
    choice = reply["choices"][0]
    assert choice["text"] == "" and choice["finish_reason"] == "length"
    assert reply["usage"] | {"prompt_tokens_details": 0} == {
        "prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5, "prompt_tokens_details": 0,
    }  # fmt: skip
    truth = server.truth(IDS)
    for i, entry in enumerate(choice["prompt_logprobs"][1:], start=1):
        assert entry[str(IDS[i])]["logprob"] == pytest.approx(float(truth[i - 1, IDS[i]]), abs=1e-5)


def test_same_seed_same_text_whatever_the_batch(server: Served) -> None:
    fields: dict[str, Any] = {"max_tokens": 12, "temperature": 1.5, "top_p": 0.95, "return_token_ids": True}

    def tokens(seed: int) -> list[int]:
        reply = server.complete(prompt=[40 + seed % 7, *IDS], seed=seed, **fields)
        return list(reply["choices"][0]["token_ids"])

    alone = [tokens(seed) for seed in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(tokens, range(16))) == alone
    assert len({tuple(t) for t in alone}) > 8
    assert len({tuple(server.complete(prompt=IDS, **fields)["choices"][0]["token_ids"]) for _ in range(4)}) > 1


def test_n_gives_what_single_seeds_give(server: Served) -> None:
    fields: dict[str, Any] = {"max_tokens": 6, "return_token_ids": True}
    many = server.complete(prompt=[IDS, IDS[1:]], n=3, seed=11, **fields)
    assert [c["index"] for c in many["choices"]] == list(range(6))
    for index, choice in enumerate(many["choices"]):
        single = server.complete(prompt=IDS[index // 3 :], seed=11 + index % 3, **fields)["choices"][0]
        assert choice["token_ids"] == single["token_ids"] and choice["text"] == single["text"]
    assert many["usage"]["prompt_tokens"] == len(IDS) + len(IDS) - 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 0}, {"logprob_token_ids": [[i, 7] for i in range(5)]}], ids=str)
def test_n_choices_share_one_scoring_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], stream: bool
) -> None:
    from serve.engine import rows

    scored: list[int] = []

    begin = rows.begin_scores

    def counted(download: Any, logits: Any, chosen: Any, *rest: Any) -> Any:
        scored.extend(chosen.tolist())
        return begin(download, logits, chosen, *rest)

    monkeypatch.setattr(rows, "begin_scores", counted)
    body: dict[str, Any] = {"prompt": IDS, "max_tokens": 2, "n": 3, "seed": 4, "prompt_logprobs": 2}
    body |= {"ignore_eos": True, **fields}
    with served() as fresh:
        if stream:
            chunks = [chunk["choices"][0] for chunk in fresh.stream("/v1/completions", body)]
            maps = {c["index"]: c["prompt_logprobs"] for c in chunks if "prompt_logprobs" in c}
        else:
            maps = {c["index"]: c["prompt_logprobs"] for c in fresh.complete(**body)["choices"]}
        truth = fresh.truth(IDS)
    if "logprob_token_ids" in fields:
        assert all(str(i) in entry and "7" in entry for i, entry in enumerate(maps[0]) if entry)
    assert sorted(scored) == sorted(IDS[1:])
    assert list(maps) and maps[0] == maps[1] == maps[2] and len(maps) == 3
    for at, (token, entry) in enumerate(zip(IDS[1:], maps[0][1:], strict=True)):
        assert entry[str(token)]["logprob"] == pytest.approx(float(truth[at, token]), abs=1e-5)


def test_prompt_entries_have_the_bytes_of_a_piece_of_a_character(server: Served) -> None:
    ids = server.tokenizer.encode("日本", add_special_tokens=False)
    (choice,) = server.complete(prompt=ids, max_tokens=0, prompt_logprobs=3)["choices"]
    own = [entry[str(token)]["bytes"] for token, entry in zip(ids[1:], choice["prompt_logprobs"][1:], strict=True)]
    whole = server.complete(prompt=ids, max_tokens=0, echo=True, logprobs=0)["choices"][0]["logprobs"]["bytes"]
    assert own == whole[1:] and b"".join(map(bytes, whole)).decode() == "日本"
    for entry in choice["prompt_logprobs"][1:]:
        assert all(bytes(e["bytes"]).decode("utf-8", "replace") == e["decoded_token"] for e in entry.values())


def test_stop_strings_cut_text_but_no_entry(server: Served) -> None:
    fields: dict[str, Any] = {
        "prompt": IDS,
        "max_tokens": 24,
        "seed": 4,
        "logprobs": 1,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    free = server.complete(**fields)["choices"][0]
    assert free["finish_reason"] == "length" and len(free["text"]) > 10
    stop = free["text"][6:9]
    cut = server.complete(**fields, stop=[stop, "never"])["choices"][0]
    at = free["text"].index(stop)
    assert cut["text"] == free["text"][:at]
    assert cut["finish_reason"] == "stop" and cut["stop_reason"] == stop
    count = len(cut["token_ids"])
    assert cut["token_ids"] == free["token_ids"][:count] and count < len(free["token_ids"])
    assert cut["logprobs"]["token_ids"] == cut["token_ids"]  # trimmed tokens have entries too
    shown = server.complete(**fields, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert shown["text"] == free["text"][: at + len(stop)]
    held = server.complete(**fields, stop=stop, min_tokens=20)["choices"][0]
    assert len(held["token_ids"]) >= 20


def test_stop_tokens_eos_and_min_tokens(server: Served) -> None:
    allowed = [2, 40]
    fields: dict[str, Any] = {
        "prompt": IDS,
        "max_tokens": 40,
        "seed": 1,
        "logprobs": 0,
        "temperature": 1,
        "return_token_ids": True,
    }
    ended = server.complete(**fields, allowed_token_ids=allowed, logit_bias={"2": 3})["choices"][0]
    assert ended["finish_reason"] == "stop" and ended["stop_reason"] is None and ended["token_ids"][-1] == 2
    assert "<|im_end|>" not in ended["text"] and ended["logprobs"]["token_ids"] == ended["token_ids"]
    on = server.complete(**fields, allowed_token_ids=allowed, ignore_eos=True)["choices"][0]
    assert len(on["token_ids"]) == 40 and 2 in on["token_ids"] and on["finish_reason"] == "length"
    late = server.complete(**fields, allowed_token_ids=allowed, min_tokens=9, logit_bias={"2": 50})["choices"][0]
    assert late["token_ids"] == [40] * 9 + [2]
    own = server.complete(**fields, allowed_token_ids=allowed, stop_token_ids=[40], ignore_eos=True)["choices"][0]
    assert own["token_ids"][-1] == 40 and own["stop_reason"] == 40
    assert server.tokenizer.convert_ids_to_tokens(40) not in own["text"]


def test_named_ids_are_exact_and_ranked(server: Served) -> None:
    names = [7, 300, 9]
    body: dict[str, Any] = {
        "prompt": IDS,
        "max_tokens": 2,
        "ignore_eos": True,
        "return_token_ids": True,
        "seed": 1,
        "return_tokens_as_token_ids": True,
    }
    choice = server.complete(**body, logprobs=1, prompt_logprobs=0, logprob_token_ids=names)["choices"][0]
    ids = IDS + choice["token_ids"]
    truth = server.truth(ids)
    for at in range(1, len(IDS)):
        entry = choice["prompt_logprobs"][at]
        assert set(entry) == {str(i) for i in (IDS[at], *names)}
        for i in names:
            assert entry[str(i)]["logprob"] == pytest.approx(float(truth[at - 1, i]), abs=1e-5)
            assert entry[str(i)]["rank"] == ranked(truth[at - 1]).index(i) + 1
    for at, top in enumerate(choice["logprobs"]["top_logprobs"], start=len(IDS)):
        assert {f"token_id:{i}" for i in names} <= set(top)
        for i in names:
            assert top[f"token_id:{i}"] == pytest.approx(float(truth[at - 1, i]), abs=1e-5)
    lists = [[], *([i] for i in range(1, len(IDS))), list(range(100)), []]
    choice = server.complete(**body, logprobs=0, prompt_logprobs=0, logprob_token_ids=lists)["choices"][0]
    for at in range(1, len(IDS)):
        assert set(choice["prompt_logprobs"][at]) == {str(IDS[at]), str(at)}
    first, second = choice["logprobs"]["top_logprobs"]
    assert len(first) == len({*range(100), choice["token_ids"][0]}) and len(second) == 1
    row = server.truth(IDS)[-1]
    assert first["token_id:50"] == pytest.approx(float(row[50]), abs=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": 2},
        {"logprobs": 1, "echo": True, "n": 2},
        {"prompt_logprobs": 1, "n": 2},
        {"echo": True, "stop": ["e", "日"]},
        {"logprobs": 0, "stop": ["zz"], "temperature": 0},
        {"logprobs": 3, "echo": True, "skip_special_tokens": False, "max_tokens": 0},
    ],
    ids=str,
)
def test_a_stream_joined_is_the_reply(server: Served, fields: dict[str, Any]) -> None:
    body: dict[str, Any] = {"prompt": TEXT, "max_tokens": 10, "seed": 2, "return_token_ids": True, **fields}
    whole = server.complete(**body)
    chunks = server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    for index, want in enumerate(whole["choices"]):
        got = joined_legacy([c for c in chunks[:-1] if c["choices"][0]["index"] == index])
        assert_close(got, want)


def assert_close(got: Any, want: Any) -> None:
    """Equal, floats within what another batch shape costs."""
    if isinstance(want, float) and isinstance(got, float):
        assert got == pytest.approx(want, abs=2e-5)
    elif isinstance(want, dict):
        assert list(got) == list(want) or set(got) == set(want)
        for key, value in want.items():
            assert_close(got[key], value)
    elif isinstance(want, list):
        assert len(got) == len(want)
        for a, b in zip(got, want, strict=True):
            assert_close(a, b)
    else:
        assert got == want


def test_usage_in_every_chunk(server: Served) -> None:
    body = {"prompt": IDS, "max_tokens": 3, "ignore_eos": True, "stream_options": {"continuous_usage_stats": True}}
    counts = [chunk["usage"]["completion_tokens"] for chunk in server.stream("/v1/completions", body)]
    assert counts == sorted(counts) and counts[-1] == 3


def test_cached_tokens_are_told(server: Served) -> None:
    prompt = list(range(100, 160))
    server.complete(prompt=prompt, max_tokens=1)
    again = server.complete(prompt=[*prompt, 5], max_tokens=1)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"unknown": 1}, "unknown"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [304]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a", "max_tokens": 256}, "prompt"),
        ({"n": 129}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logit_bias": {"304": 1}}, "logit_bias"),
        ({"allowed_token_ids": [999]}, "allowed_token_ids"),
        ({"stop_token_ids": [304]}, "stop_token_ids"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": 1, "allowed_token_ids": [2]}, "min_tokens"),
        ({"logprob_token_ids": [1]}, "logprob_token_ids"),
        ({"logprob_token_ids": [304], "logprobs": 0}, "logprob_token_ids"),
        ({"logprob_token_ids": [[1]], "logprobs": 0}, "logprob_token_ids"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stop": ""}, "stop"),
        ({"model": "other"}, "model"),
    ],
    ids=str,
)
def test_refusals_name_the_field(server: Served, fields: dict[str, Any], param: str | None) -> None:
    steps = server.engine.steps
    body = {"prompt": IDS, **fields}
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == (404 if "model" in fields else 400), reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == reply.status_code
    if param is not None:
        assert error["param"] is not None and error["param"].split(".")[0] == param and param in error["message"]
    assert server.engine.steps == steps  # before any compute


def test_nulls_are_defaults(server: Served) -> None:
    from serve.wire import CompletionRequest

    optional = dict.fromkeys(name for name, f in CompletionRequest.model_fields.items() if not f.is_required())
    assert server.complete(prompt=IDS, **optional)["usage"]["completion_tokens"] <= 16


@pytest.mark.parametrize("mask", (-torch.inf, -1e30, -1e4))
def test_minus_infinity_and_masks_are_written_as_a_number(server: Served, mask: float) -> None:
    from serve.api.entries import Names, Place, legacy
    from serve.engine.rows import score_rows

    logits = torch.tensor([[0.0, mask, 1.0]])
    row = score_rows(logits, [1], [3], [(1,)])[0]
    written = legacy(Names(server.tokenizer, as_ids=True), [Place(1, row, 0)], 3)
    assert written["token_logprobs"] == [-9999.0]
    assert written["top_logprobs"][0]["token_id:1"] == -9999.0


def test_keys_that_read_alike_keep_the_likeliest(server: Served) -> None:
    from serve.api.entries import Names, Place, legacy
    from serve.engine.sequence import RowScores

    pieces = [i for i in range(3, 259) if Names(server.tokenizer).text(i) == "\ufffd"][:3]
    row = RowScores(pieces[0], -5.0, 3, (pieces[1], pieces[2]), (-0.5, -1.0))
    top = legacy(Names(server.tokenizer), [Place(pieces[0], row, 0)], 2)["top_logprobs"][0]
    assert top == {"\ufffd": -0.5}


def test_a_probe_of_this_server_notes_its_limit_and_nothing_false(server: Served) -> None:
    from evalgate.dialects.base import Reply, Request
    from evalgate.dialects.findings import Question
    from evalgate.probe.probe import probe
    from tests.evalgate.dialects.drive import drive, reply_of

    def answer(request: Request) -> Reply:
        reply = server.http.request(request.method, request.path, json=request.json)
        return reply_of(reply.content, reply.status_code)

    found, _ = drive(probe(Question("tiny", tuple(IDS), server.tokenizer.decode(IDS))), answer)
    assert found.best == "prompt_logprobs" and (found.largest_k, found.k_is_limit) == (20, True)
    (limit,) = (note for note in found.notes if "0..20" in note)
    assert "ask for a smaller k" in limit and "--max-logprobs 64" in limit
    assert not any("does not score prompts" in note for note in found.notes), found.notes


def test_a_client_that_leaves_frees_its_sequence(server: Served) -> None:
    model = next(iter(server.engine.models.values()))
    for stream in (True, False):
        started = threading.Event()

        def leave(stream: bool = stream, started: threading.Event = started) -> None:
            import httpx2

            body = {"prompt": IDS, "max_tokens": 240, "ignore_eos": True, "n": 40, "stream": stream}
            with httpx2.Client(base_url=server.url, timeout=0.7, trust_env=False) as client:
                started.set()
                try:
                    with client.stream("POST", "/v1/completions", json=body) as reply:
                        next(reply.iter_bytes(), None)
                except httpx2.TimeoutException:
                    return

        leave()
        until = time.monotonic() + STUCK
        while model.scheduler.busy and time.monotonic() < until:
            time.sleep(0.05)
        assert not model.scheduler.busy
    assert server.complete(prompt=IDS, max_tokens=2, ignore_eos=True)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("body", [b"{not json", b'{"prompt": "a"'])
def test_a_body_that_is_no_json_is_told_so(server: Served, body: bytes) -> None:
    reply = server.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, None)
    assert error["message"].startswith("the body is not JSON")


def test_a_server_of_several_models_asks_which(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(server.engine.models, "other", server.engine.models["tiny"])
    error = server.http.get("/tokenizer_info").json()["error"]
    assert (error["code"], error["param"]) == (400, "model")
    assert error["message"] == "name a model: this server has tiny, other"


def test_prompts_of_ids_are_not_read_unless_somebody_asks(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """A window by continuations has a prompt for each position; the text of none of them is wanted."""
    from serve.api import prompt

    read: list[int] = []
    real = prompt._read

    def counted(tokenizer: Any, ids: Any) -> Any:
        read.append(len(ids))
        return real(tokenizer, ids)

    monkeypatch.setattr(prompt, "_read", counted)
    prompts = [IDS[: i + 1] for i in range(len(IDS))]
    flags: dict[str, Any] = {"max_tokens": 1, "logprobs": 3, "logprob_token_ids": [5, 9]}
    plain = server.complete(prompt=prompts, return_tokens_as_token_ids=True, return_token_ids=True, **flags)
    server.complete(prompt=prompts, prompt_logprobs=2, **{**flags, "max_tokens": 0})
    assert not read
    shown = server.complete(prompt=prompts, echo=True, **flags)
    assert sorted(read) == sorted(map(len, prompts))
    offsets = [choice["logprobs"]["text_offset"][0] for choice in plain["choices"]]
    assert offsets == [choice["logprobs"]["text_offset"][-1] for choice in shown["choices"]]


def test_the_choices_of_a_request_wait_together() -> None:
    """No step comes between them, so that prompts which begin alike share one forward."""
    prompts = [IDS[: i + 1] for i in range(len(IDS))]
    with served() as fresh:
        before = fresh.engine.steps
        fresh.complete(prompt=prompts, max_tokens=1, logprobs=2)
        assert fresh.engine.steps == before + 1
