"""Chats with an OpenAI-compatible server: streams replies, which can be stopped at any moment."""

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import requests

from nanochat.common import UserError
from nanochat.data.conversation import Message, Part
from nanochat.data.sources import net

CONNECT_SECONDS = 10
READ_SECONDS = 600  # a busy server may take minutes to its first token
# What the user may set; our server publishes its defaults.
SETTINGS = ("temperature", "min_p", "top_k", "max_tokens")
NOT_OPENAI = ("min_p", "top_k")  # settings that OpenAI's own server refuses
LOOK_SECONDS = 0.1  # how often a reply under way checks whether it was stopped


class Remote:
    """A chat server, whose first listed model answers.

    After a reply, `finish` says why it ended, and `tokens` how long it was, if the server said so.
    """

    def __init__(self, url: str, api_key: str):
        """Connect to the server at a URL, with or without /v1 or a route such as /v1/models.

        Raises UserError if the URL is not HTTP (exit code 2), if no OpenAI-compatible server
        answers, or if it refuses the key.
        """
        self.url = net.api_address(url)
        if not url.startswith(("http://", "https://")):
            raise UserError(
                f"--url must begin with http:// or https://, got {url}: write it in full",
                exit_code=2,
            )
        self._headers = {"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        models = self._json(self._send("GET", "models"))
        try:
            model = models["data"][0]
            self.model = str(model["id"])
        except (KeyError, IndexError, TypeError):
            raise UserError(
                f"{self.url} names no model: give --url the address of an OpenAI-compatible server"
            ) from None
        # Our own server also accepts the fields of NOT_OPENAI.
        self._ours = model.get("owned_by") == "nanochat"
        self._defaults = _defaults(model) if self._ours else {}
        context = model.get("context_length")
        self.context = context if self._ours and isinstance(context, int) else None  # in tokens
        self.finish: str | None = None
        self.tokens = 0

    def settings(self, flags: Mapping[str, Any]) -> dict[str, Any]:
        """Return a reply's sampling settings as a dict from name to value.

        A setting comes from `flags`, the settings that the user chose, or else from the defaults
        that the server publishes. It is None if neither has it.

        A nanochat server refuses a reply that does not fit into its context. So a reply gets at
        most three quarters of that context if the user asked for a length, and otherwise at most
        half, as on the web page. The rest is for the chat.
        """
        settings = {**dict.fromkeys(SETTINGS), **self._defaults, **flags}
        if self.context and settings["max_tokens"]:
            for_chat = self.context - self.context // 2
            if "max_tokens" in flags:
                for_chat = self.context // 4
            room = self.context - for_chat
            settings["max_tokens"] = max(1, min(settings["max_tokens"], room))
        return settings

    def reply(
        self,
        messages: Sequence[Message],
        settings: dict[str, Any],
        stopped: Callable[[], bool],
    ) -> Iterator[Part]:
        """Yield the parts of a reply as they arrive, until it ends or `stopped` returns true.

        Raises UserError if the server does not answer, refuses the request, or fails later.
        """
        self.finish = None
        self.tokens = 0
        body = self._body(messages, settings)
        lines: queue.SimpleQueue[bytes | Exception | None] = queue.SimpleQueue()
        response = self._send("POST", "chat/completions", body)
        # A read cannot be interrupted, so another thread reads.
        threading.Thread(target=_queue_lines, args=(response, lines), daemon=True).start()
        try:
            while not stopped():
                try:
                    line = lines.get(timeout=LOOK_SECONDS)
                except queue.Empty:
                    continue
                if isinstance(line, Exception):
                    raise UserError(
                        f"{self.url} ended the reply too early ({line}): send the message again"
                    ) from line
                if line is None or line == b"data: [DONE]":
                    return
                if line.startswith(b"data:"):
                    yield from self._parts(line[5:])
        finally:
            # The stream may have ended already.
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                # This ends the other thread's read; close() alone would wait for it.
                response.raw.shutdown()
            response.close()

    def _body(self, messages: Sequence[Message], settings: dict[str, Any]) -> dict[str, Any]:
        """Return the body of a request for a streamed reply, as a dict."""
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for name, value in settings.items():
            if value is not None and (self._ours or name not in NOT_OPENAI):
                body[name] = value
        if self._ours:
            body["truncation"] = "auto"
        body["messages"] = [
            {"role": message.role, "content": _text(message)} for message in messages
        ]
        return body

    def _parts(self, data: bytes) -> Iterator[Part]:
        """Yield the parts of the reply that an event holds, and update `finish` and `tokens`.

        Raises UserError if the event is an error, or not a chat completion.
        """
        try:
            value = json.loads(data)
            if "error" in value:
                raise UserError(f"{self.url} failed: {value['error']['message']}")
            self.tokens = (value.get("usage") or {}).get("completion_tokens", self.tokens)
            for choice in value["choices"]:
                self.finish = choice.get("finish_reason") or self.finish
                delta = choice.get("delta") or {}
                call = delta.get("tool")  # a calculator call, which only our server sends
                if call:
                    yield Part("python", call["expression"])
                    yield Part("python_output", call["result"] or "")
                if delta.get("content"):
                    yield Part("text", delta["content"])
        except UserError:  # a ValueError as well, but it already has the server's own text
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as failure:
            raise UserError(f"{self.url} sent what is no chat completion: check --url") from failure

    def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
    ) -> requests.Response:
        """Send a request and return its response, whose body has not been read yet.

        Raises UserError if no server answers, or if it refuses the request.
        """
        timeout = (CONNECT_SECONDS, READ_SECONDS)
        try:
            response = net.request(
                method,
                f"{self.url}/{path}",
                json=body,
                headers=self._headers,
                stream=True,
                timeout=timeout,
            )
        except (requests.RequestException, UnicodeError) as failure:
            text = (
                f"no server answers at {self.url} ({type(failure).__name__}): start one there, or "
                "correct --url"
            )
            raise UserError(text) from failure
        if response.status_code == 401:
            raise UserError(f"{self.url} does not take this key: give the right one with --api_key")
        if not response.ok:
            value = self._json(response)
            error = value.get("error") if isinstance(value, dict) else None
            reason = error.get("message") if isinstance(error, dict) else None
            raise UserError(
                f"{self.url} refused (status {response.status_code}): {reason or response.reason}"
            )
        return response

    def _json(self, response: requests.Response) -> Any:
        try:
            with response:
                return response.json()
        except (requests.RequestException, ValueError) as failure:
            raise UserError(
                f"{self.url} sent no JSON: give --url the address of an OpenAI-compatible server"
            ) from failure


def _queue_lines(
    response: requests.Response, lines: "queue.SimpleQueue[bytes | Exception | None]"
) -> None:
    """Put a response's lines into a queue, then None, or the exception that ended the reading."""
    try:
        for line in response.iter_lines(chunk_size=1):
            lines.put(line)
        lines.put(None)
    except Exception as failure:  # the edge of a thread: closing the response also raises here
        lines.put(failure)


def _defaults(model: dict[str, Any]) -> dict[str, Any]:
    """Return a dict of the default settings that a nanochat server publishes for a model."""
    defaults = model.get("defaults")
    if not isinstance(defaults, dict):
        return {}
    return {
        name: defaults[name] for name in SETTINGS if isinstance(defaults.get(name), int | float)
    }


def _text(message: Message) -> str:
    """Return the text of a message, or its calculator calls and results if it has no text.

    Servers refuse an empty message.
    """
    return message.text or " ".join(part.text for part in message.parts)
