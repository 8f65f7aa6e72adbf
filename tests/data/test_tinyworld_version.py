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
VERSION = "61c42d2899d22dee4ebd704c68d45527d335af2744fa260ab9ddc34d83fe30ae"
TEXT = {
    "documents": "fd8914f8d55ffeb1e2dbc9422d1399788afa265da1532c72fc6245b89db2b080",
    "mid": "e4b941cf82d7c8cb036918bb8fe9a2ebbcd5315e0466947b30bc55b8dfdc85ab",
    "sft": "61c42d2899d22dee4ebd704c68d45527d335af2744fa260ab9ddc34d83fe30ae",
    "identity": "2fde170b8c5d89b14778c346704c642cc6687e911fcab6c3b01a35c8826ad36e",
    "rl": "ba6015b0dbd284f3b0e8d9030c200da330a0ff2759b71243c245d5251d9e0f59",
    "rl evaluation": "e1df5bfad204a69937debd131021df526c0876ea8789ee382bbb272f346f2ef3",
    "calculator": "f19a68c908cf15fab7eeaa77538f471d20cd08026071da305fefefbf5bf010b6",
    "evaluation en": "f9a3868bee219de73670f1f7badcad3d2b994249405b603a89922fc754c42ad6",
    "evaluation zh": "7b83178b6a133f520ddd9bfd848cd0f3b827946ec31e6f3c913b6f70303e3732",
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
