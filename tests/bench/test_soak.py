"""The soak's arithmetic, its requests, and a short soak of a server with a scripted engine."""

import json
import math
import os

import pytest

from bench.serve.http import percentile
from bench.serve.rude import CONDUCTS, large_prompt
from bench.serve.soak import Requests, growth, show, soak
from nanochat.serve.server import BODY_BYTES
from tests.support.fake_engine import FakeEngine, running


def test_percentiles_are_values_that_were_measured() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    expected = {0.0: 1.0, 0.2: 1.0, 0.21: 2.0, 0.5: 3.0, 0.99: 5.0, 1.0: 5.0}
    assert {share: percentile(values, share) for share in expected} == expected
    assert math.isnan(percentile([], 0.5))


def test_summary_counts_what_was_refused_and_what_failed() -> None:
    failures = ["500", "TimeoutError", "500", "429", "503", "429", "429"]
    requests = Requests([0.1] * 98 + [2.0, 3.0], failures)
    assert requests.summary() == {
        "answered": 100,
        "refused": 4,
        "failed": 3,
        "p50_ms": 100,
        "p95_ms": 100,
        "p99_ms": 2000,
        "max_ms": 3000,
    }
    assert Requests().summary()["p50_ms"] is None


def test_growth_leaves_out_the_start_and_single_peaks() -> None:
    assert growth([0] * 10 + [100] * 40) == 0
    assert growth([0] * 10 + [100] * 30 + [160] * 10) == 60
    assert growth([100] * 49 + [900]) == 0
    assert growth([100]) == 0


def test_large_prompts_are_as_large_as_the_server_takes() -> None:
    for messages in (1, 999, 4001):
        head, _, body = large_prompt(messages).partition(b"\r\n\r\n")
        assert 140_000 < len(body) < BODY_BYTES
        assert f"content-length: {len(body)}".encode() in head
        assert json.loads(body)["messages"]


@pytest.mark.slow
def test_a_short_soak_answers_every_polite_client(capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeEngine(length=100_000)) as url:  # one token is one byte here
        port = int(url.rpartition(":")[2])
        observed = soak(port, os.getpid(), 2.0, 40)
    result = show(observed)
    assert result["chats"]["answered"] > 0
    assert result["chats"]["failed"] == 0
    assert result["agents"]["failed"] == 0
    output = capsys.readouterr().out
    assert "failed:" not in output
    assert any(name in output for name in CONDUCTS)
