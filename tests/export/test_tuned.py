"""Fine-tuned models, exported for transformers and for llama.cpp: adapters are merged, the tokenizer comes along."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.huggingface.generation import listed_ends
from nanochat.checkpoint_manager.huggingface.weights import load_qwen
from nanochat.checkpoint_manager.load import load_model
from nanochat.common import read_json, write_json
from nanochat.data.conversation import chat
from nanochat.export.__main__ import Config, main
from scripts import finetune
from tests.export.gguf_reader import Reader
from tests.export.test_llama_vocabulary import folder_with
from tests.support.flags import configured
from tests.support.qwens import oracle
from tests.support.served import serving
from tests.support.theirs import their_model, their_tokenizer
from tests.support.tiny_model import on_cpu


@pytest.fixture
def tune(tmp_path: Path) -> Any:
    """Fine-tunes a published model for a few steps."""
    with open(tmp_path / "chats.jsonl", "w", encoding="utf-8") as lines:
        for i in range(60):
            messages = [{"role": "user", "content": f"cat {i}"}, {"role": "assistant", "content": "mat"}]
            print(json.dumps({"messages": messages}), file=lines)

    def run(rank: int, family: str = "qwen3") -> None:
        (tmp_path / "model").mkdir()
        folder_with(tmp_path / "model", family=family)
        finetune.train(configured(
            finetune.Config, model=tmp_path / "model", data=(str(tmp_path / "chats.jsonl"),), lora_rank=rank, max_length=48,
            num_iterations=3, target_examples_per_step=4, device_batch_size=2, learning_rate=1e-2, compile=False,
            replay_every=0,
        ), on_cpu())  # fmt: skip

    return run


@pytest.mark.parametrize("rank", [0, 4])
def test_transformers_computes_the_tuned_model(rank: int, tune: Any, tmp_path: Path) -> None:
    tune(rank)
    main(Config(tmp_path / "out", source="tune"))
    loaded = load_model("tune", None, None, on_cpu())
    theirs = their_model(tmp_path / "out")
    assert not list((tmp_path / "out").glob("adapter*")) and "LORA" not in (tmp_path / "out" / "README.md").read_text()
    idx = torch.arange(60).view(2, 30)
    with torch.no_grad():
        torch.testing.assert_close(theirs(idx).logits, loaded.model(idx), atol=1e-5, rtol=1e-5)
    tokenizer = their_tokenizer(tmp_path / "out")
    asked = [{"role": "user", "content": "the cat?"}]
    made = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert made == loaded.tokenizer.render_prompt(chat("the cat?"))
    assert theirs.generation_config.eos_token_id == [302, 300]


def test_every_end_of_a_reply_that_only_config_json_lists_is_kept(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder_with(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    config = tmp_path / "model" / "config.json"
    write_json(config, {**read_json(config), "eos_token_id": [302, 300, 5]})
    main(Config(tmp_path / "out", model=tmp_path / "model"))
    assert listed_ends(tmp_path / "out") == [302, 300, 5]


def test_transformers_replies_as_a_tuned_mixture_with_deltanets_is_served(tune: Any, tmp_path: Path) -> None:
    """Qwen3.5-MoE from an adapter of attention, shared expert and experts to a reply over HTTP."""
    tune(4, "qwen3.5-moe")
    main(Config(tmp_path / "out", source="tune"))
    loaded = load_model("tune", None, None, on_cpu())
    assert any(".experts." in name and "lora_B" in name for name, _ in loaded.model.named_parameters())
    theirs = their_model(tmp_path / "out", dtype=torch.float32)
    with serving(loaded=(loaded.model, loaded.tokenizer)) as served:
        prompt = served.tokenizer.render_prompt(chat("the cat"))
        messages = [{"role": "user", "content": "the cat"}]
        answer = served.ok("/v1/chat/completions", messages=messages, temperature=0, max_tokens=12)
    made = theirs.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
    ends = [i for i, token in enumerate(made) if token in theirs.generation_config.eos_token_id]
    reply = made[: ends[0]] if ends else made
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["message"]["content"] == served.tokenizer.decode(reply) != ""


@pytest.mark.parametrize(
    "settings", [{"modules_to_save": ["lm_head"]}, {"use_dora": True, "rank_pattern": {"q_proj": 2}}]
)
def test_transformers_computes_what_peft_computed_before_it_was_merged(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    import peft

    (tmp_path / "model").mkdir()
    folder_with(tmp_path / "model")
    base = oracle(load_qwen(tmp_path / "model", on_cpu()))
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, **settings)
    adapted = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        for name, value in adapted.named_parameters():
            if "modules_to_save" in name:
                value.mul_(1.5)
    adapted.save_pretrained(tmp_path / "adapter")
    main(Config(tmp_path / "out", model=tmp_path / "model", adapter=tmp_path / "adapter"))
    merged = their_model(tmp_path / "out")
    idx = torch.arange(60).view(2, 30)
    with torch.no_grad():
        torch.testing.assert_close(merged(idx).logits, adapted(idx).logits, atol=3e-5, rtol=1e-5)
        main(Config(tmp_path / "out.gguf", "gguf", model=tmp_path / "model", adapter=tmp_path / "adapter"))
    assert ("output.weight" in Reader(tmp_path / "out.gguf").tensors) == ("modules_to_save" in settings)
