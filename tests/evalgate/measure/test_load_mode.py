"""Load modes of candidates, and chat templates that differ: what a request becomes, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from evalgate.core import Document, Message, SourceInfo
from evalgate.errors import MismatchError, UsageError
from evalgate.measure.checks import check_request
from evalgate.measure.request import RunRequest
from evalgate.measure.tokenizers import template_notes


def specs(*candidates: str, mode: str) -> list[str]:
    return RunRequest.of("kl", "ref", candidates, load_mode=mode).candidate_specs


def test_modes_are_candidates() -> None:
    """Both at once are two candidates of one run, so that their difference is paired by document."""
    assert specs("a", "b", mode="native") == ["a", "b"]
    assert specs("a", "b", mode="dequantized") == ["a@dequantized", "b@dequantized"]
    assert specs("a", "http://h/v1", mode="both") == ["a", "a@dequantized", "http://h/v1"]
    assert specs("a@dequantized", "a", mode="both") == ["a@dequantized", "a"]
    request = RunRequest.of("kl", "ref", ["a"], load_mode="both")
    assert replace(request, seed=3).candidates == request.candidates


def test_modes_that_mean_nothing_are_refused() -> None:
    with pytest.raises(UsageError, match="demo@int8 is converted: leave one out"):
        specs("demo@int8", mode="both")
    with pytest.raises(UsageError, match="candidates that are loaded here and none is"):
        specs("http://h/v1", mode="dequantized")


def test_options_of_loading_reach_the_server_or_are_refused() -> None:
    request = RunRequest.of("kl", "a", ["b"], revision="v1", allow_pickle=True, trust_remote_code=True)
    assert request.server_options == ["--revision", "v1", "--allow-pickle", "--trust-remote-code"]
    assert RunRequest.of("kl", "a", ["b"]).server_options == []
    for field, option in (("python", "--python"), ("revision", "--revision"), ("allow_pickle", "--allow-pickle")):
        value = True if field == "allow_pickle" else "x"
        request = RunRequest.of("kl", "http://h/v1", ["http://i/v1"], **{field: value})
        with pytest.raises(UsageError, match=f"{option} applies to models that are loaded here and no source is one"):
            check_request(request)


def test_another_chat_template_is_refused_where_chats_are_shown() -> None:
    ref = SourceInfo("ref", "ref", "embedded", 10, 10, template_hash="aa")
    same, other, none = (
        replace(ref, spec=n, name=n, template_hash=h) for n, h in (("s", "aa"), ("o", "bb"), ("n", ""))
    )
    text = [Document("d", "x", "some text")]
    chat = [Document("c", "x", "", messages=(Message("user", "hi"), Message("assistant", "hello")))]
    assert template_notes([ref, same], chat) == []
    assert template_notes([ref, none], text) == []
    (note,) = template_notes([ref, same, other], text)
    assert note == "o has another chat template than ref: no chat is shown, and no figure depends on it"
    with pytest.raises(MismatchError, match=r"o has another chat template than ref.*--allow-template"):
        template_notes([ref, other], chat)
    with pytest.raises(MismatchError, match="n has no chat template, unlike ref"):
        template_notes([ref, none], chat)
    assert template_notes([ref, other], chat, allowed=True) == [
        "o has another chat template than ref, by which both were shown chats"
    ]
