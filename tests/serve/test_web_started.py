"""The page starts fine-tuning in a real browser: the run outlives the page and its server, is found, stopped and resumed."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from nanochat.serve.runs import record
from tests.support.browsing import visit
from tests.support.fake_engine import eventually
from tests.support.qwens import write_folder

pytestmark = [pytest.mark.browser, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[2]
LOST = ["Failed to load resource"]  # while there is no server


@contextlib.contextmanager
def server(port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The server of a real command line, which is killed at the end, as by kill -9."""
    words = ["-m", "scripts.chat_web", "--runs_only", "--runs=start", f"--port={port}", "--device_type=cpu"]
    environment = {**os.environ, "NANOCHAT_API_KEY": "secret"}
    with subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL) as process:

        def answers() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
            return False

        try:
            eventually(answers)
            yield process
        finally:
            process.kill()


@pytest.fixture
def tuned(base_folder: Path) -> Iterator[Path]:
    """The folder of the run, whose process ends with the test."""
    folder = base_folder / "tuned_checkpoints" / "model-chats"
    yield folder
    started = record.read(folder)
    if started and started.alive:
        os.kill(started.pid, signal.SIGKILL)


def fill(page: Page, **values: str) -> None:
    for name, value in values.items():
        page.get_by_label(re.compile(f"^--{name}")).fill(value)


def test_a_run_outlives_its_page_and_its_server(browser: Browser, tmp_path: Path, tuned: Path):
    (tmp_path / "model").mkdir()
    write_folder(tmp_path / "model", "qwen3")
    reply = {"role": "assistant", "content": "<b>sat</b>"}
    chats = [{"messages": [{"role": "user", "content": f"cat {number}"}, reply]} for number in range(40)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    port = socket.create_server(("127.0.0.1", 0)).getsockname()[1]
    url = f"http://127.0.0.1:{port}/runs"

    page_url = f"{url}#key=secret"  # as a server without a key of its own prints it
    with server(port), visit(browser, page_url, ready="#new-run") as page:
        page.get_by_role("button", name="Fine-tune a model").click()
        fill(
            page,
            model=str(tmp_path / "model"),
            data=f"{tmp_path}/chats.jsonl",
            num_iterations="10000",
            max_length="48",
        )
        fill(page, target_examples_per_step="4", eval_every="0")
        page.get_by_label("--compile").select_option("False")
        expect(page.locator("#command")).to_contain_text("--num_iterations=10000")
        page.get_by_role("button", name="Start", exact=True).click()
        card = page.locator(".started")
        expect(card.get_by_role("heading")).to_be_focused()
        expect(card.locator(".state")).to_have_text("running")
        # the model writes its own words first, for a minute where processors are slow
        expect(card.locator(".output")).to_contain_text(re.compile("step 00003/"), timeout=180_000)
        before = card.locator(".output").inner_text()
        page.wait_for_function(
            "old => document.querySelector('.started .output').textContent.length > old", arg=len(before)
        )
    started = record.read(tuned)
    assert started is not None and started.alive  # although its page and its server are gone

    with server(port), visit(browser, page_url, ready=".started", problems=LOST) as page:
        card = page.locator(".started")
        expect(card.locator(".state")).to_have_text("running")
        key = {"x-api-key": "secret"}
        refused = httpx.post(f"{url}/start", json={"values": started.values}, headers=key, timeout=60)
        assert refused.json()["error"]["code"] == "already_running"
        card.get_by_role("button", name="Stop").click()
        expect(card.locator(".state")).to_have_text("stopped")
        expect(card.locator(".note")).to_have_text(re.compile(r"^Step [\d,]+ is saved\.$"))
        step = int(re.sub(r"\D", "", card.locator(".note").inner_text()))
        card.get_by_role("button", name="Resume").click()
        fill(page, stop_at=str(step + 2))
        expect(page.get_by_label(re.compile("^--lora_rank"))).to_have_count(0)  # what it learns stays
        page.locator("#go").click()
        expect(card.locator(".note")).to_have_text(f"Step {step + 2:,} is saved.")
        expect(card.locator(".state")).to_have_text("stopped")
        expect(card.locator(".output")).to_contain_text(f"resuming from step {step:,}")
