"""What benchmarks cannot measure is refused with code 2, before anything is measured."""

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from bench.finetune import __main__ as finetune
from bench.gpu import __main__ as gpu
from bench.multiplier import __main__ as multiplier
from bench.multiplier import corpus
from bench.npu_ops import __main__ as npu_ops
from bench.processes import check_checkout, check_installed
from bench.serve import __main__ as serve
from bench.serve import soak
from bench.tokenizer import __main__ as tokenizer
from bench.train import __main__ as train
from nanochat.common import UserError
from tests.bench.fakes import UPSTREAM, fake_upstream


@pytest.mark.parametrize(
    ("program", "flags", "words"),
    [
        (train, {"rounds": 0}, "--rounds"),
        (train, {"quick": True, "upstream": Path()}, "--quick"),
        (finetune, {"steps": 0}, "--steps"),
        (finetune, {"quick": True, "against": ("transformers",)}, "--quick"),
        (gpu, {"upstream": Path("nowhere")}, "--upstream.*nowhere"),
        (gpu, {"rows": 0}, "--rows.*got 0"),
        (npu_ops, {"chip": "910A"}, "--chip"),
        (npu_ops, {"depth": 4}, "--depth"),
        (serve, {"rounds": 0}, "--rounds"),
        (soak, {"clients": 1}, "try --quick"),
        (tokenizer, {"corpus": Path("nowhere")}, "--corpus"),
        (corpus, {"folder": Path(), "russian": -1}, "--russian"),
        (multiplier, {"quick": True, "variants": ("a=--matrix_lr=1",)}, "--quick"),
        (multiplier, {"steps": (0,)}, "--steps.*got 0"),
        (multiplier, {"seeds": (1, 1)}, "--seeds.*got 1 1"),
        (multiplier, {"stretch": (1.0,)}, "--stretch"),
        (multiplier, {"depths": ()}, "--depths.*none"),
        (multiplier, {}, "--upstream DIR"),
        (multiplier, {"baseline": "ours"}, "--variants"),
        (multiplier, {"variants": ("Hot=--matrix_lr=1",)}, "small letters"),
        (multiplier, {"variants": ("hot=--depth=3",)}, "may have the flags"),
        (multiplier, {"variants": ("hot",)}, "at least one flag"),
        (multiplier, {"variants": ("hot=--checkout=x",)}, "a checkout of this"),
        (multiplier, {"ladder": True, "depths": (8,)}, "--ladder.*got --depths"),
        (multiplier, {"ladder": True, "steps": (9,), "seeds": (1,)}, "got --steps, --seeds"),
    ],
)
def test_flags_that_cannot_be_measured_are_refused(
    program: ModuleType,
    flags: dict[str, Any],
    words: str,
) -> None:
    with pytest.raises(UserError, match=words) as refused:
        program.main(program.Config(**flags))
    assert refused.value.exit_code == 2


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    old = UPSTREAM.replace("def setup_optimizer", "def setup_optimizers")
    folders = {
        "nowhere": tmp_path / "nowhere",
        "nanochat/gpt.py": tmp_path,
        "setup_optimizer": fake_upstream(tmp_path / "old", old),
    }
    for word, folder in folders.items():
        with pytest.raises(UserError, match=f"--upstream.*{word}"):
            check_checkout("--upstream", folder)


def test_a_peer_that_is_not_installed_is_named() -> None:
    with pytest.raises(UserError, match="llama-cpp needs no_such_package"):
        check_installed("llama-cpp", "json", "no_such_package")
