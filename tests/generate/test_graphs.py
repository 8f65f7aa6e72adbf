"""Decoding steps as captured graphs: what is generated is what is generated without them."""

from dataclasses import replace

import pytest
import torch

from nanochat import device
from nanochat.engine import Engine
from nanochat.generate.graphs import rounded
from nanochat.generate.sampling import Sampling
from tests.emulated_npu.worker import on_npu
from tests.support.qwens import VOCABULARY, tiny_qwen
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer

GREEDY = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
DRAWN = Sampling(temperature=1.0, max_tokens=30, ignore_eos=True, seed=3)


def model_of(family: str, compute: device.Compute, vocabulary: int):
    if family == "gpt":
        return tiny_gpt(vocabulary, 640, dtype=compute.dtype, operations=compute.operations).to(compute.device)
    return tiny_qwen(family, dtype=compute.dtype, operations=compute.operations).to(compute.device)


def test_rows_and_keys_are_rounded_up() -> None:
    assert [rounded(count, 12) for count in (1, 2, 3, 5, 8, 9, 12)] == [1, 2, 4, 8, 8, 12, 12]


@pytest.mark.parametrize("family", ["gpt", "qwen3", "qwen3.5"])
@on_npu(TASK_QUEUE_ENABLE="1", NANOCHAT_DTYPE="float32")
def test_replies_with_graphs_are_replies_without(family: str) -> None:
    """Prompts of different lengths that come and go, so that rows, padding and blocks of keys change."""
    compute = device.compute_init("npu")
    if True:
        tokenizer = tiny_tokenizer() if family == "gpt" else tiny_tokenizer(VOCABULARY)
        model = model_of(family, compute, tokenizer.vocab_size)
        replies = []
        for graphs in (None, compute.platform):
            engine = Engine(model, tokenizer, 6, graphs=graphs)
            generator = torch.Generator().manual_seed(1)
            lengths = (5, 40, 190, 17, 9, 120, 3)
            said = {}
            for number, length in enumerate(lengths):
                prompt = torch.randint(0, 250, (length,), generator=generator).tolist()
                sampling = replace(DRAWN if number % 3 == 2 else GREEDY, max_tokens=12 + 9 * number)
                said[engine.submit(prompt, sampling)] = []
                for _ in range(4):
                    for event in engine.step():
                        said[event.request].append(event.token)
            while engine.busy:
                for event in engine.step():
                    said[event.request].append(event.token)
            replies.append(said)
        assert replies[0] == replies[1], family
        assert engine.graphs is not None and engine.graphs.replays > 3 * len(engine.graphs.shapes)
        assert {1, 2, 4, 6} >= {rows for rows, _ in engine.graphs.shapes}
