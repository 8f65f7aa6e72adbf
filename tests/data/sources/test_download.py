"""The downloader against a server on this machine that truncates, stalls, refuses, redirects and lies."""

import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path

import pytest

from nanochat.common import UserError
from nanochat.data.sources import download
from nanochat.data.sources.download import (
    Fetched,
    Patience,
    Remote,
    check_space,
    fetch_all,
    part_of,
    part_size,
    probe_size,
)
from tests.support.file_server import CONTENT, SHA, Handler, Server, stall, status, truncate

QUICK = Patience(attempts=4, stall_seconds=0.3, first_wait_seconds=0.01, longest_wait_seconds=0.05)


def fetch(server: Server, folder: Path, **options) -> tuple[Path, list[str]]:
    """Fetch one file; return its path and the lines that `say` got."""
    said: list[str] = []
    path = folder / "a.bin"
    options = {"patience": QUICK, "say": said.append, **options}
    fetch_all([Remote(f"{server.url}/a.bin", path)], **options)
    return path, said


def ranges(server: Server) -> list[str | None]:
    return [headers.get("Range") for _, headers in server.requests]


def test_a_file_arrives_whole_and_leaves_no_part(server, tmp_path):
    moved: list[float] = []
    path, said = fetch(server, tmp_path, advance=moved.append)
    assert path.read_bytes() == CONTENT and sum(moved) == len(CONTENT) and said == []
    assert [p.name for p in tmp_path.glob("a*")] == ["a.bin"]


def test_a_file_that_is_there_is_not_asked_for(server, tmp_path):
    (tmp_path / "a.bin").write_bytes(b"mine")
    path, _ = fetch(server, tmp_path)
    assert path.read_bytes() == b"mine" and server.requests == []


def test_truncated_and_stalled_downloads_go_on_where_they_stopped(server, tmp_path):
    server.faults = [truncate, stall, truncate]
    moved: list[float] = []
    path, said = fetch(server, tmp_path, advance=moved.append)
    assert path.read_bytes() == CONTENT and sum(moved) == len(CONTENT)
    assert ranges(server)[0] is None
    assert 200_000 < int((ranges(server)[1] or "").removeprefix("bytes=").rstrip("-")) <= 300_000
    assert len(server.requests) >= 3 and len(said) == len(server.requests) - 1


def test_a_part_of_an_earlier_run_is_continued(server, tmp_path):
    part_of(tmp_path / "a.bin").write_bytes(CONTENT[:700_000])
    assert part_size(tmp_path / "a.bin") == 700_000
    path, _ = fetch(server, tmp_path)
    assert path.read_bytes() == CONTENT and ranges(server) == ["bytes=700000-"]


def test_a_server_without_ranges_sends_the_file_again(server, tmp_path):
    server.faults = [truncate, lambda handler: handler.whole(ranges=False)]
    path, _ = fetch(server, tmp_path)
    assert path.read_bytes() == CONTENT


def test_a_file_that_changed_between_attempts_is_fetched_again(server, tmp_path):
    other = CONTENT[::-1]
    server.faults = [truncate, lambda handler: handler.whole(body=other, etag='"two"')]
    path, _ = fetch(server, tmp_path)
    assert path.read_bytes() == other
    assert server.requests[1][1]["If-Range"] == '"one"'


def test_a_complete_part_and_a_part_too_long_are_both_settled_by_416(server, tmp_path):
    part_of(tmp_path / "a.bin").write_bytes(CONTENT)
    path, said = fetch(server, tmp_path)
    assert path.read_bytes() == CONTENT and said == []
    path.unlink()
    part_of(path).write_bytes(CONTENT + b"more")
    path, said = fetch(server, tmp_path)
    assert path.read_bytes() == CONTENT and "does not belong" in said[0]


def test_busy_and_failing_servers_are_tried_again_after_the_time_they_name(server, tmp_path):
    server.faults = [status(429, {"Retry-After": "0"}), status(500), status(503, {"Retry-After": "soon"})]
    path, said = fetch(server, tmp_path)
    assert path.read_bytes() == CONTENT
    assert ["429" in said[0], "500" in said[1], "503" in said[2]] == [True] * 3


def test_a_server_that_keeps_failing_ends_in_a_message_with_the_hint(server, tmp_path):
    server.faults = [status(500)] * 9
    with pytest.raises(UserError, match=r"answered 500 .* \(4 attempts\)\. Try the mirror\."):
        fetch(server, tmp_path, hint="Try the mirror.")


@pytest.mark.parametrize(("code", "text"), [(404, "404"), (403, "HF_TOKEN"), (401, "HF_TOKEN")])
def test_refusals_are_not_repeated(server, tmp_path, code, text):
    server.faults = [status(code)]
    with pytest.raises(UserError, match=text):
        fetch(server, tmp_path)
    assert len(server.requests) == 1


def test_redirects_are_followed_and_the_token_stays_with_the_first_host(server, tmp_path):
    elsewhere = server.url.replace("127.0.0.1", "localhost") + "/store"
    server.faults = [status(302, {"Location": elsewhere, "X-Linked-Etag": f'"{SHA}"'})]
    remote = Remote(f"{server.url}/a.bin", tmp_path / "a.bin")
    arrived = fetch_all([remote], {"Authorization": "Bearer secret"}, QUICK)
    assert arrived == [Fetched(tmp_path / "a.bin", len(CONTENT), SHA)]
    assert [headers.get("Authorization") for _, headers in server.requests] == ["Bearer secret", None]


def test_a_wrong_sha256_is_fetched_again(server, tmp_path):
    flipped = bytes([CONTENT[0] ^ 1]) + CONTENT[1:]
    promise = status(302, {"Location": "/store", "X-Linked-Etag": SHA})
    server.faults = [promise, lambda handler: handler.whole(body=flipped), promise]
    path, said = fetch(server, tmp_path)
    assert path.read_bytes() == CONTENT and "SHA-256" in said[0]
    assert ranges(server) == [None] * 4


def test_content_that_fails_the_check_never_gets_the_final_name(server, tmp_path):
    def check(path: Path) -> None:
        if path.read_bytes() == b"please log in":
            raise ValueError("it is a web page")

    server.faults = [lambda handler: handler.whole(body=b"please log in")] * 9
    with pytest.raises(UserError, match="it is a web page"):
        fetch(server, tmp_path, check=check)
    assert not (tmp_path / "a.bin").exists()
    server.faults = []
    assert fetch(server, tmp_path, check=check)[0].read_bytes() == CONTENT


def test_no_server_at_all_gives_up_sooner_and_says_why(tmp_path):
    said: list[str] = []
    patience = Patience(attempts=99, stall_seconds=1, first_wait_seconds=0.01)
    with pytest.raises(UserError, match=r"connection refused \(3 attempts\)"):
        fetch_all([Remote("http://127.0.0.1:9/a", tmp_path / "a")], patience=patience, say=said.append)
    assert len(said) == 2
    with pytest.raises(UserError, match="could not be resolved"):
        fetch_all([Remote("http://no-such-host.invalid/a", tmp_path / "a")], patience=patience)
    with pytest.raises(UserError, match="not a web address"):
        fetch_all([Remote("hub.example/a", tmp_path / "a")], patience=patience)


def test_three_at_a_time_arrive_in_the_order_asked_for(server, tmp_path):
    def slow(handler: Handler) -> None:
        time.sleep(0.03)
        handler.whole()

    server.faults = [slow] * 8
    remotes = [Remote(f"{server.url}/{i}", tmp_path / f"{i}") for i in range(8)]
    arrived = fetch_all(remotes, patience=QUICK, parallel=3)
    assert [f.path for f in arrived] == [remote.path for remote in remotes]
    assert 1 < server.most_active <= 3


def test_one_failure_stops_the_others_and_keeps_their_parts(server, tmp_path):
    def refuse_later(handler: Handler) -> None:
        time.sleep(0.2)
        handler.answer(404, b"", {})

    server.faults = [truncate, refuse_later]
    with pytest.raises(UserError, match="404"):
        fetch_all(
            [Remote(f"{server.url}/{i}", tmp_path / f"{i}") for i in range(5)],
            patience=Patience(first_wait_seconds=30, longest_wait_seconds=30),
            parallel=2,
        )
    assert sum(part_size(tmp_path / f"{i}") for i in range(5)) >= 65_536
    assert len(server.requests) == 2


def test_ctrl_c_keeps_the_part_and_ends_at_once(server, tmp_path):
    server.faults = [lambda handler: (handler.whole(upto=400_000), time.sleep(5))[0]]
    code = (
        "import os, signal, sys, threading, time; from pathlib import Path\n"
        "from nanochat.data.sources.download import *\n"
        "path = Path(sys.argv[2])\n"
        "def press():\n"
        "    while part_size(path) < 300_000: time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=press, daemon=True).start()\n"
        "try: fetch_all([Remote(sys.argv[1], path)])\n"
        "except KeyboardInterrupt: sys.exit(130)\n"
    )
    arguments = [f"{server.url}/a", str(tmp_path / "a")]
    result = subprocess.run([sys.executable, "-c", code, *arguments], timeout=30, capture_output=True, text=True)
    assert result.returncode == 130, result.stderr
    assert part_size(tmp_path / "a") >= 300_000
    fetch_all([Remote(arguments[0], tmp_path / "a")], patience=QUICK)
    assert (tmp_path / "a").read_bytes() == CONTENT


def test_two_processes_that_fetch_the_same_file_do_not_mix_bytes(server, tmp_path):
    remote = Remote(f"{server.url}/a", tmp_path / "a")
    threads = [threading.Thread(target=fetch_all, args=([remote],), kwargs={"patience": QUICK}) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert remote.path.read_bytes() == CONTENT
    assert [p.name for p in tmp_path.glob("a*")] == ["a"]


def test_what_another_process_wrote_meanwhile_is_not_fetched_again(server, tmp_path, monkeypatch):
    """The other process held the lock, wrote a part of the file, and was stopped."""

    def flock(f, how):
        if f.tell() == 0:
            part_of(tmp_path / "a.bin").write_bytes(CONTENT[:1000])

    monkeypatch.setattr(fcntl, "flock", flock)
    path, _ = fetch(server, tmp_path)
    assert path.read_bytes() == CONTENT and ranges(server) == ["bytes=1000-"]


@pytest.mark.parametrize("kind", ["link", "pipe", "another user's"])
def test_a_part_that_another_user_may_have_put_there_is_refused(server, tmp_path, monkeypatch, kind):
    victim, part = tmp_path / "victim", part_of(tmp_path / "a.bin")
    victim.write_text("mine")
    if kind == "link":
        part.symlink_to(victim)
    elif kind == "pipe":
        os.mkfifo(part)
    else:
        part.write_bytes(CONTENT[:1000])
        about = os.stat_result((0o100644, 1, 1, 1, os.geteuid() + 1, 0, 1000, 0, 0, 0))
        monkeypatch.setattr(os, "fstat", lambda _: about)
    with pytest.raises(UserError, match=r"a\.bin\.part") as refused:
        fetch(server, tmp_path)
    assert "Delete it" in str(refused.value) and victim.read_text() == "mine"


def test_size_is_known_beforehand_and_a_full_disk_is_refused(server, tmp_path):
    assert probe_size(f"{server.url}/a", {}, QUICK) == len(CONTENT)
    check_space(tmp_path, 1)
    with pytest.raises(UserError, match=r"needs about 1000000000\.0 GB.*NANOCHAT_BASE_DIR"):
        check_space(tmp_path, 1e18)


# --- servers that lie about sizes, and full disks ------------------------------------------------


@pytest.mark.parametrize("size", ["\u00b2", "-5", "1" + "0" * 30, "5, 5", "0x10", "many\x1b[2J"])
def test_a_size_that_is_no_number_of_bytes_is_refused_in_one_line(server, tmp_path, size):
    server.faults = [lambda handler: handler.answer(200, b"12345", {"Content-Length": size})]
    with pytest.raises(UserError, match="as the size of the file, which must be a number of bytes") as refused:
        fetch(server, tmp_path)
    assert "\n" not in str(refused.value) and "\x1b" not in str(refused.value)
    assert [path.name for path in tmp_path.glob("a*") if path.stat().st_size] == []


@pytest.mark.parametrize("wait", ["\u00b2", "9" * 400, "Fri, 31 Dec 99999 00:00:00 GMT"])
def test_a_strange_wait_is_not_waited_for(server, tmp_path, wait):
    server.faults = [status(503, {"Retry-After": wait})]
    assert fetch(server, tmp_path)[0].read_bytes() == CONTENT


def test_a_size_that_the_disk_cannot_hold_is_refused_before_the_first_byte(server, tmp_path):
    server.faults = [lambda handler: handler.answer(200, b"12345", {"Content-Length": "9" * 15})]
    with pytest.raises(UserError, match=r"needs about 1000000\.0 GB"):
        fetch(server, tmp_path)
    assert part_size(tmp_path / "a.bin") == 0


def endless(handler: Handler) -> None:
    """A body without Content-Length that does not end while the client reads."""
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(bytes(1 << 16))


def test_an_endless_body_without_a_size_leaves_the_reserve_free_and_nothing_behind(server, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(download.shutil, "disk_usage", lambda _: usage._replace(free=download.RESERVE + 3_000_000))
    server.faults = [endless]
    with pytest.raises(UserError, match=r"does not say how large .* sent 3,\d{3},\d{3} bytes.* Nothing was kept"):
        fetch(server, tmp_path)
    assert part_size(tmp_path / "a.bin") == 0


def test_a_body_longer_than_its_size_is_not_read_to_its_end(server, tmp_path):
    """As when a server compresses what was asked for uncompressed."""

    pack = zlib.compressobj(wbits=31)
    body = b"".join(pack.compress(bytes(1 << 20)) for _ in range(64)) + pack.flush()
    server.faults = [lambda handler: handler.answer(200, body, {"Content-Encoding": "gzip"})]
    _, said = fetch(server, tmp_path)
    assert re.match(r"a.bin: \d{2,3},\d{3} bytes arrived for a file of 65,\d{3};", said[0]), said[0]


def test_a_full_disk_says_what_is_kept(server, tmp_path, monkeypatch):
    real = os.fsync

    def full(fd: int) -> None:
        if os.fstat(fd).st_size >= len(CONTENT):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(fd)

    monkeypatch.setattr(download.os, "fsync", full)
    with pytest.raises(UserError, match=r"disk is full: .*a\.bin\.part keeps the 900,000 bytes .* resumes"):
        fetch(server, tmp_path)
    assert part_size(tmp_path / "a.bin") == len(CONTENT)
