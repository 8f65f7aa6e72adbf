"""Holds the models of the server, each with its engine thread, its limits and its metrics.

GET /metrics returns the metrics as Prometheus text under vLLM's names, so that dashboards made for
vLLM work here too.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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

from nanochat.common import UserError, tr
from nanochat.engine import Engine
from nanochat.generate.reply import Event
from nanochat.serve.engine_thread import EngineThread
from nanochat.serve.routes.fields import ApiError, Defaults, Limits
from nanochat.tokenizer import Tokenizer

F = TypeVar("F", Counter, Gauge, Histogram)

# Upper bounds of histogram buckets, in seconds: to the first token, between tokens, and to the last
# token. A CPU may take seconds for what a GPU does in milliseconds.
FIRST = (
    *(0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
BETWEEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1),
    *(0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0),
)
TOTAL = (
    *(0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0),
    *(10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0),
)

# --- counters ------------------------------------------------------------------------------------


class Families:
    """The Prometheus metrics of one server, each registered once and labelled by model."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._metrics: dict[str, Any] = {}

    def get(
        self,
        kind: type[F],
        name: str,
        help_text: str,
        labels: Sequence[str] = ("model_name",),
        **options: Any,
    ) -> F:
        """Return the metric called `name`, registering it on first use."""
        if name not in self._metrics:
            self._metrics[name] = kind(
                f"vllm:{name}", help_text, labels, registry=self._registry, **options
            )
        return self._metrics[name]  # type: ignore[no-any-return]

    def response(self) -> Response:
        """Return an HTTP response with all metrics as Prometheus text."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)


class Metrics:
    """The metrics of one model; all times are in seconds."""

    def __init__(
        self,
        families: Families,
        model: str,
        thread: EngineThread[Event] | None,
    ):
        """Register the metrics of a model.

        `thread` runs the model's engine, or is None for an adapter, whose base model already
        reports how busy the engine is.
        """
        self._families = families
        self._model = model
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
        self.total = self._histogram(
            "e2e_request_latency_seconds", "From request to last token.", TOTAL
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
        """Count a reply that ended for `reason`."""
        self._ended.labels(self._model, reason).inc()

    def _counter(self, name: str, help_text: str) -> Counter:
        return self._families.get(Counter, name, help_text).labels(self._model)

    def _gauge(
        self,
        name: str,
        help_text: str,
        value: Callable[[], float],
    ) -> None:
        self._families.get(Gauge, name, help_text).labels(self._model).set_function(value)

    def _histogram(
        self,
        name: str,
        help_text: str,
        buckets: Sequence[float],
    ) -> Histogram:
        return self._families.get(Histogram, name, help_text, buckets=buckets).labels(self._model)


class Watch:
    """Times the replies of one request, and counts their tokens."""

    def __init__(
        self,
        metrics: Metrics,
        prompts: Sequence[int],
        start: float,
    ):
        """Watch one reply for each of `prompts`, the lengths of the prompts in tokens.

        `start` is when the request arrived, by the monotonic clock.
        """
        self._metrics = metrics
        self._prompts = prompts
        self._start = start
        self._last: dict[int, float] = {}  # index of a reply -> when its last token arrived
        self._ended: dict[int, str] = {}

    @property
    def done(self) -> bool:
        """Whether all replies have ended."""
        return len(self._ended) == len(self._prompts)

    def add(self, news: Sequence[tuple[int, Event]]) -> None:
        """Count and time tokens that were delivered together, each with its reply's index.

        The time since a reply's previous token is divided equally among its new tokens.
        """
        now = time.monotonic()
        metrics = self._metrics
        counts: dict[int, int] = {}
        for index, event in news:
            if index in self._last:
                counts[index] = counts.get(index, 0) + 1
            else:
                self._last[index] = now
                self._begin(index, event, now)
            if event.finish is not None:
                self._ended[index] = event.finish
                metrics.ended(event.finish)
                metrics.total.observe(now - self._start)
        metrics.generation_tokens.inc(len(news))
        for index, count in counts.items():
            seconds = (now - self._last[index]) / count
            for _ in range(count):
                metrics.between.observe(seconds)
            self._last[index] = now

    def _begin(self, index: int, event: Event, now: float) -> None:
        """Record the time to a reply's first token, and count the tokens of its prompt."""
        metrics = self._metrics
        metrics.first.observe(now - self._start)
        metrics.prompt_tokens.inc(self._prompts[index])
        metrics.queries.inc(self._prompts[index])
        metrics.hits.inc(event.reused)

    def end(self) -> None:
        """Count as aborted all replies that have not ended."""
        for _ in range(len(self._prompts) - len(self._ended)):
            self._metrics.ended("abort")


# --- models --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Announced:
    """What the server publishes about a model, and the default settings of requests to it."""

    model: str  # the name in the API, such as nanochat-sft-d4
    stage: str
    tag: str
    step: int
    temperature: float = 0.6
    min_p: float = 0.0
    top_k: int = 50  # 0 samples from the whole vocabulary
    max_tokens: int = 512
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    # More facts about the model in /v1/models, for the web page.
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Loadable:
    """A model that is ready to be served: an engine's own model, or one of its adapters.

    Several Loadables may share an engine.
    """

    engine: Engine
    tokenizer: Tokenizer
    announced: Announced
    adapter: str = ""  # the name by which the engine knows the adapter; "": the model itself


class Hosted:
    """A model that answers requests to the server.

    A model and its adapters share the engine's slots, and their requests wait in one line.
    """

    def __init__(
        self,
        loadable: Loadable,
        thread: EngineThread[Event],
        families: Families,
    ):
        """Host a model, and register its metrics in `families`; `thread` runs its engine."""
        engine = loadable.engine
        announced = loadable.announced
        self.name = announced.model
        self.tokenizer = loadable.tokenizer
        self.check = engine.check
        self.schemas = engine.schemas
        self.adapter = loadable.adapter
        self.thread = thread
        self.limits = Limits(self.name, engine.length, self.tokenizer.vocab_size)
        self.defaults = Defaults(
            announced.temperature,
            announced.min_p,
            announced.top_k,
            announced.max_tokens,
            announced.top_p,
            announced.repetition_penalty,
        )
        self.metrics = Metrics(families, self.name, None if self.adapter else thread)
        self._announced = announced
        self._started = int(time.time())

    def described(self) -> dict[str, Any]:
        """Return the model's entry in /v1/models as a dict."""
        return {
            "id": self.name,
            "object": "model",
            "created": self._started,
            "owned_by": "nanochat",
            **self._announced.about,
            "stage": self._announced.stage,
            "tag": self._announced.tag,
            "step": self._announced.step,
            "context_length": self.limits.context,
            "max_model_len": self.limits.context,
            "vocab_size": self.limits.vocabulary,
            "defaults": {
                "temperature": self.defaults.temperature,
                "min_p": self.defaults.min_p,
                "top_k": self.defaults.top_k,
                "max_tokens": self.defaults.max_tokens,
                "top_p": self.defaults.top_p,
                "repetition_penalty": self.defaults.repetition_penalty,
                "enable_thinking": self.tokenizer.thinks_by_default,  # None: there is no switch
            },
            "capabilities": {
                "system_message": self.tokenizer.takes_system,
                "tools": self.tokenizer.takes_tools,
            },
        }


class Models:
    """All models of a server, the default one first."""

    def __init__(self, loadables: Sequence[Loadable], waiting: int):
        """Host models, letting up to `waiting` requests wait for the slots of each engine.

        Raises UserError (exit code 2) if two models have the same name.
        """
        self.families = Families()
        names = [loadable.announced.model for loadable in loadables]
        for name in names:
            if names.count(name) > 1:
                raise UserError(
                    tr(
                        "two models would have the name {name!r}: leave one out, or give it another "
                        "name",
                        name=name,
                    ),
                    2,
                )
        threads: dict[int, EngineThread[Event]] = {}  # by id(engine)
        self.all: list[Hosted] = []
        for loadable in loadables:
            key = id(loadable.engine)
            if key not in threads:
                threads[key] = EngineThread[Event](loadable.engine, waiting)
            self.all.append(Hosted(loadable, threads[key], self.families))
        self.threads = list(threads.values())  # one for each engine
        self.default = self.all[0]

    def named(self, name: Any) -> Hosted:
        """Return the model called `name`, or the default one if `name` is None.

        Raises ApiError (404) if there is no such model.
        """
        if name is None:
            return self.default
        for model in self.all:
            if model.name == name:
                return model
        raise ApiError(404, "model_not_found", f"{self._offer()}, or leave model out", "model")

    def of_body(self, value: Any) -> Hosted:
        """Return the model that a decoded body asks for, or the default one if it names none.

        Raises ApiError (404) if there is no such model.
        """
        return self.named(value.get("model") if isinstance(value, Mapping) else None)

    def _offer(self) -> str:
        """Return the beginning of an error message, which lists the names of all models."""
        names = ", ".join(repr(model.name) for model in self.all)
        if len(self.all) > 1:
            return f"this server has the models {names}: ask for one of these"
        return f"this server has only the model {names}: ask for that"
