"""Checks under which name a request reaches the server, and adds the safety headers to every response."""

import contextlib
import ipaddress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanochat.serve.answers import error
from nanochat.serve.chat_api import ApiError

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def host_allowed(host: str, names: tuple[str, ...]) -> bool:
    """Whether a Host header names this server: an IP address, localhost, or one of `names`.

    If another site points its own name at this address (DNS rebinding), the header holds that site's name.
    """
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
    name = name.removeprefix("[").removesuffix("]").lower()
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(name))
    return name in {"localhost", *(own.lower() for own in names)}


class Guard:
    """Checks the Host header of every request, and adds the safety headers to every response."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...]):
        self.app = app
        self.hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *own, (b"cache-control", b"no-store")]}
            await send(message)

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        host = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), "")
        if host_allowed(host, self.hosts):
            await self.app(scope, receive, guarded)
        else:
            text = (
                "this server does not answer to this Host name: to allow it, start the server with --allowed_hosts NAME"
            )
            await error(ApiError(403, "host_not_allowed", text))(scope, receive, guarded)
