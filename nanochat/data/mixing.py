"""Read the value of `--data`: one corpus, or several with weights.

`--data web:0.7,books:0.3` takes seven rows in ten from web and three from books.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

from nanochat.common import UserError, tr
from nanochat.data.corpora import Corpus, corpora, existing, resolve

EXAMPLE = "--data web:0.7,books:0.3"
LONGEST = 255  # bytes in the name of a folder
# The largest sum of shares; with a larger one, counts of rows could overflow 64 bits.
FINEST = 1_000_000


@dataclass(frozen=True)
class Data:
    """The corpora that a stage trains on.

    Out of every `sum(shares)` rows, `shares[k]` come from `corpora[k]`.
    """

    corpora: tuple[Corpus, ...]
    shares: tuple[int, ...] = (1,)  # integers in lowest terms

    @property
    def name(self) -> str:
        """The name of the only corpus, or all names with their shares, such as web:7,books:3.

        `--data` accepts both forms.
        """
        if len(self.corpora) == 1:
            return self.corpora[0].name
        weighted = []
        for corpus, share in zip(self.corpora, self.shares, strict=True):
            weighted.append(f"{corpus.name}:{share}")
        return ",".join(weighted)

    @property
    def vocabulary(self) -> str:
        """The name of the tokenizer's folder: the name of the data, without any shares."""
        return unweighted(self.name) if len(self.corpora) > 1 else self.name


def unweighted(name: str) -> str:
    """Return the name of a mixture without shares: web:7,books:3 becomes web,books."""
    return ",".join(item.rpartition(":")[0] or item for item in name.split(","))


def resolve_data(data: str | None) -> Data:
    """Return the corpora that a value of `--data` names, with their shares.

    The value is the name of a corpus, the path that a corpus was imported from, or
    NAME:WEIGHT,NAME:WEIGHT. Weights are positive and need not add up to 1; without weights, all
    shares are equal. None means the only corpus. Raises UserError (exit code 2) if a corpus is
    missing or ambiguous, or if the mixture cannot be used.
    """
    if data is None or _names_one_corpus(data):
        return Data((resolve(data),))
    weighted_names = [_parse(item.strip(), data) for item in data.split(",")]
    if len(weighted_names) < 2:
        raise UserError(
            tr(
                "a mixture needs at least two corpora, as in {example}, got {data!r}",
                example=EXAMPLE,
                data=data,
            ),
            exit_code=2,
        )
    weights = [weight for _, weight in weighted_names]
    if None in weights and any(weights):
        raise UserError(
            tr(
                "give a weight to every corpus, as in {example}, or to none, got {data!r}",
                example=EXAMPLE,
                data=data,
            ),
            exit_code=2,
        )
    mixed = tuple(resolve(name) for name, _ in weighted_names)
    _check_names([corpus.name for corpus in mixed], data)
    return Data(mixed, whole_shares([weight or Fraction(1) for weight in weights], data))


def _names_one_corpus(data: str) -> bool:
    """Return whether a value of --data is a single name or path.

    An existing corpus or path may have a comma or a colon in its name.
    """
    if any(corpus.name == data for corpus in corpora()) or existing(data) is not None:
        return True
    return "," not in data and ":" not in data


def _check_names(names: list[str], data: str) -> None:
    """Raise UserError (exit code 2) if a name is repeated or the names are too long together."""
    repeated = [name for name in names if names.count(name) > 1]
    if repeated:
        raise UserError(
            tr(
                "{repeated} is named twice in {data!r}; give it once, with the sum of its weights",
                repeated=repeated[0],
                data=data,
            ),
            exit_code=2,
        )
    length = len(",".join(names).encode())
    if length > LONGEST:
        raise UserError(
            tr(
                "the names of a mixture's corpora name the folder of its tokenizer, so "
                "they may have {longest} bytes together with a comma between them, got "
                "{length}; take fewer corpora, or import them under shorter names",
                longest=LONGEST,
                length=length,
            ),
            exit_code=2,
        )


def _parse(item: str, data: str) -> tuple[str, Fraction | None]:
    """Return the name and the weight in NAME:WEIGHT; for a NAME alone, the weight is None.

    Raises UserError (exit code 2) if the weight is not a positive number, or follows no name.
    """
    name, colon, weight = item.rpartition(":")
    if not colon:
        return item, None
    try:
        value = Fraction(weight)
    except (ValueError, ZeroDivisionError):
        value = Fraction(0)
    if not name or value <= 0:
        raise UserError(
            tr(
                "a weight must be a number above 0, as in {example}, got {item!r} in {data!r}",
                example=EXAMPLE,
                item=item,
                data=data,
            ),
            exit_code=2,
        )
    return name, value


def whole_shares(weights: list[Fraction], data: str) -> tuple[int, ...]:
    """Return the smallest integers in the same ratios as the weights.

    Raises UserError (exit code 2) if their sum is larger than FINEST (one million).
    """
    unit = lcm(*(weight.denominator for weight in weights))
    multiples = [int(weight * unit) for weight in weights]
    divisor = gcd(*multiples)
    shares = [multiple // divisor for multiple in multiples]
    if sum(shares) > FINEST:
        raise UserError(
            tr(
                "weights may be as fine as one in {finest:,}, got {data!r}, which means "
                "{share:,} in {total:,}; round the weights",
                finest=FINEST,
                data=data,
                share=shares[0],
                total=sum(shares),
            ),
            exit_code=2,
        )
    return tuple(shares)
