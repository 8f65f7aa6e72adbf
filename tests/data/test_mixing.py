"""--data names a corpus, a folder or a mixture; weights are in lowest terms, and each mistake gets its own message."""

from pathlib import Path

import pytest

from nanochat.common import UserError, base_dir
from nanochat.data.mixing import resolve_data, unweighted
from nanochat.data.shards import write_shards
from nanochat.dataset import import_folder


@pytest.fixture(autouse=True)
def corpora() -> None:
    for name in ("web", "books", "code"):
        write_shards(base_dir() / "base_data" / name, [f"{name} {i}" for i in range(9)])


@pytest.mark.parametrize(
    ("data", "name", "vocabulary", "shares"),
    [
        ("web", "web", "web", (1,)),
        ("web:0.7,books:0.3", "web:7,books:3", "web,books", (7, 3)),
        ("web:70, books:30", "web:7,books:3", "web,books", (7, 3)),
        ("web:1/3,books:2/3", "web:1,books:2", "web,books", (1, 2)),
        ("books,web,code", "books:1,web:1,code:1", "books,web,code", (1, 1, 1)),
        ("web:1e-3,books:0.999", "web:1,books:999", "web,books", (1, 999)),
    ],
)
def test_data_is_read_and_named_in_a_way_that_is_read_again(data, name, vocabulary, shares):
    found = resolve_data(data)
    assert (found.name, found.vocabulary, found.shares) == (name, vocabulary, shares)
    assert [corpus.name for corpus in found.corpora] == vocabulary.split(",")
    assert resolve_data(found.name) == found
    assert unweighted(found.name) == found.vocabulary


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ("web:0.7,shop:0.3", "no corpus or folder 'shop'; the corpora here are books, code, web"),
        (
            "web:0.7,books",
            "give a weight to every corpus, as in .*, or to none, got 'web:0.7,books'",
        ),
        ("web:0.7,books:x", "a weight must be a number above 0, as in .*, got 'books:x' in"),
        ("web:0.7,books:0", "a weight must be a number above 0, .* got 'books:0'"),
        ("web:0.7,books:inf", "a weight must be a number above 0"),
        (":1,books:2", "a weight must be a number above 0, .* got ':1'"),
        ("web:1", "a mixture needs at least two corpora, as in --data web:0.7,books:0.3, got 'web:1'"),
        ("web:1,books:2,web:3", "web is named twice in 'web:1,books:2,web:3'; give it once"),
        ("web:0.12345678,books:0.5", "as fine as one in 1,000,000, got .*; round the weights"),
    ],
)
def test_mistakes_are_named_and_end_with_code_2(data, said):
    with pytest.raises(UserError, match=said) as refused:
        resolve_data(data)
    assert refused.value.exit_code == 2


def test_a_folder_may_stand_for_its_corpus_in_a_mixture_too(tmp_path: Path):
    source = tmp_path / "own"
    source.mkdir()
    (source / "a.txt").write_text("one\n<|endoftext|>\ntwo\n<|endoftext|>\nthree", encoding="utf-8")
    import_folder(source)
    assert resolve_data(f"{source}:1,web:1").name == "own:1,web:1"
    assert resolve_data(str(source)).name == "own"


def test_the_names_of_a_mixture_may_be_longer_than_a_file_name_but_not_its_tokenizer() -> None:
    names = [letter * 100 for letter in "abc"]
    for name in names:
        write_shards(base_dir() / "base_data" / name, [f"{name} {i}" for i in range(9)])
    assert len(resolve_data(",".join(f"{name}:{1:060d}" for name in names[:2])).corpora) == 2
    with pytest.raises(UserError, match=r"may have 255 bytes together .*, got 302; take fewer corpora") as raised:
        resolve_data(",".join(names))
    assert raised.value.exit_code == 2
