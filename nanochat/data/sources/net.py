"""HTTP requests with the headers they were given: no login from ~/.netrc, no proxy to this host."""

import ipaddress
import os
from typing import Any
from urllib.parse import urlsplit

import requests
from requests.auth import AuthBase

from nanochat.common import UserError, tr

DIRECT = {"http": "", "https": ""}  # no proxy, whatever the environment says
PROXY_VARIABLES = (
    "https_proxy",
    "HTTPS_PROXY",
    "http_proxy",
    "HTTP_PROXY",
    "all_proxy",
    "ALL_PROXY",
)
ROUTES = ("/chat/completions", "/completions", "/models", "/responses")


class _AsGiven(AuthBase):
    """Leaves a request as it is. Without it, requests puts the login of ~/.netrc into the header."""

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        return request


class _Session(requests.Session):
    """A session that takes no login from ~/.netrc after a redirect either."""

    def rebuild_auth(
        self,
        prepared_request: requests.PreparedRequest,
        response: requests.Response,
    ) -> None:
        """Remove the login if a redirect leads to another host, and add none."""
        self.trust_env = False
        super().rebuild_auth(prepared_request, response)
        self.trust_env = True


def request(
    method: str,
    url: str,
    **options: Any,
) -> requests.Response:
    """Send a request as requests.request() does, and return the response.

    An Authorization header stays the one that the caller gives. A request to this host goes there
    directly, whatever http_proxy says. Raises UserError (exit code 2) if the proxy of the
    environment is SOCKS and the package that speaks it is missing.
    """
    if is_this_host(url):
        options["proxies"] = DIRECT
    try:
        # The session stays open, because the caller reads a streamed response later.
        return _Session().request(method, url, **{"auth": _AsGiven(), **options})
    except requests.exceptions.InvalidSchema as failure:
        if "SOCKS" not in str(failure):
            raise
        names = [name for name in PROXY_VARIABLES if os.environ.get(name, "").startswith("socks")]
        raise UserError(
            tr(
                "{variables} names a SOCKS proxy, which needs another package: pip install "
                "pysocks, or set https_proxy to the address of an HTTP proxy",
                variables=tr(" and ").join(names) or tr("a proxy variable"),
            ),
            exit_code=2,
        ) from failure


def is_this_host(url: str) -> bool:
    """Return whether the address is that of this host itself: localhost, 127.0.0.0/8 or ::1."""
    host = urlsplit(url).hostname or ""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name
        return False


def api_address(url: str) -> str:
    """Return the base address of an OpenAI-compatible API, which ends in /v1.

    `url` may lack /v1, end in slashes, or be the full address of a route, as guides print it.
    """
    base = url.strip().rstrip("/")
    for route in ROUTES:
        base = base.removesuffix(route)
    return base.rstrip("/").removesuffix("/v1").rstrip("/") + "/v1"
