"""What a model says while it trains: in every stage, on any number of ranks, and without a trace in what is learned."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanochat.data.conversation import Part
from nanochat.device import Compute
from nanochat.engine import Engine
from nanochat.generate.sampling import Sampling
from nanochat.runtime.parallel import whole_parameters
from nanochat.runtime.samples import read_samples
from nanochat.train.samples import HELD_OUT, LONGEST, OPENING, Graded, held_out_prompts, keep_replies
from tests.support.ranks import run_ranks
from tests.support.small_world import (
    STAGES,
    Even,
    even_tasks,
    run_stage,
    shrink,
    small_chain,
    stage_folder,
    tensors,
    up_to,
)
from tests.support.tiny_model import on_cpu, tiny_gpt, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
SHORT: dict[str, Any] = {"num_iterations": 4, "eval_every": 2, "samples": 4}


class Given:
    """Rows of given tokens, padded with begin marks as packed rows are."""

    def __init__(self, *rows: list[int]):
        self.rows, self.row_tokens = [[TOKENIZER.bos, *row] for row in rows], 120
        self.count = len(rows)

    def plan_rows(self, first: int, count: int) -> range:
        return range(first, first + count)

    def batch(self, plan_rows: range) -> tuple[torch.Tensor]:
        padded = [self.rows[n] + [TOKENIZER.bos] * (self.row_tokens - len(self.rows[n])) for n in plan_rows]
        return (torch.tensor(padded),)


def chat(question: str, answer: str) -> list[int]:
    special, encode = TOKENIZER.special, TOKENIZER.encode
    asked = [special("user_start"), *encode(question), special("user_end")]
    return [*asked, special("assistant_start"), *encode(answer), special("assistant_end")]


def prompts(count: int, *rows: list[int]) -> list[list[int]]:
    return held_out_prompts(Given(*rows), count, TOKENIZER)  # type: ignore[arg-type]


# --- prompts -------------------------------------------------------------------------------------


def test_prompts_are_questions_or_the_first_words_of_documents() -> None:
    text = TOKENIZER.encode("the cat sat on the mat and the dog sat on the cat " * 2)
    asked = chat("why?", "so")
    found = prompts(4, [*asked, TOKENIZER.bos, *chat("who?", "me")], text)
    assert found == [[TOKENIZER.bos, *asked[: asked.index(TOKENIZER.special("assistant_start")) + 1]],
                     [TOKENIZER.bos, *text[:OPENING]]]  # fmt: skip


def test_prompts_differ_and_leave_room_for_a_reply() -> None:
    long = chat("a" * 200, "b")
    assert len(prompts(4, chat("why?", "so"), chat("why?", "no"), long, chat("who?", "me"))) == 2
    assert prompts(1, chat("why?", "so"), chat("who?", "me")) == prompts(9, chat("why?", "so"))
    assert prompts(0, chat("why?", "so")) == [] == prompts(4, [])


# --- replies -------------------------------------------------------------------------------------


def test_replies_are_the_models_likeliest_and_leave_no_trace(tmp_path: Path) -> None:
    model = tiny_gpt(TOKENIZER.vocab_size, 128)
    asked = prompts(2, chat("why?", "so"), TOKENIZER.encode("the cat sat on the mat"))
    expected = Engine(model, TOKENIZER).generate(asked, Sampling(temperature=0.0, max_tokens=LONGEST))
    model.train()
    before = torch.get_rng_state(), {name: value.clone() for name, value in whole_parameters(model)}
    keep_replies(tmp_path, 7, asked, model, TOKENIZER, on_cpu())
    first, second = read_samples(tmp_path)
    assert (first.step, first.source, first.asked, second.asked[:7]) == (7, HELD_OUT, "why?", "the cat")
    assert TOKENIZER.decode(expected[1].tokens).startswith(second.said[:5])
    assert torch.equal(torch.get_rng_state(), before[0])
    assert all(torch.equal(value, before[1][name]) for name, value in whole_parameters(model))
    assert model.training
    keep_replies(tmp_path / "none", 7, [], model, TOKENIZER, on_cpu())
    assert not (tmp_path / "none").exists()


def test_graded_replies_are_those_to_the_first_problems_in_their_order(tmp_path: Path) -> None:
    task = even_tasks("tinyworld")[1]
    assert isinstance(task, Even)
    said = Graded(task, 2, on_cpu(0, 2))
    for i in (6, 2, 0, 4):
        said.hear(i, [Part("text", f"reply {i}")], float(i == 2))
    said.keep(tmp_path, 3)
    found = read_samples(tmp_path)
    assert [(one.source, one.said, one.grade) for one in found] == [("even", "reply 0", 0.0), ("even", "reply 2", 1.0)]
    assert found[1].asked == task[2].messages[0].text
    other = Graded(task, 2, on_cpu(1, 2))
    other.hear(1, [Part("text", "reply 1")], 1.0)
    other.keep(tmp_path, 4)
    assert len(read_samples(tmp_path)) == 2  # only rank 0 keeps samples


# --- stages --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A base folder with four steps of every stage, and their samples."""
    with small_chain(tmp_path_factory.mktemp("chain"), **SHORT) as base:
        yield base


def kept(base: Path, stage: str) -> dict[int, list[tuple[str, str]]]:
    """What was asked and said by step."""
    found: dict[int, list[tuple[str, str]]] = {}
    for one in read_samples(stage_folder(base, stage)):
        found.setdefault(one.step, []).append((one.asked, one.said))
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_keeps_samples_of_the_same_prompts(stage: str, chain: Path) -> None:
    said = kept(chain, stage)
    assert list(said) == ([0, 2, 4] if stage == "rl" else [2, 4])
    questions = [[asked for asked, _ in pairs] for pairs in said.values()]
    assert all(len(asked) == 4 and asked == questions[0] for asked in questions)


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_samples_change_no_bit_of_what_is_learned(stage: str, chain: Path, base_folder: Path) -> None:
    up_to(stage, chain, base_folder)
    run_stage(stage, **{**SHORT, "samples": 0})
    assert kept(base_folder, stage) == {}
    assert tensors(base_folder, stage, 4) == tensors(chain, stage, 4)


def test_a_run_that_resumes_has_the_samples_of_one_that_never_stopped(chain: Path, base_folder: Path) -> None:
    up_to("sft", chain, base_folder)
    run_stage("sft", save_every=2, keep=0, **SHORT)
    run_stage("sft", save_every=2, keep=0, resume=2, stop_at=3, **SHORT)
    assert list(kept(base_folder, "sft")) == [2]  # what came after step 2 is forgotten
    run_stage("sft", **SHORT)
    assert kept(base_folder, "sft") == kept(chain, "sft")


def a_rank(compute: Compute) -> None:
    shrink(pytest.MonkeyPatch())  # the process ends with the stages
    for stage in ("sft", "rl"):
        run_stage(stage, compute, shard="full", **SHORT)


@pytest.mark.ranks
def test_two_ranks_with_shards_keep_samples_of_the_prompts_of_one(chain: Path, base_folder: Path) -> None:
    up_to("sft", chain, base_folder)
    run_ranks(2, a_rank)
    one, two = kept(chain, "sft"), kept(base_folder, "sft")
    assert {step: [asked for asked, _ in pairs] for step, pairs in two.items()} == {
        step: [asked for asked, _ in pairs] for step, pairs in one.items()
    }
    graded = kept(base_folder, "rl")
    assert list(graded) == [0, 2, 4] and all(len(pairs) == 4 for pairs in graded.values())
