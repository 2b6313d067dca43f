"""The kinds of measurement that give a run, and the choice among them."""

from __future__ import annotations

from evalgate.measure.contract import RunMeasurement
from evalgate.measure.recordings import is_recorded
from evalgate.measure.request import Judge, RunRequest


def measurement_of(request: RunRequest, judge: Judge | None = None) -> RunMeasurement:
    """The kind of measurement that a request asks for: is the reference recorded, and is some model an endpoint?"""
    from evalgate.measure.kinds.embedded import EmbeddedMeasurement
    from evalgate.measure.kinds.endpoints import EndpointMeasurement
    from evalgate.measure.kinds.trace import TraceMeasurement
    from evalgate.measure.kinds.trace_endpoints import TraceEndpointMeasurement

    recorded = is_recorded(request.reference)
    remote = any(model.remote for model in (request.candidates if recorded else request.models))
    if recorded:
        return TraceEndpointMeasurement(request, judge) if remote else TraceMeasurement(request, judge)
    return EndpointMeasurement(request, judge) if remote else EmbeddedMeasurement(request, judge)
