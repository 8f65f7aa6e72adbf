"""What each stage learns from: the published mixtures from local folders, your own file, and the held-out part."""

import json
from collections import Counter
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

import pytest

from nanochat.common import UserError, sha256_of
from nanochat.data.conversation import Conversation, chat
from nanochat.data.tinyworld import world as tinyworld
from tasks import mixtures
from tasks.mixtures import HELD_OUT, Mix, mix, own_conversations, rl_tasks
from tasks.spellingbee import SimpleSpelling, SpellingBee

DATA = Path(__file__).parent.parent / "support" / "files" / "tasks"


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NANOCHAT_TASK_DIR", str(DATA))


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture of TinyWorld with 1,800 conversations, which are made in no time."""
    make = tinyworld.sft_conversations
    monkeypatch.setattr(tinyworld, "sft_conversations", lambda seed: make(seed, 1800))


def lines(name: str) -> int:
    return len((DATA / name).read_text(encoding="utf-8").splitlines())


def counts(made: Mix) -> Counter[str]:
    """How many conversations of each task there are."""
    mixture = made.conversations
    return Counter(mixture.locate(i)[0].name for i in range(len(mixture)))  # type: ignore[attr-defined]


def test_the_published_mixtures(local: None) -> None:
    mid, sft = (counts(mix(stage, "fineweb", 1)) for stage in ("mid", "sft"))
    both = {"SmolTalk": "smol-smoltalk/data", "GSM8K": "gsm8k/main"}
    sizes = {name: lines(f"{folder}/train.jsonl") for name, folder in both.items()}
    identity = len(tinyworld.identity_conversations())
    spelling = {"SimpleSpelling": 200_000, "SpellingBee": 80_000}
    assert mid == {**sizes, "MMLU": lines("mmlu/auxiliary_train/train.jsonl"), "Identity": 2 * identity, **spelling}
    arc = {name: lines(f"ai2_arc/{name}/train.jsonl") for name in ("ARC-Easy", "ARC-Challenge")}
    assert sft == {**sizes, **arc, "Identity": identity, "SimpleSpelling": 300, "SpellingBee": 300}


def test_published_conversations_end_with_the_assistant_and_follow_the_seed(local: None) -> None:
    one, two, other = (list(mix("sft", "fineweb", seed).train()) for seed in (1, 1, 2))
    assert one == two and one != other
    assert all(conversation.messages[-1].role == "assistant" for conversation in one)


def test_the_published_rl_tasks(local: None) -> None:
    train, test = rl_tasks("fineweb")
    assert train.name == test.name == "GSM8K"
    assert len(train) == lines("gsm8k/main/train.jsonl") and len(test) == lines("gsm8k/main/test.jsonl")


def numbered(size: int) -> Mix:
    return Mix("numbers", "key", lambda: [chat(str(i), "yes") for i in range(size)])


@pytest.mark.parametrize("size", [1, 49, 50, 51, 1000])
def test_the_hold_out_and_the_rest_are_disjoint_and_whole(size: int) -> None:
    made = numbered(size)
    train, val = ([conversation.messages[0].text for conversation in part()] for part in (made.train, made.val))
    assert not set(train) & set(val)
    assert sorted([*train, *val], key=int) == [str(i) for i in range(size)]
    assert len(val) == -(-size // HELD_OUT)


def test_conversations_are_made_once_and_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    monkeypatch.setattr(tinyworld, "sft_conversations", lambda seed: made.append(seed) or [chat("a", "b")] * 3)
    mixture = mix("sft", "tinyworld", 5)
    assert mixture.key and not made
    assert len(list(mixture.train())) + len(list(mixture.val())) == 3
    assert made == [5]


def test_a_curriculum_is_chosen_by_the_traits_of_the_corpus() -> None:
    assert mixtures.curriculum("tinyworld") is mixtures.CURRICULA["tinyworld"]
    for corpus in ("fineweb", "tinyworld:1,fineweb:1", None):
        assert mixtures.curriculum(corpus) is mixtures.CURRICULA["published"]


def test_keys_of_prepared_conversations_stay_the_same_unless_copies_of_them_were_trained() -> None:
    version = tinyworld.VERSION
    assert mix("mid", "tinyworld", 7).key == f"tinyworld mid 7 {version}"
    assert mix("sft", "tinyworld", 8).key == f"tinyworld sft 8 {version}"
    assert mix("mid", "fineweb", 7).key == f"published mid 7 {version}, copies held out together"
    assert mix("sft", "fineweb", 7).key == f"published sft 7 {version}"
    assert (mix("mid", "tinyworld", 7).name, mix("sft", "x", 7).name) == ("TinyWorld", "SmolTalk and tasks")


def test_every_curriculum_has_a_measure_of_its_own_name() -> None:
    seen: set[str] = set()
    for one in mixtures.CURRICULA.values():
        names = set(one.measures(False))
        assert names and not names & seen
        seen |= names


def write_own(path: Path, count: int) -> None:
    turns = ([{"role": "user", "content": f"问 {i}"}, {"role": "assistant", "content": "答"}] for i in range(count))
    path.write_text("".join(json.dumps(one, ensure_ascii=False) + "\n" for one in turns), encoding="utf-8")


@pytest.mark.parametrize(("count", "held_out"), [(2, [1]), (20, [19]), (50, [49]), (120, [49, 99])])
def test_your_own_file_takes_the_place_of_the_mixture(tmp_path: Path, count: int, held_out: list[int]) -> None:
    path = tmp_path / "own.jsonl"
    write_own(path, count)
    made = mix("sft", "tinyworld", 1, str(path))
    assert asked(made.val()) == [f"问 {i}" for i in held_out], "the first conversation is trained"
    assert asked(made.train()) == [f"问 {i}" for i in range(count) if i not in held_out]
    key = made.key
    write_own(path, count + 1)
    assert mix("sft", "tinyworld", 1, str(path)).key != key  # a changed file is prepared again


def test_your_own_file_in_the_home_folder_needs_two_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_own(tmp_path / "own.jsonl", 2)
    assert len(list(mix("sft", "tinyworld", 1, "~/own.jsonl").train())) == 1
    write_own(tmp_path / "own.jsonl", 1)  # it would be held out, and none would be left to train on
    with pytest.raises(UserError, match="at least 2 conversations"):
        mix("sft", "tinyworld", 1, "~/own.jsonl")


def test_identity_is_in_both_languages() -> None:
    said = [conversation.messages[0].text for conversation in map(mixtures.Identity().__getitem__, range(20))]
    assert any(text.isascii() for text in said) and any(not text.isascii() for text in said)


def test_your_conversations_are_one_in_ten_of_the_mixture_in_an_order_that_follows_the_seed(tmp_path: Path) -> None:
    pair = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "I am Pip."}]
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps(pair) + "\n" for _ in range(20)), encoding="utf-8")
    made, again, other = (mix("sft", "tinyworld", seed, added=str(path)) for seed in (1, 1, 2))
    plain, mixed = list(mix("sft", "tinyworld", 1).conversations), list(made.conversations)
    yours = chat("Who are you?", "I am Pip.")
    count = mixed.count(yours)
    assert 0.095 < count / len(mixed) < 0.105 and count % 20 == 0
    assert sorted(map(str, mixed)) == sorted(map(str, [*plain, *[yours] * count]))  # nothing of the mixture is lost
    assert mixed == list(again.conversations) and mixed != list(other.conversations)
    assert made.key == again.key and str(path) in made.name
    path.write_text(path.read_text() + json.dumps(pair) + "\n")
    assert mix("sft", "tinyworld", 1, added=str(path)).key != made.key


def test_replacing_and_adding_at_once_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--conversations replaces the mixture and --mix adds to it") as refused:
        mix("sft", "tinyworld", 1, "a.jsonl", "b.jsonl")
    assert refused.value.exit_code == 2


# --- copies --------------------------------------------------------------------------------------


def asked(conversations: Iterable[Conversation]) -> list[str]:
    return [conversation.messages[0].text for conversation in conversations]


@pytest.mark.parametrize(
    ("weights", "times", "held_out"),
    [
        ([""], 1, list(range(9, 120, 10))),  # the last of every ten: files begin with what matters most
        ([":2"], 2, [49, 99]),  # of repeated conversations the last of every 50
        ([":1", ""], 2, [49, 99]),  # the same file twice
        ([":30"], 30, [49, 99]),
    ],
)
def test_a_conversation_that_is_held_out_is_trained_in_no_copy(
    tmp_path: Path, weights: list[str], times: int, held_out: list[int]
) -> None:
    path = tmp_path / "own.jsonl"
    write_own(path, 120)
    made = own_conversations([f"{path}{weight}" for weight in weights])
    assert asked(made.val()) == [f"问 {i}" for i in held_out]
    trained = Counter(asked(made.train()))
    assert trained == {f"问 {i}": times for i in range(120) if i not in held_out}
    assert times == 1 or made.key != sha256(f"{times} {sha256_of(path)}".encode()).hexdigest(), "kept by old versions"


def test_of_a_few_repeated_conversations_the_last_is_held_out(tmp_path: Path) -> None:
    few, many = tmp_path / "few.jsonl", tmp_path / "many.jsonl"
    write_own(few, 20)
    assert asked(own_conversations([f"{few}:3"]).val()) == ["问 19"]
    write_own(many, 200)
    made = own_conversations([f"{few}:3", str(many)])
    trained = Counter(asked(made.train()))
    assert asked(made.val()) == [f"问 {i}" for i in (49, 99, 149, 199)]
    assert all(trained[f"问 {i}"] == 4 for i in range(20)), "a short file beside others is learned whole"
    one = tmp_path / "one.jsonl"
    write_own(one, 1)
    with pytest.raises(UserError, match="at least 2 conversations that differ, since one is for validation, got 1"):
        own_conversations([f"{one}:2"])


def test_a_record_that_two_files_or_two_lines_hold_is_trained_or_held_out_in_all_copies(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    write_own(first, 100)
    second.write_text(first.read_text("utf-8") + first.read_text("utf-8"), "utf-8")
    first.write_text("\n".join(reversed(first.read_text("utf-8").splitlines())), "utf-8")
    made = own_conversations([str(first), str(second)])
    held_out = {f"问 {i}" for i in range(0, 100, 10)}  # the last of every ten, from the last line on
    assert Counter(asked(made.val())) == dict.fromkeys(held_out, 1)
    assert Counter(asked(made.train())) == {f"问 {i}": 3 for i in range(100) if f"问 {i}" not in held_out}


@pytest.mark.parametrize(("count", "held_out"), [(2, 1), (9, 1), (100, 10), (900, 30), (1500, 30), (5000, 100)])
def test_your_own_files_leave_thirty_conversations_for_validation_or_a_tenth(
    tmp_path: Path, count: int, held_out: int
) -> None:
    path = tmp_path / "own.jsonl"
    write_own(path, count)
    made = own_conversations([str(path)])
    val = asked(made.val())
    assert len(val) == held_out and len(asked(made.train())) == count - held_out
    assert "问 0" not in val


@pytest.mark.parametrize(("count", "held_out"), [(1, []), (50, [49]), (120, [49, 99])])
def test_conversations_that_are_added_are_trained_or_held_out_in_all_copies(
    tmp_path: Path, count: int, held_out: list[int]
) -> None:
    path = tmp_path / "own.jsonl"
    write_own(path, count)
    made, without = mix("sft", "tinyworld", 1, added=str(path)), mix("sft", "tinyworld", 1)
    yours = {f"问 {i}" for i in range(count)}
    trained = Counter(text for text in asked(made.train()) if text in yours)
    assert sorted(text for text in asked(made.val()) if text in yours) == sorted(f"问 {i}" for i in held_out)
    assert trained.keys() == yours - {f"问 {i}" for i in held_out} and len(set(trained.values())) == 1
    of_mixture = [text for text in asked(made.val()) if text not in yours]
    assert sorted(of_mixture) == sorted(asked(without.val())), "the mixture's own are held out as without yours"


def test_a_file_that_needs_no_copies_is_held_out_by_place_as_before(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    write_own(path, 2000)
    made = mix("sft", "tinyworld", 1, added=str(path))
    everything = list(made.conversations)
    assert list(made.val()) == everything[::HELD_OUT]


def test_who_the_assistant_is_comes_twice_and_is_held_out_twice(local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixtures, "SimpleSpelling", lambda size: SimpleSpelling(200))
    monkeypatch.setattr(mixtures, "SpellingBee", lambda size: SpellingBee(80))
    made = mix("mid", "fineweb", 1)
    trained, held_out = Counter(made.train()), Counter(made.val())
    identity = set(tinyworld.identity_conversations())
    assert any(one in identity for one in held_out)
    for one in identity:
        assert (trained[one], held_out[one]) in ((2, 0), (0, 1))


def test_files_with_keys_that_were_passed_over_once_are_tokenised_again(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for name, record in (("plain", {"messages": messages}), ("with", {"system": "Be short.", "messages": messages})):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(f"{json.dumps(record)}\n" * 2)
        key = f"{path} {sha256_of(path)}, the last held out"
        assert (mix("sft", "mine", 1, custom=str(path)).key == key) is (name == "plain")
