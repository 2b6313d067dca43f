"""Sweeps: several candidates against one reference, from a request to the folder that is published.

`evalgate sweep` and `evalgate.sweep` are this. Measuring is in `evalgate.measure.sweep`, places and ties are in
`evalgate.stats.leaderboard`, and what a reader sees is in `evalgate.reports.leaderboard*`.
"""

from evalgate.sweeps.sweep import Sweep, load_sweep, run_sweep

__all__ = ["Sweep", "load_sweep", "run_sweep"]
