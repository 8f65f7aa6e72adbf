"""Measures a model on tasks while it trains: CORE of base models, and the tasks of chat models.

Every measurement asks the same problems, so that the figures make a curve.
"""

import functools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nanochat.checkpoint_manager.copies import served_copy
from nanochat.common import UserError, log, required_appendix, tr, warn
from nanochat.data.conversation import Conversation, Part, Task
from nanochat.data.traits import traits
from nanochat.device import Compute
from nanochat.generate.sampling import Sampling
from nanochat.model import Model
from nanochat.runtime import parallel
from nanochat.tokenizer import Tokenizer
from nanochat.train.flags import CoreFlags

SHARE = 0.01  # the most that --core_every=auto spends, as a share of a run's FLOPs
MOST_TIMES = 20  # measurements of a run with --core_every=auto, at most
PASSES = 3  # a training step computes three times what reading its tokens alone does
# A reply is decoded token by token, which keeps a device less busy than reading does: a decoded
# token takes the time of this many tokens that are read together. The host's number is measured
# (dev/LOG.md), and the other one is an estimate.
DECODING = 50
DECODING_ON_HOST = 4
CHAT_SHARE = 8  # chat stages ask an eighth of --core_examples, since their tasks write replies
CHAT_BATCH = 32  # problems that are answered together
LONGEST_REPLY = 512  # tokens
SEED = 1337  # chooses the problems of chat tasks

Measures = Mapping[str, Callable[[], Task]]  # by name; a call reads the data of the task
Evaluate = Callable[[Model], float | None]  # the figure of a model that is not sharded
Prepare = Callable[[], tuple[int, Evaluate]]  # the cost of a measurement in tokens that are read


@dataclass(frozen=True)
class TrainingRun:
    """What decides whether a run is measured, and how often."""

    corpus: str
    steps: int
    tokens: int  # tokens of all steps
    own_data: bool = False  # whether a chat stage learns from other conversations than its corpus's


class TaskScores:
    """Measures one figure of a model on tasks. Every rank creates one, and calls it together.

    A measurement is due every `every` steps; 0 means never.
    """

    def __init__(
        self,
        every: int,
        figure: str,
        evaluate: Evaluate,
        model: Model,
        compute: Compute,
    ):
        """Prepare to measure `figure`, the name in metrics.jsonl, by calling `evaluate`."""
        self.every = every
        self.figure = figure
        self.evaluate = evaluate
        self.model = model
        self.compute = compute

    def measure(self, step: int) -> dict[str, float]:
        """Return the figure by its name, or an empty dict, after a warning, if it has no value.

        The model may be sharded: a copy that is not sharded is measured. Raises signals.Stopped on
        every rank if the run is asked to stop.
        """
        start = time.perf_counter()
        try:
            score = self.evaluate(served_copy(self.model, self.compute))
        except UserError as why:  # training goes on: a figure is not worth a run
            warn(
                tr(
                    "step {step}: {figure} is left out: {why}",
                    step=step,
                    figure=self.figure,
                    why=why,
                )
            )
            return {}
        if score is None:
            return {}
        seconds = time.perf_counter() - start
        log(f"step {step:05d} | {self.figure}: {score:.4f} ({seconds:.1f} s)")
        return {self.figure: score}


def of_base_model(
    flags: CoreFlags, training: TrainingRun, model: Model, tokenizer: Tokenizer, compute: Compute
) -> TaskScores:
    """Return the TaskScores of pretraining, which measure CORE.

    Raises UserError if --core_every asks for a measurement that is impossible here, for example
    because the eval bundle is missing. If it is "auto", one line in the log says so instead.
    """

    def prepare() -> tuple[int, Evaluate]:
        core = required_appendix("nanochat.evals.core", "--core_every")
        bundle = core.find_bundle()
        if bundle is None:
            raise UserError(
                tr(
                    "there is no eval bundle in the base folder. "
                    "`python -m scripts.base_eval --download_only` fetches it (162 MB)"
                )
            )
        examples = flags.core_examples
        most_shots = max(task.shots for task in core.read_bundle(bundle))
        if examples <= most_shots:
            raise UserError(
                tr(
                    "--core_examples must be above {shots}, the examples that a prompt of CORE "
                    "shows, got {examples}",
                    shots=most_shots,
                    examples=examples,
                ),
                exit_code=2,
            )
        tokens_per_batch = compute.platform.evaluation_rows * model.config.sequence_len
        # Reading them again takes longer than a card needs for a measurement (dev/LOG.md).
        read = functools.cache(core.read_problems)

        def evaluate(served: Model) -> float | None:
            return core.evaluate_core(
                served,
                tokenizer,
                bundle,
                compute,
                examples,
                tokens_per_batch,
                log_tasks=False,
                read=read,
            ).core

        return core.count_tokens(bundle, examples, tokenizer, read), evaluate

    every, evaluate = _prepared(flags, training, "CORE", prepare, compute)
    return TaskScores(every, "core", evaluate, model, compute)


def of_chat_model(
    flags: CoreFlags,
    training: TrainingRun,
    measures: Measures,
    model: Model,
    tokenizer: Tokenizer,
    compute: Compute,
) -> TaskScores:
    """Return the TaskScores of a chat stage, which measure ChatCORE over the tasks of `measures`.

    For TinyWorld, that is the mean over its own tasks. Replies are decoded greedily, and have at
    most twice as many tokens as the longest reference answer of their task. A run with data of its
    own measures nothing by default. Raises UserError as of_base_model() does, and if a task cannot
    be read.
    """

    def prepare() -> tuple[int, Evaluate]:
        chat = required_appendix("nanochat.evals.chat", "--core_every")
        count = max(flags.core_examples // CHAT_SHARE, 1)
        tasks = [
            TaskSample(read_task(), count, tokenizer, chat.grade_reply)
            for read_task in measures.values()
        ]
        decoding = DECODING if compute.platform.has_own_memory else DECODING_ON_HOST
        cost = 0
        for task in tasks:
            cost += task.prompt_tokens
            if task.kind != "choice":
                cost += len(task) * task.longest_reply * decoding

        def evaluate(served: Model) -> float | None:
            scores = []
            for task in tasks:
                sampling = Sampling(temperature=0.0, max_tokens=task.longest_reply)
                score = chat.evaluate(
                    task,
                    served,
                    tokenizer,
                    compute,
                    sampling,
                    batch_size=CHAT_BATCH,
                    shown=False,
                )
                scores.append((score.accuracy, score.baseline))
            return chat.chat_core(scores)

        return cost, evaluate

    if training.own_data and flags.core_every == "auto":
        return TaskScores(0, "chat_core", _nothing, model, compute)
    every, evaluate = _prepared(flags, training, "ChatCORE", prepare, compute)
    return TaskScores(every, "chat_core", evaluate, model, compute)


def _prepared(
    flags: CoreFlags, training: TrainingRun, title: str, prepare: Prepare, compute: Compute
) -> tuple[int, Evaluate]:
    """Return the number of steps between measurements, 0 for never, and the function that measures.

    Raises UserError as `prepare` does, unless --core_every is "auto".
    """
    if flags.core_every == 0:
        return 0, _nothing
    if flags.core_every != "auto":
        return flags.core_every, _on_all_ranks(title, prepare, compute)[1]
    if title == "CORE" and traits(training.corpus).curriculum == "tinyworld":
        return 0, _nothing  # CORE asks for knowledge that TinyWorld does not have
    try:
        cost, evaluate = _on_all_ranks(title, prepare, compute)
    except UserError as why:
        log(tr("{title} is not measured while training: {why}", title=title, why=why))
        return 0, _nothing
    every = affordable_every(cost, training.tokens, training.steps)
    if not every:
        log(
            tr(
                "{title} is not measured while training: a measurement would cost {percent:.1f} % "
                "of this run. --core_every=N measures it all the same",
                title=title,
                percent=100 * cost / (PASSES * training.tokens),
            )
        )
    return every, evaluate


def _on_all_ranks(title: str, prepare: Prepare, compute: Compute) -> tuple[int, Evaluate]:
    """Return the result of prepare(), or raise UserError on every rank if any rank's call does."""
    failure = None
    prepared = None
    try:
        prepared = prepare()
    except UserError as why:
        failure = why
    if not parallel.least(int(prepared is not None), compute) or prepared is None:
        raise failure or UserError(
            tr("{title} cannot be measured on another rank, whose message says why", title=title)
        )
    return prepared


def _nothing(_: Model) -> None:
    """Measure nothing."""


def affordable_every(cost: int, tokens: int, steps: int) -> int:
    """Return the number of steps between measurements that take 1 % (SHARE) of a run's FLOPs.

    A measurement takes as long as reading `cost` tokens, and the run trains on `tokens` tokens.
    There are at most 20 (MOST_TIMES) measurements. Returns 0 if a single one costs too much.
    """
    times = affordable_times(cost, tokens)
    return math.ceil(steps / times) if times else 0


def affordable_times(cost: int, tokens: float) -> int:
    """Return how many measurements affordable_every() affords in a run, whatever its steps."""
    return min(math.floor(SHARE * PASSES * tokens / max(cost, 1)), MOST_TIMES)


class TaskSample:
    """A few problems of a task, drawn with a fixed seed, as a task of their own."""

    def __init__(
        self,
        task: Task,
        count: int,
        tokenizer: Tokenizer,
        grade_reply: Callable[[Task, int, list[Part]], float],
    ):
        """Draw `count` problems, or all if there are fewer, and measure them in tokens."""
        self.task = task
        self.name = task.name
        self.kind = task.kind
        self._grade_reply = grade_reply
        total = len(task)
        self._numbers = sorted(random.Random(SEED).sample(range(total), min(count, total)))
        answers = [len(self._answer(i, tokenizer)) for i in range(len(self))]
        self.longest_reply = min(2 * max(answers), LONGEST_REPLY)
        self.prompt_tokens = sum(len(tokenizer.render_prompt(self[i])) for i in range(len(self)))

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, i: int) -> Conversation:
        return self.task[self._numbers[i]]

    def letters(self, i: int) -> Sequence[str]:
        """Return the letters to choose from in problem i."""
        return self.task.letters(self._numbers[i])

    def grade(self, i: int, reply: str) -> float:
        """Return the grade of a letter or a text."""
        return self.task.grade(self._numbers[i], reply)

    def grade_parts(self, i: int, parts: list[Part]) -> float:
        """Return the grade of a reply that may have calls of the calculator."""
        return self._grade_reply(self.task, self._numbers[i], parts)

    def _answer(self, i: int, tokenizer: Tokenizer) -> list[int]:
        """Return the tokens that the reference answer of problem i adds to its prompt."""
        answer = self[i].messages[-1]
        return tokenizer.encode("".join(part.text for part in answer.parts))
