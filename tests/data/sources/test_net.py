"""Requests keep their header, go to this host without a proxy, and name a SOCKS proxy that cannot be used."""

from pathlib import Path

import pytest

from nanochat.common import UserError
from nanochat.data.sources import net


@pytest.mark.parametrize("redirected", [False, True])
def test_a_login_in_netrc_does_not_replace_the_key(
    server, redirected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password other\n")
    monkeypatch.setenv("NETRC", str(netrc))
    if redirected:
        server.faults = [lambda handler: handler.answer(302, b"", {"Location": f"{server.url}/other"})]
    response = net.request("GET", f"{server.url}/file", headers={"Authorization": "Bearer key"})
    assert len(response.history) == redirected
    assert response.request.headers["Authorization"] == "Bearer key"


def test_this_host_is_reached_directly(server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://192.0.2.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    server.files["/file"] = b"x"
    assert net.request("GET", f"{server.url}/file", timeout=5).content == b"x"


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://localhost:8000/v1", True),
        ("http://127.3.2.1", True),
        ("http://[::1]:80", True),
        ("http://a.localhost", True),
        ("http://10.0.0.1", False),
        ("http://localhost.example.com", False),
    ],
)
def test_this_host_is_known_by_its_names(url: str, here: bool) -> None:
    assert net.is_this_host(url) == here


def test_a_socks_proxy_without_its_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "socks5h://127.0.0.1:1080")
    monkeypatch.setattr("requests.adapters.SOCKSProxyManager", missing_socks)
    with pytest.raises(UserError, match=r"https_proxy names a SOCKS proxy.*pysocks") as refused:
        net.request("GET", "https://192.0.2.1/file", timeout=1)
    assert refused.value.exit_code == 2


def missing_socks(*_: object, **__: object) -> None:
    import requests

    raise requests.exceptions.InvalidSchema("Missing dependencies for SOCKS support.")


BASE = "https://example.com/v1"


@pytest.mark.parametrize(
    "url", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/chat/completions/", "/v1/models", "/chat/completions"]
)
def test_an_address_may_be_that_of_a_route(url: str) -> None:
    assert net.api_address(f"https://example.com{url}") == BASE
