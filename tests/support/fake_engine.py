"""An engine with scripted replies, a tokenizer of single bytes, and a server that uses them."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import uvicorn.server

from nanochat.data.conversation import Conversation, Part
from nanochat.engine import Event
from nanochat.generate.sampling import Sampling
from nanochat.serve.app import create_app
from nanochat.serve.listening import App, Server
from nanochat.serve.models import Announced, Loadable
from nanochat.serve.server import Settings
from nanochat.tokenizer import ROLES, Rendered

CHAT = "/v1/chat/completions"

# Ten times a second uvicorn looks whether it should end, and for as long it waits for its connections: of the hundreds of
# servers that tests start, each takes a tenth of that time to end.
_quick = SimpleNamespace(**{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)})
uvicorn.server.asyncio = _quick  # type: ignore[assignment]


@dataclass(frozen=True)
class ServerSettings(Settings, Announced):
    """The settings of a server with one model, and those of the model."""


SETTINGS = ServerSettings(model="nanochat-sft-d4", stage="sft", tag="d4", step=300)
ABOUT = {
    "corpus": "tinyworld",
    "parameters": 4_921_344,
    "knows": {"en": "capitals and sums", "zh": "各国首都和算术"},
    "others": ["-i rl -g old", "-i base -g d4"],
}


@dataclass
class ByteTokenizer:
    """Each token is one byte, so every Chinese character is split into three tokens."""

    takes_system: bool = False
    takes_tools: bool = False
    takes_options: bool = False
    thinks_by_default: bool | None = None
    call_format: str | None = None
    thought_marks: tuple[str, str] | None = None
    strips_space: bool = False

    sampling: ClassVar[Mapping[str, float]] = {}
    bos = 256
    stops = frozenset({256 + ROLES.index("assistant_end"), bos})
    marks_begin = True
    adds_bos = True
    vocab_size = 256 + len(ROLES)

    @property
    def specials(self) -> dict[str, int]:
        return {role: self.special(role) for role in ROLES}

    def special(self, role: str) -> int:
        return 256 + ROLES.index(role)

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="replace"))

    encode_reply = encode

    def encode_after(self, text: str, mark: bool) -> list[int]:
        return self.encode(text)

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        return b"".join(bytes([i]) if i < 256 else ROLES[i - 256].encode() for i in ids)

    def decode(self, ids: Sequence[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def marked(self, kind: str, text: str) -> list[int]:
        return [self.special(f"{kind}_start"), *self.encode(text), self.special(f"{kind}_end")]

    def parts(self, parts: Sequence[Part | str]) -> list[int]:
        marks = {"python": "python", "python_output": "output"}
        ids: list[int] = []
        for part in parts:
            if isinstance(part, str):
                ids += self.encode(part)
            else:
                ids += self.marked(marks[part.kind], part.text) if part.kind in marks else self.encode(part.text)
        return ids

    def render(self, conversation: Conversation) -> Rendered:
        ids = [self.bos]
        for message in conversation.messages:
            if message.role == "assistant":
                start, end = self.special("assistant_start"), self.special("assistant_end")
                ids += [start, *self.parts(message.parts), end]
            else:
                ids += self.marked("user", message.text)
        return Rendered(ids, [0] * len(ids))

    def render_prompt(self, conversation: Conversation) -> list[int]:
        return [*self.render(conversation).ids, self.special("assistant_start")]

    def render_as_sent(self, conversation: Conversation) -> None:
        """This format has no place for turns in another order."""


@dataclass
class Seen:
    """A request that the engine received, the tokens of its reply that are left, and how many were sent."""

    prompt: list[int]
    sampling: Sampling
    left: list[int]
    said: int = 0
    cancelled: bool = False


class NoSchemas:
    """Schemas that need no preparation."""

    def is_ready(self, schema: str) -> bool:
        return True

    def prepare(self, schema: str) -> None:
        return None


@dataclass
class FakeEngine:
    """Answers each question with its entry in `replies`, or repeats the question; one byte per step.

    With `gated`, a step sends a token only after `allow` has permitted it, so that a test can look at half an answer
    without depending on time. `seen` keeps every request. `fail` makes the next step raise.
    """

    replies: Mapping[str, Sequence[Part | str]] = field(default_factory=dict)
    slots: int = 2
    length: int = 4096
    gated: bool = False
    fail: bool = False
    seen: list[Seen] = field(default_factory=list)
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    schemas: NoSchemas = field(default_factory=NoSchemas)

    def __post_init__(self) -> None:
        self._permits = threading.Semaphore(0)
        self._active: list[int] = []
        self._waiting: list[int] = []
        self._suspended: list[int] = []

    def allow(self, tokens: int) -> None:
        """Permit this many more steps."""
        self._permits.release(tokens)

    @property
    def busy(self) -> bool:
        return bool(self._active or self._waiting)

    @property
    def free_slots(self) -> int:
        return self.slots - len(self._active)

    def check(self, prompt: list[int], sampling: Sampling) -> None:
        """This engine accepts everything."""

    def submit(self, prompt: list[int], sampling: Sampling) -> int:
        user_start, user_end = self.tokenizer.special("user_start"), self.tokenizer.special("user_end")
        start = len(prompt) - prompt[::-1].index(user_start)
        question = bytes(prompt[start : prompt.index(user_end, start)]).decode()
        left = [*self.tokenizer.parts(self.replies.get(question, [question])), self.tokenizer.special("assistant_end")]
        self.seen.append(Seen(prompt, sampling, left))
        self._waiting.append(len(self.seen) - 1)
        return len(self.seen) - 1

    def cancel(self, request: int) -> bool:
        for requests in (self._active, self._waiting, self._suspended):
            if request in requests:
                requests.remove(request)
                self.seen[request].cancelled = True
                return True
        return False

    def suspend(self, request: int) -> None:
        (self._active if request in self._active else self._waiting).remove(request)
        self._suspended.append(request)

    def resume(self, request: int) -> None:
        self._suspended.remove(request)
        self._waiting.append(request)

    def step(self) -> list[Event]:
        while self._waiting and self.free_slots:
            self._active.append(self._waiting.pop(0))
        if self.gated and not self._permits.acquire(timeout=0.005):
            return []  # so that a request can be cancelled while no step is permitted
        if self.fail:
            self.fail = False
            raise RuntimeError("the device is gone")
        return [self._say(request) for request in list(self._active)]

    def _say(self, request: int) -> Event:
        seen = self.seen[request]
        token = seen.left.pop(0)
        seen.said += 1
        finish = "stop" if not seen.left else "length" if seen.said == seen.sampling.max_tokens else None
        if finish:
            self._active.remove(request)
        return Event(request, token, 0.0, False, finish)


@contextlib.contextmanager
def running(
    engine: Any,
    tokenizer: Any = None,
    settings: ServerSettings = SETTINGS,
    wrap: Any = None,
    beside: Sequence[Loadable] = (),
    port: int = 0,
) -> Iterator[str]:
    """Run a real server in a thread, and yield its address. `wrap` may wrap the ASGI app, `beside` are further models,
    and port 0 takes a free one."""
    app = create_app([Loadable(engine, tokenizer or engine.tokenizer, settings), *beside], settings)
    with serving(replace(app, asgi=wrap(app.asgi)) if wrap else app, port) as url:
        try:
            yield url
        finally:
            for each in (engine, *(other.engine for other in beside)):
                if isinstance(each, FakeEngine):
                    each.allow(100_000)


@contextlib.contextmanager
def serving(app: App, port: int = 0) -> Iterator[str]:
    """Run a real server for an application in a thread, and yield its address. Port 0 takes a free one."""
    listener = socket.create_server(("127.0.0.1", port))
    server = Server(app)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(timeout=30)


def ask(text: str, **fields: Any) -> dict[str, Any]:
    """The body of a request that asks one question."""
    return {"messages": [{"role": "user", "content": text}], **fields}


def eventually(condition: Callable[[], bool]) -> None:
    """Wait until another thread makes the condition true."""
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true within 30 seconds"
        time.sleep(0.005)  # without it, the other thread would wait for this one
