"""The tokenizer against a slow Python BPE, its files against damage, rendered chats against tables by hand."""

import base64
import importlib.metadata
import json
import os
import pickle
import random
import subprocess
import sys
import types
import unicodedata
from pathlib import Path

import numpy as np
import pytest
import regex
import tiktoken

from nanochat import tokenizer as module
from nanochat.common import UserError
from nanochat.data import bpe, tokenizer_file
from nanochat.data.conversation import Conversation, Part, assistant, chat, system, user
from nanochat.tokenizer import PATTERNS, ROLES, Tokenizer, tokenizer_dir
from tests.rustbpe.test_rustbpe import PUBLISHED, slow_ranks
from tests.rustbpe.test_rustbpe import published as published  # a fixture: a folder with the published rustbpe

TEXTS = [
    "The cat sat on the mat. The cat's hat isn't flat; they've that, and we'll see 12345 cats.",
    "中国的首都是北京。法国的首都是巴黎，日本的首都是东京。今天天气很好，我们去公园。",
    "def add(a, b):\n    return a + b\n\n\nprint(add(12, 30))\n",
    "aaaa aaaa aaaaaa  bbbb\t\tcc\r\n  dd   \n\n",
    "Café naïve — 🌍🌏 ½ 〇\u3000全角　空格 e\u0301 \u017f's",
]


def make(vocab_size: int = 330) -> Tokenizer:
    return Tokenizer.train(TEXTS, vocab_size)


def test_merges_equal_a_slow_bpe():
    """Tokens of texts are compared with tiktoken's below."""
    tokenizer = make(330)
    expected = slow_ranks(TEXTS, 330 - len(ROLES), PATTERNS["nanochat"])
    assert [(tokenizer.decode_bytes([i]), i) for i in range(330 - len(ROLES))] == expected


@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_pattern_matches_every_character(pattern):
    characters = "".join(chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000)
    assert "".join(regex.findall(PATTERNS[pattern], characters)) == characters
    text = "".join(x + y for x in "aé中1〇½ \u3000\n\r\t'.。🌍\u0301\u200d" for y in "sz文9 \n\r。'\x00")
    assert "".join(regex.findall(PATTERNS[pattern], text)) == text


def test_text_comes_back_whatever_it_holds():
    tokenizer = make()
    for text in [*TEXTS, "\x00\x7f", "<|bos|>", "𠀀𪛖", "\ufffd", " " * 1_000_001, "中" * 1_000_001]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_spelled_out_special_tokens_in_text_stay_text():
    tokenizer = make()
    text = "<|assistant_start|><|assistant_end|>"
    assert max(tokenizer.encode(text)) < tokenizer.vocab_size - len(ROLES)
    assert tokenizer.encode_batch([text])[0] == tokenizer.encode(text)
    rendered = tokenizer.render(chat(text, text))
    assert rendered.ids.count(tokenizer.special("assistant_start")) == 1
    assert rendered.ids.count(tokenizer.special("assistant_end")) == 1


def test_half_a_surrogate_pair_is_replaced_in_chat_and_refused_in_training():
    tokenizer = make()
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a\ufffdb"
    with pytest.raises(UserError, match=r"document 1 .*U\+D800\) at character 2"):
        Tokenizer.train(["good", "ab\ud800c"], 300)


def test_batch_equals_one_by_one_for_any_number_of_threads(monkeypatch):
    tokenizer = make()
    texts = TEXTS * 5 + [""]
    expected = [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts, threads=1) == expected
    assert tokenizer.encode_batch(texts, threads=3) == expected
    monkeypatch.setattr(module, "LONGEST_TEXT", 7)
    cut = tokenizer.encode_batch(texts)
    assert [tokenizer.decode(ids) for ids in cut] == texts
    tokens, lengths = tokenizer.encode_joined(texts)
    assert tokens.tolist() == [token for ids in cut for token in ids] and lengths.tolist() == [len(ids) for ids in cut]
    assert [len(part) for part in tokenizer.encode_joined([])] == [0, 0]


def test_half_a_character_decodes_to_a_replacement():
    tokenizer = make(256 + len(ROLES))
    ids = tokenizer.encode("中")
    assert len(ids) == 3
    assert tokenizer.decode_bytes(ids[:2]) == "中".encode()[:2]
    assert tokenizer.decode(ids[:2]) == "\ufffd"


def test_token_bytes_sum_to_the_text_and_are_zero_for_special_tokens():
    tokenizer = make()
    lengths = tokenizer.token_bytes()
    assert lengths.shape == (tokenizer.vocab_size,) and lengths.dtype == np.int32
    for text in TEXTS:
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode())
    assert [lengths[tokenizer.special(role)] for role in ROLES] == [0] * len(ROLES)


def test_vocabulary_size_counts_special_tokens_and_numbers_them_last():
    tokenizer = make(330)
    assert tokenizer.vocab_size == 330
    assert sorted(tokenizer.special(role) for role in ROLES) == list(range(330 - len(ROLES), 330))
    assert tokenizer.bos == tokenizer.special("bos")
    with pytest.raises(KeyError):
        tokenizer.special("end_of_text")


@pytest.mark.parametrize(
    ("texts", "vocab_size", "pattern", "named"),
    [
        (["abc abc"], 1000, "nanochat", r"at most 268 tokens.*--vocab_size 268"),
        (TEXTS, 264, "nanochat", "at least 265 tokens.*got 264"),
        (TEXTS, 300, "gpt9", "one of nanochat.*got 'gpt9'"),
        (["a", b"b"], 300, "nanochat", "document 1 is bytes"),
    ],
)
def test_what_cannot_be_trained_is_refused(texts, vocab_size, pattern, named):
    with pytest.raises(UserError, match=named):
        Tokenizer.train(texts, vocab_size, pattern=pattern)
    assert Tokenizer.train(["abc abc"], 268).vocab_size == 268


def test_saved_tokenizer_is_json_and_loads_equal(tmp_path):
    tokenizer = make()
    path = tokenizer.save(tmp_path)
    content = json.loads(path.read_text())
    assert content["pattern"] == "nanochat" and content["regex"] == PATTERNS["nanochat"]
    assert base64.b64decode(content["ranks"][97]) == b"a"
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.hash, loaded.vocab_size, loaded.pattern) == (tokenizer.hash, tokenizer.vocab_size, "nanochat")
    assert tokenizer.hash == make().hash != make(331).hash
    assert all(loaded.encode(text) == tokenizer.encode(text) for text in TEXTS)
    assert [loaded.special(role) for role in ROLES] == [tokenizer.special(role) for role in ROLES]


def test_a_damaged_file_is_refused_with_the_next_step(tmp_path):
    path = make().save(tmp_path / "mine")
    good = path.read_text()
    changed = json.loads(good)
    changed["ranks"][300], changed["ranks"][301] = changed["ranks"][301], changed["ranks"][300]
    for text in (good[: len(good) // 2], json.dumps(changed), "[]", "{}", ""):
        path.write_text(text)
        with pytest.raises(UserError, match=r"is damaged.*python -m scripts.tok_train --data mine"):
            Tokenizer.load(tmp_path / "mine")
    path.write_text(json.dumps({**json.loads(good), "version": 99}))
    with pytest.raises(UserError, match="has format nanochat-tokenizer 99"):
        Tokenizer.load(tmp_path / "mine")


def test_a_missing_tokenizer_names_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    with pytest.raises(UserError, match=r"python -m scripts.tok_train --data tinyworld") as raised:
        Tokenizer.load(tokenizer_dir("tinyworld"))
    assert raised.value.exit_code == 2


def names(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Tokens as readable words, special tokens as their roles."""
    roles = {tokenizer.special(role): role for role in ROLES}
    return [roles.get(i) or tokenizer.decode([i]) for i in ids]


def test_rendered_chat_trains_words_calls_and_end_marks_only():
    tokenizer = Tokenizer.train(["x"], 256 + len(ROLES))
    reply = (Part("text", "A"), Part("python", "1+1"), Part("python_output", "2"), Part("text", "B"))
    rendered = tokenizer.render(Conversation((user("hi"), assistant(*reply), user("k"), assistant("C"))))
    expected = (
        "bos:0 user_start:0 h:0 i:0 user_end:0 assistant_start:0 A:1 python_start:1 1:1 +:1 1:1 python_end:1 "
        "output_start:0 2:0 output_end:0 B:1 assistant_end:1 user_start:0 k:0 user_end:0 assistant_start:0 C:1 "
        "assistant_end:1"
    )
    shown = zip(names(tokenizer, rendered.ids), rendered.mask, strict=True)
    assert " ".join(f"{name}:{mask}" for name, mask in shown) == expected


def test_prompt_ends_where_the_assistant_begins():
    tokenizer = Tokenizer.train(["x"], 256 + len(ROLES))
    expected = ["bos", "user_start", "h", "i", "user_end", "assistant_start"]
    assert names(tokenizer, tokenizer.render_prompt(Conversation((user("hi"),)))) == expected
    assert names(tokenizer, tokenizer.render_prompt(chat("hi", "the reference answer"))) == expected


def test_system_turn_is_joined_to_the_first_user_turn():
    tokenizer = make()
    joined = tokenizer.render(Conversation((system("Be brief."), user("hi"), assistant("A"))))
    assert joined == tokenizer.render(chat("Be brief.\n\nhi", "A"))


@pytest.mark.parametrize(
    "messages", [(), (assistant("a"),), (user("a"), user("b")), (system("s"),), (system("s"), assistant("a"))]
)
def test_turns_out_of_order_are_refused(messages):
    with pytest.raises(UserError, match=r"turn|alternate"):
        make().render(Conversation(messages))
    with pytest.raises(UserError, match=r"turn|alternate"):
        make().render_prompt(Conversation(messages))


@pytest.mark.slow
def test_this_suite_passes_with_the_published_trainer(published):
    if "NANOCHAT_PUBLISHED_RUSTBPE" in os.environ:
        assert importlib.metadata.version("rustbpe") == PUBLISHED
        return
    paths = f"{published}{os.pathsep}{Path(__file__).parents[1]}"
    environment = {"PYTHONPATH": paths, "NANOCHAT_PUBLISHED_RUSTBPE": "1", "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.parametrize("found", [None, types.ModuleType("rustbpe")], ids=["nothing", "its source folder"])
def test_without_rustbpe_training_names_the_set_up_and_the_rest_works(found, monkeypatch, tmp_path) -> None:
    trained = Tokenizer.train(["the cat"] * 2, 266)
    trained.save(tmp_path)
    monkeypatch.setitem(sys.modules, "rustbpe", found)
    with pytest.raises(UserError, match=r"rustbpe.* not installed for .*setup_env\.sh"):
        Tokenizer.train(["the cat"], 270)
    bpe.encoding_rustbpe.cache_clear()
    try:
        assert Tokenizer.load(tmp_path).encode("the cat") == trained.encode("the cat")
    finally:
        bpe.encoding_rustbpe.cache_clear()


def fuzz(seed: int, count: int) -> list[str]:
    """Random texts of words, Chinese, marks, digits, spaces, emoji and any other assigned characters."""
    rng = random.Random(seed)
    parts = "the| cat|'s|'LL| I'm|中国|的|，|。|〇|々|1|2025|½| |  |\n|\r\n|\t|\u3000|!?|...|é|e\u0301|😀|🇫🇷|\0".split(
        "|"
    )
    parts += ["👩\u200d👧", "<|bos|>", "def f(x):\n    return x"]
    points = [chr(i) for i in range(0x20000) if unicodedata.category(chr(i)) not in ("Cn", "Cs", "Co")]
    return [
        "".join(rng.choice(parts) if rng.random() < 0.9 else rng.choice(points) for _ in range(rng.randrange(30)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_either_encoder_gives_the_same_tokens(pattern):
    tokenizer = Tokenizer.train([*TEXTS, *fuzz(1, 300)], 900, pattern)
    other = bpe.TiktokenEncoder(tokenizer._ranks, tokenizer.regex)
    texts = [*fuzz(2, 2000), "a\ud800b", "\ud83d\ude00", "汉字" * 5000]
    assert other.encode_batch(texts, 2) == [other.encode(text) for text in texts]
    assert tokenizer.encode_batch(texts) == other.encode_batch(texts, 1)
    assert [tokenizer.encode(text) for text in texts] == other.encode_batch(texts, 1)
    expected = [token for text in texts for token in other.encode(text)]
    for encoder in (tokenizer, other):
        tokens, lengths = encoder.encode_joined(texts, 2)
        assert tokens.tolist() == expected and tokens.dtype in (np.uint16, np.uint32)
        assert lengths.tolist() == [len(other.encode(text)) for text in texts] and lengths.dtype == np.int64


@pytest.mark.parametrize("pattern", PATTERNS)
def test_exports_give_the_same_tokens(pattern, tmp_path):
    tokenizer = Tokenizer.train([*TEXTS, *fuzz(3, 300)], 900, pattern)
    ranks, theirs = tokenizer.export(tmp_path)
    texts = fuzz(4, 2000)
    expected = [tokenizer.encode(text) for text in texts]
    numbers = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in ranks.read_text().splitlines()}
    encoding = tiktoken.Encoding("exported", pat_str=tokenizer.regex, mergeable_ranks=numbers, special_tokens={})
    assert encoding.encode_ordinary_batch(texts) == expected
    tokenizers = pytest.importorskip("tokenizers")
    loaded = tokenizers.Tokenizer.from_file(str(theirs))
    assert loaded.get_vocab_size() == tokenizer.vocab_size
    assert loaded.encode("<|bos|>").ids == [tokenizer.bos], "there, special tokens in a text are read"
    for text, ids in zip(texts, expected, strict=True):
        if "<|bos|>" not in text:
            assert loaded.encode(text).ids == ids, repr(text)
            assert loaded.decode(ids, skip_special_tokens=False) == text


def test_merges_of_a_damaged_vocabulary_are_refused():
    with pytest.raises(ValueError, match="token 256 is not made of two earlier tokens"):
        bpe.merges([*(bytes([i]) for i in range(256)), b"abc"])


def test_a_tokenizer_can_be_pickled():
    tokenizer = make()
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.hash == tokenizer.hash and [again.encode(text) for text in TEXTS] == [*map(tokenizer.encode, TEXTS)]


def test_a_file_with_an_endless_token_is_refused_at_once(tmp_path):
    """To find its merges would take a minute for a megabyte, and four for two."""
    path = make().save(tmp_path)
    content = json.loads(path.read_text())
    content["ranks"].append(base64.b64encode(b"ab" * 500_000).decode())
    content.pop("sha256")
    path.write_text(json.dumps({**content, "sha256": tokenizer_file.digest(content)}))
    with pytest.raises(UserError, match="the longest has 1,000,000 bytes"):
        Tokenizer.load(tmp_path)
