"""A Mac's GPU, which nobody here has: what the platform decides, a training in its name, and torch's wheel for macOS.

torch.mps is stood in for, and the training computes on the host. The wheel comes from the package index, of which a few
megabytes are read; what it says of operators is that torch registers a kernel for them, not that the kernel is right.
"""

import ast
import contextlib
import inspect
import json
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from nanochat import device
from nanochat.common import UserError
from nanochat.device import Compute, choose
from nanochat.platforms import base as platforms_base
from nanochat.platforms.apple import platform as apple
from nanochat.platforms.apple.platform import Apple
from nanochat.platforms.base import Platform
from nanochat.platforms.plain import Host
from nanochat.train import samples
from tests.support import small_world
from tests.support.real_torch_npu import Signature, signature_of
from tests.support.remote_wheels import TORCH_FOR_MACS, NoNetwork, text_of
from tests.support.tiny_model import pretend

ROOT = Path(__file__).resolve().parent.parent.parent
GIB = 2**30
GRAPHS = {"graphed", "captured", "graph_pool"}  # methods that nothing calls where graphs_missing() gives a reason
STEPS = 2


@contextlib.contextmanager
def on_a_mac() -> Iterator[list[str]]:
    """A Mac with macOS 14, whose GPU has 16 GiB, of which 3 GiB are taken; it lists the calls that change something."""
    calls: list[str] = []
    answers: dict[ModuleType, dict[str, Callable[..., Any]]] = {
        torch.backends.mps: {
            "is_available": lambda: True,
            "is_macos_or_newer": lambda major, minor: (major, minor) <= (14, 0),
            "get_name": lambda: "Apple M4",
        },
        torch.mps: {
            "device_count": lambda: 1,
            "recommended_max_memory": lambda: 16 * GIB,
            "driver_allocated_memory": lambda: 3 * GIB,
            "empty_cache": lambda: calls.append("empty_cache"),
            "synchronize": lambda: calls.append("synchronize"),
        },
    }
    with pytest.MonkeyPatch.context() as patch:
        for module, functions in answers.items():
            for name, function in functions.items():
                patch.setattr(module, name, function)
        for name in ("to", "copy_"):  # which open() replaces
            patch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
        yield calls


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    with on_a_mac() as calls:
        yield calls
        monkeypatch.undo()  # first what a test has put in place of the stand-ins


# --- what the platform decides -------------------------------------------------------------------


def test_it_is_used_only_if_it_is_named(mac: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("npu", "cuda"):
        monkeypatch.setattr(device.PLATFORMS[name], "unavailable", lambda self: "broken")
    name, _, reason = choose(None)
    assert name == "cpu"
    assert "mps only with --device_type=mps" in reason
    assert choose("mps") == ("mps", "gloo", "asked for")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert "mps" not in choose(None)[2]
    with pytest.raises(UserError, match="no GPU of a Mac"):
        choose("mps")


def test_it_computes_in_fp32_and_in_bf16_from_macos_14_on(mac: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert Apple().best_dtype()[0] == torch.float32
    assert Apple().lacks_dtype(torch.bfloat16) == ""
    monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: False)
    assert "macOS 14" in Apple().lacks_dtype(torch.bfloat16)
    assert Apple().lacks_dtype(torch.float16) == ""


def test_a_job_of_several_ranks_is_refused(mac: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="one rank, got 2") as refused:
        device.compute_init("mps")
    assert refused.value.exit_code == 2


def test_copies_of_host_tensors_wait_and_are_not_pinned(mac: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[bool] = []

    def copy(self: torch.Tensor, other: object, *, non_blocking: bool = False) -> torch.Tensor:
        waits.append(not non_blocking)
        return self

    for name in ("to", "copy_"):
        monkeypatch.setattr(torch.Tensor, name, copy)
    compute = pretend(Apple(), device=Apple().open())
    tensor = torch.zeros(2)
    assert device.pin(tensor, compute) is tensor
    device.to_device(tensor, compute)
    tensor.copy_(tensor, non_blocking=True)
    assert waits == [True, True]


def test_memory_is_what_metal_says(mac: list[str]) -> None:
    platform = Apple()
    platform.start_memory_watch()
    assert (platform.memory_total(), platform.memory_reachable()) == (16 * GIB, 16 * GIB)
    assert (platform.memory_free(), platform.memory_peak()) == (13 * GIB, 3 * GIB)
    assert platform.memory_taken() == 3 * GIB
    assert mac == ["empty_cache", "synchronize"]
    assert "--device_batch_size" in platform.explain(RuntimeError("MPS backend out of memory (MPS allocated: 3 GB)"))


# --- a training in its name ----------------------------------------------------------------------


class Recorder(TorchDispatchMode):
    """Collects the names of the operators that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "aten":
            self.names.add(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Training:
    """Losses of a training as on a Mac, those in plain torch, and the operators of the first, with a sample of words."""

    losses: list[float]
    plain_losses: list[float]
    operators: frozenset[str]


def losses_of(tag: str, folder: Path, platform: Platform) -> list[float]:
    """Train on the host with a platform's decisions."""
    compute: Compute = pretend(platform, operations=platform.operations("auto"))
    small_world.run_stage("base", compute, num_iterations=STEPS, eval_every=STEPS, samples=1, model_tag=tag)
    lines = (folder / "base_checkpoints" / tag / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    folder = tmp_path_factory.mktemp("apple")
    with pytest.MonkeyPatch.context() as patch, sdpa_kernel(SDPBackend.MATH):  # a Mac lacks the CPU's fused attention
        patch.setattr(samples, "LONGEST", 3)  # tokens
        patch.setenv("NANOCHAT_BASE_DIR", str(folder))
        small_world.make_corpus(folder)
        with on_a_mac(), Recorder() as recorder:
            Apple().open()
            losses = losses_of("mac", folder, Apple())
        return Training(losses, losses_of("plain", folder, Host()), frozenset(recorder.names))


def test_a_training_in_its_name_is_that_of_plain_torch(training: Training) -> None:
    assert len(training.losses) == STEPS
    assert training.losses == training.plain_losses


# --- torch's wheel for macOS ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel() -> zipfile.ZipFile:
    """The text of the wheel of the torch that the locks name."""
    lock = (ROOT / "locks" / "requirements-torch.lock").read_text()
    version = re.search(r"^torch==(\S+)", lock, re.M)
    assert version
    try:
        return zipfile.ZipFile(text_of(version[1], TORCH_FOR_MACS))
    except NoNetwork as why:
        pytest.skip(f"torch {version[1]} for macOS could not be downloaded: {why}")


def signatures(wheel: zipfile.ZipFile, module: str) -> dict[str, Signature]:
    tree = ast.parse(wheel.read(f"{module.replace('.', '/')}/__init__.py"))
    return {node.name: signature_of(node.args) for node in tree.body if isinstance(node, ast.FunctionDef)}


def calls_of_torch() -> Iterator[tuple[str, str, ast.Call | None]]:
    """The functions of torch's modules for Macs that the platform calls, also by what it inherits."""
    for node in ast.walk(ast.parse(inspect.getsource(apple))):
        if isinstance(node, ast.Call):
            module, _, name = ast.unparse(node.func).rpartition(".")
            if module in ("torch.mps", "torch.backends.mps"):
                yield module, name, node
    (parent,) = [
        node for node in ast.parse(inspect.getsource(platforms_base)).body if getattr(node, "name", "") == "Platform"
    ]
    for method in ast.walk(parent):
        if isinstance(method, ast.FunctionDef) and method.name not in {*vars(Apple), *GRAPHS}:
            yield from (("torch.mps", name, None) for name in re.findall(r"self\.module\.(\w+)", ast.unparse(method)))


@pytest.mark.contract
def test_the_functions_that_it_calls_are_there_with_these_arguments(wheel: zipfile.ZipFile) -> None:
    functions = {module: signatures(wheel, module) for module in ("torch.mps", "torch.backends.mps")}
    calls = list(calls_of_torch())
    assert {"synchronize", "device_count", "driver_allocated_memory", "get_name"} <= {name for _, name, _ in calls}
    for module, name, call in calls:
        assert name in functions[module], f"{module}.{name} is not there"
        if call is not None:
            keywords = {keyword.arg or "" for keyword in call.keywords}
            assert not functions[module][name].problem(len(call.args), keywords), ast.unparse(call)


@pytest.mark.contract
def test_torch_seeds_it_with_the_other_generators(wheel: zipfile.ZipFile) -> None:
    assert "torch.mps.manual_seed(seed)" in wheel.read("torch/random.py").decode()
    assert "manual_seed" in signatures(wheel, "torch.mps")


def without_a_kernel(names: frozenset[str], wheel: zipfile.ZipFile) -> list[str]:
    """The operators for which torch registers neither a kernel of MPS nor a composite of other operators."""
    listed = yaml.load(wheel.read("torchgen/packaged/ATen/native/native_functions.yaml"), yaml.CSafeLoader)
    entries = {entry["func"].partition("(")[0]: entry for entry in listed}

    def has_kernel(name: str) -> bool:
        entry = entries.get(name)
        if entry is None:
            return False
        if "structured_delegate" in entry:
            return has_kernel(entry["structured_delegate"])
        keys = {key.strip() for group in entry.get("dispatch", {"CompositeImplicit": ""}) for key in group.split(",")}
        return any(key == "MPS" or key.startswith("Composite") for key in keys)

    return sorted(name for name in names if not has_kernel(name))


@pytest.mark.contract
def test_every_operator_of_a_training_has_a_kernel(training: Training, wheel: zipfile.ZipFile) -> None:
    assert {"mm", "embedding", "_log_softmax", "argmax"} <= training.operators, sorted(training.operators)
    assert without_a_kernel(training.operators, wheel) == []
    assert without_a_kernel(frozenset({"_linalg_eigh"}), wheel) == ["_linalg_eigh"]
