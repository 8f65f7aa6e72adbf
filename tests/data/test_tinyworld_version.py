"""TinyWorld's text has a version, which changes whenever the text does."""

import hashlib
from collections.abc import Iterable

from nanochat.data.conversation import Conversation
from nanochat.data.tinyworld import world as tinyworld
from nanochat.data.tinyworld.words import LANGUAGES

# What VERSION names: SHA-256s of the text for the default seed. Corpora and token files on users' disks are made
# again only when VERSION changes, so a changed text under the same VERSION would go unseen.
VERSION = "fc94f942c56b23c4a6fcf36cc2899b646fae6e5cfe0b9187d5068f1db5f1e8a5"
TEXT = {
    "documents": "efdbd347fba2abcf48b466230dd2d792ce2991c1005ba9b60ba1b03e86439836",
    "mid": "52023adb7d94dd3262d4a14c5ed78e825825f2c8e2cdbd7f37dc37e70eacf15a",
    "sft": "05ec5fc8e0f0d5eac124424398d0e335b18ef78743ab25fdf5c73e4dede76e2c",
    "identity": "af0014b9331012d116e36b959728f070fe5ad047a3a5b962f40a6206ae1e048d",
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
