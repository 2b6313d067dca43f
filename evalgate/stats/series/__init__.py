"""What plots of a run show, as data: pure functions of the per-position table that return small dataclasses.

Every plot (the HTML report, `run.plot`, a notebook) draws what these return, so that plots cannot disagree. Intervals
come from `evalgate.stats.intervals`. Each function takes one candidate's `Scores` (`metrics.split_candidates`) and is
vectorised: a million positions take seconds.

| function | returns |
|---|---|
| `distribution` | how often a metric's values fall in bins of a logarithmic axis |
| `delta_p_distribution` | the same of the change of the actual token's probability, both signs |
| `profile` | a metric's mean by position, reference entropy, domain, token class or document |
| `worst_documents` | the documents where a metric is worst |
| `entropy_calibration` | what a model states (entropy) against what it pays (nll) |
| `probability_calibration` | the candidate's probability of the actual token where the reference's is in a bin |
| `running` | a metric's mean as documents arrive |
| `noise_floor` | what models show against themselves, from the summary |
"""

from evalgate.stats.series.calibration import (
    Calibration,
    CalibrationBin,
    entropy_calibration,
    probability_calibration,
)
from evalgate.stats.series.distribution import Bin, Distribution, delta_p_distribution, distribution
from evalgate.stats.series.floor import NoiseFloor, noise_floor
from evalgate.stats.series.known import ends_of, known_series
from evalgate.stats.series.profile import Part, Profile, cuts_of, profile, worst_documents
from evalgate.stats.series.running import Running, RunningPoint, running

__all__ = [
    "Bin",
    "Calibration",
    "CalibrationBin",
    "Distribution",
    "NoiseFloor",
    "Part",
    "Profile",
    "Running",
    "RunningPoint",
    "cuts_of",
    "delta_p_distribution",
    "distribution",
    "ends_of",
    "entropy_calibration",
    "known_series",
    "noise_floor",
    "probability_calibration",
    "profile",
    "running",
    "worst_documents",
]
