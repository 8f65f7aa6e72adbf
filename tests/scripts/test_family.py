"""A Qwen3 that is trained from nothing: every stage, resumed runs, chats, and an export that needs no code of ours."""

import os
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import pytest
import torch

from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.huggingface.weights import load_qwen
from nanochat.checkpoint_manager.load import load_model
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError
from nanochat.data.conversation import chat
from nanochat.engine import Engine
from nanochat.export.huggingface import export
from nanochat.generate.sampling import Sampling
from nanochat.models.qwen.model import Qwen
from nanochat.runtime.tracking import read_metrics
from nanochat.tokenizer import ROLES, Tokenizer
from tests.support.small_world import make_corpus, run_stage, shrink
from tests.support.theirs import their_model, their_tokenizer
from tests.support.tiny_model import on_cpu

pytestmark = pytest.mark.slow  # whole stages

OWN = {"base": {"family": "qwen3"}, "mid": {}, "sft": {"documents_every": 0, "num_iterations": 60},
       "rl": {"num_iterations": 4, "eval_every": 2}}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base folder in which a Qwen3 went through all stages."""
    with pytest.MonkeyPatch.context() as patch:
        base = tmp_path_factory.mktemp("qwen")
        patch.setenv("NANOCHAT_BASE_DIR", str(base))
        make_corpus(base)
        shrink(patch)
        for stage, flags in OWN.items():
            run_stage(stage, **flags)
        yield base


@pytest.fixture
def trained(made: Path, base_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That folder, as the base folder of a test."""
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(made))
    return made


def test_every_stage_trains_it(trained: Path) -> None:
    for stage in OWN:
        losses = [line["loss"] for line in read_metrics(checkpoint_dir(stage, "d2")) if "loss" in line]
        assert len(losses) == OWN[stage].get("num_iterations", 20)
        assert stage == "rl" or fmean(losses[-5:]) < fmean(losses[:5]) - 0.1, (stage, losses)
    assert isinstance(load_model("rl", "d2", None, on_cpu()).model, Qwen)


@pytest.mark.parametrize(
    "flag", [{"window_pattern": "SL"}, {"offset_layers": 1}, {"exclusive_layers": 1}, {"bigram_rows": 64}]
)
def test_what_only_a_gpt_has_is_refused(trained: Path, flag: dict[str, Any]) -> None:
    ((name, value),) = flag.items()
    with pytest.raises(UserError, match=f"a Qwen3 .*, got --{name}={value}: leave the flag out"):
        run_stage("base", family="qwen3", model_tag="windows", **flag)
    assert not checkpoint_dir("base", "windows").exists()


def test_transformers_loads_its_export_without_code_of_ours(trained: Path, tmp_path: Path) -> None:
    loaded = load_model("sft", "d2", None, on_cpu(), torch.float32)
    export(loaded, tmp_path / "mine", "float32")
    assert not [name for name in os.listdir(tmp_path / "mine") if name.endswith(".py")]
    theirs = their_model(tmp_path / "mine")
    tokenizer = their_tokenizer(tmp_path / "mine")
    asked = [{"role": "user", "content": "What is the capital of France? 巴黎"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == loaded.tokenizer.render_prompt(chat(asked[0]["content"]))
    idx = torch.tensor([ids])
    with torch.no_grad():
        assert (theirs(idx).logits - loaded.model(idx)).abs().max() <= 1e-5
    made = theirs.generate(idx, max_new_tokens=12, do_sample=False)[0, len(ids) :].tolist()
    (reply,) = Engine(loaded.model, loaded.tokenizer, 1).generate([ids], Sampling(0.0, max_tokens=12))
    own = reply.forced.index(True) if True in reply.forced else len(reply.tokens)  # what follows is the calculator's
    assert own >= 2 and made[:own] == reply.tokens[:own]


def test_its_export_is_a_base_for_chats_and_fine_tuning(trained: Path, tmp_path: Path) -> None:
    """Its marks are those of our tokenizer, and the embedding has no rows that no token uses."""
    loaded = load_model("sft", "d2", None, on_cpu(), torch.float32)
    export(loaded, tmp_path / "mine", "float32")
    model = load_qwen(tmp_path / "mine", on_cpu(), torch.float32)
    tokenizer = cast(Tokenizer, FolderTokenizer(tmp_path / "mine", model.config.vocab_size))
    assert [tokenizer.special(role) for role in ROLES] == [loaded.tokenizer.special(role) for role in ROLES]
    prompt = loaded.tokenizer.render_prompt(chat("the capital of France"))
    assert tokenizer.render_prompt(chat("the capital of France")) == prompt
    first, second = (
        Engine(one, words, 1).generate([prompt], Sampling(0.0, max_tokens=12))[0]
        for one, words in ((loaded.model, loaded.tokenizer), (model, tokenizer))
    )
    assert first.tokens == second.tokens
