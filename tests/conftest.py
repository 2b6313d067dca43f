"""`make test` draws the same examples every time, so that a failure is the change's; `make fuzz` draws new ones."""

from hypothesis import HealthCheck, settings

# How long an example takes says how busy the machine is, and nothing about the code.
UNTIMED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, database=None, **UNTIMED)
settings.register_profile("new", derandomize=False, print_blob=True, **UNTIMED)
settings.load_profile("same")
