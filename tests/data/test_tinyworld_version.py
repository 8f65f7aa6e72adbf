"""TinyWorld's text has a version, which changes whenever the text does."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import pytest

from nanochat.data.conversation import Conversation
from nanochat.data.corpora import MAKE_TINYWORLD, resolve
from nanochat.data.shards import write_shards
from nanochat.data.tinyworld import world as tinyworld
from nanochat.data.tinyworld.words import LANGUAGES

# What VERSION names: SHA-256s of the text for the default seed. Corpora and token files on users' disks are made
# again only when VERSION changes, so a changed text under the same VERSION would go unseen.
VERSION = "6a4c616d7e64e28953a5827c577b2678b4a628690f9f556d885a1cde8c848f16"
TEXT = {
    "documents": "f8118baf186713f9f6b9b4d7a6d0d61ba3cfea137b073585ab468ec1ce75e72a",
    "mid": "9f0e7be3cd36d80ead577fddbfd0d3d57b86eab710b6c2055d66075fb883eec3",
    "sft": "39024ba57a588945ce339f80a043dc0f80d83859bad92e510e3751911e11dd24",
    "identity": "c448df411c47d9957ea0c22bec00b6898b3d0af047c25ec9422d7cb06cbe2e6e",
    "rl": "405faa8f5b309277f977b96fc7f309511d4f1de63d3ac9e7dfd875b1a08eb367",
    "rl evaluation": "6c76974fb95ab574d8510f30052993d62b3404f767f73b75534ee7424f5409a0",
    "calculator": "99bd5cb6e8f0d3b897844094f2542a57ed69034cb1f59c634c1e0749d2144b34",
    "evaluation en": "d91ef2d62f87cb99ae5e88804c9e2afcac59d8483c8ff880207c8e3f38c500d9",
    "evaluation zh": "bf1499cda30bcf8cecdc4c3c98f3f83f9b3e853d93b48fd7e141474d9355fae4",
}


def digest(made: Iterable[str | Conversation | tinyworld.Problem]) -> str:
    """A SHA-256 over texts in order, each with what a model or a measure sees of it."""
    hashed = hashlib.sha256()
    for one in made:
        about: list[object] = []
        if isinstance(one, tinyworld.Problem):
            about += [one.answer, one.competing, one.relation, one.language, one.held_out_combination, one.tool]
            one = one.conversation
        if isinstance(one, Conversation):
            about += [(m.role, [(part.kind, part.text) for part in m.parts]) for m in one.messages]
        else:
            about.append(one)
        hashed.update(f"{about!r}\n".encode())
    return hashed.hexdigest()


def test_text_that_changes_takes_a_new_version():
    """Of the conversations a tenth: all of them take four seconds."""
    found = {
        "documents": digest(tinyworld.documents()),
        "mid": digest(tinyworld.mid_conversations(size=6000)),
        "sft": digest(tinyworld.sft_conversations(size=2000)),
        "identity": digest(tinyworld.identity_conversations()),
        "rl": digest(tinyworld.rl_problems()),
        "rl evaluation": digest([*tinyworld.rl_evaluation(), *tinyworld.rl_evaluation(unseen=True)]),
        "calculator": digest(tinyworld.calculator_evaluation()),
    }
    for language in LANGUAGES:
        found[f"evaluation {language}"] = digest(
            [
                *tinyworld.evaluation(language),
                *tinyworld.held_out_combinations(language),
                *tinyworld.unknown_evaluation(language),
                *tinyworld.story_evaluation(language),
            ]
        )
    assert (tinyworld.VERSION, found) == (VERSION, TEXT), (
        "TinyWorld makes another text: choose another VERSION in world.py, then write it and these SHA-256s here"
    )


@pytest.mark.parametrize("asked", ["tinyworld", None])
def test_documents_of_another_version_are_told_and_still_read(asked: str | None, base_folder: Path, capsys) -> None:
    for version in ("of an earlier version", tinyworld.VERSION):
        folder = base_folder / "base_data" / "tinyworld"
        about = {"kind": "tinyworld", "make": MAKE_TINYWORLD, "fingerprint": version}
        write_shards(folder, [f"fact {i}" for i in range(200)], about=about)
        assert resolve(asked).folder == folder
        said = capsys.readouterr().err
        assert ("of another version" in said and MAKE_TINYWORLD in said) == (version != tinyworld.VERSION)
