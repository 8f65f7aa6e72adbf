"""Addresses on the Hugging Face hub and on ModelScope, and the header with the access token."""

import os
from typing import Literal
from urllib.parse import urlsplit

from nanochat.common import tr

HUB = "https://huggingface.co"
MODELSCOPE = "https://modelscope.cn"

Host = Literal["hub", "modelscope"]


def endpoint() -> str:
    """Return the base address of the Hugging Face hub, or of the mirror that HF_ENDPOINT names."""
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def file_address(
    repo: str,
    path: str,
    host: Host = "hub",
) -> str:
    """Return the address of the file `path` in the data set `repo` on `host`.

    The variables MODELSCOPE_ENDPOINT and HF_ENDPOINT, if set, replace the addresses of the hosts.
    """
    if host == "modelscope":
        base = (os.environ.get("MODELSCOPE_ENDPOINT") or MODELSCOPE).rstrip("/")
        return f"{base}/datasets/{repo}/resolve/master/{path}"
    return f"{endpoint()}/datasets/{repo}/resolve/main/{path}"


def is_hub(url: str) -> bool:
    """Return whether an address is an https address on the Hugging Face hub itself.

    HF_TOKEN is sent only to such an address.
    """
    parts = urlsplit(url)
    is_secure = parts.scheme == "https" and (parts.port or 443) == 443
    return is_secure and parts.hostname == urlsplit(HUB).hostname


def hub_headers(url: str) -> dict[str, str]:
    """Return the header with the access token HF_TOKEN for an address on the hub itself.

    Returns {} if HF_TOKEN is not set, and for other addresses: a mirror or an unencrypted
    connection must not see the token.
    """
    token = os.environ.get("HF_TOKEN", "").strip()
    if token and is_hub(url):
        return {"Authorization": f"Bearer {token}"}
    return {}


def how_to_be_admitted(url: str) -> str:
    """Return advice for a user whose request for `url` was refused with status 401 or 403.

    For a data set, the advice names the page with its terms.
    """
    page, separator, _ = url.partition("/resolve/")
    if not separator or "/datasets/" not in page:
        return tr(
            "If the data needs an account, set HF_TOKEN, which is sent only to {hub}.", hub=HUB
        )
    if "/resolve/master/" in url:
        return tr(
            "The data needs an account of ModelScope: accept its terms on {page}, "
            "fetch it with ModelScope's own program, and import the folder with --data "
            "DIR.",
            page=page,
        )
    page = HUB + page[page.index("/datasets/") :]
    return tr(
        "The data needs an account: accept its terms on {page}, and set HF_TOKEN to an "
        "access token of that account. The token is sent only to {hub}, so leave "
        "HF_ENDPOINT unset.",
        page=page,
        hub=HUB,
    )
