"""The engine's calculator calls, with a script in place of the model."""

import pytest
import torch

from nanochat.attention import PlainAttention
from nanochat.cache import Cache
from nanochat.context import Cached
from nanochat.data.conversation import Part
from nanochat.engine import Engine
from nanochat.generate.reply import FAILED, reply_parts
from nanochat.generate.sampling import Sampling
from nanochat.gpt import GPTConfig
from tests.support.tiny_model import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
mark = TOKENIZER.special


class Scripted:
    """Stands in for a GPT. The first token of a slot names the script that the model says there.

    Every pass checks that each slot holds exactly the tokens of one conversation.
    """

    def __init__(self, scripts: dict[int, list[int]]):
        self.config = GPTConfig(
            sequence_len=64, vocab_size=TOKENIZER.vocab_size, n_layer=1, n_head=1, n_kv_head=1, n_embd=24
        )
        self.device, self.dtype, self.scripts = torch.device("cpu"), torch.float32, scripts
        self.attention = PlainAttention()

    def new_cache(self, slots: int, length: int, dtype: torch.dtype | None = None) -> Cache:
        return Cache(1, slots, length, 1, 24, self.device, dtype or self.dtype)

    def hidden(self, idx: torch.Tensor, context: Cached) -> torch.Tensor:
        cache, slots, lengths = context.cache, context.slots, context.lengths
        assert context.cached is not None and context.new is not None and lengths is not None
        assert list(context.cached) == cache.positions[slots].tolist() and list(context.new) == lengths.tolist()
        out = torch.zeros(*idx.shape, 2)
        for row, slot in enumerate(range(slots.start, slots.stop)):
            place, count = int(cache.positions[slot]), int(lengths[row])
            assert place + idx.size(1) <= cache.length
            cache.k[0, slot, place : place + idx.size(1), 0, 0] = idx[row].float()
            first = int(cache.k[0, slot, 0, 0, 0])
            script = [first, *self.scripts.get(first, [])]
            if first in self.scripts:
                assert cache.k[0, slot, : place + count, 0, 0].tolist() == script[: place + count]
                assert place == 0 or int(cache.last[slot]) == script[place - 1]
            for t in range(count):
                out[row, t, 0] = script[place + t + 1] if place + t + 1 < len(script) else mark("assistant_end")
            cache.last[slot] = idx[row, count - 1]
            cache.positions[slot] += count
        return out

    def log_totals(self, logits: torch.Tensor) -> None:
        return None

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(x[:, 0].long(), TOKENIZER.vocab_size).float() * 10


def call(expression: str, answer: str) -> list[int]:
    inside = [mark("output_start"), *TOKENIZER.encode(answer), mark("output_end")]
    return [mark("python_start"), *TOKENIZER.encode(expression), mark("python_end"), *inside]


@pytest.mark.parametrize("pad", [False, True])
def test_each_request_gets_the_answer_to_its_own_call(pad):
    words = TOKENIZER.encode
    scripts = {
        1: call("12*12", "144") + words(" cat") + [mark("assistant_end")],
        2: words("the cat ") + call("'strawberry'.count('r')", "3") + call("90/4", "22.5"),
        3: words("猫"),
        4: call("__import__('os')", FAILED) + words("mat"),
        5: [*call("", FAILED), mark("python_end"), *words("on")],
    }
    engine = Engine(Scripted(scripts), TOKENIZER, slots=4, pad=pad)  # type: ignore[arg-type]
    replies = engine.generate([[number] for number in scripts], Sampling(0.0, max_tokens=60))
    for script, reply in zip(scripts.values(), replies, strict=True):
        expected = script if script[-1] == mark("assistant_end") else [*script, mark("assistant_end")]
        assert reply.tokens == expected and reply.finish == "stop"
        outputs = [token for token, forced in zip(reply.tokens, reply.forced, strict=True) if forced]
        assert outputs.count(mark("output_start")) == script.count(mark("output_start"))
        assert all(logprob == 0 for logprob, forced in zip(reply.logprobs, reply.forced, strict=True) if forced)
    assert reply_parts(replies[1].tokens, TOKENIZER) == [
        Part("text", "the cat "),
        Part("python", "'strawberry'.count('r')"),
        Part("python_output", "3"),
        Part("python", "90/4"),
        Part("python_output", "22.5"),
    ]


@pytest.mark.parametrize("room", range(1, 9))
def test_forced_tokens_are_cut_where_the_reply_must_end(room):
    script = call("12*12", "144")
    start = script.index(mark("output_start"))
    engine = Engine(Scripted({1: script}), TOKENIZER)  # type: ignore[arg-type]
    (by_limit,) = engine.generate([[1]], Sampling(0.0, max_tokens=room))
    engine = Engine(Scripted({1: script}), TOKENIZER, length=room + 1)  # type: ignore[arg-type]
    (by_context,) = engine.generate([[1]], Sampling(0.0, max_tokens=60))
    assert by_limit == by_context
    assert by_limit.tokens == script[:room] and by_limit.finish == "length"
    assert by_limit.forced == [i >= start for i in range(room)]


def test_only_the_calculator_writes_its_output():
    script = [mark("output_start"), mark("output_end")]
    reply = Engine(Scripted({1: script}), TOKENIZER).generate([[1]], Sampling(1.0, 5, max_tokens=1))[0]  # type: ignore[arg-type]
    assert reply.tokens[0] not in script
