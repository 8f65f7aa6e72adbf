"""What is kept of responses: only so many, only for a while, and only for the key that they were made with."""

import json

import pytest

from nanochat.serve.routes.fields import ApiError
from nanochat.serve.routes.responses.store import ResponseStore, Shelf

CHAT = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "你好"}]


class Clock:
    """A clock that a test sets, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept_of(shelf: Shelf, *numbers: str) -> list[str]:
    found = []
    for number in numbers:
        try:
            found.append(shelf.response(number)["id"])
        except ApiError as failure:
            assert (failure.status, failure.code) == (404, "not_found")
    return found


def test_a_response_comes_back_with_its_chat_until_it_is_removed() -> None:
    shelf = ResponseStore().of("Bearer a", "host")
    shelf.keep("r1", CHAT, {"id": "r1", "half": "\ud800"})
    assert shelf.messages("r1") == shelf.messages("r1") == CHAT
    assert shelf.response("r1") == shelf.response("r1", again=False) == {"id": "r1", "half": "\ud800"}
    with pytest.raises(ApiError) as caught:
        shelf.messages("r1")
    assert (caught.value.status, caught.value.param) == (400, "previous_response_id")


def test_another_key_finds_and_removes_nothing() -> None:
    kept = ResponseStore()
    own, other = kept.of("Bearer a", "host"), kept.of("Bearer b", "host")
    own.keep("r1", CHAT, {"id": "r1"})
    for each in (other, kept.of("", "host"), kept.of("\ud800", "host")):
        assert kept_of(each, "r1") == []
        with pytest.raises(ApiError):
            each.response("r1", again=False)
        with pytest.raises(ApiError):
            each.messages("r1")
    assert kept_of(own, "r1") == kept_of(kept.of("Bearer a", "host"), "r1") == ["r1"]


def test_the_one_that_was_used_least_recently_goes_first() -> None:
    shelf = ResponseStore(max_count=3).of("", "host")
    for number in ("r1", "r2", "r3"):
        shelf.keep(number, CHAT, {"id": number})
    shelf.messages("r1")
    shelf.keep("r4", CHAT, {"id": "r4"})
    assert kept_of(shelf, "r1", "r2", "r3", "r4") == ["r1", "r3", "r4"]


def test_all_together_never_hold_more_bytes_than_they_may() -> None:
    size = len(json.dumps(CHAT)) + len(json.dumps({"id": "r1"}))
    shelf = ResponseStore(max_bytes=3 * size).of("", "host")
    for number in ("r1", "r2", "r3"):
        shelf.keep(number, CHAT, {"id": number})
    shelf.response("r1", again=False)
    shelf.keep("r4", CHAT, {"id": "r4"})  # in the room of the removed one
    assert kept_of(shelf, "r2", "r3", "r4") == ["r2", "r3", "r4"]
    shelf.keep("r5", [*CHAT, {"role": "user", "content": "x" * 3 * size}], {"id": "r5"})
    assert kept_of(shelf, "r2", "r3", "r4", "r5") == []  # what is larger than all may be is not kept either
    shelf.keep("r6", CHAT, {"id": "r6"})
    assert kept_of(shelf, "r6") == ["r6"]


def test_what_is_not_used_for_a_while_is_gone() -> None:
    clock = Clock()
    shelf = ResponseStore(seconds=60, now=clock).of("", "host")
    for number in ("r1", "r2"):
        shelf.keep(number, CHAT, {"id": number})
    clock.now = 50
    assert kept_of(shelf, "r1") == ["r1"]  # which counts as a use
    clock.now = 100
    assert kept_of(shelf, "r1", "r2") == ["r1"]
    clock.now = 161
    assert kept_of(shelf, "r1") == []


def test_the_case_of_the_scheme_and_spaces_do_not_change_the_key() -> None:
    store = ResponseStore()
    store.of("Bearer a", "host").keep("r1", CHAT, {"id": "r1"})
    for header in ("bearer a", "BEARER  a ", " Bearer a"):
        assert kept_of(store.of(header, "other"), "r1") == ["r1"]


def test_an_address_that_fills_the_store_loses_its_own_responses() -> None:
    """Also if it sends another key with each of them."""
    size = len(json.dumps(CHAT)) + len(json.dumps({"id": "r000"}))
    for limits in ({"max_bytes": 5 * size}, {"max_count": 5}):
        store = ResponseStore(**limits)
        own = store.of("Bearer own", "a")
        own.keep("r1", CHAT, {"id": "r1"})
        for number in range(100):
            store.of(f"Bearer {number}", "b").keep(f"r{number:03}", CHAT, {"id": f"r{number:03}"})
        assert kept_of(own, "r1") == ["r1"]
        assert kept_of(store.of("Bearer 99", "b"), "r099") == ["r099"]
