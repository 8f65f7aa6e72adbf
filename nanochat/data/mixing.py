"""One corpus, or several by weights: of `--data web:0.7,books:0.3` seven rows in ten are of one, three of the other."""

from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path

from nanochat.common import UserError
from nanochat.data.corpora import Corpus, corpora, resolve

EXAMPLE = "--data web:0.7,books:0.3"
FINEST = 1_000_000  # shares in a million; beyond that counts of rows would outgrow 64 bits


@dataclass(frozen=True)
class Data:
    """What a stage trains on: corpora, and of how many rows in sum(shares) each gives its share."""

    corpora: tuple[Corpus, ...]
    shares: tuple[int, ...] = (1,)  # whole numbers in lowest terms

    @property
    def name(self) -> str:
        """A corpus's own name, or all of them with their shares, which `--data` takes too: web:7,books:3."""
        if len(self.corpora) == 1:
            return self.corpora[0].name
        return ",".join(f"{corpus.name}:{share}" for corpus, share in zip(self.corpora, self.shares, strict=True))

    @property
    def vocabulary(self) -> str:
        """The name of the tokenizer's folder: of a mixture the names alone, so that weights may change."""
        return unweighted(self.name) if len(self.corpora) > 1 else self.name


def unweighted(name: str) -> str:
    """The name of data without weights."""
    return ",".join(one.rpartition(":")[0] or one for one in name.split(","))


def resolve_data(data: str | None) -> Data:
    """What `--data` names: a corpus by name, a folder it was imported from, or NAME:WEIGHT,NAME:WEIGHT.

    Weights are positive numbers of any sum; without any, all corpora weigh the same. None means the only corpus
    there is. UserError with exit code 2 for what is not there or cannot be read.
    """
    known = data is None or any(corpus.name == data for corpus in corpora()) or Path(data).expanduser().exists()
    if known or not ({",", ":"} & set(data or "")):
        return Data((resolve(data),))
    assert data is not None
    named = [_weighted(one.strip(), data) for one in data.split(",")]
    if len(named) < 2:
        raise UserError(f"a mixture needs two corpora, such as {EXAMPLE}, got {data!r}", exit_code=2)
    if len({weight is None for _, weight in named}) > 1:
        raise UserError(f"give every corpus a weight, as in {EXAMPLE}, or none, got {data!r}", exit_code=2)
    chosen = tuple(resolve(name) for name, _ in named)
    names = [corpus.name for corpus in chosen]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"{twice[0]} is named twice in {data!r}; give it once, with the sum of its weights", exit_code=2
        )
    return Data(chosen, whole_shares([weight or Fraction(1) for _, weight in named], data))


def _weighted(text: str, data: str) -> tuple[str, Fraction | None]:
    """A corpus and its weight, out of NAME or NAME:WEIGHT."""
    name, colon, weight = text.rpartition(":")
    if not colon:
        return text, None
    try:
        value = Fraction(weight)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not name or value <= 0:
        raise UserError(f"a weight must be a number above 0, as in {EXAMPLE}, got {text!r} in {data!r}", exit_code=2)
    return name, value


def whole_shares(weights: list[Fraction], data: str) -> tuple[int, ...]:
    """Weights as whole numbers in lowest terms. UserError where their sum is more than FINEST."""
    unit = lcm(*(weight.denominator for weight in weights))
    shares = [int(weight * unit) for weight in weights]
    shares = [share // gcd(*shares) for share in shares]
    if sum(shares) > FINEST:
        raise UserError(
            f"weights may be as fine as one in {FINEST:,}, got {data!r}, which is {shares[0]:,} in {sum(shares):,}; "
            "round them",
            exit_code=2,
        )
    return tuple(shares)
