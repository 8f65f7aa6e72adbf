"""Checks the name and the key with which a request comes, and adds the safety headers to every response."""

import contextlib
import hashlib
import hmac
import ipaddress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanochat.serve.routes.answers import error
from nanochat.serve.routes.fields import ApiError

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


def needs_key(path: str) -> bool:
    """Whether a path is only for clients with the key: all but the pages, which hold no secret, and /health."""
    return path not in ("/", "/runs", "/health") and not path.startswith("/assets/")


def digest(text: bytes) -> bytes:
    """What stands for a key in comparisons, so that keys of any length take equally long."""
    return hashlib.sha256(text).digest()


class Guard:
    """Checks Host header and key of every request, and adds the safety headers to every response."""

    def __init__(self, app: ASGIApp, hosts: tuple[str, ...], api_key: str = ""):
        """Without an `api_key`, clients need none."""
        self.app = app
        self.hosts = hosts
        self._key = digest(api_key.encode()) if api_key else None

    def _may(self, scope: Scope) -> bool:
        """Whether a request has the right key, or needs none."""
        if self._key is None or not needs_key(scope["path"]):
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return hmac.compare_digest(digest(key.strip()), self._key) and scheme.lower() == b"bearer"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
                message = {
                    **message,
                    "headers": [*message["headers"], *own, (b"cache-control", b"no-store")],
                }
            await send(message)

        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        host = next(
            (value.decode("latin-1") for name, value in scope["headers"] if name == b"host"), ""
        )
        if not host_allowed(host, self.hosts):
            text = "this server does not answer to this Host name: to allow it, start the server with --allowed_hosts NAME"
            await error(ApiError(403, "host_not_allowed", text))(scope, receive, guarded)
        elif not self._may(scope):
            text = "this server needs its key: send the header Authorization: Bearer KEY, with the key of --api_key"
            refusal = error(ApiError(401, "invalid_api_key", text))
            refusal.headers["WWW-Authenticate"] = "Bearer"
            await refusal(scope, receive, guarded)
        else:
            await self.app(scope, receive, guarded)
