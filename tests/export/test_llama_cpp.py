"""GGUF files in llama.cpp itself: the same tokens, and the same greedy replies.

llama_cpp is no dependency of the tests, since it is built from source for minutes. To run these tests:
`CMAKE_BUILD_PARALLEL_LEVEL=2 pip install --no-binary llama-cpp-python llama-cpp-python`.
"""

import dataclasses
import unicodedata
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.load import Loaded
from nanochat.data.conversation import chat
from nanochat.engine import Engine
from nanochat.export import llama
from nanochat.generate.sampling import Sampling
from nanochat.nn.qwen.model import Qwen
from nanochat.tokenizer import Tokenizer
from tests.export.test_llama_vocabulary import folder_with
from tests.support.qwens import CONFIGS, tiny_qwen
from tests.support.rustbpe_texts import hostile_texts
from tests.support.tiny_model import TEXT

llama_cpp = pytest.importorskip("llama_cpp", reason="llama_cpp is not installed: the docstring says how to build it")

WORDS = " ".join(["one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"] * 3)
MODELS = {
    "qwen2": CONFIGS["qwen2"],
    "qwen2.5-tied": CONFIGS["qwen2.5-tied"],
    "qwen3": CONFIGS["qwen3"],
    "qwen3.5": dataclasses.replace(CONFIGS["qwen3.5"], delta_key_dim=16),
}
TEXTS = ["", "the cat 猫", "I'll don't SHE'S", "  12345 67,890.5\r\n\r\n x", "ﬁ ½ Ⅷ\t\n",
         "naïve café ☕️ \U0001f469\u200d\U0001f467",
         "العربية हिन्दी", "a\u00a0b\u3000c", "def f(x):\n    return x**2  # ok\n", "<|user_start|>"]  # fmt: skip


def own_tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT + WORDS] * 4, 320, "qwen2")


def in_llama(path: Path) -> Any:
    """A model that keeps its keys and values in fp32, as ours does."""
    return llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False,
                           type_k=0, type_v=0)  # fmt: skip


def random_model(family: str) -> Qwen:
    model = Qwen(MODELS[family])
    if family == "qwen3.5":
        model.init_weights(1)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 2:
                    parameter.mul_(3.0)
                elif name.endswith("A_log"):
                    parameter.copy_(torch.rand(parameter.shape, generator=generator) * 4 - 4)
                elif not name.endswith("conv1d.weight"):
                    parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
        return model.eval()
    return tiny_qwen(family)


@pytest.mark.parametrize("family", MODELS)
def test_64_greedy_tokens_are_ours(family: str, tmp_path: Path) -> None:
    model, tokenizer = random_model(family), own_tokenizer()
    llama.export(Loaded(model, tokenizer, {}, "sft", "d2", 1), tmp_path / "x.gguf", "float32")
    theirs = in_llama(tmp_path / "x.gguf")
    prompt = [tokenizer.bos, *tokenizer.encode("the cat sat on the mat 猫坐在垫子上 12 34")]
    made: list[int] = []
    theirs.eval(prompt)
    for _ in range(64):
        made.append(int(theirs.scores[theirs.n_tokens - 1].argmax()))
        theirs.eval(made[-1:])
    with torch.no_grad():
        ours = model(torch.tensor([[*prompt, *made]]))[0]
    assert ours[len(prompt) - 1 : -1].argmax(-1).tolist() == made
    logits = torch.tensor(theirs.scores[: theirs.n_tokens])
    assert (logits - ours).abs().max() <= 1e-4 * ours.abs().max()
    (reply,) = Engine(model, tokenizer, 1).generate([prompt], Sampling(0.0, max_tokens=64))
    own = reply.forced.index(True) if True in reply.forced else len(reply.tokens)  # what follows is the calculator's
    assert made[:own] == reply.tokens[:own]


def same_tokens(theirs: Any, tokenizer: Any, text: str) -> None:
    ours = [*([tokenizer.bos] if tokenizer.marks_begin else []), *tokenizer.encode(text)]
    assert theirs.tokenize(text.encode(), add_bos=True, special=False) == ours, repr(text[:200])


def test_texts_and_chats_become_our_tokens(tmp_path: Path) -> None:
    tokenizer = own_tokenizer()
    llama.export(Loaded(tiny_qwen("qwen3"), tokenizer, {}, "sft", "d2", 1), tmp_path / "x.gguf", "float32")
    theirs = in_llama(tmp_path / "x.gguf")
    for text in [*TEXTS, *(text[:2000] for text in hostile_texts(1))]:
        same_tokens(theirs, tokenizer, text)
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    formatter = Jinja2ChatFormatter(
        theirs.metadata["tokenizer.chat_template"], theirs.detokenize([theirs.token_eos()], special=True).decode(),
        theirs.detokenize([theirs.token_bos()], special=True).decode())  # fmt: skip
    prompt = formatter(messages=[{"role": "user", "content": "the cat? 猫 12"}]).prompt
    made = theirs.tokenize(prompt.encode(), add_bos=False, special=True)
    assert made == tokenizer.render_prompt(chat("the cat? 猫 12"))
    vocab = theirs._model.vocab
    ends = [token for token in range(tokenizer.vocab_size) if llama_cpp.llama_vocab_is_eog(vocab, token)]
    assert sorted(ends) == sorted([tokenizer.bos, tokenizer.special("assistant_end")])


def test_a_published_tokenizer_gives_our_tokens(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tokenizer: Any = folder_with(tmp_path / "model")
    assert isinstance(tokenizer, FolderTokenizer)
    llama.export(Loaded(tiny_qwen("qwen3"), tokenizer, {}, "tune", "a", 1), tmp_path / "x.gguf", "bfloat16")  # type: ignore[arg-type]
    theirs = in_llama(tmp_path / "x.gguf")
    for text in [*TEXTS[:-1], *(text[:2000] for text in hostile_texts(1))]:
        same_tokens(theirs, tokenizer, unicodedata.normalize("NFC", text))  # llama.cpp never normalises
    prompt = "<|im_start|>user\nthe cat? 12<|im_end|>\n<|im_start|>assistant\n"
    assert theirs.tokenize(prompt.encode(), add_bos=True, special=True) == tokenizer.render_prompt(chat("the cat? 12"))
