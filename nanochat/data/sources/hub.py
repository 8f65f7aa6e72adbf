"""The addresses of the Hugging Face hub and of ModelScope, and who gets the access token."""

import os
from typing import Literal
from urllib.parse import urlsplit

HUB = "https://huggingface.co"
MODELSCOPE = "https://modelscope.cn"

Host = Literal["hub", "modelscope"]


def endpoint() -> str:
    """Return the address to fetch data sets from: HF_ENDPOINT, which may name a mirror, or the hub
    itself."""
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def file_address(
    repo: str,
    path: str,
    host: Host = "hub",
) -> str:
    """Return the address of one file of a data set on the hub, or with host="modelscope" on
    ModelScope.

    ModelScope calls its main branch master. MODELSCOPE_ENDPOINT replaces its address, as
    HF_ENDPOINT does for the hub.
    """
    if host == "modelscope":
        base = (os.environ.get("MODELSCOPE_ENDPOINT") or MODELSCOPE).rstrip("/")
        return f"{base}/datasets/{repo}/resolve/master/{path}"
    return f"{endpoint()}/datasets/{repo}/resolve/main/{path}"


def is_hub(url: str) -> bool:
    """Return whether an address is one of the Hugging Face hub itself, over https: only there
    HF_TOKEN is sent."""
    parts = urlsplit(url)
    is_secure = parts.scheme == "https" and (parts.port or 443) == 443
    return is_secure and parts.hostname == urlsplit(HUB).hostname


def hub_headers(url: str) -> dict[str, str]:
    """Return the access token in HF_TOKEN as a header, for the hub itself. A mirror or a plain
    connection must not see it."""
    token = os.environ.get("HF_TOKEN", "").strip()
    if token and is_hub(url):
        return {"Authorization": f"Bearer {token}"}
    return {}


def how_to_be_admitted(url: str) -> str:
    """Return what to do when a host answers 401 or 403: where the terms of the data are, and which
    token to set."""
    page, separator, _ = url.partition("/resolve/")
    if not separator or "/datasets/" not in page:
        return f"If the data needs an account, set HF_TOKEN, which is sent only to {HUB}."
    if "/resolve/master/" in url:
        return (
            f"The data needs an account of ModelScope: accept its terms on {page}, fetch it with "
            "ModelScope's own program, and import the folder with --data DIR."
        )
    page = HUB + page[page.index("/datasets/") :]
    return (
        f"The data needs an account: accept its terms on {page}, and set HF_TOKEN to an access "
        f"token of that account. The token is sent only to {HUB}, so leave HF_ENDPOINT unset."
    )
