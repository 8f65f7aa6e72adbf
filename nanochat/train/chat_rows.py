"""Opens the rows of a stage's conversations, tokenising the conversations if that is still to do.

A GPT reads them as the Rows of dataloader.py, with a begin mark before each conversation. Published
models read PackedRows, or PairRows if the conversations are pairs of answers.
"""

from collections.abc import Callable, Iterable

import numpy as np
import torch

from nanochat.common import tr
from nanochat.data.conversation import Conversation
from nanochat.dataloader import Rows
from nanochat.prepare.conversations import (
    ConversationSplits,
    conversation_folder,
    prepare_conversations,
)
from nanochat.prepare.plan import Plan, TooLong, plan
from nanochat.prepare.token_files import TokenSet
from nanochat.tokenizer import Tokenizer


class PackedRows(Rows):
    """Rows of conversations without begin marks, as published models expect them.

    A conversation's own first token takes the place of the begin mark. A batch also says which
    conversation of its row each token belongs to.
    """

    extras: tuple[str, ...] = ("documents",)

    def batch(self, plan_rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Return (inputs, targets, documents) of rows of the plan, int64 (B, T) each.

        `documents` holds the index of each token's conversation in its row. Padding at the end of a
        row counts as one more document.
        """
        inputs, targets = super().batch(plan_rows)
        documents = torch.zeros_like(inputs)
        columns = np.arange(inputs.size(1))
        for b, row in enumerate(plan_rows.tolist()):
            ends = [column + length + 1 for column, _, length in self._segments(row)]
            numbers = np.searchsorted(ends, columns, side="right")
            documents[b] = torch.from_numpy(numbers)
        return inputs, targets, documents

    def _fill(
        self,
        row: int,
        cells: np.ndarray,
        targets: np.ndarray,
    ) -> None:
        super()._fill(row, cells, targets)
        tokens = self._token_set.parts[0].tokens
        for column, start, _ in self._segments(row):
            cells[column] = tokens[start - 1]


class PairRows(PackedRows):
    """Rows for preference training that hold pairs: a preferred answer, then the rejected one.

    A pair is never divided between rows. Each answer includes its prompt; pair n consists of
    documents 2n and 2n + 1 of the row. targets_in() counts pairs. The caller fills `references`
    with a reference model's scores of the pairs, in the order of the plan, float32 (pairs, 2).
    """

    extras: tuple[str, ...] = ("documents", "references")

    def __init__(
        self,
        token_set: TokenSet,
        plan: Plan,
        bos: int,
        seed: int | None,
        masked: bool,
    ):
        super().__init__(token_set, plan, bos, seed, masked)
        self._target_counts = np.diff(self._first_segments) // 2
        self.pair_starts = self._first_segments // 2
        self.conversations = int(self.pair_starts[-1])  # pairs
        self.references = np.zeros((self.conversations, 2), np.float32)

    def batch(self, plan_rows: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Return (inputs, targets, documents, references) of rows of the plan.

        The first three are int64 (B, T). The last is float32 (B, P, 2), where P is the largest
        number of pairs in one of the rows; rows with fewer pairs are padded with zeros.
        """
        starts = self.pair_starts[plan_rows]
        counts = self._target_counts[plan_rows]
        references = torch.zeros(len(plan_rows), int(counts.max(initial=0)), 2)
        for b, (start, count) in enumerate(zip(starts, counts, strict=True)):
            pairs = self.references[start : start + count]
            references[b, :count] = torch.from_numpy(pairs)
        return *super().batch(plan_rows), references


def conversation_rows(
    name: str,
    conversations: Callable[[], Iterable[Conversation]],
    key: str,
    tokenizer: Tokenizer,
    length: int,
    seed: int | None,
    masked: bool,
    too_long: TooLong | None = None,
    pairs: bool = False,
    title: str | None = None,
) -> Rows:
    """Return rows of `length` tokens made of conversations; see plan() for those that do not fit.

    Rows describes `seed` and `masked`. With `too_long`, which plan() describes, the rows are
    PackedRows; with `pairs` as well, they are PairRows.

    The tokens are saved in `chat_data/<name>-<hash>`. `key` identifies the content: `conversations`
    is called only if no tokens with this key are saved. Raises UserError, naming the conversations
    as `title`, if none of them fits.
    """
    folder = conversation_folder(name, tokenizer, key)
    token_set = prepare_conversations(folder, conversations, tokenizer, key)
    row_plan = plan(token_set, length + 1, cut=False, too_long=too_long, pairs=pairs, title=title)
    if pairs:
        return PairRows(token_set, row_plan, tokenizer.bos, seed, masked)
    if too_long:
        return PackedRows(token_set, row_plan, tokenizer.bos, seed, masked)
    return Rows(token_set, row_plan, tokenizer.bos, seed, masked)


def chat_rows(
    stage: str,
    conversations: ConversationSplits,
    tokenizer: Tokenizer,
    length: int,
    seed: int,
    masked: bool,
    too_long: TooLong | None = None,
    pairs: bool = False,
) -> tuple[Rows, Rows]:
    """Return the training rows and the validation rows of a stage's conversations.

    conversation_rows() describes the arguments.
    """
    key = conversations.key
    options = (tokenizer, length, seed, masked, too_long, pairs)
    title = tr("the training conversations of {name}", name=conversations.name)
    train = conversation_rows(stage, conversations.train, key, *options, title)
    title = tr("the held-out conversations of {name}", name=conversations.name)
    val = conversation_rows(f"{stage}-val", conversations.val, key, *options, title)
    return train, val
