"""Opens the rows of a stage's conversations, tokenising the conversations if that is still to do."""

from collections.abc import Callable, Iterable

from nanochat.data.conversation import Conversation
from nanochat.dataloader import PackedRows, Rows
from nanochat.evals.preferences import PairRows
from nanochat.prepare.conversations import (
    ConversationSplits,
    conversation_folder,
    prepare_conversations,
)
from nanochat.prepare.plan import TooLong, plan
from nanochat.tokenizer import Tokenizer


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
) -> Rows:
    """Return rows of `length` tokens made of conversations; see plan() for those that do not fit.

    Rows describes `seed` and `masked`. With `too_long`, which plan() describes, the rows are
    PackedRows; with `pairs` as well, they are PairRows.

    The tokens are saved in `chat_data/<name>-<hash>`. `key` identifies the content: `conversations`
    is called only if no tokens with this key are saved.
    """
    folder = conversation_folder(name, tokenizer, key)
    token_set = prepare_conversations(folder, conversations, tokenizer, key)
    row_plan = plan(token_set, length + 1, cut=False, too_long=too_long, pairs=pairs)
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
    train = conversation_rows(stage, conversations.train, key, *options)
    val = conversation_rows(f"{stage}-val", conversations.val, key, *options)
    return train, val
