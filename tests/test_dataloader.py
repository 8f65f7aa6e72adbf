"""The loader gives the planned rows, in an order that is known in advance and equal on any number of ranks."""

import queue
import threading
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from nanochat.common import UserError, base_dir
from nanochat.data.conversation import chat
from nanochat.data.corpora import Corpus
from nanochat.data.mixing import Data
from nanochat.data.shards import write_shards
from nanochat.dataloader import IGNORED, Rows, Source, epoch_order, make_step, steps
from nanochat.prepare.conversations import prepare_conversations
from nanochat.prepare.documents import prepare_documents
from nanochat.prepare.interleave import MixedRows, blend
from nanochat.prepare.plan import plan
from nanochat.prepare.token_files import TokenSet
from nanochat.tokenizer import Tokenizer
from nanochat.train.sizes import mixture_table
from tests.support.tiny_model import on_cpu

DOCUMENTS = [f"Document {i} says {'ha ' * (i * 7 % 40)}and 第{i}号。" for i in range(400)]
TOKENIZER = Tokenizer.train(DOCUMENTS, 360)
CPU = on_cpu()
CHATS = [chat(f"What is {i}?", f"It is {'so ' * (i % 9)}{i}.") for i in range(80)]


@pytest.fixture
def documents() -> TokenSet:
    folder = base_dir() / "base_data" / "c"
    write_shards(folder, DOCUMENTS, rows_per_shard=150)
    return prepare_documents(Corpus("c", folder), TOKENIZER, "train")


@pytest.fixture
def chats(tmp_path) -> TokenSet:
    return prepare_conversations(tmp_path / "chats", CHATS, TOKENIZER, "k")


def rows_over(tokens: TokenSet, row_tokens: int = 65, seed: int | None = 7, masked: bool = False) -> Rows:
    return Rows(tokens, plan(tokens, row_tokens, cut=not masked), TOKENIZER.bos, seed, masked)


def cells(rows: Rows, number: int) -> list[int]:
    """The T + 1 cells of an unmasked row; padding is left out."""
    inputs, targets = rows.row(number)
    return [int(inputs[0]), *(int(t) for t in targets if t != IGNORED)]


def split_at_bos(row: list[int]) -> list[tuple[int, ...]]:
    """The pieces of a row."""
    pieces: list[list[int]] = []
    for token in row:
        if token == TOKENIZER.bos:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return [tuple(piece) for piece in pieces]


def test_an_epoch_holds_every_token_once_and_begins_every_piece_with_bos(documents):
    rows = rows_over(documents)
    held = Counter(token for n in range(rows.count) for token in cells(rows, n) if token != TOKENIZER.bos)
    assert held == Counter(token for part in documents.parts for token in part.tokens.tolist())
    whole = {tuple(TOKENIZER.encode(text)) for text in DOCUMENTS}
    pieces = [piece for n in range(rows.count) for piece in split_at_bos(cells(rows, n))]
    assert sum(piece in whole for piece in pieces) > 0.9 * documents.documents


def test_inputs_and_targets_are_shifted_by_one(documents):
    rows = rows_over(documents)
    for number in range(rows.count):
        inputs, targets = rows.row(number)
        assert inputs.shape == targets.shape == (64,) and inputs.dtype == targets.dtype == torch.int64
        kept = targets != IGNORED
        assert (inputs[1:] == targets[:-1])[kept[:-1]].all() and inputs[0] == TOKENIZER.bos
        assert kept.all() or int(kept.sum()) == int(rows._plan.used.min()) - 1


def test_masked_rows_train_what_the_mask_marks_and_nothing_else(chats):
    rows = rows_over(chats, row_tokens=97, masked=True)
    expected = Counter()
    for conversation in CHATS:
        rendered = TOKENIZER.render(conversation)
        expected += Counter(t for t, m in zip(rendered.ids, rendered.mask, strict=True) if m)
    trained = Counter()
    for number in range(rows.count):
        inputs, targets = rows.row(number)
        kept = targets != IGNORED
        assert (inputs[1:] == targets[:-1])[kept[:-1]].all()
        trained += Counter(targets[kept].tolist())
    assert trained == expected
    with_bos = rows_over(chats, row_tokens=97)
    assert with_bos.targets_in(0, with_bos.count) > rows.targets_in(0, rows.count)


def test_a_masked_chat_row_by_hand(tmp_path):
    tokens = prepare_conversations(tmp_path / "one", [chat("ab", "c")], Tokenizer.train(["x"], 265), "k")
    tokenizer = Tokenizer.train(["x"], 265)
    rows = Rows(tokens, plan(tokens, 10, cut=False), tokenizer.bos, None, masked=True)
    inputs, targets = rows.row(0)
    mark = tokenizer.special
    assert inputs.tolist() == [
        mark("bos"), mark("user_start"), 97, 98, mark("user_end"), mark("assistant_start"), 99, mark("assistant_end"),
        mark("bos"),
    ]  # fmt: skip
    assert targets.tolist() == [-1, -1, -1, -1, -1, 99, mark("assistant_end"), -1, -1]


def test_documents_cannot_be_masked(documents):
    with pytest.raises(UserError, match="without a mask"):
        rows_over(documents, masked=True)


def test_targets_in_equals_counting_them(documents, chats):
    for rows in (rows_over(documents), rows_over(chats, 97, masked=True), rows_over(documents, seed=None)):
        counts = [int((rows.row(n)[1] != IGNORED).sum()) for n in range(2 * rows.count + 3)]
        for first, count in ((0, 1), (0, rows.count), (3, rows.count), (rows.count - 2, 5), (5, 0), (0, len(counts))):
            assert rows.targets_in(first, count) == sum(counts[first : first + count])


# --- order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 100, 1_000])
def test_every_epoch_is_a_permutation_and_they_differ(count):
    orders = [epoch_order(count, seed, epoch) for seed in (0, 1, 42) for epoch in range(3)]
    assert all(sorted(order.tolist()) == list(range(count)) for order in orders)
    if count >= 100:
        assert len({tuple(order) for order in orders}) == len(orders)
        assert abs(np.corrcoef(orders[0], np.arange(count))[0, 1]) < 0.3


def test_the_order_never_changes_between_versions():
    # A checkpoint stores a row number only: a change here would make old runs repeat and skip rows.
    assert epoch_order(10, 42, 0).tolist() == [3, 6, 8, 0, 4, 9, 7, 1, 2, 5]
    assert epoch_order(10, 42, 1).tolist() == [8, 0, 1, 9, 6, 5, 3, 7, 4, 2]


def test_rows_follow_the_epoch_orders_without_repeat_or_skip(documents):
    rows = rows_over(documents)
    expected = np.concatenate([epoch_order(rows.count, 7, epoch) for epoch in range(3)])
    assert (rows.plan_rows(0, 3 * rows.count) == expected).all()
    assert (rows.plan_rows(rows.count - 5, 20) == expected[rows.count - 5 : rows.count + 15]).all()
    assert len(rows.plan_rows(3, 0)) == 0
    sequential = rows_over(documents, seed=None)
    assert sequential.plan_rows(rows.count - 2, 4).tolist() == [rows.count - 2, rows.count - 1, 0, 1]


def rows_seen(rows: Source, world_size: int, count: int, first_row: int = 0) -> list[tuple[list[tuple], int]]:
    """For each step, the rows of all ranks in the order of their numbers; also checks the count of targets."""
    per_rank = [list(islice(steps(rows, first_row, 8, 2, on_cpu(r, world_size)), count)) for r in range(world_size)]
    out = []
    for parts in zip(*per_rank, strict=True):
        assert len({part.num_targets for part in parts}) == 1
        inputs = [torch.cat([inputs for inputs, _ in part.micro_batches]) for part in parts]
        ordered = torch.stack(inputs, dim=1).flatten(0, 1)  # number n is row n // world_size of rank n % world_size
        counted = sum(int((targets != IGNORED).sum()) for part in parts for _, targets in part.micro_batches)
        assert counted == parts[0].num_targets
        out.append(([tuple(row.tolist()) for row in ordered], counted))
    return out


def test_steps_hold_the_same_rows_on_one_two_and_four_ranks(documents, chats):
    for rows in (rows_over(documents), rows_over(chats, 97, masked=True)):
        count = rows.count // 8 + 3  # beyond one epoch
        one = rows_seen(rows, 1, count)
        assert one == rows_seen(rows, 2, count) == rows_seen(rows, 4, count)
        assert one[2:] == rows_seen(rows, 4, count - 2, first_row=16)  # resumed
        flat = [row for step, _ in one for row in step]
        assert flat == [tuple(rows.row(n)[0].tolist()) for n in range(len(flat))]


def test_a_blend_takes_every_nth_row_from_the_second_set_and_both_in_their_own_order(documents, chats):
    first, second = rows_over(chats, 65), rows_over(documents)
    mixed = blend(first, second, 4)
    inputs, targets = mixed.batch(mixed.plan_rows(0, 40))
    for n in range(40):
        source, number = (second, n // 4) if n % 4 == 3 else (first, n - n // 4)
        assert torch.equal(inputs[n], source.row(number)[0]) and torch.equal(targets[n], source.row(number)[1])
    assert mixed.count == first.count * 4 // 3
    assert mixed.key == f"{first.key} {second.key} 4"
    with pytest.raises(UserError, match="2 or more, got 1"):
        blend(first, second, 1)


def three_sets(documents: TokenSet, chats: TokenSet) -> list[Rows]:
    return [rows_over(documents), rows_over(chats, 65), rows_over(documents, seed=3)]


@pytest.mark.parametrize("shares", [(7, 3), (1, 999), (999, 1), (5, 3, 2), (1, 1, 1), (333_333, 333_333, 333_334)])
def test_a_mixture_takes_each_set_in_its_share_and_in_its_own_order(documents, chats, shares):
    sources = three_sets(documents, chats)[: len(shares)]
    mixed, total = MixedRows(sources, shares), sum(shares)
    inputs, _ = mixed.batch(mixed.plan_rows(0, 300))
    taken = [0] * len(shares)
    for n in range(300):
        assert mixed.rows_before(n) == taken
        assert all(abs(count - n * share / total) < len(shares) for count, share in zip(taken, shares, strict=True))
        (k,) = (k for k, count in enumerate(mixed.rows_before(n + 1)) if count > taken[k])
        assert torch.equal(inputs[n], sources[k].row(taken[k])[0])
        taken[k] += 1
    # Far on, where 32 bits would overflow: the pattern repeats every `total` rows.
    whole, rest = divmod(10**12, total)
    assert mixed.rows_before(10**12) == [
        whole * share + n for share, n in zip(shares, mixed.rows_before(rest), strict=True)
    ]
    assert sum(mixed.rows_before(10**12)) == 10**12


def test_a_mixture_is_the_same_from_anywhere_and_on_any_number_of_ranks(documents, chats):
    mixed = MixedRows(three_sets(documents, chats), (5, 3, 2))
    whole = mixed.plan_rows(0, 400)
    for first, count in ((0, 1), (1, 1), (7, 100), (250, 150), (399, 1), (13, 0)):
        assert mixed.plan_rows(first, count).tolist() == whole[first : first + count].tolist()
        counted = int((mixed.batch(whole[first : first + count])[1] != IGNORED).sum())
        assert mixed.targets_in(first, count) == counted
    one = rows_seen(mixed, 1, 12)
    assert one == rows_seen(mixed, 2, 12) == rows_seen(mixed, 4, 12)
    assert one[5:] == rows_seen(MixedRows(three_sets(documents, chats), (5, 3, 2)), 4, 7, first_row=40)


def test_an_epoch_of_a_mixture_ends_with_the_first_set_that_was_seen_whole(documents, chats):
    sources = three_sets(documents, chats)
    for shares in ((1, 1, 1), (5, 3, 2), (1, 50, 1)):
        mixed = MixedRows(sources, shares)
        at_end, beyond = mixed.rows_before(mixed.count), mixed.rows_before(mixed.count + 1)
        assert all(n <= source.count for n, source in zip(at_end, sources, strict=True))
        assert any(n > source.count for n, source in zip(beyond, sources, strict=True))
        assert len(set(mixed.plan_rows(0, mixed.count).tolist())) == mixed.count
    assert MixedRows(sources, (5, 3, 2)).key != MixedRows(sources, (5, 2, 3)).key


def test_the_report_gets_a_row_for_each_corpus_of_a_mixture(documents, chats):
    a, b = Corpus("a", Path()), Corpus("b", Path())
    sources = three_sets(documents, chats)[:2]
    table = mixture_table(Data((a, b), (7, 3)), MixedRows(sources, (7, 3)), 200)
    assert [(row["corpus"], row["share"], row["rows read"]) for row in table] == [("a", "70 %", 140), ("b", "30 %", 60)]
    assert [row["epochs"] for row in table] == [140 / sources[0].count, 60 / sources[1].count]
    assert mixture_table(Data((a,)), sources[0], 200) == []


def test_micro_batches_have_the_device_batch_size_and_the_rest_comes_last(documents):
    rows = rows_over(documents)
    step = make_step(rows, 0, 10, 3, on_cpu(1, 2))
    assert [tuple(inputs.shape) for inputs, _ in step.micro_batches] == [(3, 64), (2, 64)]
    assert step.first_row == 0


def test_a_step_needs_a_row_for_each_rank(documents):
    with pytest.raises(UserError, match=r"multiple of 4 rows .* got 6"):
        next(steps(rows_over(documents), 0, 6, 2, on_cpu(0, 4)))


def test_a_failure_in_the_loader_reaches_the_caller(documents, monkeypatch):
    rows = rows_over(documents)
    stream = steps(rows, 0, 4, 2, CPU)
    next(stream)
    monkeypatch.setattr(Rows, "batch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(islice(stream, 3))


def test_one_thread_makes_the_next_step_while_this_one_is_used_and_no_more(documents, monkeypatch):
    rows, made, batch = rows_over(documents), queue.Queue(), Rows.batch

    def noted(self: Rows, plan_rows: np.ndarray):
        made.put((threading.current_thread(), plan_rows.tolist()))
        return batch(self, plan_rows)

    monkeypatch.setattr(Rows, "batch", noted)
    stream = steps(rows, 0, 4, 4, CPU)
    next(stream)
    expected = rows.plan_rows(0, 16).reshape(4, 4).tolist()
    some = [made.get(timeout=60) for _ in range(2)]  # the second one before it is asked for
    assert [numbers for _, numbers in some] == expected[:2]
    next(stream)
    some.append(made.get(timeout=60))
    stream.close()
    assert some[2][1] == expected[2] and made.empty()
    (thread,) = {thread for thread, _ in some}
    assert thread is not threading.current_thread() and not thread.is_alive()
