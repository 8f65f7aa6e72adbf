"""tokenizer.json, the file that holds a tokenizer: its content, its hash, and how damage is told."""

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanochat.common import UserError, read_json, tr

FORMAT = "nanochat-tokenizer"
VERSION = 1
FILE_NAME = "tokenizer.json"
# The largest sum of the squared lengths of all tokens in a file: finding how a token was merged
# takes time in proportion to the square of its length. For a vocabulary of 100,000 usual tokens, the
# sum is a thousandth of this.
MOST_MERGING = 2e10


def content(
    pattern: str,  # the name of the split pattern
    regex: str,
    specials: Mapping[str, str],  # the spelling of each special token, by its role
    ranks: Sequence[bytes],  # the bytes of each learned token
) -> dict[str, Any]:
    """Return everything that defines a vocabulary, as the file has it; digest() gives its hash."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "pattern": pattern,
        "regex": regex,
        "specials": specials,
        "ranks": [base64.b64encode(token).decode() for token in ranks],
    }


def digest(vocabulary: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a vocabulary's content, whatever the layout of the file."""
    return hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()


def read(path: Path, remedy: str) -> dict[str, Any]:
    """Return the content of a file, once its format and its hash have been checked.

    Raises UserError, which tells the `remedy`, if the file is damaged or of another format.
    """
    try:
        vocabulary = read_json(path)
        expected_hash = vocabulary.pop("sha256")
        saved_format = (vocabulary["format"], vocabulary["version"])
    except UserError as failure:
        raise _damaged(path, str(failure.__cause__), remedy) from failure
    except (KeyError, TypeError, AttributeError) as failure:
        raise _damaged(path, repr(failure), remedy) from failure
    if saved_format != (FORMAT, VERSION):
        raise UserError(
            tr(
                "{path} has format {saved_format} {saved_version}, but this program reads "
                "{format} {version}. {remedy}",
                path=path,
                saved_format=saved_format[0],
                saved_version=saved_format[1],
                format=FORMAT,
                version=VERSION,
                remedy=remedy,
            )
        )
    if digest(vocabulary) != expected_hash:
        cause = tr(
            "its content does not have the SHA-256 {expected_hash}", expected_hash=expected_hash
        )
        raise _damaged(path, cause, remedy)
    return vocabulary


def ranks_in(vocabulary: Mapping[str, Any]) -> list[bytes]:
    """Return the bytes of each learned token.

    Raises ValueError if a token is damaged, or if it would take too long to find how the tokens
    were merged.
    """
    ranks = [base64.b64decode(token, validate=True) for token in vocabulary["ranks"]]
    if sum(len(token) ** 2 for token in ranks) > MOST_MERGING:
        longest = max(map(len, ranks))
        raise ValueError(
            tr("its tokens are too long, the longest has {longest:,} bytes", longest=longest)
        )
    return ranks


@contextmanager
def refuses_damage(path: Path, remedy: str) -> Iterator[None]:
    """Turn the errors that the content of a damaged file causes into a UserError."""
    try:
        yield
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as failure:
        raise _damaged(path, repr(failure), remedy) from failure


def _damaged(path: Path, cause: str, remedy: str) -> UserError:
    return UserError(
        tr("{path} is damaged: {cause}. {remedy}", path=path, cause=cause, remedy=remedy)
    )
