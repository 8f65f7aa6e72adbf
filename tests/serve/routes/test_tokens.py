"""/tokenize, /detokenize and /tokenizer_info: the shapes of vLLM, with the tokens of our tokenizer."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.data.conversation import Conversation, user
from nanochat.export.huggingface import begin_mark
from nanochat.serve.routes.fields import Limits
from nanochat.serve.routes.tokens import tokenize, tokenizer_info
from tests.support.qwens import write_folder
from tests.support.served import Served, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving() as one:
        yield one


def test_text_and_tokens_go_back_and_forth(served):
    tokenizer, text = served.tokenizer, "the cat 猫 sat"
    plain = served.ok("/tokenize", prompt=text, add_special_tokens=False)
    assert plain["tokens"] == tokenizer.encode(text)
    assert (plain["count"], plain["max_model_len"], plain["token_strs"]) == (len(plain["tokens"]), 160, None)
    assert served.ok("/detokenize", tokens=plain["tokens"]) == {"prompt": text}
    start = served.ok("/tokenize", prompt=text, return_token_strs=True)
    assert start["tokens"] == [tokenizer.bos, *plain["tokens"]]
    assert len(start["token_strs"]) == start["count"]


def test_special_tokens_that_a_prompt_spells_out_are_those_tokens_as_for_vllm(served):
    info = served.client.get("/tokenizer_info").json()
    end, tokenizer = served.tokenizer.special("assistant_end"), served.tokenizer
    text = f"the cat{info['eos_token']} sat"
    marked = [*tokenizer.encode("the cat"), end, *tokenizer.encode(" sat")]
    assert served.ok("/tokenize", prompt=text, add_special_tokens=False)["tokens"] == marked
    asked = {"temperature": 0, "max_tokens": 3, "echo": True, "logprobs": 0, "add_special_tokens": False}
    by_text, by_ids = (served.ok("/v1/completions", prompt=prompt, **asked) for prompt in (text, marked))
    assert by_text["choices"] == by_ids["choices"]
    messages = [{"role": "user", "content": text}]
    assert end not in served.ok("/tokenize", messages=messages)["tokens"]
    assert (info["vocab_size"], info["model_max_length"]) == (served.tokenizer.vocab_size, 160)
    assert info["added_tokens_decoder"][str(served.tokenizer.bos)]["content"] == info["bos_token"]


def test_a_chat_with_a_reply_to_continue(served):
    hello, begun = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "the cat"}
    fields = {"messages": [hello, begun], "continue_final_message": True}
    found = served.ok("/tokenize", **fields, add_generation_prompt=False)["tokens"]
    rendered = served.tokenizer.render_prompt(Conversation((user("hi"),)))
    assert found == [*rendered, *served.tokenizer.encode("the cat")]
    assert served.ok("/v1/chat/completions", **fields, max_tokens=1)["usage"]["prompt_tokens"] == len(found)
    assert served.refused("/tokenize", **fields, add_generation_prompt=True)["param"] == "add_generation_prompt"
    assert served.refused("/tokenize", **{**fields, "messages": [hello]})["param"] == "messages[0].role"


@pytest.mark.parametrize("free_rows", [0, 2, 17])
def test_only_special_tokens_with_a_spelling_are_listed(free_rows: int, tmp_path: Path) -> None:
    """A published model has no marks of a calculator: their tokens are free rows of its embedding, or there is none."""
    rows = 303 + free_rows
    tokenizer: Any = FolderTokenizer(write_folder(tmp_path, "qwen3"), rows)
    limits = Limits("qwen3", 256, rows)
    info = tokenizer_info(tokenizer, limits)
    assert (info["bos_token"], info["eos_token"]) == ("<|endoftext|>", "<|im_end|>")
    listed = {number: token["content"] for number, token in info["added_tokens_decoder"].items()}
    assert listed == {"300": "<|endoftext|>", "301": "<|im_start|>", "302": "<|im_end|>"}
    assert tokenize({"prompt": "<|im_end|>"}, tokenizer, limits)["tokens"] == [302]
    assert tokenize({"prompt": ""}, tokenizer, limits)["tokens"] == []


def test_a_text_begins_as_the_publisher_s_tokenizer_begins_it(tmp_path: Path) -> None:
    """Llama 3 has a mark before every text, and Qwen has none."""
    path = write_folder(tmp_path, "qwen3") / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"post_processor": begin_mark("<|endoftext|>", 300)}))
    tokenizer: Any = FolderTokenizer(tmp_path, 320)
    limits = Limits("llama3", 256, 320)
    assert tokenize({"prompt": "cat"}, tokenizer, limits)["tokens"] == [300, *tokenizer.encode("cat")]
    without = {"prompt": "cat", "add_special_tokens": False}
    assert tokenize(without, tokenizer, limits)["tokens"] == tokenizer.encode("cat")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "typo": 1}, "typo"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ],
)
def test_bad_bodies_are_refused_by_name(served, path, fields, param):
    assert served.refused(path, **fields)["param"] == param
