"""Writes a model and its tokenizer to a folder that Hugging Face transformers can load."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanochat import device
from nanochat.checkpoint_manager.files import new_folder
from nanochat.checkpoint_manager.huggingface.config import published
from nanochat.checkpoint_manager.huggingface.expert_files import one_by_one
from nanochat.checkpoint_manager.huggingface.folders import read_object
from nanochat.checkpoint_manager.huggingface.generation import FILE_NAME as GENERATION
from nanochat.checkpoint_manager.huggingface.generation import listed_ends
from nanochat.checkpoint_manager.huggingface.template import CHATML
from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.load import Loaded
from nanochat.checkpoint_manager.tensors import write_tensors
from nanochat.common import UserError, tr, write_atomic, write_json
from nanochat.data import bpe
from nanochat.models.qwen.config import QwenConfig
from nanochat.tokenizer import ROLES, Tokenizer

MODELLING = Path(__file__).with_name("modeling_nanochat.py")
# Renders a conversation to the same tokens as tokenizer.render(): the system text is put in front
# of the first user text.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% set first = namespace(text='') %}{% for message in messages %}{% if "
    "message.role == 'system' %}{% set first.text = message.content + '\\n\\n' %}{% elif "
    "message.role == 'user' %}<|user_start|>{{ first.text + message.content }}<|user_end|>{% set "
    "first.text = '' %}{% elif message.role == 'assistant' %}<|assistant_start|>{{ message.content "
    "}}<|assistant_end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant_start|>{% "
    "endif %}"
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
    """Return our tokenizer as the content of a tokenizer.json for the `tokenizers` library.

    With it, the library puts the BOS token in front of every text, unless told not to.
    """
    special_ids = [tokenizer.special(role) for role in ROLES]
    specials = {tokenizer.decode([special_id]): special_id for special_id in special_ids}
    ranks = [tokenizer.decode_bytes([rank]) for rank in range(min(special_ids))]
    content = json.loads(bpe.huggingface_json(ranks, tokenizer.regex, specials))
    bos = tokenizer.decode([tokenizer.bos])
    content["post_processor"] = begin_mark(bos, tokenizer.bos)
    return content


def begin_mark(spelling: str, token: int) -> dict[str, Any]:
    """Return the post_processor of a tokenizer.json that puts a token in front of every text."""
    mark = {"SpecialToken": {"id": spelling, "type_id": 0}}
    first_text = {"Sequence": {"id": "A", "type_id": 0}}
    second_text = {"Sequence": {"id": "B", "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [mark, first_text],
        "pair": [mark, first_text, mark, second_text],
        "special_tokens": {spelling: {"id": spelling, "ids": [token], "tokens": [spelling]}},
    }


def is_known_family(loaded: Loaded) -> bool:
    """Return whether transformers has its own code for the model's family."""
    return isinstance(loaded.model.config, QwenConfig)


def _configs(loaded: Loaded, dtype: str) -> dict[str, dict[str, Any]]:
    """Return the contents of the JSON files that go with the weights, by file name.

    With a published tokenizer this is only config.json, because the other files are copied.
    """
    tokenizer: Tokenizer | FolderTokenizer = loaded.tokenizer
    shape = loaded.model.config
    end_of_reply = tokenizer.special("assistant_end")
    if isinstance(tokenizer, FolderTokenizer):
        ends = _ends(tokenizer.folder, end_of_reply)
        config = published(shape) | {"eos_token_id": ends, "torch_dtype": dtype}
        bos = tokenizer.named("bos_token")
        if bos is not None:
            config["bos_token_id"] = bos
        return {"config.json": config}
    generation_config: dict[str, Any] = {
        "bos_token_id": tokenizer.bos,
        "eos_token_id": [end_of_reply, tokenizer.bos],  # a document ends where the next one begins
        "pad_token_id": end_of_reply,
    }
    config = published(shape) if is_known_family(loaded) else _own_config(shape)
    config |= {"bos_token_id": tokenizer.bos, "eos_token_id": end_of_reply, "torch_dtype": dtype}
    if not is_known_family(loaded):
        config["use_cache"] = False
        generation_config["use_cache"] = False
    return {
        "config.json": config,
        "generation_config.json": generation_config,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokenizer.decode([tokenizer.bos]),
            "eos_token": tokenizer.decode([end_of_reply]),
            "pad_token": tokenizer.decode([end_of_reply]),
            "model_max_length": shape.sequence_len,
            "padding_side": "left",
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
            # Transformers 4 would add token_type_ids, which generate() then refuses.
            "model_input_names": ["input_ids", "attention_mask"],
        },
        "tokenizer.json": tokenizer_json(tokenizer),
    }


def _ends(folder: Path, end_of_reply: int) -> int | list[int]:
    """Return the ends of a reply for config.json: several only where no other file lists them.

    generation_config.json is copied, and comes before config.json where it lists any.
    """
    listed = listed_ends(folder)
    is_elsewhere = read_object(folder / GENERATION).get("eos_token_id") is not None
    if is_elsewhere or end_of_reply not in listed or len(listed) == 1:
        return end_of_reply
    return listed


def _own_config(shape: Any) -> dict[str, Any]:
    """Return the content of a GPT's config.json, naming the classes in modeling_nanochat.py."""
    return {
        "architectures": ["NanochatForCausalLM"],
        "model_type": "nanochat_ascend",
        "auto_map": {
            "AutoConfig": "modeling_nanochat.NanochatConfig",
            "AutoModelForCausalLM": "modeling_nanochat.NanochatForCausalLM",
        },
        "tie_word_embeddings": False,
        **asdict(shape),
    }


def converted(name: str, parameter: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a parameter converted to `dtype`.

    Raises UserError if any of its values is not finite in `dtype`.
    """
    value = parameter.detach().to(dtype)
    if not value.isfinite().all():
        raise UserError(
            tr(
                "{name} has values that {dtype} cannot hold. Export with --dtype bfloat16 "
                "or --dtype float32",
                name=name,
                dtype=dtype,
            )
        )
    return value


def export(loaded: Loaded, folder: Path, dtype: str) -> None:
    """Write a loaded model to a new folder, which appears only once it is complete.

    Raises UserError if the folder already exists (exit code 2), or if a value is not finite in
    `dtype`.
    """
    with new_folder(folder) as temporary:
        if isinstance(loaded.tokenizer, FolderTokenizer):
            loaded.tokenizer.save(temporary)
            if loaded.tokenizer.chat_format.source is None:
                write_atomic(temporary / "chat_template.jinja", CHATML)
        for name, content in _configs(loaded, dtype).items():
            write_json(temporary / name, content)
        write_atomic(temporary / "README.md", _readme(loaded, folder.name))
        if not is_known_family(loaded):
            write_atomic(temporary / MODELLING.name, MODELLING.read_bytes())
        tensors = {}
        for name, parameter in loaded.model.named_parameters():
            value = converted(name, parameter, device.DTYPES[dtype])
            for tensor_name, tensor in one_by_one(name, value):
                tensors[tensor_name] = tensor.contiguous()
        write_tensors(tensors, temporary / "model.safetensors", {"format": "pt"})


def _readme(loaded: Loaded, name: str) -> str:
    needs_code = not is_known_family(loaded)
    return README.format(
        name=name,
        stage=loaded.stage,
        tag=loaded.tag,
        step=loaded.step,
        trust=", trust_remote_code=True" if needs_code else "",
        code=OWN_CODE if needs_code else "",
        more=CALCULATOR if isinstance(loaded.tokenizer, Tokenizer) else "",
    )
