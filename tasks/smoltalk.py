"""SmolTalk: general conversations, in the selection for small models.

Allal et al. 2025, arXiv:2502.02737.
"""

from pathlib import Path

from nanochat.common import UserError, tr
from nanochat.data.conversation import Conversation
from nanochat.data.library_words import in_words
from tasks.common import Ungraded, one_of
from tasks.messages import read_alternating
from tasks.published import Published, load_table


def source(split: str) -> Published:
    """Return the location of a split of SmolTalk on the Hugging Face hub."""
    return Published("HuggingFaceTB/smol-smoltalk", None, split, ("data", "."))


class SmolTalk(Ungraded):
    """The conversations of SmolTalk, from the train split (460 K) or the test split (24 K).

    If a conversation ends with a message of the user, that message is dropped.
    """

    name = "SmolTalk"

    def __init__(self, split: str, folder: str | Path | None = None):
        one_of(tr("the split of {task}", task="SmolTalk"), split, ("train", "test"))
        self._table = load_table(source(split), ("messages",), folder)

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, i: int) -> Conversation:
        messages = self._table[i]["messages"]
        if messages and messages[-1]["role"] == "user":
            messages = messages[:-1]
        try:
            return read_alternating(messages)
        except ValueError as broken:
            raise UserError(
                tr(
                    "{source}: conversation {i}: {broken}. Copy or fix the file.",
                    source=self._table.source,
                    i=i,
                    broken=in_words(broken),
                )
            ) from broken
