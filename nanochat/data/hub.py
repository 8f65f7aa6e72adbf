"""The address of the Hugging Face hub, and who gets the access token for it."""

import os
from urllib.parse import urlsplit

HUB = "https://huggingface.co"


def endpoint() -> str:
    """The address to fetch data sets from: HF_ENDPOINT, which may name a mirror, or the hub itself."""
    return (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")


def is_hub(url: str) -> bool:
    """Whether an address is one of the Hugging Face hub itself, over https: only there HF_TOKEN is sent."""
    parts = urlsplit(url)
    return (parts.scheme, parts.hostname, parts.port or 443) == ("https", urlsplit(HUB).hostname, 443)


def hub_headers(url: str) -> dict[str, str]:
    """The access token in HF_TOKEN as a header, for the hub itself. A mirror or a plain connection must not see it."""
    token = os.environ.get("HF_TOKEN", "").strip()
    return {"Authorization": f"Bearer {token}"} if token and is_hub(url) else {}
