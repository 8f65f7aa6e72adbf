"""The settings by which a reply is sampled, and what a model refuses of them; choice.py follows them."""

import random
import zlib
from array import array
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from nanochat.common import UserError, tr
from nanochat.data.traits import Drawing, traits

# Below this temperature the choice is greedy, because the quotient of a logit and a smaller number
# may not fit into fp32.
COLDEST = 1e-5
UNBOUNDED = 3e38  # the largest temperature, close to the largest fp32 number
MOST_ALTERNATIVES = 20  # most likely tokens that can be reported for a position
MOST_STOPS = 64  # stop strings or stop tokens in a request
LONGEST_STOP = 256  # characters in a stop string
MOST_BIASES = 1024  # tokens with a bias in a request
MOST_BIAS = 100.0  # absolute value of a bias
# Settings that are numbers, with the smallest and the largest value.
RANGES = (
    ("temperature", 0, UNBOUNDED),
    ("top_p", 1e-6, 1),
    ("min_p", 0, 1),
    ("repetition_penalty", 1e-3, 1e3),
    ("presence_penalty", -100, 100),
    ("frequency_penalty", -100, 100),
    ("min_tokens", 0, 1 << 31),
    ("logprobs", 0, MOST_ALTERNATIVES),
)
# Settings that are lists, with the largest number of entries.
LONGEST_LISTS = (
    ("stop", MOST_STOPS),
    ("stop_tokens", MOST_STOPS),
    ("logit_bias", MOST_BIASES),
)


@dataclass(frozen=True)
class Sampling:
    """The settings by which a reply is sampled.

    With a `temperature` of 0, the most likely token is taken; with a `top_k` of None, any token may
    be sampled. Raises UserError (exit code 2) if no model could accept a value; Engine.submit()
    checks what depends on the model.
    """

    temperature: float = 1.0
    top_k: int | None = 50
    max_tokens: int = 256
    seed: int = 42
    # Sample from the fewest most likely tokens whose probabilities add up to this, after top_k.
    top_p: float = 1.0
    # Leave out tokens that are less likely than this share of the most likely token's probability.
    min_p: float = 0.0
    # For tokens in prompt or reply, divide logits above 0 by this, and multiply the others by it.
    repetition_penalty: float = 1.0
    # Subtract these from the logits of tokens in the reply: the first once, the second once for
    # each occurrence.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token, and what is added to its logit
    stop: tuple[str, ...] = ()  # strings that end the reply; the reply's text ends before them
    stop_tokens: tuple[int, ...] = ()  # tokens that end the reply, besides the model's end marks
    min_tokens: int = 0  # least tokens in the reply before an end mark or a stop may end it
    ignore_eos: bool = False  # whether to continue after the model's end marks
    logprobs: int = 0  # most likely tokens to report with every sampled token
    # Report the prompt's log-probabilities, with this many most likely tokens at each position.
    prompt_logprobs: int | None = None
    # JSON schema that the reply must meet, as JSON text, or a Lark grammar that begins with start:
    schema: str | None = None
    adapter: str = ""  # name of the engine's adapter that answers this request; "": none

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        if self.schema is not None and (self.ignore_eos or self.min_tokens):
            raise UserError(
                tr(
                    "a reply with a schema ends with its value, so ignore_eos and "
                    "min_tokens do not fit: leave them out"
                ),
                exit_code=2,
            )

    def _check_numbers(self) -> None:
        """Raise UserError (exit code 2) if a number is out of range."""
        for name, low, high in RANGES:
            value = getattr(self, name)
            if low <= value <= high:
                continue
            values = {"name": name, "low": low, "high": high, "value": value}
            message = tr("{name} must be from {low:,g} to {high:,g}, got {value}", **values)
            if high >= UNBOUNDED:
                message = tr("{name} must be finite and at least {low:g}, got {value}", **values)
            raise UserError(message, exit_code=2)
        if self.top_k is not None and self.top_k < 1:
            raise UserError(
                tr(
                    "top_k must be at least 1, got {top_k}. To sample from all tokens, give 0 "
                    "in a command or flag, and None in Python",
                    top_k=self.top_k,
                ),
                exit_code=2,
            )
        if self.max_tokens < 1:
            raise UserError(
                tr("max_tokens must be at least 1, got {max_tokens}", max_tokens=self.max_tokens),
                exit_code=2,
            )
        count = self.prompt_logprobs
        if count is not None and not 0 <= count <= MOST_ALTERNATIVES:
            raise UserError(
                tr(
                    "prompt_logprobs must be from 0 to {most}, got {count}",
                    most=MOST_ALTERNATIVES,
                    count=count,
                ),
                exit_code=2,
            )

    def _check_lists(self) -> None:
        """Raise UserError (exit code 2) if a list, stop string or bias is outside its limits."""
        for name, limit in LONGEST_LISTS:
            entries = len(getattr(self, name))
            if entries > limit:
                raise UserError(
                    tr(
                        "{name} has at most {limit} entries, got {entries:,}",
                        name=name,
                        limit=limit,
                        entries=entries,
                    ),
                    exit_code=2,
                )
        for stop in self.stop:
            if not 0 < len(stop) <= LONGEST_STOP:
                raise UserError(
                    tr(
                        "a stop string has from 1 to {longest} characters, got one of {count:,}",
                        longest=LONGEST_STOP,
                        count=len(stop),
                    ),
                    exit_code=2,
                )
        for token, bias in self.logit_bias:
            if not -MOST_BIAS <= bias <= MOST_BIAS:
                raise UserError(
                    tr(
                        "a logit_bias must be from -{most:g} to {most:g}, got "
                        "{bias} for token {token}",
                        most=MOST_BIAS,
                        bias=bias,
                        token=token,
                    ),
                    exit_code=2,
                )

    @property
    def adjusts(self) -> bool:
        """Whether penalties, biases or `min_tokens` change logits before a token is chosen."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.min_tokens
        )

    def top_k_of(self, vocabulary: int) -> int:
        """Return how many of the most likely tokens to sample from, or 0 for a greedy choice."""
        if self.temperature < COLDEST:
            return 0
        return min(self.top_k or vocabulary, vocabulary)


def check_request(
    prompt: Sequence[int],
    sampling: Sampling,
    length: int,
    vocabulary: int,
) -> None:
    """Raise UserError if the prompt is empty, leaves no room for a reply or has unknown tokens.

    `length` is the limit for prompt and reply together, in tokens. The settings must not name
    unknown tokens either.
    """
    if not prompt:
        raise UserError(
            tr("the prompt is empty: it must have at least one token. Pass a text to answer.")
        )
    if len(prompt) >= length:
        raise UserError(
            tr(
                "the prompt is too long: it has {count} tokens, the context holds "
                "{length}, and the reply needs at least one. Shorten the prompt or start a "
                "new chat.",
                count=len(prompt),
                length=length,
            )
        )
    check_tokens(tr("the prompt"), prompt, vocabulary)
    check_tokens("stop_tokens", sampling.stop_tokens, vocabulary)
    check_tokens("logit_bias", [token for token, _ in sampling.logit_bias], vocabulary)


def check_tokens(
    name: str,
    tokens: Collection[int],
    vocabulary: int,
) -> None:
    """Raise UserError if a token is not in a vocabulary of the given size."""
    if not tokens or (min(tokens) >= 0 and max(tokens) < vocabulary):
        return
    wrong = next(token for token in tokens if not 0 <= token < vocabulary)
    raise UserError(
        tr(
            "{name} holds token {wrong}, but the model's tokens go from 0 to "
            "{last:,}: send tokens of this model",
            name=name,
            wrong=wrong,
            last=vocabulary - 1,
        )
    )


def chat_drawing(
    corpus: str | None,
    temperature: float | Literal["auto"] = "auto",
    min_p: float | Literal["auto"] = "auto",
    top_k: int | Literal["auto"] = "auto",
    published: Mapping[str, float] | None = None,
) -> Drawing:
    """Return the sampling settings for chats with a model trained on a corpus.

    "auto" stands for the publisher's value, which `published` holds under the names of Drawing, or
    else for the value that suits models of that corpus.
    """
    default = traits(corpus).chats
    if published:
        source = "generation_config.json"
        reason = {"en": f"the publisher's {source}", "zh": f"发布者的 {source}"}
        default = replace(default, **published, reason=reason)
    flags = {"temperature": temperature, "min_p": min_p, "top_k": top_k}
    chosen: dict[str, Any] = {name: value for name, value in flags.items() if value != "auto"}
    if not chosen:
        return default
    return replace(default, **chosen, reason={"en": "asked for", "zh": "由你指定"})


def sample_settings(
    sampling: Sampling,
    prompt: Sequence[int],
    number: int,
) -> Sampling:
    """Return the settings of one sample of a prompt, which differ from `sampling` only in the seed.

    The new seed depends only on the given seed, `number` (the sample's index) and the prompt.
    """
    return replace(sampling, seed=sample_seeds(sampling.seed, prompt, [number])[0])


def sample_seeds(
    seed: int,
    prompt: Sequence[int],
    numbers: Iterable[int],
) -> list[int]:
    """Return a seed for each sample index in `numbers`, from `seed`, the index and the prompt."""
    prompt_digest = zlib.crc32(array("q", prompt).tobytes())
    return [random.Random(f"{seed}/{number}/{prompt_digest}").getrandbits(63) for number in numbers]
