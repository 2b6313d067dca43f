"""Servers of tests are forked off a preloaded process; where that stopped working the suite would only get slow."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evalgate.server.process import EmbeddedServer
from tests.preloaded.parent import read_at_import
from tests.preloaded.sitecustomize import ADDRESS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(ADDRESS not in os.environ, reason="no process is preloaded on this system"),
]


def has_torch(server: EmbeddedServer) -> bool:
    """Whether torch lies in the memory of the process that we started: its stand-in has none."""
    return "libtorch" in Path(f"/proc/{server.pid}/maps").read_text()


def test_a_server_is_a_fork_whatever_libraries_put_into_our_environment(
    tiny: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers.generation  # noqa: F401

    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")
    with EmbeddedServer([tiny[0]], device="cpu") as server:
        assert not has_torch(server)


def test_where_a_library_would_read_another_setting_it_is_a_process_of_its_own() -> None:
    here = dict(os.environ)
    assert read_at_import({**here, "ONEDNN_MAX_CPU_ISA": "AVX2"}) != read_at_import(here)
    assert read_at_import({**here, "HF_HUB_OFFLINE": "1"}) != read_at_import({**here, "HF_HUB_OFFLINE": "0"})
    assert read_at_import({**here, "EVALGATE_CACHE": "x"}) == read_at_import(here)
