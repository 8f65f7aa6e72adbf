"""Matrices kept side by side: views instead of copies, and one cast for all of them."""

import subprocess
import sys

import pytest
import torch
import torch.nn as nn

from nanochat.platforms.together import as_stack, cast_together, place_together


def parameters(*shapes: tuple[int, int]) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def test_matrices_side_by_side_are_viewed_and_others_copied() -> None:
    block = torch.arange(24.0).view(4, 2, 3)
    assert as_stack(list(block[1:3])).data_ptr() == block[1].data_ptr()
    for others in ([block[0], block[2]], [block[1], block[0]], [block[0], torch.zeros(2, 3)], list(block.mT)):
        stacked = as_stack(others)
        assert stacked.data_ptr() != others[0].data_ptr()
        assert torch.equal(stacked, torch.stack(others))


def test_parameters_move_together_and_stay_themselves() -> None:
    given = parameters((4, 4), (2, 3), (4, 4), (2, 3), (4, 4))
    before, ids = [p.detach().clone() for p in given], [id(p) for p in given]
    place_together(given)
    assert [id(p) for p in given] == ids and all(map(torch.equal, given, before))
    squares = as_stack([given[0].data, given[2].data, given[4].data])
    squares.zero_()
    assert not given[4].any() and given[3].any()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_cast_is_many_casts_with_their_gradients(together: bool, dtype: torch.dtype) -> None:
    q, k, v, out, small = given = parameters((4, 4), (4, 4), (4, 4), (4, 4), (2, 3))
    if together:
        place_together(given)
    layers = [[(q, k, v), (out,)], [(small,)]]
    made = cast_together(layers, dtype)
    expected = [[torch.cat((q, k, v)).to(dtype), out.to(dtype)], [small.to(dtype)]]
    torch.testing.assert_close(made, expected, rtol=0, atol=0)
    gradients = []
    for matrices in (made, expected):
        flat = [matrix for layer in matrices for matrix in layer]
        sum(
            (matrix.float() * (i + torch.arange(matrix.size(0))[:, None])).sum() for i, matrix in enumerate(flat)
        ).backward()
        gradients.append([p.grad for p in given])
        for parameter in given:
            parameter.grad = None
    torch.testing.assert_close(gradients[0], gradients[1])
    assert as_stack([g for g in gradients[0][:4] if g is not None]).data_ptr() == gradients[0][0].data_ptr()


def test_a_model_is_built_without_torchs_compiler() -> None:
    """Importing the compiler takes 1.6 seconds, which every evaluation and every chat would wait for."""
    program = (
        "import sys, torch; from nanochat.gpt import GPT, GPTConfig\n"
        "with torch.device('meta'): GPT(GPTConfig(16, 300, 2, 2, 2, 32, bigram_rows=64))\n"
        "print('torch._dynamo' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["False"]
