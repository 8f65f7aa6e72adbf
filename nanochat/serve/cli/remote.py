"""Chats with an OpenAI-compatible server: streams replies, which can be stopped at any moment.

The server is not trusted: whatever it sends is either shown as text or refused in one message.
"""

import contextlib
import queue
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeGuard
from urllib.parse import unquote, urlsplit, urlunsplit

import requests
from requests.auth import AuthBase, HTTPBasicAuth

from nanochat.common import UserError, parse_json, tr
from nanochat.data.conversation import Message, Part
from nanochat.data.sources import net
from nanochat.serve.formats.pieces import Thought, parts_as_request

CONNECT_SECONDS = 10
READ_SECONDS = 600  # a busy server may take minutes to its first token
# What the user may set; our server publishes its defaults.
SETTINGS = ("temperature", "min_p", "top_k", "max_tokens")
NOT_OPENAI = ("min_p", "top_k")  # settings that OpenAI's own server refuses
DONES = (b"data: [DONE]", b"data:[DONE]")  # the last line of a streamed reply
LOOK_SECONDS = 0.1  # how often a reply under way checks whether it was stopped
JSON_BYTES = 4 << 20  # the longest answer that is not streamed
JSON_SECONDS = 60.0  # for the whole of it to arrive
LINE_BYTES = 1 << 20  # the longest line of a streamed reply
REPLY_BYTES = 64 << 20  # the longest streamed reply
REASON_LETTERS = 500  # letters to show of a server's reason for a failure
LONGEST_NAME = 200  # characters of a model's name
LARGEST_SETTING = 10**9


class Remote:
    """A chat server, whose first listed model answers.

    After a reply, `finish` says why it ended, and, if the server said so, `tokens` how long it was
    and `forgotten` how many of the first messages the model did not see.
    """

    def __init__(self, url: str, api_key: str):
        """Connect to the server at a URL, with or without /v1 or a route such as /v1/models.

        A user name and a password in the URL are sent if there is no key; messages leave them out.
        Raises UserError if the URL is not HTTP (exit code 2), if no OpenAI-compatible server
        answers, or if it refuses the key.
        """
        if not url.startswith(("http://", "https://")):
            raise UserError(
                tr(
                    "--url must begin with http:// or https://, got {without_password}: write it "
                    "in full",
                    without_password=_without_password(url),
                ),
                exit_code=2,
            )
        self.url, self._auth = _split_url(url)
        self._headers = {"Accept-Encoding": "identity"}
        if api_key:
            self._auth = _Bearer(api_key)
        models = self._json(self._send("GET", "models"))
        try:
            model = models["data"][0]
            self.model = model["id"]
        except (KeyError, IndexError, TypeError):
            model = None
        if not isinstance(model, dict) or not _is_name(model["id"]):
            raise UserError(
                tr(
                    "{url} names no model: give --url the address of an OpenAI-compatible server",
                    url=self.url,
                )
            )
        # Our own server also accepts the fields of NOT_OPENAI.
        self._ours = model.get("owned_by") == "nanochat"
        self._defaults = _defaults(model) if self._ours else {}
        context = model.get("context_length")
        self.context = context if self._ours and _is_count(context) else None  # in tokens
        self.finish: str | None = None
        self.tokens = 0
        self.forgotten = 0

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
    ) -> Generator[Part | Thought, None, None]:
        """Yield the parts and thoughts of a reply as they arrive, until it ends or `stopped` returns true.

        Raises UserError if the server does not answer, refuses the request, fails later, or closes
        the connection before the reply has ended.
        """
        self.finish = None
        self.tokens = 0
        self.forgotten = 0
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
                if line is None and not self.finish:
                    line = EOFError(tr("the server closed the connection"))
                if isinstance(line, Exception):
                    raise UserError(
                        tr(
                            "{url} ended the reply too early ({line}): send the message again",
                            url=self.url,
                            line=line,
                        )
                    ) from line
                if line is None or line in DONES:
                    self.finish = self.finish or "stop"  # some servers give no reason
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
            {"role": message.role, "content": _text(message), **self._more(message)}
            for message in messages
        ]
        return body

    def _more(self, message: Message) -> dict[str, Any]:
        """Return what only our own server reads: the thought of a message, and its calculations."""
        if not self._ours or message.role != "assistant":
            return {}
        more = {key: value for key, value in message.fields.items() if key == "reasoning_content"}
        kinds = [part.kind for part in message.parts]
        if "python" in kinds and kinds[0] != "python_output":  # else there is no call before it
            more["parts"] = parts_as_request(message.parts)
        return more

    def _parts(self, data: bytes) -> Iterator[Part | Thought]:
        """Yield the parts and thoughts that an event holds, and update what reply() says of it.

        Raises UserError if the event is an error, or not a chat completion.
        """
        try:
            value = parse_json(data)
            if "error" in value:
                raise UserError(
                    tr(
                        "{url} failed: {reason}",
                        url=self.url,
                        reason=_reason(value) or tr("it gave no reason"),
                    )
                )
            tokens = (value.get("usage") or {}).get("completion_tokens")
            if _is_count(tokens):
                self.tokens = tokens
            forgotten = value.get("truncated_messages")  # only our server leaves messages out
            if _is_count(forgotten):
                self.forgotten = forgotten
            for choice in value["choices"]:
                self.finish = _text_in(choice, "finish_reason") or self.finish
                delta = choice.get("delta") or {}
                call = delta.get("tool")  # a calculator call, which only our server sends
                if call:
                    yield Part("python", _text_in(call, "expression"))
                    if call.get("result") is not None:  # the call was not cut off
                        yield Part("python_output", _text_in(call, "result"))
                # Servers differ in the name, and some send an object under the second one.
                thought = delta.get("reasoning_content") or delta.get("reasoning")
                if isinstance(thought, str) and thought:
                    yield Thought(thought)
                text = _text_in(delta, "content")
                if text:
                    yield Part("text", text)
        except UserError:  # a ValueError as well, but it already has the server's own text
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as failure:
            raise UserError(
                tr("{url} sent something other than a chat completion: check --url", url=self.url)
            ) from failure

    def _send(
        self,
        method: str,
        path: str,
        body: Any = None,
    ) -> requests.Response:
        """Send a request and return its response, whose body has not been read yet.

        Raises UserError if no server answers, if it refuses the request, or as net.request() does.
        """
        timeout = (CONNECT_SECONDS, READ_SECONDS)
        try:
            response = net.request(
                method,
                f"{self.url}/{path}",
                json=body,
                headers=self._headers,
                auth=self._auth,
                stream=True,
                timeout=timeout,
                allow_redirects=False,  # the chat and the key are for this server only
            )
        except UserError:  # of the proxy
            raise
        except (requests.RequestException, UnicodeError, ValueError) as failure:
            text = tr(
                "no server answers at {url} ({failure}): start one there, or correct --url",
                url=self.url,
                failure=type(failure).__name__,
            )
            raise UserError(text) from failure
        if response.status_code == 401:
            raise UserError(
                tr("{url} does not take this key: give the right one with --api_key", url=self.url)
            )
        if 300 <= response.status_code < 400:
            raise UserError(
                tr(
                    "{url} sends its clients to another address: give that one with --url",
                    url=self.url,
                )
            )
        if not response.ok:
            reason = _reason(self._json(response)) or response.reason[:REASON_LETTERS]
            raise UserError(
                tr(
                    "{url} refused (status {status_code}): {reason}",
                    url=self.url,
                    status_code=response.status_code,
                    reason=reason,
                )
            )
        return response

    def _json(self, response: requests.Response) -> Any:
        """Return the JSON value of a response.

        Raises UserError if the body is not JSON, too large, compressed or too slow.
        """
        end = time.monotonic() + JSON_SECONDS
        try:
            with response:
                _check_encoding(response)
                body = bytearray()
                for piece in response.iter_content(1 << 12):
                    body += piece
                    if len(body) > JSON_BYTES or time.monotonic() > end:
                        raise ValueError("too large or too slow")
            return parse_json(bytes(body))
        except (requests.RequestException, ValueError) as failure:
            raise UserError(
                tr(
                    "{url} sent no JSON: give --url the address of an OpenAI-compatible server",
                    url=self.url,
                )
            ) from failure


def _queue_lines(
    response: requests.Response, lines: "queue.SimpleQueue[bytes | Exception | None]"
) -> None:
    """Put a response's lines into a queue, then None, or the exception that ended the reading."""
    try:
        _check_encoding(response)
        line = bytearray()
        size = 0
        for byte in response.iter_content(chunk_size=1):
            size += len(byte)
            if byte == b"\n":
                lines.put(bytes(line).removesuffix(b"\r"))
                line.clear()
            else:
                line += byte
            if len(line) > LINE_BYTES or size > REPLY_BYTES:
                raise ValueError(f"more than {LINE_BYTES:,} bytes a line or {REPLY_BYTES:,} in all")
        if line in DONES:  # any other line without an end was cut off
            lines.put(bytes(line))
        lines.put(None)
    except Exception as failure:  # the edge of a thread: closing the response also raises here
        lines.put(failure)


# --- addresses -----------------------------------------------------------------------------------


class _Bearer(AuthBase):
    """Sends a key, or nothing if it is empty; either keeps requests from reading ~/.netrc."""

    def __init__(self, api_key: str = ""):
        self._api_key = api_key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        if self._api_key:
            request.headers["Authorization"] = f"Bearer {self._api_key}".encode()  # type: ignore[assignment]
        return request


def _split_url(url: str) -> tuple[str, AuthBase]:
    """Return a server's URL, which ends with /v1 and has no password, and what is sent in its place.

    Raises UserError (exit code 2) if the URL is malformed.
    """
    try:
        parts = urlsplit(url)
        host = parts.netloc.rpartition("@")[2]
        password = parts.password
        _ = parts.port  # raises ValueError if it is not a number
    except ValueError:
        raise UserError(
            tr(
                "--url is not an address, got {without_password}: write http://HOST:PORT",
                without_password=_without_password(url),
            ),
            2,
        ) from None
    plain = net.api_address(urlunsplit((parts.scheme, host, parts.path, "", "")))
    if not parts.username:
        return plain, _Bearer()
    return plain, HTTPBasicAuth(unquote(parts.username), unquote(password or ""))


def _without_password(url: str) -> str:
    """Return a URL, which may be malformed, without what stands before the last @."""
    return re.sub(r"^([a-zA-Z]*:?/*).*@", r"\1", url, flags=re.DOTALL)


# --- what a server sends -------------------------------------------------------------------------


def _check_encoding(response: requests.Response) -> None:
    """Raise ValueError if a body is compressed: a small one could unpack to gigabytes."""
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ValueError("the body is compressed, which was not asked for")


def _is_count(value: Any) -> TypeGuard[int]:
    """Return whether a value is an integer from 0 to LARGEST_SETTING."""
    return type(value) is int and 0 <= value <= LARGEST_SETTING


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_NAME


def _text_in(fields: Mapping[str, Any], name: str) -> str:
    """Return a field's text, or "" if it is null or missing. Raises TypeError for other types."""
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise TypeError(f"{name} is not a text")
    return value


def _reason(value: Any) -> str:
    """Return the beginning of the message in an error of OpenAI's format, or "" without one."""
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message[:REASON_LETTERS] if isinstance(message, str) else ""


def _defaults(model: dict[str, Any]) -> dict[str, Any]:
    """Return a dict of the default settings that a nanochat server publishes for a model."""
    defaults = model.get("defaults")
    if not isinstance(defaults, dict):
        return {}
    published: dict[str, Any] = {}
    for name in ("temperature", "min_p"):
        value = defaults.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if 0 <= value <= LARGEST_SETTING:  # false for NaN
            published[name] = value
    for name in ("top_k", "max_tokens"):
        if _is_count(defaults.get(name)):
            published[name] = defaults[name]
    return published


def _text(message: Message) -> str:
    """Return the text of a message, or its calculator calls and results if it has no text.

    Servers refuse an empty message.
    """
    return message.text or " ".join(part.text for part in message.parts)
