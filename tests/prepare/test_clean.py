"""Near-duplicates and contaminated documents are left out of the tokens, alike with any number of processes."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from nanochat.common import UserError
from nanochat.data.corpora import Corpus, dropped_summary, list_of_dropped, shards
from nanochat.data.shards import read_about, texts
from nanochat.prepare.__main__ import Config, main
from nanochat.prepare.clean import clean, take_back
from nanochat.prepare.documents import prepare_documents
from nanochat.tokenizer import tokenizer_dir
from tests.prepare.test_minhash import CHINESE, ENGLISH, changed, text_of
from tests.prepare.test_prepare import TOKENIZER, decoded, make_corpus

ORIGINALS = [
    text_of(CHINESE[:300] if n % 2 else ENGLISH, n, 120, "" if n % 2 else " ") for n in range(300)
]  # each far from the others
COPIES = [changed(text, 0.02, n) for n, text in enumerate(ORIGINALS[:90])]


@pytest.fixture
def corpus() -> Corpus:
    order = np.random.default_rng(0).permutation(len(ORIGINALS) + len(COPIES))
    return make_corpus([(ORIGINALS + COPIES)[n] for n in order])


def tokens_of(corpus: Corpus) -> list[str]:
    return [text for split in ("val", "train") for text in decoded(prepare_documents(corpus, TOKENIZER, split))]


def everything(corpus: Corpus) -> list[str]:
    return [text for split in ("val", "train") for text in texts(shards(corpus, split))]


def test_one_of_each_pair_is_left_out_and_nothing_else(corpus: Corpus) -> None:
    about = clean(corpus, True, None, False)
    assert about["near_duplicates"] == about["documents"] == len(COPIES) and about["of"] == 390
    kept = Counter(tokens_of(corpus))
    assert not kept - Counter(everything(corpus)) and kept.total() == len(ORIGINALS)
    for number, copy in enumerate(COPIES):
        assert sum(kept[text] for text in {ORIGINALS[number], copy}) == 1


def test_a_copy_of_a_validation_document_is_left_out_of_training() -> None:
    partners = {text: changed(text, 0.02, n) for n, text in enumerate(ORIGINALS)}
    partners |= {copy: text for text, copy in partners.items()}
    corpus = make_corpus([*partners])
    held_out = list(texts(shards(corpus, "val")))
    clean(corpus, True, None, False)
    kept = decoded(prepare_documents(corpus, TOKENIZER, "train"))
    assert decoded(prepare_documents(corpus, TOKENIZER, "val")) == held_out and len(held_out) > 5
    assert not {partners[text] for text in held_out} & {*kept} - {*held_out}


def test_the_result_is_the_same_with_processes_and_a_second_time(corpus: Corpus) -> None:
    clean(corpus, True, None, False, processes=1)
    first = [list_of_dropped(path).read_bytes() for path in shards(corpus, "train")], read_about(corpus.folder)
    clean(corpus, True, None, False, processes=3)
    again = [list_of_dropped(path).read_bytes() for path in shards(corpus, "train")], read_about(corpus.folder)
    assert first == again
    assert not [path for path in (corpus.folder / "dropped").iterdir() if path.suffix != ".npy"]


def test_contaminated_documents_are_counted_and_left_out_only_when_asked(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = tmp_path / "sets"
    for name, numbers in (("gsm8k", (100, 102)), ("ceval-exam", (101, 103, 105))):
        (sets / name).mkdir(parents=True)
        rows = [json.dumps({"question": ORIGINALS[n][: 60 if n % 2 else 600]}) for n in numbers]
        (sets / name / "test.jsonl").write_text("\n".join(rows))
    (sets / "cmmlu").mkdir()
    about = clean(corpus, False, sets, False)
    assert about["check_against"] == {"ceval-exam": 3, "gsm8k": 2} and about["documents"] == 0
    assert read_about(corpus.folder)["dropped"]["contaminated"] == 5
    said = capsys.readouterr()
    assert "5 of 390 documents hold a passage of an evaluation (ceval-exam 3, gsm8k 2)" in said.out
    assert "has no text to look for in cmmlu, so documents with questions of these evaluations stay" in said.err
    assert len(tokens_of(corpus)) == 390
    about = clean(corpus, True, sets, True, processes=2)
    assert about["documents"] == len(COPIES) + 5
    kept = set(tokens_of(corpus))
    assert not kept & {ORIGINALS[n] for n in (100, 101, 102, 103, 105)} and ORIGINALS[104] in kept


def test_counting_keeps_what_was_left_out_earlier(
    corpus: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "test.jsonl").write_text(json.dumps({"q": ORIGINALS[0]}) + "\n")
    before = clean(corpus, True, None, False)
    assert clean(corpus, False, tmp_path, False)["contaminated"] > 0
    assert f"{len(COPIES)} documents were left out earlier and still are" in capsys.readouterr().out
    assert read_about(corpus.folder)["dropped"] == before and len(tokens_of(corpus)) == len(ORIGINALS)


def test_a_command_does_not_take_back_what_an_earlier_one_left_out(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s" / "test.jsonl").write_text(json.dumps({"q": ORIGINALS[0]}) + "\n")
    clean(corpus, False, tmp_path, True)
    before = read_about(corpus.folder)
    with pytest.raises(UserError, match="left out documents by --drop_contaminated, and this one would take") as raised:
        clean(corpus, True, None, False)
    assert raised.value.exit_code == 2 and "--check_against" in str(raised.value), "the earlier command is named"
    assert read_about(corpus.folder) == before
    assert clean(corpus, True, tmp_path, True)["near_duplicates"] == len(COPIES)
    with pytest.raises(UserError, match="by --dedup"):
        clean(corpus, False, tmp_path, True)


def test_other_evaluations_do_not_take_back_what_earlier_ones_left_out(corpus: Corpus, tmp_path: Path) -> None:
    for folder, original in (("a/s", 0), ("b/t", 1)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "test.jsonl").write_text(json.dumps({"q": ORIGINALS[original]}) + "\n")
    clean(corpus, False, tmp_path / "a", True)
    with pytest.raises(UserError, match="passages of s, which --check_against does not name now"):
        clean(corpus, False, tmp_path / "b", True)
    (tmp_path / "a" / "s").rename(tmp_path / "b" / "s")
    assert set(clean(corpus, False, tmp_path / "b", True)["check_against"]) == {"s", "t"}


def test_the_command_tokenises_what_is_left_and_takes_it_back(
    corpus: Corpus, capsys: pytest.CaptureFixture[str]
) -> None:
    TOKENIZER.save(tokenizer_dir("c"))
    before = tokens_of(corpus)
    main(Config(data="c", dedup=True))
    said = capsys.readouterr().out
    assert f"c: 90 of 390 documents ({90 / 390:.2%}) are near-duplicates and are left out" in said
    assert len(tokens_of(corpus)) == 300
    assert dropped_summary([corpus]) == {"left out of c": f"90 of 390 documents ({90 / 390:.2%})"}
    main(Config(data="c"))  # the stages decide nothing anew
    assert len(tokens_of(corpus)) == 300
    main(Config(data="c", all_documents=True))
    assert tokens_of(corpus) == before and dropped_summary([corpus]) == {}
    take_back(corpus)


def test_a_damaged_list_is_refused_with_the_command_that_makes_it(corpus: Corpus) -> None:
    clean(corpus, True, None, False)
    damaged = next(p for p in shards(corpus, "train") if len(np.load(list_of_dropped(p))))
    list_of_dropped(damaged).write_bytes(b"x")
    with pytest.raises(
        UserError, match=r"is damaged\. Make it again with: python -m nanochat\.prepare --data c --dedup"
    ):
        tokens_of(corpus)


def test_of_a_mixture_the_command_that_screens_again_names_the_mixture_whose_tokenizer_is_there(corpus: Corpus) -> None:
    make_corpus(name="d")
    TOKENIZER.save(tokenizer_dir("c,d"))
    main(Config(data="c,d", dedup=True))
    assert read_about(corpus.folder)["dropped"]["make"] == "python -m nanochat.prepare --data c:1,d:1 --dedup"


def test_flags_that_contradict_each_other_are_refused() -> None:
    for cfg, why in (
        (Config(drop_contaminated=True), "needs --check_against DIR"),
        (Config(all_documents=True, dedup=True), "goes without --dedup"),
    ):
        with pytest.raises(UserError, match=why) as raised:
            main(cfg)
        assert raised.value.exit_code == 2
