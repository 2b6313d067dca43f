"""`make test` draws the same examples every time, so that a failure is the change's; `make fuzz` draws new ones."""

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing about the code.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, database=None, **UNTIMED)
settings.register_profile("new", derandomize=False, print_blob=True, **UNTIMED)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The demo model's tests first: they take longest, and the other worker takes over what is left meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("demo") is None)
