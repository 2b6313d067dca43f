"""`make test` draws the same examples every time, so that a failure is the change's; `make fuzz` draws new ones."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.browser import chromium as chromium  # a fixture: see tests/browser.py
from tests.preloaded import preloaded
from tests.preloaded.sitecustomize import ADDRESS

if TYPE_CHECKING:
    from tests.warm import WarmServers

# How long an example takes says how busy the machine is, and nothing about the code.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, database=None, **UNTIMED)
settings.register_profile("new", derandomize=False, print_blob=True, **UNTIMED)
settings.load_profile("same")


@pytest.fixture(scope="session", autouse=True)
def nothing_kept() -> Iterator[None]:
    """No test finds hidden states that another one left in the user's cache; those of the cache set their own limit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EVALGATE_CACHE_HIDDEN", "0")
        yield


@pytest.fixture
def own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that the test starts are processes of their own, as a user's are, and no forks of a preloaded one."""
    monkeypatch.delenv(ADDRESS, raising=False)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A reference and a candidate (`tests.checkpoints.pair`) that no test changes."""
    from tests.checkpoints import pair

    return pair(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def warm_servers(tiny: tuple[str, str]) -> Iterator[WarmServers]:
    """The servers over `tiny` that stay up between tests."""
    from tests.warm import WarmServers

    made = WarmServers(Path(tiny[0]).parent)
    yield made
    made.close()


@pytest.fixture(scope="module")
def warm(warm_servers: WarmServers) -> Iterator[WarmServers]:
    """Embedded servers over `tiny` are shared with other tests; a test of their life must not ask for this."""
    with warm_servers.patched():
        yield warm_servers


def pytest_configure(config: pytest.Config) -> None:
    """Servers are forked off a preloaded process; workers of pytest-xdist share their parent's."""
    block = preloaded()
    block.__enter__()
    config.add_cleanup(lambda: block.__exit__(None, None, None))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The demo model's tests first, for they take longest: half of their files in each half of all tests.

    Two workers begin with a half each, and then take over what the other has not come to.
    """
    demo = {item: item.get_closest_marker("demo") is not None for item in items}
    files = dict.fromkeys(item.path for item in items if demo[item])
    first = {path for number, path in enumerate(files) if number % 2}
    ours = [item for item in items if demo[item] and item.path in first]
    theirs = [item for item in items if demo[item] and item.path not in first]
    rest = [item for item in items if not demo[item]]
    middle = max(0, len(items) // 2 - len(ours))
    items[:] = [*ours, *rest[:middle], *theirs, *rest[middle:]]


# Jobs that a shell runs in the background ignore Ctrl-C, and so would every child of theirs that a test interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)
