"""GET /metrics: what the server does, in Prometheus text under vLLM's names, so that dashboards made for vLLM fit."""

import time
from collections.abc import Sequence

from fastapi import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from nanochat.engine import Event
from nanochat.serve.engine_thread import EngineThread

# Upper bounds in seconds. A CPU takes up to seconds for what a GPU does in milliseconds.
FIRST = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
WHOLE = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)


class Metrics:
    """The counters of one server. All times are in seconds."""

    def __init__(self, model: str, thread: EngineThread[Event]):
        self._registry = CollectorRegistry()
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts that were answered.", model)
        self.generation_tokens = self._counter("generation_tokens", "Tokens of replies.", model)
        self.queries = self._counter("prefix_cache_queries", "Tokens of prompts that were looked up.", model)
        self.hits = self._counter("prefix_cache_hits", "Tokens of prompts that were not read again.", model)
        help_text = "Requests that ended, by the reason: stop, length, error or abort."
        self._ended = Counter(
            "vllm:request_success", help_text, ["model_name", "finished_reason"], registry=self._registry
        )
        self._model = model
        self.first = self._histogram("time_to_first_token_seconds", "From request to first token.", model, FIRST)
        self.between = self._histogram("inter_token_latency_seconds", "Between tokens of a reply.", model, BETWEEN)
        self.whole = self._histogram("e2e_request_latency_seconds", "From request to last token.", model, WHOLE)
        running = self._gauge("num_requests_running", "Requests that the engine works on.", model)
        running.set_function(lambda: thread.slots - thread.free_slots)
        self._gauge("num_requests_waiting", "Requests that wait for a slot.", model).set_function(
            lambda: len(thread.line)
        )
        self._gauge("kv_cache_usage_perc", "Share of the slots in use, 0 to 1.", model).set_function(
            lambda: 1 - thread.free_slots / thread.slots
        )

    def ended(self, reason: str) -> None:
        """Count a request that ended."""
        self._ended.labels(self._model, reason).inc()

    def response(self) -> Response:
        """All of it as text."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def _counter(self, name: str, what: str, model: str) -> Counter:
        return Counter(f"vllm:{name}", what, ["model_name"], registry=self._registry).labels(model)

    def _gauge(self, name: str, what: str, model: str) -> Gauge:
        return Gauge(f"vllm:{name}", what, ["model_name"], registry=self._registry).labels(model)

    def _histogram(self, name: str, what: str, model: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"vllm:{name}", what, ["model_name"], registry=self._registry, buckets=buckets).labels(model)


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
