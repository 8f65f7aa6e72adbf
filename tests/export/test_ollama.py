"""Modelfiles: the chat template for Ollama, or none where it would write something else."""

import re
from pathlib import Path

import pytest

from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.export.ollama import FORMATS, Messages, chat_lines, modelfile
from nanochat.tokenizer import Tokenizer
from tests.export.test_llama_vocabulary import folder_with
from tests.support.tiny_model import TEXT

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
)
LLAMA3 = (
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' }}"
    "{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
WITHOUT_THOUGHTS = CHATML.replace("m.content +", "m.content.split('</think>')[-1] +")


def with_template(folder: Path, template: str) -> FolderTokenizer:
    tokenizer = folder_with(folder)
    (folder / "chat_template.jinja").write_text(template)
    return tokenizer


def expanded(template: str, messages: Messages) -> str:
    """What Go writes for a template of one range over the messages."""
    parts = re.fullmatch(r"\{\{- range \.Messages \}\}(.*)\{\{ end \}\}(.*)", template, re.DOTALL)
    assert parts
    turns = [parts[1].replace("{{ .Role }}", m["role"]).replace("{{ .Content }}", m["content"]) for m in messages]
    return "".join(turns) + parts[2]


def test_chatml_with_the_publishers_system_message(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, CHATML)
    chats = chat_lines(tokenizer)
    assert chats and tokenizer.chat_format.template and chats.system == "Be kind."
    for messages in ([{"role": "user", "content": "a"}], [{"role": "system", "content": "b"}]):
        default = [] if messages[0]["role"] == "system" else [{"role": "system", "content": chats.system}]
        assert expanded(chats.template, [*default, *messages]) == tokenizer.chat_format.template.render(
            messages, reply=True
        )
    (tmp_path / "generation_config.json").write_text(
        '{"eos_token_id": 302, "temperature": 0.7, "repetition_penalty": 1.05}'
    )
    text = modelfile(tmp_path / "x.gguf", tokenizer, chats)
    assert text.startswith('FROM ./x.gguf\nTEMPLATE """{{- range') and 'SYSTEM """Be kind."""\n' in text
    assert text.endswith('PARAMETER stop "<|im_end|>"\nPARAMETER temperature 0.7\nPARAMETER repeat_penalty 1.05\n')


def test_llama3_without_a_system_message(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, LLAMA3)
    chats = chat_lines(tokenizer)
    assert chats and tokenizer.chat_format.template and not chats.system
    messages = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    assert expanded(chats.template, messages) == tokenizer.chat_format.template.render(messages, reply=True)
    assert chats.template == FORMATS[1].template()


@pytest.mark.parametrize("template", [WITHOUT_THOUGHTS, "[INST] {{ messages[0].content }} [/INST]", "{{ raise() }}"])
def test_other_templates_are_left_out(template: str, tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, template)
    assert chat_lines(tokenizer) is None
    assert "TEMPLATE" not in modelfile(tmp_path / "x.gguf", tokenizer, None)


def test_our_own_chats_end_at_our_marks(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train([TEXT] * 4, 290, "qwen2")
    assert chat_lines(tokenizer) is None
    assert 'PARAMETER stop "<|assistant_end|>"' in modelfile(tmp_path / "x.gguf", tokenizer, None)
