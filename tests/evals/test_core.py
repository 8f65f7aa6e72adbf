"""CORE: prompts as published, the same decisions as with one problem at a time, and a download whole or not at all."""

import hashlib
import io
import json
import math
import shutil
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nanochat.common import UserError, base_dir
from nanochat.data.sources.download import Patience
from nanochat.device import Compute
from nanochat.evals import core as core_eval
from nanochat.evals.core import IclTask, PromptRow, choose_examples, common_prefix, make_rows
from tests.support.file_server import Server
from tests.support.tiny_model import tiny_gpt, tiny_tokenizer

BUNDLE = Path(__file__).parent.parent / "support" / "files" / "eval_bundle"
CPU = Compute(torch.device("cpu"), "cpu", "gloo", 0, 0, 1, torch.float32, "a test")
TOKENIZER = tiny_tokenizer()


class Tape:
    """A cache that keeps the tokens themselves."""

    def __init__(self, slots: int, length: int):
        self.rows, self.length, self.positions = [torch.empty(0, dtype=torch.long)] * slots, length, torch.zeros(slots)

    def clear(self, slots: slice) -> None:
        self.rows[slots] = [torch.empty(0, dtype=torch.long)] * len(self.rows[slots])

    def copy(self, source: int, target: int, tokens: int) -> None:
        assert len(self.rows[source]) == tokens
        self.rows[target] = self.rows[source]


class Induction:
    """A model that completes repetitions: it predicts what followed the longest earlier match of the last tokens."""

    device = torch.device("cpu")

    def new_cache(self, slots: int, length: int) -> Tape:
        return Tape(slots, length)

    def hidden(self, idx: Tensor, context: Any = None) -> Tensor:
        if context is None:
            return self._hidden(idx)
        tape = context.cache
        states = []
        lengths = [idx.size(1)] * len(idx) if context.lengths is None else context.lengths.tolist()
        for slot, (row, length) in enumerate(zip(idx, lengths, strict=True)):
            cached = tape.rows[slot]
            assert len(cached) == context.cached[slot]
            assert len(cached) + len(row) <= tape.length
            states.append(self._hidden(torch.cat((cached, row))[None])[0, -len(row) :])
            tape.rows[slot] = torch.cat((cached, row[:length]))
        return torch.stack(states)

    def _hidden(self, idx: Tensor) -> Tensor:
        x = torch.zeros(*idx.shape, TOKENIZER.vocab_size)
        for b, row in enumerate(idx):
            alike = torch.zeros(len(row))  # per earlier token: how many tokens before it equal the last tokens
            for t in range(1, len(row)):
                alike = torch.where(row == row[t], torch.cat((torch.zeros(1), alike[:-1])) + 1, 0)
                x[b, t].index_add_(0, row[1 : t + 1], alike[:t] + torch.arange(t) / 10_000)
        return x

    def logits(self, x: Tensor) -> Tensor:
        return x

    def token_losses(self, x: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(x, targets, reduction="none")

    def __call__(self, idx: Tensor) -> Tensor:
        return self.hidden(idx)


def task(kind: str, shots: int = 1, delimiter: str = " ") -> IclTask:
    return IclTask("a task", kind, Path("none"), shots, delimiter, 0.25)


# --- prompts -------------------------------------------------------------------------------------


def test_a_multiple_choice_prompt_shows_examples_with_their_answers() -> None:
    shown = {"query": "2 + 2", "choices": ["5", "4"], "gold": 1}
    asked = {"query": "1 + 1", "choices": ["2", "3"], "gold": 0}
    prompts = core_eval.render(task("multiple_choice", 2, "\nA: "), asked, [shown, shown])
    assert prompts == ["2 + 2\nA: 4\n\n2 + 2\nA: 4\n\n1 + 1\nA: 2", "2 + 2\nA: 4\n\n2 + 2\nA: 4\n\n1 + 1\nA: 3"]


def test_a_schema_prompt_varies_the_context() -> None:
    shown = {"context_options": ["He", "She"], "continuation": "sings.", "gold": 1}
    asked = {"context_options": ["It", "They"], "continuation": "rains.", "gold": 0}
    assert core_eval.render(task("schema"), asked, [shown]) == [
        "She sings.\n\nIt rains.",
        "She sings.\n\nThey rains.",
    ]


def test_a_language_modeling_prompt_leaves_no_space_before_the_continuation() -> None:
    shown = {"context": " one two ", "continuation": "three"}
    asked = {"context": "  four five\n", "continuation": "six"}
    prompts = core_eval.render(task("language_modeling"), asked, [shown])
    assert prompts == ["one two three\n\nfour five", "one two three\n\nfour five six"]


def test_examples_are_drawn_as_upstream_draws_them() -> None:
    # random.Random(1234 + number).sample([i for i in range(9) if i != number], 3)
    assert [choose_examples(9, number, 3) for number in (0, 4, 8)] == [[8, 1, 7], [0, 3, 1], [1, 4, 2]]
    for number in range(50):
        drawn = choose_examples(50, number, 49)
        assert sorted(drawn) == [i for i in range(50) if i != number]


def test_judged_is_what_differs() -> None:
    assert common_prefix([[1, 2, 3], [1, 2, 4, 5], [1, 2]]) == 2
    assert common_prefix([[7], [7]]) == 1
    options = [[0, 1, 2, 3], [0, 1, 4]]
    assert make_rows("multiple_choice", 5, options) == [PromptRow(5, options[0], 2), PromptRow(5, options[1], 2)]
    contexts = [[0, 1, 8, 9], [0, 2, 3, 8, 9]]
    assert make_rows("schema", 5, contexts) == [PromptRow(5, contexts[0], 2), PromptRow(5, contexts[1], 3)]
    assert make_rows("language_modeling", 5, [[0, 1], [0, 1, 2, 3]]) == [PromptRow(5, [0, 1, 2, 3], 2)]


def test_at_least_one_token_is_judged_where_options_begin_alike() -> None:
    assert [row.start for row in make_rows("multiple_choice", 0, [[0, 1], [0, 1, 2]])] == [1, 2]
    assert [row.start for row in make_rows("multiple_choice", 0, [[0, 1], [0, 1]])] == [1, 1]
    assert [row.start for row in make_rows("schema", 0, [[0, 1], [0, 2]])] == [1, 1]
    assert [row.start for row in make_rows("language_modeling", 0, [[0, 1, 2], [0, 1, 3]])] == [2]


# --- scores --------------------------------------------------------------------------------------


def one_at_a_time(model: Any, wanted: IclTask) -> list[bool]:
    """The slow reference: one prompt per pass, and its loss from a softmax in float64."""
    problems = core_eval.read_problems(wanted)
    decisions = []
    for number, problem in enumerate(problems):
        examples = [problems[i] for i in choose_examples(len(problems), number, wanted.shots)]
        prompts = [[TOKENIZER.bos, *TOKENIZER.encode(text)] for text in core_eval.render(wanted, problem, examples)]
        scores = []
        for row in make_rows(wanted.kind, 0, prompts):
            with torch.no_grad():
                logits = model(torch.tensor([row.tokens]))[0].double()
            judged = range(row.start, len(row.tokens))
            if wanted.kind == "language_modeling":
                decisions.append(all(int(logits[t - 1].argmax()) == row.tokens[t] for t in judged))
            else:
                scores.append(-sum(float(logits[t - 1].log_softmax(0)[row.tokens[t]]) for t in judged) / len(judged))
        if scores:
            decisions.append(scores.index(min(scores)) == problem["gold"])
    return decisions


@pytest.mark.parametrize("tokens_per_batch", [1, 500, 100_000])
@pytest.mark.parametrize("seed", [None, 2])
def test_batched_decisions_are_those_of_one_problem_at_a_time(seed: int | None, tokens_per_batch: int) -> None:
    model: Any = Induction() if seed is None else tiny_gpt(TOKENIZER.vocab_size, seed=seed)
    for wanted in core_eval.read_bundle(BUNDLE):
        problems = core_eval.read_problems(wanted)
        numbers = range(len(problems))
        batched = core_eval.judge(wanted, problems, numbers, model, TOKENIZER, tokens_per_batch)
        assert batched == one_at_a_time(model, wanted)


def test_core_is_the_mean_of_accuracies_above_chance(capsys: pytest.CaptureFixture[str]) -> None:
    model: Any = Induction()
    core = core_eval.evaluate_core(model, TOKENIZER, BUNDLE, CPU)
    expected = []
    for wanted in core_eval.read_bundle(BUNDLE):
        decisions = one_at_a_time(model, wanted)
        expected.append((sum(decisions) / len(decisions) - wanted.baseline) / (1 - wanted.baseline))
    assert [score.centered for score in core.tasks] == pytest.approx(expected)
    assert core.core == pytest.approx(sum(expected) / 4)
    assert [score.problems for score in core.tasks] == [8, 8, 5, 6]
    assert capsys.readouterr().out.count("| accuracy ") == 4


def test_ranks_share_the_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_gpt(TOKENIZER.vocab_size, seed=2)
    wanted = core_eval.read_bundle(BUNDLE)[0]
    right = []

    def total(values: list[float], compute: Compute) -> list[float]:
        right.append(values[0])
        return values

    monkeypatch.setattr(core_eval.parallel, "total", total)
    monkeypatch.setattr(core_eval.parallel, "least", lambda value, compute: value)
    for rank in range(3):
        compute = Compute(CPU.device, "cpu", "gloo", rank, rank, 3, torch.float32, "a test")
        core_eval.evaluate_task(model, TOKENIZER, wanted, compute)
    assert sum(right) == sum(one_at_a_time(model, wanted))


def test_a_limit_takes_the_first_of_the_shuffled_problems() -> None:
    wanted = core_eval.read_bundle(BUNDLE)[1]
    assert core_eval.read_problems(wanted, 3) == core_eval.read_problems(wanted)[:3]
    assert core_eval.evaluate_task(tiny_gpt(TOKENIZER.vocab_size), TOKENIZER, wanted, CPU, limit=3).problems == 3
    with pytest.raises(UserError, match=r"pick_one shows 3 examples.*raise --max_per_task"):
        core_eval.read_problems(core_eval.read_bundle(BUNDLE)[0], 3)


def test_a_diverged_model_is_refused() -> None:
    model = tiny_gpt(TOKENIZER.vocab_size)
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    with pytest.raises(UserError, match="not finite"):
        core_eval.evaluate_core(model, TOKENIZER, BUNDLE, CPU)


def a_rank(compute: Compute) -> tuple[tuple[str, ...], dict[str, float]]:
    """What a rank left out, and the accuracies of the other tasks; rank 1 cannot compute the task pick_two."""
    judge = core_eval.judge

    def judged(task: IclTask, *args: Any) -> list[bool]:
        if compute.rank == 1 and task.label == "pick_two":
            raise UserError("the model's loss is not finite")
        return judge(task, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_eval, "judge", judged)
        found = core_eval.evaluate_core(tiny_gpt(TOKENIZER.vocab_size, seed=2), TOKENIZER, BUNDLE, compute)
    return found.broken, {score.label: score.accuracy for score in found.tasks}


@pytest.mark.ranks
def test_ranks_leave_out_together_a_task_that_one_of_them_cannot_compute(pool: Any) -> None:
    alone = core_eval.evaluate_core(tiny_gpt(TOKENIZER.vocab_size, seed=2), TOKENIZER, BUNDLE, CPU)
    expected = {score.label: score.accuracy for score in alone.tasks if score.label != "pick_two"}
    assert pool.run(2, a_rank) == [(("pick_two",), expected)] * 2


# --- the bundle ----------------------------------------------------------------------------------


def test_the_bundle_is_found_in_the_base_folder_or_where_the_flag_says(tmp_path: Path) -> None:
    assert core_eval.find_bundle() is None
    assert core_eval.find_bundle(BUNDLE) == BUNDLE
    with pytest.raises(UserError, match=r"no core\.yaml") as refused:
        core_eval.find_bundle(tmp_path)
    assert refused.value.exit_code == 2
    shutil.copytree(BUNDLE, base_dir() / "eval_bundle")
    assert core_eval.find_bundle() == base_dir() / "eval_bundle"


def test_read_bundle_gives_delimiters_and_baselines() -> None:
    tasks = core_eval.read_bundle(BUNDLE)
    assert [(one.label, one.shots, one.delimiter) for one in tasks] == [
        ("pick_one", 3, "\nAnswer: "),
        ("pick_two", 0, " "),
        ("who", 2, " "),
        ("finish", 1, " "),
    ]
    assert [one.baseline for one in tasks] == pytest.approx([1 / 3, 0.5, 0.5, 0], abs=1e-5)


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("core.yaml", "icl_tasks:", "icl_task:", r"differs from the published one \(KeyError"),
        ("core.yaml", "icl_tasks:", "icl_tasks: {", "differs from the published one"),
        ("core.yaml", "schema", "generation", "icl_task_type must be one of"),
        ("core.yaml", "language/who", "language/where", r"no file .*where\.jsonl"),
        ("core.yaml", "language/who", "../core.yaml/../../who", "dataset_uri must name a file in"),
        ("core.yaml", "language/who.jsonl", "/etc/passwd", "dataset_uri must name a file in"),
        ("eval_meta_data.csv", ",50,TRUE,who", ",100,TRUE,who", "must be 0 to below 100, got 100"),
        ("eval_meta_data.csv", ",50,TRUE,who", ",nan,TRUE,who", "must be 0 to below 100, got nan"),
        ("eval_meta_data.csv", "who,", "whose,", r"differs from the published one \(KeyError"),
        ("eval_meta_data.csv", ",50,TRUE,who", ",half,TRUE,who", "differs from the published one"),
    ],
)
def test_a_changed_bundle_is_refused(tmp_path: Path, file: str, old: str, new: str, message: str) -> None:
    folder = Path(shutil.copytree(BUNDLE, tmp_path / "bundle"))
    text = (folder / file).read_text()
    assert old in text
    (folder / file).write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=message):
        core_eval.read_bundle(folder)


def test_a_bundle_without_tasks_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLE, tmp_path / "bundle"))
    (folder / "core.yaml").write_text("icl_tasks: []\n")
    with pytest.raises(UserError, match="lists no task"):
        core_eval.read_bundle(folder)


def test_a_data_file_that_links_out_of_the_bundle_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(BUNDLE, tmp_path / "bundle"))
    (file,) = folder.rglob("who.jsonl")
    file.rename(tmp_path / "who.jsonl")
    file.symlink_to(tmp_path / "who.jsonl")
    with pytest.raises(UserError, match="dataset_uri must name a file in"):
        core_eval.read_bundle(folder)


@pytest.mark.parametrize(
    "line", ["{", "5", '{"query": "", "choices": []}', '{"query": "", "choices": ["a"], "gold": 1}']
)
def test_a_broken_problem_is_named_by_file_and_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"query": "", "choices": ["a"], "gold": 0}) + "\n" + line + "\n")
    with pytest.raises(UserError, match=r"problems\.jsonl, line 2: "):
        core_eval.read_problems(IclTask("a task", "multiple_choice", path, 0, " ", 0.0))


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        yield server
        server.shutdown()


def zipped(folder: Path) -> bytes:
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        for path in folder.rglob("*"):
            archive.write(path, Path("eval_bundle") / path.relative_to(folder))
    return held.getvalue()


def test_a_downloaded_bundle_is_unpacked_in_place(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    packed = zipped(BUNDLE)
    server.files["/eval_bundle.zip"] = packed
    assert core_eval.download_bundle(f"{server.url}/eval_bundle.zip") == core_eval.find_bundle()
    assert len(core_eval.read_bundle(base_dir() / "eval_bundle")) == 4
    assert [path.name for path in base_dir().iterdir()] == ["eval_bundle"]
    assert hashlib.sha256(packed).hexdigest() in capsys.readouterr().out


def test_a_page_in_place_of_the_bundle_is_refused_and_nothing_is_unpacked(server: Server) -> None:
    server.files["/eval_bundle.zip"] = b"<html>Please sign in</html>"
    with pytest.raises(UserError, match=r"not a zip archive(.|\n)*/eval_bundle, or give --eval_bundle"):
        core_eval.download_bundle(f"{server.url}/eval_bundle.zip", Patience(attempts=1))
    assert core_eval.find_bundle() is None


@pytest.mark.parametrize("bound", ["MAX_PACKED_BYTES", "MAX_UNPACKED_BYTES", "MAX_FILES"])
def test_a_bundle_that_is_too_large_is_refused_and_not_kept(
    server: Server, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/eval_bundle.zip"] = zipped(BUNDLE)
    monkeypatch.setattr(core_eval, bound, 2)
    with pytest.raises(UserError, match=r"at most 2\b|of 2\b"):
        core_eval.download_bundle(f"{server.url}/eval_bundle.zip", Patience(attempts=1))
    assert list(base_dir().iterdir()) == []


def test_a_folder_that_is_in_the_way_of_a_download_is_named_before_it(server: Server) -> None:
    (base_dir() / "eval_bundle").mkdir()
    (base_dir() / "eval_bundle" / "notes.txt").touch()
    with pytest.raises(UserError, match="eval_bundle exists already"):
        core_eval.download_bundle(f"{server.url}/eval_bundle.zip", Patience(attempts=1))
