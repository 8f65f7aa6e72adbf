"""The model, its optimizers, the training step and the engine on the emulated NPU, against the CPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bench.updates import update
from nanochat import device
from nanochat.context import Cached
from nanochat.device import Compute
from nanochat.engine import Engine
from nanochat.generate.sampling import Sampling
from nanochat.gpt import GPT
from nanochat.optim import Muon, Optimizers, Rates
from nanochat.platforms.ascend.platform import Ascend
from nanochat.platforms.layers import accelerate
from nanochat.platforms.operations import Operations
from nanochat.step import LossScale, Outcome
from tests.emulated_npu.worker import on_npu
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer

CPU = Compute(torch.device("cpu"), "cpu", "gloo", 0, 0, 1, torch.float32, "test")
VOCAB = 290


def tokens(B: int, T: int, seed: int = 5) -> Tensor:
    return torch.randint(0, VOCAB, (B, T), generator=torch.Generator().manual_seed(seed))


class Batch:
    """Two passes of two rows each."""

    extras: tuple[str, ...] = ()

    def __init__(self, compute: Compute, seed: int):
        rows = tokens(4, 141, seed)
        self.num_targets = 4 * 140
        self.micro_batches = [
            tuple(device.pin(part.contiguous(), compute) for part in (rows[i : i + 2, :-1], rows[i : i + 2, 1:]))
            for i in (0, 2)
        ]


def train(compute: Compute, steps: int, scale: LossScale | None = None) -> tuple[GPT, list[Outcome]]:
    """A small model with windows, grouped heads and value embeddings after some steps."""
    model = tiny_gpt(VOCAB, dtype=compute.dtype, operations=compute.operations).train().to(compute.device)
    optimizers = Optimizers(model, model.parameter_roles(), model.config.n_embd, Rates(), 1.0, compute.dtype)
    scale = scale or LossScale.start(compute, {})
    return model, [update(model, optimizers, Batch(compute, 7), scale, compute) for _ in range(steps)]


def compare(compute: Compute, loss: float, parameters: float) -> None:
    """Check that ten steps give the same losses and parameters on the device and on the CPU."""
    model, ours = train(compute, 10)
    reference, theirs = train(CPU, 10)
    assert not any(outcome.skipped for outcome in ours)
    for a, b in zip(ours, theirs, strict=True):
        assert abs(a.loss - b.loss) < loss
        assert abs(a.grad_norm - b.grad_norm) < 0.05 * b.grad_norm
    far = max(float((a.cpu().float() - b).norm() / b.norm())
              for a, b in zip(model.parameters(), reference.parameters(), strict=True))  # fmt: skip
    assert far < parameters


@pytest.mark.parametrize("name", ["auto", "plain"])
@on_npu()
def test_fp32_training_on_an_npu_is_that_on_the_cpu(name: str) -> None:
    compute = replace(device.compute_init("npu", name), dtype=torch.float32)
    compare(compute, loss=2e-4, parameters=0.02)


@on_npu(chip="SoC999")
def test_fp32_training_on_a_chip_that_nobody_knows_is_that_on_the_cpu() -> None:
    compute = replace(device.compute_init("npu"), dtype=torch.float32)
    assert compute.operations.name == "listed"
    compare(compute, loss=1e-5, parameters=0.02)


@pytest.mark.parametrize("name", ["auto", "plain"])
@on_npu(chip="910A")
def test_fp16_training_on_a_910a_is_close_to_fp32_and_counts_no_mask_as_an_overflow(name: str) -> None:
    compute = device.compute_init("npu", name)
    assert (compute.dtype, compute.scaler) == (torch.float16, True)
    compare(compute, loss=0.05, parameters=float("inf"))


@on_npu(chip="910A")
def test_an_overflow_that_saturates_skips_the_update_and_halves_the_scale() -> None:
    compute = device.compute_init("npu")
    scale = LossScale(2.0**40, 0, True)
    model, outcomes = train(compute, 1, scale)
    before = tiny_gpt(VOCAB).state_dict()
    assert outcomes[0].skipped
    assert scale.value == 2.0**39
    assert all(torch.equal(before[name], p.cpu()) for name, p in model.state_dict().items())
    assert not train(compute, 1, LossScale(1024.0, 0, True))[1][0].skipped  # the flag was cleared


@on_npu()
def test_a_step_waits_for_the_device_once_and_copies_its_batch() -> None:
    from tests.emulated_npu import log

    compute = device.compute_init("npu")
    model, _ = train(compute, 1)
    optimizers = Optimizers(model, model.parameter_roles(), model.config.n_embd, Rates(), 1.0, compute.dtype)
    scale = LossScale.start(compute, {})
    update(model, optimizers, Batch(compute, 7), scale, compute)
    batch = Batch(compute, 8)
    with log.record() as seen:
        update(model, optimizers, batch, scale, compute)
    assert sum(seen.synchronisations.values()) == 1
    assert seen.copies == {"host to device": 4, "device to host": 1}
    assert not seen.unsupported


# --- Muon ----------------------------------------------------------------------------------------


def muon_steps(where: str, operations: Operations) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(16, 8), (16, 8), (8, 24), (8, 24), (8, 24)]
    start = [(f"m{i}", torch.randn(shape, generator=generator).to(where)) for i, shape in enumerate(shapes)]
    optimizer = Muon(start, weight_decay=0.1, arithmetic=operations.muon)
    for _ in range(3):
        for _, matrix in start:
            matrix.grad = torch.randn(matrix.shape, generator=generator).to(where)
        optimizer.step()
    return [matrix.cpu() for _, matrix in start]


@on_npu()
def test_muon_on_an_npu_is_muon_on_the_cpu() -> None:
    for here, there in zip(
        muon_steps("npu", Ascend().operations("auto")), muon_steps("cpu", Operations()), strict=True
    ):
        torch.testing.assert_close(here, there, rtol=1e-6, atol=1e-6)


# --- generation ----------------------------------------------------------------------------------


def check_cache(model: GPT, tolerance: float) -> None:
    """Feed rows of different lengths through a cache, in pieces and then token by token: the logits must equal the
    logits of the whole sequence at once."""
    model, idx = model.npu(), tokens(2, 150).npu()
    with torch.inference_mode():
        full = model(idx)
        cache = model.new_cache(2, 160, model.dtype)
        # The first row reads 140 tokens in two pieces; in the second piece the second row has 9 tokens and padding.
        model.hidden(idx[:, :80], Cached(cache, idx[:, :80], cached=[0, 0], new=[80, 80]))
        lengths = torch.tensor([60, 9]).npu()
        context = Cached(cache, idx[:, 80:140], None, lengths, cached=[80, 80], new=[60, 9])
        out = model.logits(model.hidden(idx[:, 80:140], context))
        torch.testing.assert_close(out[0], full[0, 80:140], atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(out[1, :9], full[1, 80:89], atol=tolerance, rtol=tolerance)
        held = [140, 89]
        for step in range(8):
            new = torch.stack([idx[row, held[row] + step] for row in (0, 1)])[:, None]
            context = Cached(cache, new, cached=[place + step for place in held], new=[1, 1])
            out = model.logits(model.hidden(new, context))
            expected = torch.stack([full[row, held[row] + step] for row in (0, 1)])
            torch.testing.assert_close(out[:, 0], expected, atol=tolerance, rtol=tolerance)


@on_npu()
def test_fp32_generation_by_mask_continues_the_whole_forward() -> None:
    check_cache(tiny_gpt(VOCAB, operations=Ascend().operations("auto")), 1e-4)


@on_npu(chip="310P")
def test_an_inference_card_generates_what_the_whole_forward_says() -> None:
    check_cache(wide_gpt(torch.float16), 0.02)


def wide_gpt(dtype: torch.dtype) -> GPT:
    """The same model with heads of 16 channels, which the decoding operators need."""
    model = tiny_gpt(VOCAB, dtype=dtype)
    config = replace(model.config, n_head=2, n_kv_head=1)
    wide = GPT(config, dtype)
    accelerate(wide, Ascend().operations("auto"))
    wide.init_weights(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.shape == wide.get_parameter(name).shape:
                wide.get_parameter(name).copy_(parameter)
    return wide.eval()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@on_npu()
def test_generation_by_lengths_continues_the_whole_forward(dtype: torch.dtype) -> None:
    from tests.emulated_npu import log

    with log.record() as seen:
        check_cache(wide_gpt(dtype), 0.02 if dtype == torch.float16 else 0.15)
    assert seen.operators["npu_fused_infer_attention_score"] == 10 * 4  # two pieces and eight tokens, four layers


@on_npu()
def test_requests_by_lengths_say_together_what_each_says_alone() -> None:
    """Slots join and leave, prompts are read in padded passes, and windows are shorter than the replies."""
    tokenizer = tiny_tokenizer()
    model = wide_gpt(torch.float16).npu()
    prompts = [tokenizer.encode("the cat sat on the mat " * n)[: 3 + 12 * n] for n in (1, 2, 4, 3, 1)]
    settings = Sampling(0.0, None, 100)
    together = Engine(model, tokenizer, slots=3, length=160, prefill_tokens=40).generate(prompts, settings)
    for prompt, said in zip(prompts, together, strict=True):
        (alone,) = Engine(model, tokenizer, slots=1, length=160).generate([prompt], settings)
        assert alone.tokens == said.tokens
        assert max(abs(a - b) for a, b in zip(alone.logprobs, said.logprobs, strict=True)) < 0.05


@on_npu()
def test_the_engine_says_the_same_on_an_npu_and_on_the_cpu() -> None:
    tokenizer = tiny_tokenizer()
    prompts = [tokenizer.encode("the cat sat"), tokenizer.encode("strawberry 12 34"), tokenizer.encode("on")]
    said = []
    for where, operations in (("npu", Ascend().operations("auto")), ("cpu", Operations())):
        model = tiny_gpt(tokenizer.vocab_size, operations=operations).to(where)
        engine = Engine(model, tokenizer, slots=4, length=160)
        said.append([c.tokens for c in engine.generate(prompts, Sampling(0.0, None, 40), samples=2)])
    assert said[0] == said[1]
