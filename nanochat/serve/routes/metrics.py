"""GET /metrics: what the server does, in Prometheus text under vLLM's names, so that dashboards made for vLLM fit."""

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fastapi import Response
from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from nanochat.engine import Event
from nanochat.serve.engine_thread import EngineThread

F = TypeVar("F", Counter, Gauge, Histogram)

# Upper bounds in seconds. A CPU takes up to seconds for what a GPU does in milliseconds.
FIRST = (
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
BETWEEN = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
)
WHOLE = (
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    60.0,
    120.0,
    240.0,
    480.0,
)


class Families:
    """The metrics of one server: each name is registered once, with a value for every model."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._known: dict[str, Any] = {}

    def get(
        self,
        kind: type[F],
        name: str,
        what: str,
        labels: Sequence[str] = ("model_name",),
        **options: Any,
    ) -> F:
        """The metric of a name, which is registered when it is asked for the first time."""
        if name not in self._known:
            self._known[name] = kind(
                f"vllm:{name}", what, labels, registry=self._registry, **options
            )
        return self._known[name]  # type: ignore[no-any-return]

    def response(self) -> Response:
        """All of it as text."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class Metrics:
    """The counters of one model. All times are in seconds."""

    def __init__(self, families: Families, model: str, thread: EngineThread[Event] | None):
        """`thread` is the one of the model's engine; None for an adapter, whose base tells how busy the engine is."""
        self._families, self._model = families, model
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were answered.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens of replies.")
        self.queries = self._counter(
            "prefix_cache_queries", "Tokens of prompts that were looked up."
        )
        self.hits = self._counter(
            "prefix_cache_hits", "Tokens of prompts that were not read again."
        )
        help_text = "Requests that ended, by the reason: stop, length, error or abort."
        self._ended = families.get(
            Counter, "request_success", help_text, ("model_name", "finished_reason")
        )
        self.first = self._histogram(
            "time_to_first_token_seconds", "From request to first token.", FIRST
        )
        self.between = self._histogram(
            "inter_token_latency_seconds", "Between tokens of a reply.", BETWEEN
        )
        self.whole = self._histogram(
            "e2e_request_latency_seconds", "From request to last token.", WHOLE
        )
        if thread is None:
            return
        self._gauge(
            "num_requests_running",
            "Requests that the engine works on.",
            lambda: thread.slots - thread.free_slots,
        )
        self._gauge(
            "num_requests_waiting", "Requests that wait for a slot.", lambda: len(thread.line)
        )
        self._gauge(
            "kv_cache_usage_perc",
            "Share of the slots in use, 0 to 1.",
            lambda: 1 - thread.free_slots / thread.slots,
        )

    def ended(self, reason: str) -> None:
        """Count a request that ended."""
        self._ended.labels(self._model, reason).inc()

    def _counter(self, name: str, what: str) -> Counter:
        return self._families.get(Counter, name, what).labels(self._model)

    def _gauge(self, name: str, what: str, value: Callable[[], float]) -> None:
        self._families.get(Gauge, name, what).labels(self._model).set_function(value)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        return self._families.get(Histogram, name, what, buckets=buckets).labels(self._model)


class Watch:
    """Times the replies of one request, and counts their tokens."""

    def __init__(self, metrics: Metrics, prompts: Sequence[int], start: float):
        """`prompts` are the lengths of the prompts in tokens; `start` is when the request came, monotonic."""
        self._metrics, self._prompts, self._start = metrics, prompts, start
        self._last: dict[int, float] = {}  # place of a reply -> when its last token came
        self._ended: dict[int, str] = {}

    @property
    def done(self) -> bool:
        """Whether all replies have ended."""
        return len(self._ended) == len(self._prompts)

    def add(self, news: Sequence[tuple[int, Event]]) -> None:
        """Follow the events of one delivery. The tokens of a reply that come together share the time since the last."""
        now, metrics = time.monotonic(), self._metrics
        counts: dict[int, int] = {}
        for place, event in news:
            if place not in self._last:
                self._last[place] = now
                metrics.first.observe(now - self._start)
                metrics.prompt_tokens.inc(self._prompts[place])
                metrics.queries.inc(self._prompts[place])
                metrics.hits.inc(event.reused)
            else:
                counts[place] = counts.get(place, 0) + 1
            if event.finish is not None:
                self._ended[place] = event.finish
                metrics.ended(event.finish)
                metrics.whole.observe(now - self._start)
        metrics.generation_tokens.inc(len(news))
        for place, count in counts.items():
            for _ in range(count):
                metrics.between.observe((now - self._last[place]) / count)
            self._last[place] = now

    def end(self) -> None:
        """Count replies that did not come to their end."""
        for _ in range(len(self._prompts) - len(self._ended)):
            self._metrics.ended("abort")
