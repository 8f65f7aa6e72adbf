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
VERSION = "f7ce7ad97ec9839ba80bed8321b1dda74459c526b325f721b3d858a6f08b5f52"
TEXT = {
    "documents": "476a64c74984fdd3910dd0221d672a741b57f3df75da998f1abf2395da077099",
    "mid": "2ccde51998c9bb2255b3e9e1b75506cc6d3ed28daa446e55ed17201c7b69424f",
    "sft": "f7ce7ad97ec9839ba80bed8321b1dda74459c526b325f721b3d858a6f08b5f52",
    "identity": "2fde170b8c5d89b14778c346704c642cc6687e911fcab6c3b01a35c8826ad36e",
    "rl": "ba6015b0dbd284f3b0e8d9030c200da330a0ff2759b71243c245d5251d9e0f59",
    "rl evaluation": "e1df5bfad204a69937debd131021df526c0876ea8789ee382bbb272f346f2ef3",
    "calculator": "f19a68c908cf15fab7eeaa77538f471d20cd08026071da305fefefbf5bf010b6",
    "evaluation en": "7b76f1e3be613acf75d172e26c312d9bd34043aeb7acf1ce1f273137f112065e",
    "evaluation zh": "a6e2627a4ab57f72665dc293abbc5172f42edd8d4eeb9d5c01ae6023b258ee7e",
}


def digest(made: Iterable[str | Conversation | tinyworld.Problem]) -> str:
    """A SHA-256 over texts in order, each with what a model or a measure sees of it."""
    hashed = hashlib.sha256()
    for one in made:
        about: list[object] = []
        if isinstance(one, tinyworld.Problem):
            about += [one.answer, one.competing, one.relation, one.language, one.held_out_combination, one.tool]
            about += [one.names, one.tale]
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
                *tinyworld.follow_up_evaluation(language),
                *tinyworld.tale_evaluation(language),
                *tinyworld.persona_evaluation(language),
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
