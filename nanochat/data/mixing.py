"""One corpus or several with weights: `--data web:0.7,books:0.3` takes seven rows in ten from web, three from books."""

from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

from nanochat.common import UserError
from nanochat.data.corpora import Corpus, corpora, existing, resolve

EXAMPLE = "--data web:0.7,books:0.3"
LONGEST = 255  # bytes in the name of a folder
FINEST = (
    1_000_000  # the largest sum of shares; with a larger one, counts of rows could overflow 64 bits
)


@dataclass(frozen=True)
class Data:
    """What a stage trains on: of every sum(shares) rows, shares[k] rows come from corpora[k]."""

    corpora: tuple[Corpus, ...]
    shares: tuple[int, ...] = (1,)  # whole numbers in lowest terms

    @property
    def name(self) -> str:
        """The name of the corpus, or all names with their shares, such as web:7,books:3. `--data` accepts both."""
        if len(self.corpora) == 1:
            return self.corpora[0].name
        return ",".join(
            f"{corpus.name}:{share}"
            for corpus, share in zip(self.corpora, self.shares, strict=True)
        )

    @property
    def vocabulary(self) -> str:
        """The name of the tokenizer's folder. For a mixture it has no weights, so that the weights may change."""
        return unweighted(self.name) if len(self.corpora) > 1 else self.name


def unweighted(name: str) -> str:
    """The name of data without weights."""
    return ",".join(one.rpartition(":")[0] or one for one in name.split(","))


def resolve_data(data: str | None) -> Data:
    """Read the value of `--data`: the name of a corpus, a folder that was imported, or NAME:WEIGHT,NAME:WEIGHT.

    Weights are positive numbers and need not add up to 1; without weights all corpora count the same. None means the
    only corpus. UserError (code 2) if a corpus does not exist or a weight cannot be read.
    """
    known = (
        data is None
        or any(corpus.name == data for corpus in corpora())
        or existing(data) is not None
    )
    if known or not ({",", ":"} & set(data or "")):
        return Data((resolve(data),))
    assert data is not None
    named = [_weighted(one.strip(), data) for one in data.split(",")]
    if len(named) < 2:
        raise UserError(
            f"a mixture needs at least two corpora, as in {EXAMPLE}, got {data!r}", exit_code=2
        )
    if len({weight is None for _, weight in named}) > 1:
        raise UserError(
            f"give a weight to every corpus, as in {EXAMPLE}, or to none, got {data!r}", exit_code=2
        )
    chosen = tuple(resolve(name) for name, _ in named)
    names = [corpus.name for corpus in chosen]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(
            f"{twice[0]} is named twice in {data!r}; give it once, with the sum of its weights",
            exit_code=2,
        )
    if len(",".join(names).encode()) > LONGEST:
        raise UserError(
            f"the names of a mixture's corpora name the folder of its tokenizer, so they may have {LONGEST} bytes "
            f"together with a comma between them, got {len(','.join(names).encode())}; take fewer corpora, or import "
            "them under shorter names",
            exit_code=2,
        )
    return Data(chosen, whole_shares([weight or Fraction(1) for _, weight in named], data))


def _weighted(text: str, data: str) -> tuple[str, Fraction | None]:
    """Split NAME or NAME:WEIGHT into the name and the weight."""
    name, colon, weight = text.rpartition(":")
    if not colon:
        return text, None
    try:
        value = Fraction(weight)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not name or value <= 0:
        raise UserError(
            f"a weight must be a number above 0, as in {EXAMPLE}, got {text!r} in {data!r}",
            exit_code=2,
        )
    return name, value


def whole_shares(weights: list[Fraction], data: str) -> tuple[int, ...]:
    """Weights as whole numbers in lowest terms. UserError if their sum is larger than FINEST."""
    unit = lcm(*(weight.denominator for weight in weights))
    shares = [int(weight * unit) for weight in weights]
    shares = [share // gcd(*shares) for share in shares]
    if sum(shares) > FINEST:
        raise UserError(
            f"weights may be as fine as one in {FINEST:,}, got {data!r}, which means {shares[0]:,} in "
            f"{sum(shares):,}; round the weights",
            exit_code=2,
        )
    return tuple(shares)
