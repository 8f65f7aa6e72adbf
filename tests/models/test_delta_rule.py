"""The gated delta rule for one token and for chunks, against a loop over heads and tokens."""

import pytest
import torch
from torch import Tensor

from nanochat.models.qwen.delta_rule import chunked, step, unit

B, T, H, G, DK, DV = 2, 75, 2, 3, 6, 5


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, memory: Tensor, documents: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The reference: the equations of delta_rule.py, for one head and one token after the other.

    A document begins with an empty memory.
    """
    outputs = torch.zeros(v.shape)
    memories = memory.clone()
    for row in range(B):
        for head in range(H * G):
            S = memory[row, head]
            for t in range(T):
                q_t = unit(q[row, t, head // G]) / DK**0.5
                k_t = unit(k[row, t, head // G])
                a = log_decay[row, t, head].exp()
                b = strength[row, t, head]
                if documents is not None and t and documents[row, t] != documents[row, t - 1]:
                    S = torch.zeros(DK, DV)
                S = a * S
                w = b * (v[row, t, head] - S.T @ k_t)
                S = S + torch.outer(k_t, w)
                outputs[row, t, head] = S.T @ q_t
            memories[row, head] = S
    return outputs, memories


def inputs_of_tokens() -> list[Tensor]:
    torch.manual_seed(1)
    return [
        torch.randn(B, T, H, DK),
        torch.randn(B, T, H, DK),
        torch.randn(B, T, H * G, DV),
        -torch.rand(B, T, H * G) * 0.3,
        torch.rand(B, T, H * G),
        torch.randn(B, H * G, DK, DV),
    ]


def test_steps_give_the_outputs_and_the_memory_of_the_recurrence() -> None:
    *inputs, memory = inputs_of_tokens()
    expected_outputs, expected_memory = recurrence(*inputs, memory, documents=None)
    for t in range(T):
        output, memory = step(*(x[:, t : t + 1] for x in inputs), memory)
        torch.testing.assert_close(output[:, 0], expected_outputs[:, t], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(memory, expected_memory, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_give_the_outputs_the_memory_and_the_gradients_of_the_recurrence(size: int, packed: bool) -> None:
    documents = torch.tensor([[0] * 20 + [1] * 44 + [2] * 11, [0] * 75]) if packed else None
    leaves = [x.requires_grad_() for x in inputs_of_tokens()]
    output_weights, memory_weights = torch.randn(B, T, H * G, DV), torch.randn(B, H * G, DK, DV)

    def results(outputs: Tensor, memory: Tensor) -> tuple[Tensor, ...]:
        total = (outputs * output_weights).sum() + (memory * memory_weights).sum()
        return outputs, memory, *torch.autograd.grad(total, leaves)

    expected = results(*recurrence(*leaves, documents=documents))
    for ours, theirs in zip(results(*chunked(*leaves, documents, size)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
