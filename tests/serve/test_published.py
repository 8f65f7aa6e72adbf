"""The server with a published model: its own template and vocabulary, and no mark that it does not know."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.huggingface.weights import load_qwen
from nanochat.data.conversation import Conversation, user
from nanochat.generate.sampling import Sampling
from nanochat.serve.models import Models
from nanochat.serve.routes.chat import read_chat
from scripts.chat_web import Config, models_of
from tests.support.qwens import VOCABULARY, write_folder
from tests.support.sentence_pieces import ROWS, write_model
from tests.support.served import Served, serving
from tests.support.tiny_model import on_cpu


@pytest.fixture(scope="module", params=["qwen3", "qwen3.5"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder: Path = write_folder(tmp_path_factory.mktemp("model"), request.param)
    with serving(loaded=(load_qwen(folder, on_cpu()), FolderTokenizer(folder, VOCABULARY))) as one:
        yield one


def test_a_chat_is_what_the_template_makes_of_it(served: Served) -> None:
    messages = [{"role": "user", "content": "the cat"}]
    rendered = served.tokenizer.render_prompt(Conversation((user("the cat"),)))
    assert served.ok("/tokenize", messages=messages)["tokens"] == rendered
    found: dict[str, Any] = served.ok("/v1/chat/completions", messages=messages, temperature=0, max_tokens=8)
    (alone,) = served.alone.generate([rendered], Sampling(0.0, max_tokens=8))
    assert found["usage"]["prompt_tokens"] == len(rendered)
    assert found["usage"]["completion_tokens"] == len(alone.tokens)


def test_the_entry_of_the_model_says_what_its_template_takes(served: Served) -> None:
    (model,) = served.client.get("/v1/models").json()["data"]
    assert model["capabilities"] == {"system_message": True, "tools": False}  # ChatML, as it has no template


def test_texts_are_continued_without_a_mark_in_front(served: Served) -> None:
    plain = served.tokenizer.encode("the cat")
    assert served.ok("/tokenize", prompt="the cat")["tokens"] == plain
    found = served.ok("/v1/completions", prompt="the cat", max_tokens=4, temperature=0)
    assert found["usage"]["prompt_tokens"] == len(plain)
    assert served.ok("/v1/completions", prompt=plain, max_tokens=4, temperature=0)["choices"] == found["choices"]


def test_a_chat_that_the_template_refuses_is_the_mistake_of_the_client(tmp_path: Path) -> None:
    (write_folder(tmp_path, "qwen3") / "chat_template.jinja").write_text("{{ raise_exception('no questions') }}")
    with serving(loaded=(load_qwen(tmp_path, on_cpu()), FolderTokenizer(tmp_path, VOCABULARY))) as served:
        body = {"messages": [{"role": "user", "content": "the cat"}]}
        for path in ("/v1/chat/completions", "/tokenize"):
            assert served.refused(path, **body)["param"] == "messages"
        assert served.refused("/v1/responses", input="the cat")["param"] == "input"


SENTENCE_PIECES = [("llama2", "llama2"), ("mistral3", "mistral3")]


def lines_of(served: Served, **body: Any) -> str:
    """The text of a streamed chat."""
    with served.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize(("layout", "template"), SENTENCE_PIECES)
def test_a_model_with_sentencepiece_replies_as_in_transformers(layout: str, template: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = write_model(tmp_path, layout, template)
    theirs = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    their_tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    # A random model writes bytes that are no characters, for each of which transformers decodes a mark of its own.
    byte_tokens = [token for name, token in their_tokenizer.get_vocab().items() if name.startswith("<0x")]
    settings = {"temperature": 0, "max_tokens": 16, "logit_bias": dict.fromkeys(map(str, byte_tokens), -100)}

    def greedy(prompt: list[int], count: int) -> str:
        tokens = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, suppress_tokens=byte_tokens
        )[0]
        return their_tokenizer.decode(tokens[len(prompt) :], skip_special_tokens=True)

    with serving(loaded=(load_qwen(folder, on_cpu()), FolderTokenizer(folder, ROWS))) as served:
        for text in ("hello  world", "猫 what is it?", "x\n"):
            messages = [{"role": "user", "content": text}]
            body = {"messages": messages, **settings}
            prompt = their_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
            expected = greedy(prompt["input_ids"], 16)
            assert served.ok("/v1/chat/completions", **body)["choices"][0]["message"]["content"] == expected
            assert lines_of(served, **body) == expected
            prompt = their_tokenizer(text)["input_ids"]
            continued = served.ok("/v1/completions", prompt=text, **settings)
            assert continued["choices"][0]["text"].lstrip(" ") == greedy(prompt, 16).lstrip(" ")


PUBLISHED = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}


@pytest.mark.parametrize(
    ("config", "flags", "defaults"),
    [
        ({}, {}, {"temperature": 0.6, "top_k": 50, "top_p": 1, "min_p": 0, "repetition_penalty": 1}),
        (PUBLISHED, {}, {**PUBLISHED, "min_p": 0}),
        ({"top_k": 0, "min_p": 0.1, "do_sample": True}, {}, {"temperature": 0.6, "top_k": 0, "min_p": 0.1}),
        (PUBLISHED, {"temperature": 0.2, "top_k": 5}, {**PUBLISHED, "temperature": 0.2, "top_k": 5}),
    ],
)
def test_the_publishers_settings_are_the_defaults_of_requests(
    config: dict[str, Any], flags: dict[str, Any], defaults: dict[str, Any], tmp_path: Path
) -> None:
    path = write_folder(tmp_path, "qwen3") / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}) if path.exists() else json.dumps(config))
    cfg = Config(model=tmp_path, slots=1, served_model_name="mine", **flags)
    (model,) = models_of(cfg, on_cpu())
    (hosted,) = Models([model], 1).all
    assert hosted.name == "mine"
    assert defaults.items() <= hosted.described()["defaults"].items()
    sampling = read_chat(
        {"messages": [{"role": "user", "content": "x"}]}, hosted.limits, hosted.defaults
    ).settings.sampling
    for name, value in defaults.items():
        assert (getattr(sampling, name) or 0) == value
