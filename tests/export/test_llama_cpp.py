"""GGUF files in a server of llama.cpp: the same tokens, and the same greedy replies.

xllamacpp brings llama-server as a wheel, in the process of the tests.
"""

import dataclasses
import unicodedata
from pathlib import Path
from typing import Any, cast

import gguf
import httpx
import pytest
import torch
import torch.nn.functional as F
import xllamacpp

from nanochat.checkpoint_manager.huggingface.tokenizer import FolderTokenizer
from nanochat.checkpoint_manager.load import Loaded
from nanochat.data.conversation import chat
from nanochat.engine import Engine
from nanochat.export import llama
from nanochat.export.q8_0 import quantized
from nanochat.generate.sampling import Sampling
from nanochat.linear import Linear
from nanochat.models.llama import Llama
from nanochat.models.qwen.layers import Vocabulary
from nanochat.models.qwen.model import Qwen
from nanochat.tokenizer import Tokenizer
from tests.export.test_llama_vocabulary import folder_with
from tests.support.qwens import CONFIGS, OPTIONS, tiny_qwen
from tests.support.rustbpe_texts import hostile_texts
from tests.support.sentence_pieces import ROWS, write_tokenizer
from tests.support.tiny_model import TEXT

WORDS = " ".join(["one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"] * 3)
MODELS = {
    "qwen2": CONFIGS["qwen2"],
    "qwen2.5-tied": CONFIGS["qwen2.5-tied"],
    "qwen3": CONFIGS["qwen3"],
    "llama3": CONFIGS["llama3"],
    "qwen3.5": dataclasses.replace(CONFIGS["qwen3.5"], delta_key_dim=16),
    "llama linear": OPTIONS["llama linear"],
    "llama dynamic": OPTIONS["llama dynamic"],
    "llama yarn": OPTIONS["llama yarn"],
    "qwen3 yarn": OPTIONS["qwen3 yarn"],
}
TEXTS = ["", "the cat 猫", "I'll don't SHE'S", "  12345 67,890.5\r\n\r\n x", "ﬁ ½ Ⅷ\t\n",
         "naïve café ☕️ \U0001f469\u200d\U0001f467",
         "العربية हिन्दी", "a\u00a0b\u3000c", "def f(x):\n    return x**2  # ok\n", "<|user_start|>"]  # fmt: skip


def own_tokenizer() -> Tokenizer:
    return Tokenizer.train([TEXT + WORDS] * 4, 320, "qwen2")


class LlamaServer:
    """llama-server on one thread with a model whose keys and values stay in fp32, as ours do."""

    def __init__(self, path: Path) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 256, 1, 1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.fit_params = params.warmup = False
        self.server = xllamacpp.Server(params)
        self.client = httpx.Client(base_url=self.server.listening_address, timeout=60)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        return self.client.post(path, json=body).raise_for_status().json()

    def tokens(self, text: str, bos: bool, special: bool) -> list[int]:
        return self.ask("/tokenize", content=text, add_special=bos, parse_special=special)["tokens"]

    def log_probabilities(self, tokens: list[int], vocab_size: int) -> torch.Tensor:
        """What may follow `tokens`: fp32 of vocab_size."""
        always_a = [[ord("a"), 1000]]  # the server forgets probabilities of a token that is no whole character
        reply = self.ask("/completion", prompt=tokens, n_predict=1, n_probs=vocab_size, logit_bias=always_a)
        found = torch.full((vocab_size,), float("nan"))
        for token in reply["completion_probabilities"][0]["top_logprobs"]:
            found[token["id"]] = token["logprob"]
        return found

    def ends_a_reply(self, token: int) -> bool:
        reply = self.ask("/completion", prompt=[ord("a")], n_predict=2, temperature=0, logit_bias=[[token, 1000]])
        return reply["stop_type"] == "eos"


def random_model(family: str) -> Qwen:
    if family == "qwen3.5":
        model = Qwen(MODELS[family])
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
    # With the first seed, a greedy reply of this model has a mark in it that the engine never draws.
    return tiny_qwen(family, seed=2 if family == "llama linear" else 1)


@pytest.mark.parametrize("family", MODELS)
def test_64_greedy_tokens_are_ours(family: str, tmp_path: Path) -> None:
    model, tokenizer = random_model(family), own_tokenizer()
    llama.export(Loaded(model, tokenizer, {}, "sft", "d2", 1), tmp_path / "x.gguf", "float32")
    theirs = LlamaServer(tmp_path / "x.gguf")
    prompt = [tokenizer.bos, *tokenizer.encode("the cat sat on the mat 猫坐在垫子上 12 34")]
    made: list[int] = []
    rows = []
    for _ in range(64):
        rows.append(theirs.log_probabilities([*prompt, *made], tokenizer.vocab_size))
        made.append(int(rows[-1].argmax()))
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *made]]))[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == made
    assert (torch.stack(rows) - logits.log_softmax(-1)).abs().max() <= 1e-4 * logits.abs().max()
    (reply,) = Engine(model, tokenizer, 1).generate([prompt], Sampling(0.0, max_tokens=64))
    own = reply.forced.index(True) if True in reply.forced else len(reply.tokens)  # what follows is the calculator's
    assert made[:own] == reply.tokens[:own]


class Rounded:
    """Rounds activations to Q8_0, as llama.cpp does before it multiplies them with such a matrix."""

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(as_q8_0(x.flatten(0, -2)).view_as(x), weight)


def as_q8_0(x: torch.Tensor) -> torch.Tensor:
    blocks = quantized(x).numpy()
    return torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))


def test_a_file_in_q8_0_is_computed_from_the_rounded_weights(tmp_path: Path) -> None:
    config = dataclasses.replace(CONFIGS["llama3"], n_embd=64, head_dim=16, n_hidden=96)
    model = Llama(config)
    model.init_weights(1)
    tokenizer = own_tokenizer()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(6.0)
    llama.export(Loaded(model, tokenizer, {}, "sft", "d2", 1), tmp_path / "x.gguf", "q8_0")
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, Linear | Vocabulary):
                module.weight.copy_(as_q8_0(module.weight))
                module.multiply = Rounded()
    prompt = [tokenizer.bos, *tokenizer.encode("the cat sat on the mat")]
    theirs = LlamaServer(tmp_path / "x.gguf").log_probabilities(prompt, tokenizer.vocab_size)
    with torch.no_grad():
        logits = model(torch.tensor([prompt]))[0, -1]
    ours = logits.log_softmax(-1)
    assert (theirs - ours).abs().max() <= 1e-4 * logits.abs().max()


def same_tokens(theirs: LlamaServer, tokenizer: Any, text: str) -> None:
    ours = [*([tokenizer.bos] if tokenizer.marks_begin else []), *tokenizer.encode(text)]
    assert theirs.tokens(text, bos=True, special=False) == ours, repr(text[:200])


def test_texts_and_chats_become_our_tokens(tmp_path: Path) -> None:
    tokenizer = own_tokenizer()
    llama.export(Loaded(tiny_qwen("qwen3"), tokenizer, {}, "sft", "d2", 1), tmp_path / "x.gguf", "float32")
    theirs = LlamaServer(tmp_path / "x.gguf")
    for text in [*TEXTS, *(text[:2000] for text in hostile_texts(1))]:
        same_tokens(theirs, tokenizer, text)
    prompt = theirs.ask("/apply-template", messages=[{"role": "user", "content": "the cat? 猫 12"}])["prompt"]
    assert theirs.tokens(prompt, bos=True, special=True) == tokenizer.render_prompt(chat("the cat? 猫 12"))
    ends = [token for token in range(tokenizer.vocab_size) if theirs.ends_a_reply(token)]
    assert sorted(ends) == sorted([tokenizer.bos, tokenizer.special("assistant_end")])


def test_a_published_tokenizer_gives_our_tokens(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tokenizer: Any = folder_with(tmp_path / "model")
    assert isinstance(tokenizer, FolderTokenizer)
    llama.export(Loaded(tiny_qwen("qwen3"), tokenizer, {}, "tune", "a", 1), tmp_path / "x.gguf", "bfloat16")  # type: ignore[arg-type]
    theirs = LlamaServer(tmp_path / "x.gguf")
    for text in [*TEXTS[:-1], *(text[:2000] for text in hostile_texts(1))]:
        same_tokens(theirs, tokenizer, unicodedata.normalize("NFC", text))  # llama.cpp never normalises
    prompt = "<|im_start|>user\nthe cat? 12<|im_end|>\n<|im_start|>assistant\n"
    assert theirs.tokens(prompt, bos=True, special=True) == tokenizer.render_prompt(chat("the cat? 12"))


@pytest.mark.parametrize(("layout", "template"), [("llama2", "llama2"), ("mistral3", "mistral3")])
def test_a_vocabulary_of_sentencepiece_gives_our_tokens(layout: str, template: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tokenizer = FolderTokenizer(write_tokenizer(tmp_path / "model", layout, template), ROWS)
    model = tiny_qwen("llama2", rows=ROWS)
    llama.export(Loaded(model, cast(Any, tokenizer), {}, "tune", "a", 1), tmp_path / "x.gguf", "float32")
    theirs = LlamaServer(tmp_path / "x.gguf")
    for text in [*TEXTS, "  two   three    spaces ", "def f(x):\n    return x", *hostile_texts(1)]:
        if layout == "llama2":  # the other layout puts a space in front of some texts only
            tokens = [tokenizer.bos, *tokenizer.encode(text[:2000])]
            assert theirs.tokens(text[:2000], bos=True, special=False) == tokens, repr(text[:200])
        prompt = tokenizer.render_prompt(chat(text[:2000]))
        messages = [{"role": "user", "content": text[:2000]}]
        rendered = theirs.ask("/apply-template", messages=messages)["prompt"]
        assert theirs.tokens(rendered, bos=True, special=True) == prompt, repr(text[:200])
    log_probabilities = theirs.log_probabilities(prompt[:100], ROWS)
    with torch.no_grad():
        logits = model(torch.tensor([prompt[:100]]))[0, -1]
    assert (log_probabilities - logits.log_softmax(-1)).abs().max() <= 1e-4 * logits.abs().max()
