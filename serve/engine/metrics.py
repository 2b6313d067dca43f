"""Prometheus metrics of one server, in a registry of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serve.engine.loop import Engine
from serve.engine.runtime import ModelRuntime

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)


class Metrics:
    """Counters that the guard, the routes and the engine's thread write, and gauges read at each scrape."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter("evalgate_requests", "Requests answered", ["path", "status"], registry=self.registry)
        self._seconds = Histogram(
            "evalgate_request_seconds", "Time to the last byte", ["path"], buckets=_SECONDS, registry=self.registry
        )
        self.in_flight = Gauge("evalgate_requests_in_flight", "Requests being answered", registry=self.registry)
        self._prompt = Counter("evalgate_prompt_tokens", "Prompt tokens taken in", ["model"], registry=self.registry)
        self._generated = Counter("evalgate_generated_tokens", "Tokens sampled", ["model"], registry=self.registry)
        self._cached = Counter(
            "evalgate_cached_tokens", "Prompt tokens found in the prefix cache", ["model"], registry=self.registry
        )
        self._steps = Histogram(
            "evalgate_step_seconds", "One step of a model", ["model"], buckets=_SECONDS, registry=self.registry
        )
        for name in engine.models:  # a rate over a counter needs it to be there before the first request
            for counter in (self._prompt, self._generated, self._cached):
                counter.labels(name)
        self.registry.register(_EngineGauges(engine))
        engine.on_step = self._count_step

    def count_request(self, path: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def count_prompts(self, model: str, tokens: int) -> None:
        """Prompt tokens were taken in."""
        self._prompt.labels(model).inc(tokens)

    def count_generated(self, model: str, tokens: int, *, cached: int) -> None:
        """A request is done."""
        self._generated.labels(model).inc(tokens)
        self._cached.labels(model).inc(cached)

    def _count_step(self, model: str, seconds: float) -> None:
        self._steps.labels(model).observe(seconds)


class _EngineGauges(Collector):
    """Queue and KV use, read when asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """One family per gauge, one sample per model."""
        gauges: dict[str, tuple[str, Callable[[ModelRuntime], int]]] = {
            "evalgate_waiting": ("Sequences waiting", lambda m: len(m.scheduler.waiting)),
            "evalgate_running": ("Sequences running", lambda m: len(m.scheduler.running)),
            "evalgate_kv_tokens_used": ("Tokens with keys and values in memory", lambda m: m.pool.used),
            "evalgate_kv_tokens_capacity": ("Tokens that the KV memory holds", lambda m: m.pool.capacity),
        }
        for name, (text, read) in gauges.items():
            family = GaugeMetricFamily(name, text, labels=["model"])
            for model in self._engine.models.values():
                family.add_metric([model.name], float(read(model)))
            yield family
