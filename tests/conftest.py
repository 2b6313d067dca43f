"""`make test` draws the same examples every time, so that a failure is the change's; `make fuzz` draws new ones."""

from hypothesis import settings

settings.register_profile("same", derandomize=True, database=None)
settings.register_profile("new", derandomize=False, print_blob=True)
settings.load_profile("same")
