"""The access token goes to the hub itself over https, and nowhere else."""

import pytest

from nanochat.data.sources.hub import hub_headers, is_hub


@pytest.mark.parametrize(
    "url",
    [
        "http://huggingface.co/x",
        "https://hf-mirror.com/x",
        "https://huggingface.co.evil.example/x",
        "https://huggingface.co@evil.example/x",
        "https://evil.example/https://huggingface.co",
        "https://huggingface.co:8443/x",
        "http://127.0.0.1:8000",
        "huggingface.co/x",
    ],
)
def test_no_other_address_gets_the_token(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert not is_hub(url)
    assert hub_headers(url) == {}


def test_the_hub_gets_the_token_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", " secret\n")
    for url in ("https://huggingface.co/x", "https://HuggingFace.co:443/x"):
        assert hub_headers(url) == {"Authorization": "Bearer secret"}
    monkeypatch.delenv("HF_TOKEN")
    assert hub_headers("https://huggingface.co/x") == {}
