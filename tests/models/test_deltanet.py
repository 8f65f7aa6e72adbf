"""The memory of Gated DeltaNets chunk by chunk, against the same token by token."""

import pytest
import torch
from torch import Tensor

from nanochat.models.qwen.deltanet import chunked, step

B, T, H, G, DK, DV = 2, 75, 2, 3, 6, 5


def token_by_token(*inputs: Tensor, memory: Tensor, documents: Tensor | None) -> tuple[Tensor, Tensor]:
    """What every token reads, and the memory after the last one; a document begins with an empty memory."""
    outputs = []
    for t in range(T):
        if documents is not None and t:
            continues = documents[:, t] == documents[:, t - 1]
            memory = memory * continues[:, None, None, None]
        output, memory = step(*(x[:, t : t + 1] for x in inputs), memory)
        outputs.append(output)
    return torch.cat(outputs, dim=1), memory


@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_give_the_outputs_the_memory_and_the_gradients_of_single_tokens(size: int, packed: bool) -> None:
    torch.manual_seed(1)
    inputs = [
        torch.randn(B, T, H, DK),
        torch.randn(B, T, H, DK),
        torch.randn(B, T, H * G, DV),
        -torch.rand(B, T, H * G) * 0.3,
        torch.rand(B, T, H * G),
    ]
    memory = torch.randn(B, H * G, DK, DV)
    documents = torch.tensor([[0] * 20 + [1] * 44 + [2] * 11, [0] * 75]) if packed else None
    leaves = [x.requires_grad_() for x in (*inputs, memory)]
    weights = torch.randn(B, T, H * G, DV), torch.randn(B, H * G, DK, DV)

    def results(output: Tensor, last: Tensor) -> tuple[Tensor, ...]:
        total = (output * weights[0]).sum() + (last * weights[1]).sum()
        return output, last, *torch.autograd.grad(total, leaves)

    expected = results(*token_by_token(*inputs, memory=memory, documents=documents))
    for ours, theirs in zip(results(*chunked(*inputs, memory, documents, size)), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
