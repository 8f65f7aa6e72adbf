"""The benchmark of a persona: what training reads, and what is asked."""

from pathlib import Path

from bench.persona import REWORDED, others, questions, write_conversations
from tasks.customjson import CustomJSON


def test_training_reads_plain_conversations_of_tinyworld(tmp_path: Path) -> None:
    write_conversations(tmp_path / "others.jsonl", others(50))
    read = CustomJSON(tmp_path / "others.jsonl")
    assert len(read) == 50
    assert {part.kind for i in range(50) for message in read[i].messages for part in message.parts} == {"text"}
    assert any(not read[i].messages[0].text.isascii() for i in range(50)), "both languages"


def test_rewordings_are_new_questions_about_facts_of_the_persona() -> None:
    known = questions()
    assert len(known) == 20 and not set(known) & set(REWORDED)
    assert all(any(fact in answer for answer in known.values()) for fact in REWORDED.values())
