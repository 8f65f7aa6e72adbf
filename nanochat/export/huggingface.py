"""Writes a checkpoint as a folder that Hugging Face transformers loads without a network, tokenizer included."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat import device
from nanochat.checkpoint_manager.files import new_folder
from nanochat.checkpoint_manager.huggingface.config import published
from nanochat.checkpoint_manager.huggingface.template import CHATML
from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.load import Loaded
from nanochat.checkpoint_manager.tensors import write_tensors
from nanochat.common import UserError, write_atomic, write_json
from nanochat.data import bpe
from nanochat.models.qwen.config import QwenConfig
from nanochat.tokenizer import ROLES, Tokenizer

MODELLING = Path(__file__).with_name("modeling_nanochat.py")
# Renders a conversation to the same tokens as tokenizer.render(): system text goes in front of the first user text.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% set first = namespace(text='') %}{% for message in messages %}"
    "{% if message.role == 'system' %}{% set first.text = message.content + '\\n\\n' %}"
    "{% elif message.role == 'user' %}<|user_start|>{{ first.text + message.content }}<|user_end|>"
    "{% set first.text = '' %}"
    "{% elif message.role == 'assistant' %}<|assistant_start|>{{ message.content }}<|assistant_end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant_start|>{% endif %}"
)
README = """# {name}

Trained with nanochat (stage {stage}, tag {tag}, step {step}). It loads without a network:

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{name}"{trust})
model = AutoModelForCausalLM.from_pretrained("{name}"{trust})
chat = [{{"role": "user", "content": "Why is the sky blue?"}}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))
```

{code}As is usual with transformers, text that spells a special token such as `<|user_end|>` becomes
that token: remove such text from what users write.{more}
"""
CALCULATOR = " The calculator of nanochat's own chat is not part of this export."
OWN_CODE = "`trust_remote_code` runs only `modeling_nanochat.py`. "


def tokenizer_json(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer in the format of the `tokenizers` library; it puts the BOS token in front of every text."""
    specials = {
        tokenizer.decode([tokenizer.special(role)]): tokenizer.special(role) for role in ROLES
    }
    ranks = [tokenizer.decode_bytes([number]) for number in range(min(specials.values()))]
    bos = tokenizer.decode([tokenizer.bos])
    begin = {"SpecialToken": {"id": bos, "type_id": 0}}
    text, more = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}
    marks = {
        "type": "TemplateProcessing",
        "single": [begin, text],
        "pair": [begin, text, begin, more],
        "special_tokens": {bos: {"id": bos, "ids": [tokenizer.bos], "tokens": [bos]}},
    }
    return {
        **json.loads(bpe.huggingface_json(ranks, tokenizer.regex, specials)),
        "post_processor": marks,
    }


def known(loaded: Loaded) -> bool:
    """Whether transformers knows the model's family, so that it needs no code of ours."""
    return isinstance(loaded.model.config, QwenConfig)


def _configs(loaded: Loaded, dtype: str) -> dict[str, dict[str, Any]]:
    """The content of the JSON files beside the weights, by file name; a published model brings most of them along."""
    tokenizer: Tokenizer | FolderTokenizer = loaded.tokenizer
    shape = loaded.model.config
    if isinstance(tokenizer, FolderTokenizer):
        marks = {"eos_token_id": tokenizer.special("assistant_end"), "torch_dtype": dtype}
        begin = tokenizer.named("bos_token")
        return {
            "config.json": {
                **published(shape),
                **marks,
                **({} if begin is None else {"bos_token_id": begin}),
            }
        }
    bos, end = (tokenizer.decode([tokenizer.special(role)]) for role in ("bos", "assistant_end"))
    ends = [
        tokenizer.special("assistant_end"),
        tokenizer.bos,
    ]  # the ends of a reply and of a document
    marks = {"bos_token_id": tokenizer.bos, "eos_token_id": ends[0], "torch_dtype": dtype}
    cached = {} if known(loaded) else {"use_cache": False}
    config = {
        "architectures": ["NanochatForCausalLM"],
        "model_type": "nanochat_ascend",
        "auto_map": {
            "AutoConfig": "modeling_nanochat.NanochatConfig",
            "AutoModelForCausalLM": "modeling_nanochat.NanochatForCausalLM",
        },
        "tie_word_embeddings": False,
        **asdict(shape),
    }
    return {
        "config.json": {**(published(shape) if known(loaded) else config), **marks, **cached},
        "generation_config.json": {
            "bos_token_id": tokenizer.bos,
            "eos_token_id": ends,
            "pad_token_id": ends[0],
            **cached,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": end,
            "pad_token": end,
            "model_max_length": shape.sequence_len,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
            # Transformers 4 would add token_type_ids, which generate() then refuses.
            "model_input_names": ["input_ids", "attention_mask"],
        },
        "tokenizer.json": tokenizer_json(tokenizer),
    }


def converted(name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """A parameter in a number format. UserError if it has values that the format cannot hold."""
    value = parameter.detach().to(dtype)
    if not value.isfinite().all():
        raise UserError(
            f"{name} has values that {dtype} cannot hold. Export with --dtype bfloat16 or --dtype float32"
        )
    return value


def export(loaded: Loaded, folder: Path, dtype: str) -> None:
    """Write the folder, whole or not at all. UserError (code 2) if it exists already."""
    with new_folder(folder) as temporary:
        if isinstance(loaded.tokenizer, FolderTokenizer):
            loaded.tokenizer.save(temporary)
            if loaded.tokenizer.template_source is None:
                write_atomic(temporary / "chat_template.jinja", CHATML)
        for name, content in _configs(loaded, dtype).items():
            write_json(temporary / name, content)
        trust, code = ("", "") if known(loaded) else (", trust_remote_code=True", OWN_CODE)
        more = CALCULATOR if isinstance(loaded.tokenizer, Tokenizer) else ""
        about = README.format(
            name=folder.name,
            stage=loaded.stage,
            tag=loaded.tag,
            step=loaded.step,
            trust=trust,
            code=code,
            more=more,
        )
        write_atomic(temporary / "README.md", about)
        if not known(loaded):
            write_atomic(temporary / MODELLING.name, MODELLING.read_bytes())
        wanted = device.DTYPES[dtype]
        tensors = {
            name: converted(name, value, wanted) for name, value in loaded.model.named_parameters()
        }
        write_tensors(tensors, temporary / "model.safetensors", {"format": "pt"})
