"""From a request to a stored run; `run` and `carry_out` are in evalgate.measure.run."""
