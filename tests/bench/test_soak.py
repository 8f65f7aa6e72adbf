"""The soak's arithmetic, its requests, and a short soak of a server with a scripted engine."""

import asyncio
import json
import math
import os
from collections import Counter
from pathlib import Path

import pytest

from bench.serve.http import percentile, within
from bench.serve.rude import CONDUCTS, large_prompt
from bench.serve.soak import Config, Requests, Served, growth, main, soak
from nanochat.common import UserError
from nanochat.serve.server import BODY_BYTES
from tests.support.fake_engine import FakeEngine, running


def test_percentiles_are_values_that_were_measured() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.2, 0.21, 0.5, 0.99, 1.0)] == [1.0, 2.0, 3.0, 5.0, 5.0]
    assert percentile([7.0], 0.0) == 7.0
    assert math.isnan(percentile([], 0.5))


def test_summary_counts_what_was_refused_and_what_failed() -> None:
    seen = Requests([0.1] * 98 + [2.0, 3.0], refused=4, failures=Counter({"500": 2, "TimeoutError": 1}))
    assert seen.summary() == {
        "answered": 100, "refused": 4, "failed": 3, "p50_ms": 100, "p95_ms": 100, "p99_ms": 2000, "max_ms": 3000
    }  # fmt: skip
    assert Requests().summary()["p50_ms"] is None


def test_growth_leaves_out_the_start_and_single_peaks() -> None:
    assert growth([0] * 10 + [100] * 40) == 0
    assert growth([0] * 10 + [100] * 30 + [160] * 10) == 60
    assert growth([100] * 49 + [900]) == 0
    assert growth([100]) == 0


def test_large_prompts_are_as_large_as_the_server_takes() -> None:
    for messages in (1, 999, 4001):
        head, _, body = large_prompt(messages).partition(b"\r\n\r\n")
        assert 140_000 < len(body) < BODY_BYTES and f"content-length: {len(body)}".encode() in head
        assert json.loads(body)["messages"]


def test_work_within_a_time_is_ended_after_it() -> None:
    async def value() -> int:
        return 7

    async def check() -> None:
        assert await within(value(), 30) == 7
        with pytest.raises(asyncio.TimeoutError):
            await within(asyncio.sleep(30), 0)

    asyncio.run(check())


@pytest.mark.parametrize("cfg", [Config(minutes=0), Config(clients=1)])
def test_a_soak_of_nothing_is_refused(cfg: Config) -> None:
    with pytest.raises(UserError, match="try --quick"):
        main(cfg)


def test_a_short_soak_answers_every_polite_client(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with running(FakeEngine()) as url:
        served = Served(int(url.rpartition(":")[2]), os.getpid(), tmp_path / "log")
        found = asyncio.run(soak(served, 2.0, 40))
    assert found["chats"]["answered"] > 0 and found["chats"]["failed"] == found["health"]["failed"] == 0
    said = capsys.readouterr().out
    assert said.count("failed:") == 0 and any(name in said for name in CONDUCTS)
