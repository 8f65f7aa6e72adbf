"""Every class that a platform swaps in, every slot and every entry of attention, against the plain one.

The inputs of each module are those that it gets in a plain model. Its faster twin reads the same
inputs, and must give the outputs and the gradients of inputs and parameters that the plain class gives
in fp64, up to ERROR, or to 1.5 times the error of the plain class in the same number format. Whole models in bf16 may be
1.5 times ERROR apart.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanochat.attention import PlainAttention, cache_mask
from nanochat.gpt import GPT, GPTConfig
from nanochat.models.llama import Llama, LlamaConfig
from nanochat.models.qwen.model import Qwen
from nanochat.platforms import host, qwen_layers
from nanochat.platforms.ascend.kernels import AscendChunked, AscendPlain
from nanochat.platforms.ascend.platform import Ascend
from nanochat.platforms.cpu.operations import CpuOperations
from nanochat.platforms.layers import LAYERS, accelerate
from nanochat.platforms.nvidia.attention import NvidiaOperations
from nanochat.platforms.operations import Operations
from tests.emulated_npu.worker import on_npu
from tests.support.qwens import CONFIGS
from tests.support.tensors import draw

FORMATS = [torch.float32, torch.bfloat16]
# The norm of the difference, relative to the norm of what the plain class gives in fp64.
ERROR = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

# What runs on this host without an emulated device. NVIDIA's fall-back is torch's own attention, and
# the classes of a 910A are plain torch.
ON_HOST: dict[str, Callable[[], Operations]] = {
    "cpu": CpuOperations,
    "cpu without a compiler": lambda: CpuOperations(compiles=False),
    "nvidia": lambda: NvidiaOperations(generation=0),
    "ascend, 910A": AscendChunked,
    "ascend, plain": AscendPlain,
}
FASTER_ON_HOST = ["cpu", "ascend, 910A"]  # the others swap no class

GPT_COUNTS = {
    "OperatorGPT": 1,
    "OperatorBlock": 4,
    "OperatorAttention": 4,
    "OperatorMLP": 4,
    "OperatorHead": 1,
}
# Norms of 4 layers: two a layer, one at the end, and two of heads in each layer of attention.
QWEN3_COUNTS = {
    "OperatorQwen": 1,
    "OperatorBlock": 4,
    "OperatorAttention": 4,
    "OperatorMLP": 4,
    "OperatorNorm": 17,
    "OperatorVocabulary": 1,
}
# Three of the four layers are DeltaNets, and the head is not tied to the embedding.
QWEN35_COUNTS = {
    "OperatorQwen": 1,
    "OperatorBlock": 4,
    "OperatorAttention": 1,
    "OperatorMLP": 4,
    "OperatorNorm": 11,
    "OperatorVocabulary": 2,
}
# Llama has no norms of heads, and its head is not tied.
LLAMA3_COUNTS = {
    "OperatorLlama": 1,
    "OperatorBlock": 4,
    "OperatorAttention": 4,
    "OperatorMLP": 4,
    "OperatorNorm": 9,
    "OperatorVocabulary": 2,
}
# Three of the four layers have experts.
MOE_COUNTS = {**QWEN3_COUNTS, "OperatorMLP": 1, "GroupedExperts": 3, "OperatorVocabulary": 2}
COUNTS = {
    "gpt": GPT_COUNTS,
    "qwen3": QWEN3_COUNTS,
    "qwen3.5": QWEN35_COUNTS,
    "llama3": LLAMA3_COUNTS,
    "qwen3-moe": MOE_COUNTS,
}


# One rounding to bf16 may choose another expert, or change a DeltaNet's memory from there on.
MAGNIFIERS = ("qwen3.5", "qwen3-moe")
MAGNIFYING = 10.0  # the comparison in fp32 is the strict one


# --- models --------------------------------------------------------------------------------------


def new_model(family: str, dtype: torch.dtype) -> Any:
    """A model of four layers on meta, with heads as wide as kernels want them."""
    with torch.device("meta"):
        if family == "gpt":
            config = GPTConfig(160, 320, 4, 2, 1, 128, "SL", offset_layers=2, exclusive_layers=3)
            return GPT(config, dtype)
        qwen = CONFIGS[family]
        if family in ("qwen3", "llama3", "qwen3-moe"):
            qwen = replace(qwen, n_layer=4, head_dim=64)
        return Llama(qwen, dtype) if isinstance(qwen, LlamaConfig) else Qwen(qwen, dtype)


def filled(model: Any, device: str) -> Any:
    """The model with weights that let each part matter; all are numbers of bf16."""
    model.to_empty(device="cpu")
    model.init_weights(1)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.add_(draw(*parameter.shape, seed=seed, size=0.05))
            parameter.copy_(parameter.bfloat16())
    return model.to(device)


def batch(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    idx = torch.randint(300, (2, 160), generator=generator)
    targets = torch.randint(300, (2, 160), generator=generator)
    targets[:, :50] = -1
    return idx.to(device), targets.to(device)


def inputs_of_modules(model: Any, device: str) -> dict[str, tuple[Any, ...]]:
    """What each module of a model is called with in a pass, by its name."""
    inputs: dict[str, tuple[Any, ...]] = {}
    hooks = []
    for name, module in model.named_modules():

        def remember(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
            inputs.setdefault(name, args)

        hooks.append(module.register_forward_pre_hook(remember))
    idx, targets = batch(device)
    model(idx, targets)
    for hook in hooks:
        hook.remove()
    return inputs


# --- comparing -----------------------------------------------------------------------------------


def called(module: nn.Module, args: tuple[Any, ...]) -> list[Tensor]:
    """The output of a module, and the gradients of its inputs and parameters."""
    args = tuple(
        x.detach().clone().requires_grad_() if is_activation(x) else x
        for x in args  #
    )
    leaves = [x for x in args if is_activation(x)]
    leaves += list(module.parameters())
    output = module(*args)
    weight = draw(*output.shape, seed=9, dtype=torch.bfloat16).to(output)
    grads = torch.autograd.grad((output * weight).sum(), leaves, allow_unused=True)
    return [output.detach(), *(grad for grad in grads if grad is not None)]


def is_activation(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def in_fp64(module: nn.Module) -> nn.Module:
    exact: Any = copy.deepcopy(module).double()
    if hasattr(exact, "dtype"):
        exact.dtype = torch.float64
    return exact


def as_fp64(x: Any) -> Any:
    """Activations, and pairs of rotary tables, in fp64; anything else as it is."""
    if isinstance(x, tuple):
        return tuple(map(as_fp64, x))
    return x.double() if is_activation(x) else x


def distance(actual: Tensor, expected: Tensor) -> float:
    actual = actual.detach().double().cpu()
    expected = expected.detach().double().cpu()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-6))


def check_equal(actual: Tensor, expected: Tensor, error: float, name: str) -> None:
    assert actual.shape == expected.shape, name
    difference = distance(actual, expected)
    assert difference <= error, f"{name} is {difference:.2g} apart, more than {error:.2g}"


def check_classes(family: str, dtype: torch.dtype, operations: Operations, device: str, error: float) -> None:
    """Compare every module that accelerate() swaps, and the loss and gradients of the model."""
    plain = filled(new_model(family, dtype), "cpu")
    faster = new_model(family, dtype)
    counts = accelerate(faster, operations)
    faster = filled(faster, device)
    assert counts == COUNTS[family]

    plain_inputs = inputs_of_modules(plain, "cpu")
    own_inputs = inputs_of_modules(faster, device)
    plain_modules = dict(plain.named_modules())
    compared = set()
    for name, module in faster.named_modules():
        kind = type(module).__name__
        if kind not in counts or name not in plain_inputs:
            continue
        args = plain_inputs[name]
        # Rotary tables and contexts are as the platform made them; activations are the plain ones.
        own_args = [
            x.to(device) if isinstance(x, Tensor) else own
            for x, own in zip(args, own_inputs.get(name, args), strict=True)
        ]
        actual = called(module, tuple(own_args))
        in_format = called(plain_modules[name], args)
        is_model = not name
        exact = called(in_fp64(plain_modules[name]), tuple(map(as_fp64, args)))
        for i, (result, same_format, reference) in enumerate(zip(actual, in_format, exact, strict=True)):
            magnifies = dtype == torch.bfloat16 and family in MAGNIFIERS
            slack = MAGNIFYING if magnifies else 1.5
            own_slack = slack if magnifies or is_model else 1
            allowed = max(own_slack * error, slack * distance(same_format, reference))
            if reference.numel() < 16:  # of few numbers, the distance is chance
                if is_model and dtype == torch.bfloat16:
                    continue
                allowed = max(allowed, 10 * error)
            check_equal(result, reference, allowed, f"result {i} of {name or family} ({kind})")
        compared.add(kind)
    assert compared == set(counts)


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("family", COUNTS)
@pytest.mark.parametrize("name", FASTER_ON_HOST)
def test_classes_equal_the_plain_ones_forward_and_backward(name: str, family: str, dtype: torch.dtype) -> None:
    check_classes(family, dtype, ON_HOST[name](), "cpu", ERROR[dtype])


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("family", COUNTS)
@on_npu()
def test_classes_on_a_910b_equal_the_plain_ones(family: str, dtype: torch.dtype) -> None:
    check_classes(family, dtype, Ascend().operations("auto"), "npu", ERROR[dtype])


@pytest.mark.parametrize("family", COUNTS)
@on_npu(chip="950")
def test_classes_on_a_950_equal_the_plain_ones(family: str) -> None:
    check_classes(family, torch.float32, Ascend().operations("auto"), "npu", ERROR[torch.float32])


@pytest.mark.parametrize("name", sorted({*ON_HOST} - {*FASTER_ON_HOST}))
def test_where_nothing_is_faster_only_experts_are_swapped(name: str) -> None:
    for family in COUNTS:
        counts = accelerate(new_model(family, torch.float32), ON_HOST[name]())
        assert counts == ({"GroupedExperts": 3} if family == "qwen3-moe" else {})


def test_each_faster_class_is_counted_here() -> None:
    swapped = {*LAYERS.values(), *qwen_layers.LAYERS.values()}
    assert {kind.__name__ for kind in swapped} == set().union(*COUNTS.values())


# --- slots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize(
    ("name", "family"),
    [
        *((name, family) for name in ON_HOST if name.startswith("cpu") for family in (*COUNTS, "qwen2")),  # has biases
        *((name, "qwen3.5") for name in ON_HOST if not name.startswith("cpu")),  # which fill no slot
    ],
)
def test_a_served_model_multiplies_as_before(name: str, family: str, dtype: torch.dtype) -> None:
    operations = ON_HOST[name]()
    model = new_model(family, dtype)
    accelerate(model, operations)
    model = filled(model, "cpu").eval()
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.to(dtype)
    idx, _ = batch("cpu")
    with torch.inference_mode():
        expected = model(idx)
        operations.serve(model)
        actual = model(idx)
    check_equal(actual, expected, ERROR[dtype], "logits")
    slots = [module for module in model.modules() if hasattr(module, "multiply")]
    fills_slots = name.startswith("cpu") and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float32:
        fills_slots = name == "cpu" and "avx2" in host.cpu_flags() and host.compiler() is not None
    assert any(module.multiply is not None for module in slots) == fills_slots


# --- the entries of attention --------------------------------------------------------------------


def check_attention(operations: Operations, dtype: torch.dtype, device: str, error: float) -> None:
    """Compare attend() and masked(), with gradients, with the plain ones on the CPU in fp64."""
    plain = PlainAttention()
    visible = cache_mask(torch.arange(70).expand(2, 70), 70, 20)
    entries: dict[str, Callable[[PlainAttention, list[Tensor]], Tensor]] = {
        "attend in a window": lambda bundle, qkv: bundle.attend(*qkv, 20),
        "attend to all": lambda bundle, qkv: bundle.attend(*qkv, 70, 0.2),
        "masked": lambda bundle, qkv: bundle.masked(*qkv, visible.to(qkv[0].device)),
    }
    for kv_heads in (4, 2):
        heads = (4, kv_heads, kv_heads)
        qkv = [draw(2, 70, H, 64, seed=seed, dtype=dtype) for seed, H in enumerate(heads)]
        for name, entry in entries.items():
            expected = with_gradients(entry, plain, [x.double() for x in qkv])
            actual = with_gradients(entry, operations, [x.to(device) for x in qkv])
            for i, (result, reference) in enumerate(zip(actual, expected, strict=True)):
                check_equal(result, reference, error, f"result {i} of {name}, {kv_heads} heads")


def with_gradients(
    entry: Callable[[PlainAttention, list[Tensor]], Tensor],
    bundle: PlainAttention,
    qkv: list[Tensor],
) -> list[Tensor]:
    qkv = [x.detach().clone().requires_grad_() for x in qkv]
    y = entry(bundle, qkv)
    weight = draw(*y.shape, seed=9, dtype=torch.bfloat16).to(y)
    grads = torch.autograd.grad((y * weight).sum(), qkv)
    return [y.detach(), *grads]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", ON_HOST)
def test_attention_equals_the_plain_one_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    check_attention(ON_HOST[name](), dtype, "cpu", ERROR[dtype])


@pytest.mark.parametrize("dtype", FORMATS)
@on_npu()
def test_attention_on_a_910b_equals_the_plain_one(dtype: torch.dtype) -> None:
    check_attention(Ascend().operations("auto"), dtype, "npu", ERROR[dtype])


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("name", ON_HOST)
def test_decoding_equals_attention_by_mask(name: str, dtype: torch.dtype) -> None:
    """A CPU reads the cache with a kernel of its own; of the others, an NPU alone does (test_ascend_kernels.py)."""
    operations = ON_HOST[name]()
    operations.serve(nn.Module())  # from here on a CPU uses its kernels
    B, K, window = 2, 40, 16
    q = draw(B, 1, 4, 64, seed=1, dtype=dtype)
    k, v = (draw(B, K, 2, 64, seed=seed, dtype=dtype) for seed in (2, 3))
    positions = torch.tensor([[39], [25]])
    visible = cache_mask(positions, K, window)
    expected = PlainAttention().masked(q.double(), k.double(), v.double(), visible)

    rows = torch.arange(B)[:, None]
    new_k, new_v = k[rows, positions], v[rows, positions]
    old_k, old_v = k.clone(), v.clone()
    old_k[rows, positions] = 0
    old_v[rows, positions] = 0
    ends = [int(position) + 1 for position in positions]

    def recent() -> Tensor:
        return positions - window + torch.arange(window + 1)

    with torch.inference_mode():
        extended = operations.extend(q, new_k, new_v, old_k, old_v, positions, window)
        by_lengths = operations.by_lengths(q, k, v, [1, 1], ends, recent, window)
        by_mask = operations.masked(q, k, v, visible)
    check_equal(by_mask, expected, ERROR[dtype], "masked")
    assert by_lengths is None and (extended is not None) == (name == "cpu")
    if extended is not None:
        check_equal(extended, expected, ERROR[dtype], "extend")
        assert torch.equal(old_k, k) and torch.equal(old_v, v), "the cache has the new keys"
