"""Exported folders: transformers loads them offline, and computes, tokenises and chats like the checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.load import Loaded, load_model
from nanochat.common import UserError
from nanochat.data.conversation import Conversation, assistant, chat, user
from nanochat.data.tinyworld import world as tinyworld
from nanochat.engine import Engine
from nanochat.export import huggingface
from nanochat.export.__main__ import Config, main
from nanochat.export.huggingface import export, tokenizer_json
from nanochat.generate.sampling import Sampling
from nanochat.tokenizer import Tokenizer
from tests.support.theirs import their_model, their_tokenizer
from tests.support.tiny_model import on_cpu, tiny_checkpoint, tiny_gpt, tiny_tokenizer

CPU = on_cpu()


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A checkpoint with windows, grouped heads, value embeddings, bigrams and key offset. Its context is longer than a
    window."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(tmp_path_factory.mktemp("base")))
        tiny_checkpoint("sft", bigram_rows=211, offset_layers=1)
        return load_model(None, None, None, CPU, torch.float32)


@pytest.fixture(scope="module")
def folder(loaded: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("exports") / "tiny"
    export(loaded, target, "float32")
    return target


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    return their_model(folder, trust_remote_code=True)


def ids(loaded: Loaded, rows: int = 3, length: int = 160) -> torch.Tensor:
    vocabulary, generator = loaded.model.config.vocab_size, torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (rows, length), generator=generator)


def test_the_logits_are_equal(loaded: Loaded, theirs: Any) -> None:
    idx = ids(loaded)
    with torch.no_grad():
        ours, other = loaded.model(idx), theirs(idx).logits
    assert other.dtype == torch.float32 and other.shape == ours.shape
    assert (ours - other).abs().max() <= 1e-5
    assert ours.std() > 0.1


def test_padding_on_the_left_changes_nothing(loaded: Loaded, theirs: Any) -> None:
    idx = ids(loaded, 1, 40)
    padded, mask = torch.cat((ids(loaded, 1, 9), idx), dim=1), torch.ones(1, 49, dtype=torch.long)
    mask[:, :9] = 0
    with torch.no_grad():
        assert (theirs(padded, attention_mask=mask).logits[:, 9:] - loaded.model(idx)).abs().max() <= 1e-4


def test_the_loss_is_that_of_the_next_token(loaded: Loaded, theirs: Any) -> None:
    idx = ids(loaded)
    with torch.no_grad():
        expected = loaded.model(idx[:, :-1], idx[:, 1:])
        assert float(theirs(idx, labels=idx).loss) == pytest.approx(float(expected), abs=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_close(loaded: Loaded, tmp_path: Path, dtype: str) -> None:
    export(loaded, tmp_path / "half", dtype)
    model = their_model(tmp_path / "half", trust_remote_code=True)
    assert str(model.dtype) == f"torch.{dtype}"
    idx = ids(loaded)
    with torch.no_grad():
        assert (model(idx).logits - loaded.model(idx)).abs().mean() < 0.1


def test_generation_is_greedy_as_the_engine_s(loaded: Loaded, folder: Path, theirs: Any) -> None:
    tokenizer = their_tokenizer(folder, trust_remote_code=True)
    prompts = [loaded.tokenizer.render_prompt(chat("the cat")), loaded.tokenizer.render_prompt(chat("猫 12 + 34"))]
    engine = Engine(loaded.model, loaded.tokenizer, 2, 160)
    for prompt, reply in zip(prompts, engine.generate(prompts, Sampling(temperature=0.0, max_tokens=8)), strict=True):
        made = theirs.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0]
        forced = next(
            (i for i, one in enumerate(reply.forced) if one), len(reply.tokens)
        )  # where the calculator's answer starts
        assert made[len(prompt) :].tolist()[:forced] == reply.tokens[:forced]
    batch = tokenizer([" the cat", "the mat sat on"], return_tensors="pt", padding=True)
    assert theirs.generate(**batch, max_new_tokens=3, do_sample=False).shape[0] == 2


TEXTS = [
    "", " ", "\n\n \t x", "a" * 1000, "aaaa aaa aa", "I'll don't SHE'S", "  12345 67,890.5", "ﬁ ½ Ⅷ",
    "猫坐在垫子上。\r\n\r\n你好", "def f(x):\n    return x**2  # ok\n", "naïve café ☕️ \U0001f469\u200d\U0001f467",
    "\u200b\ufeff\x00\x7f", "العربية हिन्दी",
]  # fmt: skip


@pytest.mark.parametrize("vocabulary", [290, 2048])
def test_the_tokens_are_equal(vocabulary: int, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    documents = list(tinyworld.documents(0, copies=1))[:600]
    ours = tiny_tokenizer() if vocabulary == 290 else Tokenizer.train(documents, vocabulary)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(ours)), encoding="utf-8")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    for text in [*TEXTS, *documents, "".join(documents[:20])]:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text), text
        assert theirs.decode(ours.encode(text), clean_up_tokenization_spaces=False) == text
    assert theirs.encode("the cat") == [ours.bos, *ours.encode("the cat")]
    assert len(theirs) == ours.vocab_size
    assert theirs.convert_tokens_to_ids("<|assistant_end|>") == ours.special("assistant_end")


def test_the_tokenizer_gives_only_what_the_model_takes(folder: Path) -> None:
    """Transformers 4 reads this from the file, and would otherwise add token_type_ids; 5 has another default."""
    names = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["model_input_names"]
    assert names == ["input_ids", "attention_mask"]
    tokenizer = their_tokenizer(folder, trust_remote_code=True)
    assert sorted(tokenizer("the cat")) == sorted(names)


def test_a_chat_is_rendered_alike(loaded: Loaded, folder: Path) -> None:
    tokenizer = their_tokenizer(folder, trust_remote_code=True)
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the cat?"},
             {"role": "assistant", "content": "on the mat"}, {"role": "user", "content": "猫？"}]  # fmt: skip
    made = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False)
    ours = Conversation((user("Be brief.\n\nthe cat?"), assistant("on the mat"), user("猫？")))
    assert made == [*loaded.tokenizer.render(ours).ids, loaded.tokenizer.special("assistant_start")]


def test_a_folder_is_whole_or_not_there(loaded: Loaded, folder: Path, tmp_path: Path,
                                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    with pytest.raises(UserError, match="exists already"):
        export(loaded, folder, "float32")

    def fails(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(huggingface, "write_tensors", fails)
    with pytest.raises(OSError, match="No space left"):
        export(loaded, tmp_path / "new", "float32")
    assert [path.name for path in tmp_path.iterdir() if path.name != "base"] == []


def test_the_command_exports_the_stage_that_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_checkpoint("base", step=5)
    tiny_checkpoint("sft", step=3)
    main(Config(tmp_path / "out", source="base"))
    assert "stage base, tag d2, step 5" in capsys.readouterr().out
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["n_layer"] == 4 and config["auto_map"]["AutoModelForCausalLM"].startswith("modeling_nanochat.")
    model = their_model(tmp_path / "out", trust_remote_code=True)
    assert torch.equal(model.lm_head.weight, tiny_gpt(290).lm_head.weight)
