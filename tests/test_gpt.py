"""The GPT against a slow implementation of its formulas, one position at a time; counts, init, caches."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.common import UserError
from nanochat.context import Cached
from nanochat.gpt import GPT, GPTConfig
from tests.support.tiny_model import tiny_gpt

VOCAB = 70  # padded to 128
CONFIG = GPTConfig(sequence_len=160, vocab_size=VOCAB, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, window_pattern="SL")


def tokens(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


WITH_BOTH = replace(CONFIG, bigram_rows=97, offset_layers=2, exclusive_layers=2)


def random_gpt(config: GPTConfig = WITH_BOTH, seed: int = 5, dtype: torch.dtype = torch.float32) -> GPT:
    """A model with random parameters everywhere, so that every term of the formulas matters."""
    model, generator = GPT(config, dtype), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            size = 0.5 if parameter.ndim == 1 or "gate" in name or "wte" in name else parameter.size(-1) ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * size)
    return model


# --- shapes, counts, FLOPs -----------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "millions"), [(4, 36.7), (12, 286), (20, 896.5), (24, 1384), (26, 1682)])
def test_parameter_counts_are_the_published_ones(depth: int, millions: float) -> None:
    dim = math.ceil(depth * 64 / 128) * 128
    with torch.device("meta"):
        counts = GPT(GPTConfig(2048, 32768, depth, dim // 128, dim // 128, dim)).parameter_counts()
    assert counts["total"] / 1e6 == pytest.approx(millions, rel=1e-3)
    assert counts["matrix"] == 12 * depth * dim * dim + math.ceil(depth / 2) * 12 * dim // 128
    assert counts["head"] == counts["embedding"] == 32768 * dim
    assert counts["scaling"] == counts["matrix"] + counts["head"]


def test_flops_per_token_by_hand() -> None:
    """Three layers of 32 channels with 2 of 4 heads for keys: windows 128, 160, 160; value gates in layers 0 and 2."""
    layer = 32 * 32 + 2 * 32 * 16 + 32 * 32 + 2 * 32 * 128
    linear = 3 * layer + 2 * 12 * 2 + 24 + 128 * 32
    assert GPT(CONFIG).flops_per_token() == 6 * linear + 12 * 32 * (128 + 160 + 160)


def test_windows_are_a_quarter_rounded_up_and_the_last_is_long() -> None:
    assert GPTConfig(n_layer=6, window_pattern="SSSL").windows == (512, 512, 512, 2048, 512, 2048)
    assert GPTConfig(n_layer=3, window_pattern="s").windows == (512, 512, 2048)
    assert GPTConfig(sequence_len=256, n_layer=2).windows == (128, 256)
    assert GPTConfig(sequence_len=64, n_layer=2).windows == (64, 64)
    assert GPTConfig(sequence_len=2049, n_layer=2).windows == (640, 2049)
    assert GPTConfig(n_layer=1).windows == (2048,)


@pytest.mark.parametrize(("layers", "with_tables"), [(1, [0]), (2, [1]), (3, [0, 2]), (12, [1, 3, 5, 7, 9, 11])])
def test_value_embeddings_are_on_every_other_layer_and_the_last(layers: int, with_tables: list[int]) -> None:
    config = replace(CONFIG, n_layer=layers)
    assert [i for i in range(layers) if config.has_value_embedding(i)] == with_tables
    assert list(GPT(config).value_embeds) == [str(i) for i in with_tables]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"n_embd": 33}, "n_embd must be a multiple of n_head, got 33 and 4"),
        ({"n_kv_head": 3}, "n_head must be a multiple of n_kv_head, got 4 and 3"),
        ({"n_embd": 12, "n_head": 4}, "head dimension must be a multiple of 2, of 4 with offset_layers, got 3"),
        ({"n_embd": 24, "n_head": 4, "offset_layers": 1}, "a multiple of 2, of 4 with offset_layers, got 6"),
        ({"offset_layers": 4}, "offset_layers must be from 0 to 3, n_layer, got 4"),
        ({"exclusive_layers": -1}, "exclusive_layers must be from 0 to 3, n_layer, got -1"),
        ({"window_pattern": "SXL"}, "made of S and L, got 'SXL'"),
        ({"window_pattern": ""}, "made of S and L"),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        replace(CONFIG, **change)


def test_bigrams_start_at_zero_and_add_no_flops() -> None:
    plain, model = GPT(CONFIG), GPT(WITH_BOTH)
    for one in (plain, model):
        one.init_weights(3)
    assert model.bigrams is not None and not model.bigrams.weight.any()
    assert torch.equal(model(tokens(2, 9)), plain(tokens(2, 9)))
    assert model.flops_per_token() == plain.flops_per_token()
    assert model.parameter_counts()["bigram"] == 97 * 32 and "bigram" not in plain.parameter_counts()
    assert model.parameter_roles()["bigrams.weight"] == "bigram" and model.bigrams in model.shard_groups()
    with pytest.raises(UserError, match="bigram_rows must be at least 1, or 0 for none, got -1"):
        GPT(replace(CONFIG, bigram_rows=-1))


def test_shapes_and_formats() -> None:
    model, idx = tiny_gpt(VOCAB), tokens(2, 9)
    assert model(idx).shape == (2, 9, VOCAB)
    assert model(idx).dtype == torch.float32
    assert model(idx, idx).shape == ()
    assert model(idx, idx, "none").shape == (2, 9)
    assert model.wte.weight.shape == model.lm_head.weight.shape == (128, 32)
    half = tiny_gpt(VOCAB, dtype=torch.bfloat16)
    assert {p.dtype for p in half.parameters()} == {torch.float32}  # masters
    assert half(idx).dtype == torch.float32
    assert (half(idx) - model(idx)).abs().max() < 0.3
    assert (half(idx) - model(idx)).abs().max() > 0


def test_every_parameter_has_a_role() -> None:
    roles = GPT(CONFIG).parameter_roles()
    assert (roles["wte.weight"], roles["lm_head.weight"]) == ("embedding", "head")
    assert roles["value_embeds.2.weight"] == "value_embedding"
    assert (roles["resid_lambdas"], roles["x0_lambdas"]) == ("resid", "x0")
    assert [n for n, role in roles.items() if role == "smear"] == [
        "smear_lambda", "backout_lambda", "smear_gate.weight"
    ]  # fmt: skip
    assert all((role == "matrix") == name.startswith("h.") for name, role in roles.items())


# --- initial values ------------------------------------------------------------------------------


def test_initial_values_have_the_published_distributions() -> None:
    config = GPTConfig(vocab_size=1000, n_layer=3, n_head=2, n_kv_head=2, n_embd=192)
    model, s = GPT(config), math.sqrt(3 / 192)
    model.init_weights(7)

    def uniform(weight: Tensor, low: float, high: float) -> None:
        assert low <= weight.min() and weight.max() <= high
        assert weight.mean().item() == pytest.approx((low + high) / 2, abs=0.12 * (high - low))
        assert weight.std().item() == pytest.approx((high - low) / math.sqrt(12), rel=0.2)

    for block in model.blocks:
        for matrix in (block.attn.c_q, block.attn.c_k, block.attn.c_v):
            uniform(matrix.weight, -s, s)
        uniform(block.mlp.c_fc.weight, -0.4 * s, 0.4 * s)
        assert not block.attn.c_proj.weight.any() and not block.mlp.c_proj.weight.any()
    for table in model.value_embeds.values():
        uniform(table.weight, -s, s)
    for gate in (model.smear_gate, model.blocks[0].attn.ve_gate, model.blocks[2].attn.ve_gate):
        uniform(gate.weight, 0.0, 0.02)
    assert model.wte.weight.std().item() == pytest.approx(0.8, rel=0.02)
    assert model.lm_head.weight.std().item() == pytest.approx(0.001, rel=0.02)
    torch.testing.assert_close(model.resid_lambdas.data, torch.tensor([1.15, 1.10, 1.05]))
    torch.testing.assert_close(model.x0_lambdas.data, torch.tensor([0.20, 0.125, 0.05]))
    assert model.smear_lambda.item() == 0
    assert model.backout_lambda.item() == pytest.approx(0.2)


def test_initial_values_are_a_function_of_the_seed_alone() -> None:
    def filled(seed: int, generator_seed: int) -> Tensor:
        torch.manual_seed(generator_seed)
        model = GPT(CONFIG)
        model.init_weights(seed)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(filled(1, 1), filled(1, 2))
    assert not torch.equal(filled(1, 1), filled(2, 1))


def test_no_two_tables_start_alike() -> None:
    model = GPT(CONFIG)
    model.init_weights(1)
    rows = [
        p.detach().flatten()[:64] for name, p in model.named_parameters() if p.numel() > 64 and "c_proj" not in name
    ]
    for i, one in enumerate(rows):
        for other in rows[:i]:
            assert abs(F.cosine_similarity(one, other, dim=0)) < 0.9


# --- the formulas, slowly ------------------------------------------------------------------------


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean() + torch.finfo(torch.float32).eps).sqrt()


def rotate(x: Tensor, t: int) -> Tensor:
    """Half-split rotation of one head (D,) by -theta."""
    half, y = x.numel() // 2, x.clone()
    for i in range(half):
        theta = t * 100_000.0 ** (-2 * i / x.numel())
        y[i] = x[i] * math.cos(theta) + x[half + i] * math.sin(theta)
        y[half + i] = -x[i] * math.sin(theta) + x[half + i] * math.cos(theta)
    return y


def slow_logits(model: GPT, ids: list[int]) -> Tensor:
    """(T, V) logits in float64 by the formulas, position by position, layer by layer, head by head."""
    config, w = model.config, {name: p.detach().double() for name, p in model.named_parameters()}
    H, G, D, n = config.n_head, config.n_kv_head, config.head_dim, config.n_layer
    keys: list[list[list[Tensor]]] = [[[] for _ in range(G)] for _ in range(n)]  # layer, head, place
    values: list[list[list[Tensor]]] = [[[] for _ in range(G)] for _ in range(n)]
    slows = [[torch.zeros(2, D // 4, dtype=torch.double)] * G for _ in range(n)]  # halves of the keys before
    before, earlier, logits = None, 0, []
    for t, token in enumerate(ids):
        fresh = rms(w["wte.weight"][token])
        x = fresh
        if before is not None:
            x = x + w["smear_lambda"] * torch.sigmoid(w["smear_gate.weight"][0] @ fresh[:24]) * before
        if config.bigram_rows:
            x = x + w["bigrams.weight"][(earlier * 2_654_435 + token * 40_503) % config.bigram_rows]
        before, earlier, x0, middle = fresh, token, x, x
        for layer in range(n):
            name = f"h.{layer}."
            x = w["resid_lambdas"][layer] * x + w["x0_lambdas"][layer] * x0
            a = rms(x)
            k, v = w[name + "attn.c_k.weight"] @ a, w[name + "attn.c_v.weight"] @ a
            for g in range(G):
                own = v[g * D : (g + 1) * D]
                if f"value_embeds.{layer}.weight" in w:
                    gate = 3 * torch.sigmoid(w[name + "attn.ve_gate.weight"][g] @ a[:12])
                    own = own + gate * w[f"value_embeds.{layer}.weight"][token][g * D : (g + 1) * D]
                values[layer][g].append(own)
                fast, slow = (1.2 * rms(rotate(k[g * D : (g + 1) * D], t))).view(2, 2, -1).unbind(1)
                held = slows[layer][g] if layer < config.offset_layers else slow
                keys[layer][g].append(torch.stack((fast, held), 1).flatten())
                slows[layer][g] = slow
            q, heads = w[name + "attn.c_q.weight"] @ a, []
            for h in range(H):
                g = h // (H // G)
                query = 1.2 * rms(rotate(q[h * D : (h + 1) * D], t))
                seen = range(max(0, t - config.windows[layer]), t + 1)
                scores = torch.stack([query @ keys[layer][g][j] / math.sqrt(D) for j in seen]).softmax(dim=0)
                y = torch.stack([p * values[layer][g][j] for p, j in zip(scores, seen, strict=True)]).sum(0)
                if layer < config.exclusive_layers:
                    itself = values[layer][g][t]
                    y = y - (y @ itself) / (itself @ itself) * itself
                heads.append(y)
            x = x + w[name + "attn.c_proj.weight"] @ torch.cat(heads)
            hidden = torch.relu(w[name + "mlp.c_fc.weight"] @ rms(x)) ** 2
            x = x + w[name + "mlp.c_proj.weight"] @ hidden
            if layer == n // 2:
                middle = x
        raw = w["lm_head.weight"] @ rms(x - w["backout_lambda"] * middle)
        logits.append(15 * torch.tanh(raw[: config.vocab_size] / 15))
    return torch.stack(logits)


@pytest.mark.parametrize(
    ("config", "T"),
    [
        (CONFIG, 10),
        (replace(CONFIG, sequence_len=131), 131),  # beyond the window of 128
        (replace(CONFIG, n_layer=4, n_kv_head=4, window_pattern="L"), 8),
        (replace(CONFIG, n_layer=1, n_head=1, n_kv_head=1), 8),
        (replace(CONFIG, n_layer=2, n_kv_head=1), 8),
        (WITH_BOTH, 10),
    ],
)
def test_logits_equal_the_formulas(config: GPTConfig, T: int) -> None:
    model, idx = random_gpt(config), tokens(1, T)
    with torch.no_grad():
        fast = model(idx)[0].double()
    slow = slow_logits(model, idx[0].tolist())
    assert slow.abs().max() > 1  # the comparison is not between zeros
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=1e-5)


def test_losses_equal_cross_entropy_of_the_logits() -> None:
    model, idx, targets = random_gpt(), tokens(3, 12), tokens(3, 12, seed=1)
    targets[:, ::3] = -1
    weights = torch.rand(3, 12, generator=torch.Generator().manual_seed(2))
    each = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none").view(3, 12)
    torch.testing.assert_close(model(idx, targets, "none"), each, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(idx, targets, "sum"), each.sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(idx, targets), each.sum() / (targets >= 0).sum(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(model(idx, targets, "sum", weights), (each * weights).sum(), rtol=1e-5, atol=1e-5)
    assert model(idx, torch.full_like(idx, -1)) == 0


# --- gradients -----------------------------------------------------------------------------------


def test_a_new_model_learns_in_all_its_layers() -> None:
    """Projections start at zero: the first step moves only them, head and embeddings, the second step the rest."""
    model, idx, targets = GPT(WITH_BOTH), tokens(2, 12), tokens(2, 12, seed=1)
    model.init_weights(1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        sgd.zero_grad()
        model(idx, targets).backward()
        sgd.step()
    for name, parameter in model.named_parameters():
        assert parameter.grad.abs().max() > 0, name


def test_a_model_sampled_from_first_can_be_trained_afterwards() -> None:
    model, idx = random_gpt(), tokens(2, 12)
    with torch.inference_mode():
        model(idx)
    model(idx, idx).backward()
    assert model.wte.weight.grad is not None


# --- the cache -----------------------------------------------------------------------------------


@torch.inference_mode()
def test_decoding_of_different_lengths_equals_the_full_forward() -> None:
    """Right-padded prompts into slots 1..3 of 5, then one token at a time, beyond the window."""
    model, T, lengths = random_gpt(), 140, torch.tensor([5, 17, 126])
    idx = tokens(3, T)
    full = model(idx)
    cache, slots = model.new_cache(5, 160, torch.float32), slice(1, 4)
    padded = idx[:, :126].clone()
    for row, length in enumerate(lengths):
        padded[row, length:] = 3
    out = model.logits(model.hidden(padded, Cached(cache, padded, slots, lengths)))
    for row, length in enumerate(lengths):
        torch.testing.assert_close(out[row, :length], full[row, :length], atol=2e-5, rtol=1e-4)
    assert cache.positions.tolist() == [0, 5, 17, 126, 0]
    for step in range(14):
        places = lengths + step
        new = idx.gather(1, places[:, None])
        out = model.logits(model.hidden(new, Cached(cache, new, slots)))
        torch.testing.assert_close(out[:, 0], full[torch.arange(3), places], atol=2e-5, rtol=1e-4)
    assert cache.positions.tolist() == [0, 19, 31, 140, 0]
