"""Whether what is installed here works: each back end loads a tiny random model and scores it twice.

`python -m serve.selftest CHECK...` prints a JSON line when a check begins, and one with what it found. A library that
takes the process down with it is then known by name. `evalgate doctor` reads the lines.
"""
