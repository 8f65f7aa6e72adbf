"""Spelling and counting letters: every generated solution is true."""

from collections import Counter

from nanochat.data import calculator
from tasks.spellingbee import SimpleSpelling, SpellingBee, words, words_of


def test_spelling_bee_is_right_by_hand_and_by_tool() -> None:
    for split in ("train", "test"):
        task = SpellingBee(size=200, split=split)
        for i, conversation in enumerate(task):
            question, solution = conversation.messages
            call, output = (next(p.text for p in solution.parts if p.kind == k) for k in ("python", "python_output"))
            assert calculator.calculate(call) == output
            word, letter = call.split("'")[1], call.split("'")[3]
            assert word in question.text
            assert letter in question.text
            assert word in words_of(split)
            assert f"{letter} {output}\n" in solution.text or output == "0"
            assert f"{letter} {int(output) + 1}\n" not in solution.text
            assert task.grade(i, solution.text) == 1.0
            assert task.grade(i, f"#### {int(output) + 1}") == 0.0


def test_spelling_bee_asks_in_both_languages_and_sometimes_for_an_absent_letter() -> None:
    questions = [conversation.messages[0].text for conversation in SpellingBee(size=300)]
    chinese = sum(not question.isascii() for question in questions)
    assert 50 < chinese < 150
    assert len(set(questions)) > 290
    answers = Counter(conversation.messages[1].parts[2].text for conversation in SpellingBee(size=300))
    assert answers["0"] > 5
    assert answers["2"] > 20


def test_words_of_train_and_test_are_apart() -> None:
    assert set(words_of("train")) | set(words_of("test")) == set(words())
    assert not set(words_of("train")) & set(words_of("test"))
    assert 150 < len(words_of("test")) < 250
    assert len(words()) == len(set(words())) > 2000


def test_simple_spelling_spells() -> None:
    for conversation in SimpleSpelling(size=50, split="test"):
        word, _, spelled = conversation.messages[1].text.partition(": ")
        assert spelled.replace(" ", "") == word
        assert word in conversation.messages[0].text
