"""A model that the server answers with: its engine in a thread of its own, and what the server says of the model."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nanochat.common import UserError
from nanochat.engine import Engine, Event
from nanochat.serve.engine_thread import EngineThread
from nanochat.serve.routes.fields import ApiError, Limits
from nanochat.serve.routes.metrics import Families, Metrics
from nanochat.serve.routes.sampling import Defaults
from nanochat.tokenizer import Tokenizer


@dataclass(frozen=True)
class Announced:
    """What the server announces of a model, and the defaults of a request to it."""

    model: str  # the name in the API, such as nanochat-sft-d4
    stage: str
    tag: str
    step: int
    temperature: float = 0.6
    min_p: float = 0.0
    top_k: int = 50  # 0 samples from the whole vocabulary
    max_tokens: int = 512
    about: Mapping[str, Any] = field(
        default_factory=dict
    )  # what else /v1/models says of the model, for the page


@dataclass(frozen=True)
class Loadable:
    """A model that is ready to be served: an engine, or one of its adapters. Several of these may share an engine."""

    engine: Engine
    tokenizer: Tokenizer
    announced: Announced
    adapter: str = ""  # the name by which the engine knows the adapter; "": the model itself


class Hosted:
    """One model of the server. Adapters of a model share its slots and its line of waiting requests."""

    def __init__(self, given: Loadable, thread: EngineThread[Event], families: Families):
        """`thread` is the one of its engine; `families` are the server's metrics."""
        engine, announced = given.engine, given.announced
        self.name = announced.model
        self.tokenizer = given.tokenizer
        self.check, self.schemas = engine.check, engine.schemas
        self.adapter = given.adapter
        self.thread = thread
        self.limits = Limits(self.name, engine.length, given.tokenizer.vocab_size)
        self.defaults = Defaults(
            announced.temperature, announced.min_p, announced.top_k, announced.max_tokens
        )
        self.metrics = Metrics(families, self.name, None if given.adapter else thread)
        self._announced, self._started = announced, int(time.time())
        self._capabilities = {
            "system_message": self.tokenizer.takes_system,
            "tools": self.tokenizer.takes_tools,
        }

    def described(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        told, context = self._announced, self.limits.context
        model = {
            "id": self.name,
            "object": "model",
            "created": self._started,
            "owned_by": "nanochat",
        }
        place = {"stage": told.stage, "tag": told.tag, "step": told.step}
        defaults = {
            name: getattr(told, name) for name in ("temperature", "min_p", "top_k", "max_tokens")
        }
        return {
            **model,
            **told.about,
            **place,
            "context_length": context,
            "max_model_len": context,
            "vocab_size": self.limits.vocabulary,
            "defaults": defaults,
            "capabilities": self._capabilities,
        }


class Models:
    """All models of a server, the default one first."""

    def __init__(self, given: Sequence[Loadable], waiting: int):
        """UserError (code 2) if two models have one name."""
        self.families = Families()
        names = [each.announced.model for each in given]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(
                f"two models would have the name {twice!r}: leave one out, or give it another name",
                2,
            )
        engines = {id(each.engine): each.engine for each in given}
        threads = {key: EngineThread[Event](engine, waiting) for key, engine in engines.items()}
        self.threads = list(threads.values())  # of all engines
        self.all = [Hosted(each, threads[id(each.engine)], self.families) for each in given]
        self.default = self.all[0]

    def named(self, name: Any) -> Hosted:
        """The model of a name; the default one for None. ApiError 404 if there is none of this name."""
        found = (
            self.default
            if name is None
            else next((each for each in self.all if each.name == name), None)
        )
        if found is None:
            text = f"{self._offer()}, or leave model out"
            raise ApiError(404, "model_not_found", text, "model")
        return found

    def asked(self, value: Any) -> Hosted:
        """The model that a decoded body asks for. ApiError 404 if there is none of this name."""
        return self.named(value.get("model") if isinstance(value, Mapping) else None)

    def _offer(self) -> str:
        names = ", ".join(repr(each.name) for each in self.all)
        if len(self.all) > 1:
            return f"this server has the models {names}: ask for one of these"
        return f"this server has only the model {names}: ask for that"
