"""/metrics: what Prometheus reads, under vLLM's names."""

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.served import Served, serving


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


def figures(served: Served) -> dict[str, float]:
    """Sample name, with the reason where there is one -> value."""
    response = served.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "nanochat-sft-d4"
            if "le" not in sample.labels:
                found[sample.name + sample.labels.get("finished_reason", "")] = sample.value
    return found


def test_requests_are_counted_and_timed(served):
    before = figures(served)
    assert before["vllm:num_requests_running"] == before["vllm:num_requests_waiting"] == 0
    prompt = [served.tokenizer.bos] + [40] * 30
    bodies = [served.ok("/v1/completions", prompt=prompt, max_tokens=5, ignore_eos=True) for _ in range(2)]
    assert bodies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 30  # all but the last are in the cache
    found = figures(served)
    assert found["vllm:prompt_tokens_total"] == found["vllm:prefix_cache_queries_total"] == 62
    assert found["vllm:prefix_cache_hits_total"] == 30
    assert found["vllm:generation_tokens_total"] == 10
    assert found["vllm:request_success_totallength"] == 2
    assert found["vllm:time_to_first_token_seconds_count"] == found["vllm:e2e_request_latency_seconds_count"] == 2
    assert found["vllm:inter_token_latency_seconds_count"] == 8
    assert 0 < found["vllm:time_to_first_token_seconds_sum"] <= found["vllm:e2e_request_latency_seconds_sum"]
    assert found["vllm:kv_cache_usage_perc"] == 0


def test_two_servers_count_apart(served):
    served.ok("/v1/completions", prompt="x", max_tokens=1)
    with serving() as other:
        assert figures(other)["vllm:generation_tokens_total"] == 0
