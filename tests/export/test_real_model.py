"""A real model from its GGUF file: bits, logits, replies, a step of fine-tuning, and back to llama.cpp."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from nanochat.checkpoint_manager.load import Loaded, load_published
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.data.conversation import Conversation, assistant, user
from nanochat.engine import Engine
from nanochat.export.__main__ import Config, main
from nanochat.generate.sampling import Sampling
from nanochat.runtime.tracking import read_metrics
from nanochat.serve.routes.constraints import constrained
from nanochat.serve.routes.reply import Form
from nanochat.serve.routes.tools import read_tools
from scripts import finetune
from tests.export.test_llama_cpp import LlamaServer
from tests.support.flags import configured
from tests.support.real_model import gguf_file
from tests.support.theirs import their_model, their_tokenizer
from tests.support.tiny_model import on_cpu

pytestmark = pytest.mark.slow
QUESTIONS = ("What is the capital of France?", "And of Italy? 罗马 12345 don't")
REPLY_TOKENS = 24


@pytest.fixture(scope="module")
def loaded(real_model: Path) -> Loaded:
    return load_published(real_model, None, on_cpu(), torch.float32)


@pytest.fixture(scope="module")
def theirs(real_model: Path) -> Any:
    return their_model(real_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def chat(loaded: Loaded) -> list[tuple[list[int], list[int]]]:
    """Two turns of a chat as (prompt, greedy reply) in tokens."""
    engine = Engine(loaded.model, loaded.tokenizer, 1)
    messages, turns = [], []
    for question in QUESTIONS:
        messages.append(user(question))
        prompt = loaded.tokenizer.render_prompt(Conversation(tuple(messages)))
        (reply,) = engine.generate([prompt], Sampling(0.0, max_tokens=REPLY_TOKENS))
        words = [token for token in reply.tokens if token not in loaded.tokenizer.stops]
        turns.append((prompt, words))
        messages.append(assistant(loaded.tokenizer.decode(words)))
    return turns


def unquantised(heads: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the file as gguf dequantises them, with channels of a rotated pair half a head apart."""
    for tensor in gguf.GGUFReader(gguf_file()).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        count = heads.get(tensor.name.split(".")[-2])
        if count:
            pairs = values.reshape(count, -1, 2, values.shape[1])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
        yield tensor.name, torch.from_numpy(values.copy())


def test_every_weight_has_the_bits_that_gguf_gives(real_model: Path) -> None:
    tensors = load_file(real_model / "model.safetensors")
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
             "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj",
             "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}  # fmt: skip
    for name, values in unquantised({"attn_q": 9, "attn_k": 3}):
        *layer, part, kind = name.split(".")
        prefix = f"model.layers.{layer[1]}." if layer else ""
        assert torch.equal(tensors.pop(f"{prefix}{names[part]}.{kind}"), values), name
    assert not tensors


def test_logits_and_greedy_replies_are_those_of_transformers(
    loaded: Loaded, theirs: Any, chat: list[tuple[list[int], list[int]]], real_model: Path
) -> None:
    tokenizer = their_tokenizer(real_model)
    messages: list[dict[str, str]] = []
    for question, (prompt, reply) in zip(QUESTIONS, chat, strict=True):
        messages.append({"role": "user", "content": question})
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        assert inputs["input_ids"][0].tolist() == prompt
        ids = theirs.generate(**inputs, max_new_tokens=REPLY_TOKENS, do_sample=False)[0, len(prompt) :].tolist()
        assert [token for token in ids if token not in loaded.tokenizer.stops] == reply
        messages.append({"role": "assistant", "content": tokenizer.decode(reply)})
    assert "Paris" in messages[1]["content"]
    idx = torch.tensor([chat[-1][0]])
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(idx), theirs(idx).logits, atol=1e-3, rtol=0)


def test_a_step_of_fine_tuning_with_an_adapter(real_model: Path, tmp_path: Path) -> None:
    reply = {"role": "assistant", "content": "In Paris."}
    chats = [{"messages": [{"role": "user", "content": f"Where is house {number}?"}, reply]} for number in range(8)]
    (tmp_path / "chats.jsonl").write_text("".join(f"{json.dumps(chat)}\n" for chat in chats))
    flags = {"model": real_model, "data": (str(tmp_path / "chats.jsonl"),), "max_length": 64, "num_iterations": 2,
             "target_examples_per_step": 2, "replay_every": 0, "device_batch_size": 1, "learning_rate": 1e-3, "compile": False,
             "out_tag": "paris"}  # fmt: skip
    finetune.train(configured(finetune.Config, **flags), on_cpu())
    first, *_, last = [line["loss"] for line in read_metrics(checkpoint_dir("tune", "paris")) if "loss" in line]
    assert last < first < 10


def test_replies_that_must_be_calls_are_calls_of_the_functions_with_arguments_of_their_schema(loaded: Loaded) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 1, "maximum": 9},
                       "units": {"type": "array", "items": {"enum": ["C", "F"]}, "maxItems": 2}},
        "required": ["city", "days", "units"],
        "additionalProperties": False,
    }  # fmt: skip
    offered = [
        {"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("past", "coming")
    ]
    form = Form(read_tools({"tools": offered, "tool_choice": "required"}), "json")
    prompt = loaded.tokenizer.render_prompt(Conversation((user("How warm will it be in 北京 this week? Just talk."),)))
    ((_, sampling),) = constrained([(prompt, Sampling(1.0, max_tokens=200))], form, None)
    for reply in Engine(loaded.model, loaded.tokenizer, 6).generate([prompt] * 6, sampling):
        assert reply.tokens[-1] in loaded.tokenizer.stops
        texts = loaded.tokenizer.decode(reply.tokens[:-1]).split("</tool_call>")
        assert texts.pop() == "" and texts
        for text in texts:
            call = json.loads(text.removeprefix("\n").removeprefix("<tool_call>"))
            arguments = call["arguments"]
            assert call["name"] in ("past", "coming") and list(arguments) == ["city", "days", "units"]
            assert len(arguments["city"]) <= 12 and arguments["days"] in range(1, 10)
            assert set(arguments["units"]) <= {"C", "F"} and len(arguments["units"]) <= 2


def test_llama_cpp_reads_the_exported_file_and_writes_the_same_replies(
    real_model: Path, chat: list[tuple[list[int], list[int]]], loaded: Loaded, tmp_path: Path
) -> None:
    main(Config(tmp_path / "x.gguf", model=real_model, format="gguf"))
    server = LlamaServer(tmp_path / "x.gguf")
    for text in (*QUESTIONS, "def f(x):\n    return x**2  # naïve ½ 猫\r\n\t<|im_end|>"):
        assert server.tokens(text, bos=True, special=False) == loaded.tokenizer.encode(text)
    for prompt, reply in chat:
        answer = server.ask("/completion", prompt=prompt, n_predict=REPLY_TOKENS, temperature=0, return_tokens=True)
        assert [token for token in answer["tokens"] if token not in loaded.tokenizer.stops] == reply
