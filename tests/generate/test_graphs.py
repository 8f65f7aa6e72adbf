"""Decoding steps as captured graphs: what is generated is what is generated without them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from nanochat import device
from nanochat.engine import Engine
from nanochat.generate.adapters import Adapters
from nanochat.generate.drafts import Drafts, Ngrams
from nanochat.generate.graphs import rounded
from nanochat.generate.sampling import Sampling
from nanochat.models.lora import Adapter, LoraConfig, add_adapters, first_values
from tests.emulated_npu.worker import on_npu
from tests.support.qwens import VOCABULARY, tiny_qwen
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer

GREEDY = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
DRAWN = Sampling(temperature=1.0, max_tokens=30, ignore_eos=True, seed=3)


def model_of(family: str, compute: device.Compute) -> Any:
    if family == "gpt":
        return tiny_gpt(VOCABULARY, 640, dtype=compute.dtype, operations=compute.operations).to(compute.device)
    return tiny_qwen(family, dtype=compute.dtype, operations=compute.operations).to(compute.device)


def adapters_of(model: Any, family: str) -> Adapters:
    """Two adapters, of another rank each, whose values matter."""
    given = {}
    for seed, name in enumerate(("pip", "poet")):
        like, config = tiny_qwen(family), LoraConfig(3 + seed, targets=("down_proj", "up_proj"))
        add_adapters(like, config)
        generator = torch.Generator().manual_seed(seed)
        values = {key: torch.randn(value.shape, generator=generator) for key, value in first_values(like).items()}
        given[name] = Adapter(config, values)
    return Adapters(model, given, model.dtype, model.device)


def replies(engine: Engine, names: tuple[str, ...]) -> dict[int, list[int]]:
    """What the engine says to prompts of different lengths that come and go, so that rows, padding and blocks of keys
    change; one reply fills its slot."""
    generator, said = torch.Generator().manual_seed(1), {}
    for number, length in enumerate((5, engine.length - 200, 190, 17, 9, 120, 3)):
        prompt = torch.randint(0, 250, (length,), generator=generator).tolist()
        sampling = replace(DRAWN if number % 3 == 2 else GREEDY, max_tokens=12 + 9 * number)
        if number == 1:
            sampling = replace(sampling, max_tokens=700)
        said[engine.submit(prompt, replace(sampling, adapter=names[number % len(names)]))] = []
        for _ in range(4):
            for event in engine.step():
                said[event.request].append(event.token)
    while engine.busy:
        for event in engine.step():
            said[event.request].append(event.token)
    return said


def test_rows_and_keys_are_rounded_up() -> None:
    assert [rounded(count, 12) for count in (1, 2, 3, 5, 8, 9, 12)] == [1, 2, 4, 8, 8, 12, 12]


@pytest.mark.parametrize(
    ("family", "names"),
    [("gpt", ("",)), ("qwen3.5", ("",)), ("qwen3", ("pip", "", "poet"))],
)
@on_npu(TASK_QUEUE_ENABLE="1", NANOCHAT_DTYPE="float32")
def test_replies_with_graphs_are_replies_without(family: str, names: tuple[str, ...]) -> None:
    compute, tokenizer = device.compute_init("npu"), tiny_tokenizer(VOCABULARY)
    model = model_of(family, compute)
    adapters = adapters_of(model, family) if len(names) > 1 else None
    plain = Engine(model, tokenizer, 6, adapters=adapters)
    graphed = Engine(model, tokenizer, 6, adapters=adapters, graphs=compute.platform)
    drafted = Engine(model, tokenizer, 6, adapters=adapters, graphs=compute.platform, drafts=Drafts(Ngrams()))
    expected = replies(plain, names)
    assert replies(graphed, names) == expected
    assert replies(drafted, names) == expected
    assert drafted.drafts is not None and drafted.drafts.guessed
    assert graphed.graphs is not None and graphed.passes == plain.passes
    shapes = graphed.graphs.shapes
    assert {rows for rows, *_ in shapes} == {1, 2, 4, 6} and len({adapted for *_, adapted in shapes}) <= len(names)
    assert {keys for _, keys, _ in shapes} == ({256, 512, 640} if family == "gpt" else {256})
    assert graphed.graphs.replays > 5 * len(shapes)


@pytest.mark.parametrize("family", ["gpt", "qwen3.5"])
@on_npu(TASK_QUEUE_ENABLE="1")
def test_a_step_is_one_launch_and_waits_no_more_than_without_graphs(family: str) -> None:
    """In bf16, where eager steps attend by the fused operator: the logits differ by rounding."""
    from tests.emulated_npu import log

    compute = device.compute_init("npu")
    model, launches, logits = model_of(family, compute), {}, {}
    for graphs in (None, compute.platform):
        engine = Engine(model, tiny_tokenizer(VOCABULARY), 4, graphs=graphs)
        for length in (5, 30, 18):
            prompt = torch.arange(length).tolist()
            engine.submit(prompt, replace(GREEDY, max_tokens=20, logprobs=4))
        first = engine.step()
        with log.record() as seen:
            engine.step()
        launches[graphs is None] = seen
        logits[graphs is None] = [
            value for event in first for value in (event.logprob, *(p for _, p in event.alternatives))
        ]
    with_graphs, without = launches[False], launches[True]
    assert with_graphs.operators["graph_replay"] == 1 and not with_graphs.captured
    assert sum(with_graphs.operators.values()) < 0.5 * sum(without.operators.values())
    for wait, count in with_graphs.synchronisations.items():
        assert count <= without.synchronisations[wait]
    assert logits[False] == pytest.approx(logits[True], abs=0.15)
