"""Checkpoints of karpathy/nanochat: HEAD's are converted; older ones, and files with code in them, are refused."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import torch

from nanochat.checkpoint_manager import files as step_files
from nanochat.checkpoint_manager import upstream
from nanochat.checkpoint_manager.__main__ import Config, main
from nanochat.checkpoint_manager.load import load_model
from nanochat.checkpoint_manager.locate import checkpoint_dir, find_parent
from nanochat.checkpoint_manager.resume import resume_stage
from nanochat.common import UserError
from nanochat.gpt import GPT
from nanochat.optim import Optimizers, Rates
from nanochat.tokenizer import PATTERNS, ROLES, Tokenizer
from tests.support.tiny_model import TEXT, tiny_gpt, tiny_tokenizer
from tests.support.tiny_training import CPU, WANTED

TOKENIZER = tiny_tokenizer()
# What upstream's meta files hold under model_config: asdict() of its GPTConfig, without the fields that ours adds.
FIELDS = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "window_pattern")


def encoding(tokenizer: Tokenizer, **changes: Any) -> tiktoken.Encoding:
    """The encoding that upstream's tok_train pickles."""
    ranks = [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size - len(ROLES))]
    given = {"name": "rustbpe", "pat_str": PATTERNS["nanochat"],
             "mergeable_ranks": {token: rank for rank, token in enumerate(ranks)},
             "special_tokens": {f"<|{role}|>": len(ranks) + i for i, role in enumerate(ROLES)}}  # fmt: skip
    return tiktoken.Encoding(**{**given, **changes})


def their_names(model: GPT) -> dict[str, torch.Tensor]:
    """The parameters under the names of upstream's state_dict(), with the tables in bf16."""
    state = {}
    for name, value in model.state_dict().items():
        prefix = "transformer." if name.startswith(("wte.", "h.")) else ""
        table = name.startswith(("wte.", "value_embeds."))
        state[f"{prefix}{name}"] = value.bfloat16() if table else value.clone()
    return state


def their_folder(base: Path, stage: str = "base", step: int = 123, protocol: int = 4, **changes: Any) -> Path:
    """Make a base folder as HEAD does, with one checkpoint and a tokenizer; return the checkpoint's folder."""
    folder = base / f"{stage}_checkpoints" / "d4"
    folder.mkdir(parents=True, exist_ok=True)
    model = tiny_gpt(TOKENIZER.vocab_size)
    shape = {name: getattr(model.config, name) for name in FIELDS}
    torch.save(changes.get("state", their_names(model)), folder / f"model_{step:06d}.pt")
    torch.save({"state": {}, "param_groups": []}, folder / f"optim_{step:06d}_rank0.pt")
    meta = {"step": step, "val_bpb": 0.9, "model_config": changes.get("shape", shape), "user_config": {}}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps(meta))
    (base / "tokenizer").mkdir(exist_ok=True)
    (base / "tokenizer" / "tokenizer.pkl").write_bytes(pickle.dumps(encoding(TOKENIZER), protocol))
    return folder


def convert(folder: Path, **options: Any) -> None:
    main(Config("convert", folder, **options))


@pytest.mark.parametrize(
    ("theirs", "ours", "protocol"), [("base", "base", 4), ("chatsft", "sft", 5), ("chatrl", "rl", 4)]
)
def test_a_converted_model_computes_what_it_did(tmp_path: Path, theirs: str, ours: str, protocol: int) -> None:
    convert(their_folder(tmp_path / "theirs", theirs, protocol=protocol))
    loaded = load_model(None, None, None, CPU)
    assert (loaded.stage, loaded.tag, loaded.step, loaded.corpus) == (ours, "d4", 123, "fineweb")
    text = "the cat sat on 12 mats 猫坐在垫子上"
    assert loaded.tokenizer.encode(text) == encoding(TOKENIZER).encode_ordinary(text)
    assert loaded.tokenizer.hash == TOKENIZER.hash
    model = tiny_gpt(TOKENIZER.vocab_size, operations=loaded.model.operations)  # others round in another way
    with torch.no_grad():
        for table in (model.wte, *model.value_embeds.values()):
            table.weight.copy_(table.weight.bfloat16())
    idx = torch.tensor([loaded.tokenizer.encode(text)])
    assert torch.equal(loaded.model(idx), model(idx))


def test_the_newest_step_is_taken_or_the_one_named(tmp_path: Path) -> None:
    folder = their_folder(tmp_path / "theirs", step=5)
    their_folder(tmp_path / "theirs", step=20)
    convert(folder, corpus="mine")
    convert(folder, step=5)
    where = checkpoint_dir("base", "d4")
    assert step_files.steps(where) == [5, 20]
    assert all(step_files.verify(step_files.step_dir(where, step)) == "" for step in (5, 20))
    assert find_parent("base", None, None).corpus == "mine"  # a later stage can start from it
    with pytest.raises(UserError, match="step_000005 exists already"):
        convert(folder, step=5)
    with pytest.raises(UserError, match="has steps 5, 20, not 7"):
        convert(folder, step=7)


def test_both_kinds_may_share_a_base_folder(base_folder: Path) -> None:
    folder = their_folder(base_folder)
    convert(folder)
    assert {path.name for path in folder.iterdir()} > {"model_000123.pt", "step_000123"}
    assert load_model("base", "d4", None, CPU).step == 123


def test_a_converted_run_cannot_be_resumed(tmp_path: Path) -> None:
    convert(their_folder(tmp_path / "theirs"))
    model = tiny_gpt(TOKENIZER.vocab_size)
    optimizers = Optimizers(model, model.parameter_roles(), 32, Rates(), 1.0, torch.float32)
    with pytest.raises(UserError, match="was begun with other settings"):
        resume_stage(checkpoint_dir("base", "d4"), model, optimizers, WANTED, CPU)


OLD = [("smear", "of 2026-01-17 or later: it has no smear_gate.weight, .* has had since 2026-03-14"),
       ("value_embeds", "of 2026-01-11 or later: it has no smear_gate.weight"),
       ("resid_lambdas", "of 2025: it has no smear_gate.weight")]  # fmt: skip


@pytest.mark.parametrize("newest", range(3))
def test_older_checkpoints_are_refused_by_age(tmp_path: Path, newest: int) -> None:
    lacking = [name for name, _ in OLD[: newest + 1]] + ["x0_lambdas", "ve_gate"][: 2 * (newest == 2)]
    state = {name: value for name, value in their_names(tiny_gpt(TOKENIZER.vocab_size)).items()
             if not any(word in name for word in lacking)}  # fmt: skip
    with pytest.raises(UserError, match=OLD[newest][1]):
        convert(their_folder(tmp_path / "theirs", state=state))
    assert not checkpoint_dir("base", "d4").exists()


def test_a_folder_without_a_window_pattern_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"names no .*window_pattern of the model"):
        convert(their_folder(tmp_path / "theirs", shape={"sequence_len": 16}))


class Runs:
    """An object whose pickle runs code when it is loaded."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_nothing_of_a_pickle_is_run(tmp_path: Path) -> None:
    folder = their_folder(tmp_path / "theirs")
    pickled = tmp_path / "theirs" / "tokenizer" / "tokenizer.pkl"
    pickled.write_bytes(pickle.dumps(Runs(tmp_path / "marker")))
    with pytest.raises(UserError, match="the pickle does more than hold data"):
        convert(folder)
    their_folder(tmp_path / "theirs", state={"wte": Runs(tmp_path / "marker")})
    with pytest.raises(UserError, match="cannot be read as plain tensors"):
        convert(folder)
    assert not (tmp_path / "marker").exists()


def test_other_vocabularies_are_refused(tmp_path: Path) -> None:
    folder = their_folder(tmp_path / "theirs")
    pickled = tmp_path / "theirs" / "tokenizer" / "tokenizer.pkl"
    pickled.write_bytes(pickle.dumps(encoding(Tokenizer.train([TEXT] * 4, 280))))
    with pytest.raises(UserError, match=r"the tokenizer has 280 tokens, the model 290: .*--tokenizer"):
        convert(folder)
    pickled.write_bytes(pickle.dumps(encoding(TOKENIZER, special_tokens={"<|endoftext|>": 281})))
    with pytest.raises(UserError, match="its token numbers differ from"):
        convert(folder)
    pickled.unlink()
    with pytest.raises(UserError, match=r"no tokenizer at .*: name its folder with --tokenizer"):
        convert(folder)
    with pytest.raises(UserError, match=r"has no model_NNNNNN\.pt"):
        convert(tmp_path)


def test_a_cut_pickle_is_refused() -> None:
    data = pickle.dumps(encoding(TOKENIZER))
    for end in (10, len(data) // 2, len(data) - 1):
        with pytest.raises((ValueError, IndexError)):
            upstream.plain(data[:end])
