"""The server with a published model: its own template and vocabulary, and no mark that it does not know."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.huggingface.weights import load_qwen
from nanochat.data.conversation import Conversation, user
from nanochat.generate.sampling import Sampling
from nanochat.serve.models import Models
from nanochat.serve.routes.chat import read_chat
from scripts.chat_web import Config, models_of
from tests.support.qwens import VOCABULARY, write_folder
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
