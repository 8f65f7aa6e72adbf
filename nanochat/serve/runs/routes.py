"""Routes that tell a browser about the runs: their list, new figures, and samples."""

import asyncio
import hashlib
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response

from nanochat.runtime.samples import newest_samples
from nanochat.serve.connections import owner_of
from nanochat.serve.routes.answers import QUEUE_FULL, while_connected
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.runs.describe import Describer, Run, find_runs
from nanochat.serve.runs.follow import Follower
from nanochat.serve.runs.senders import check_sender
from nanochat.serve.runs.starter import Starter
from nanochat.serve.waiting import Turns

T = TypeVar("T")
MOST_SHOWN = 8  # runs whose figures one request may ask for; the page has as many colours
# Cells of all tables that are kept in memory, some 260 bytes each; the tables of MOST_SHOWN runs have
# fewer.
MOST_CELLS = 160_000
MOST_WAITING = 64  # requests that may wait for the thread
MOST_SAMPLES = 200  # samples of a run that are sent, the newest ones
FRESH_SECONDS = 0.5  # how long the list of runs is used before it is made again


class Runs:
    """Answers requests about the runs under a base folder.

    Its own thread reads the files, for one request at a time, and addresses take turns.
    """

    def __init__(
        self,
        base: Path,
        chat: bool,
        starter: Starter | None = None,
        has_key: bool = False,
    ):
        """Serve the runs under `base`; the page links to the chat if `chat` is true.

        With a `starter`, the list also tells which runs the page has started, so that only those
        may read it whom check_sender() lets in. `has_key` says whether the server asks for a key.
        """
        self.base = base
        self.chat = chat
        self.starter = starter
        self.has_key = has_key
        self._turns = Turns(MOST_WAITING)
        self._thread = ThreadPoolExecutor(1, "runs")
        self._describer = Describer()
        self._followed: dict[str, Follower] = {}  # by key; the one requested last comes last
        self._runs: dict[str, Run] = {}
        self._list: dict[str, Any] = {}
        self._listed_at = float("-inf")

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        app.add_api_route("/runs/data", self.data)
        app.add_api_route("/runs/samples/{key}", self.samples)

    def close(self) -> None:
        """End the thread after its pending work."""
        self._thread.shutdown(wait=False)

    async def data(self, request: Request) -> Response:
        """Answer GET /runs/data?shown=KEY.EDITION.ROWS,... with the list of runs and new figures.

        For each readable run in `shown`, the body has the rows that a reader with the first ROWS
        rows of EDITION needs. If the request has the answer's ETag in If-None-Match, the
        status is 304, and there is no body.
        """
        self._check(request)
        shown = _shown_runs(request.query_params.get("shown", ""))
        body = await while_connected(request.receive, self.run(request, lambda: self._data(shown)))
        if body is None:
            return Response()  # the client has left
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers={"ETag": tag})
        return Response(body, media_type="application/json", headers={"ETag": tag})

    async def samples(self, request: Request, key: str) -> Response:
        """Answer GET /runs/samples/KEY with the newest samples of a run, latest first."""
        self._check(request)
        body = await while_connected(request.receive, self.run(request, lambda: self._samples(key)))
        if body is None:
            return Response()  # the client has left
        return Response(body, media_type="application/json")

    def _check(self, request: Request) -> None:
        """Raise ApiError (403) if the list tells more than the sender may see."""
        if self.starter is not None:
            check_sender(request, self.has_key)

    async def run(self, request: Request, work: Callable[[], T]) -> T:
        """Run `work` for a request in the thread, and return the result.

        Raises ApiError (429) if too many requests are waiting.
        """
        try:
            async with self._turns.turn(owner_of(request)):
                return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except asyncio.QueueFull:
            raise ApiError(429, "queue_full", QUEUE_FULL, retry_after=2) from None

    # --- in the thread ---------------------------------------------------------------------------

    def _refresh(self) -> None:
        """List the runs again, unless they were listed less than FRESH_SECONDS ago."""
        if time.monotonic() - self._listed_at < FRESH_SECONDS:
            return
        runs, older = find_runs(self.base)
        now = time.time()
        descriptions = [self._describer.describe(run, now) for run in runs]
        described = [description for description in descriptions if description is not None]
        self._describer.forget(runs)
        self._runs = {run.key: run for run in runs}
        self._list = {"runs": described, "older": older, "chat": self.chat}
        if self.starter is not None:
            self._runs |= {run.key: run for run in self.starter.runs()}
            self._list["started"] = self.starter.listed()
        self._listed_at = time.monotonic()

    def find(self, key: str) -> Run | None:
        """Return the run with a key, or None if there is none. Call it in the thread."""
        self._refresh()
        return self._runs.get(key)

    def refresh_next(self) -> None:
        """Let the next request list the runs again. Call it in the thread."""
        self._listed_at = float("-inf")

    def _data(self, shown: dict[str, tuple[str, int]]) -> bytes:
        """Return the list of runs, and the new figures of the runs in `shown`, as JSON."""
        self._refresh()
        news: dict[str, Any] = {}
        for key, (edition, row_count) in shown.items():
            follower = self._follow(key, len(shown))
            if follower is None:
                continue
            news[key] = {
                **follower.table.since(edition, row_count),
                "behind": follower.behind,
                "done": follower.done,
                "size": follower.size,
                "bad": follower.bad,
            }
        return _json({**self._list, "shown": news})

    def _follow(self, key: str, shown: int) -> Follower | None:
        """Return the Follower of a run, one of `shown`, after it has read the next piece.

        Returns None if there is no such run, or if the file cannot be read.
        """
        run = self._runs.get(key)
        if run is None:
            self._followed.pop(key, None)
            return None
        follower = self._followed.pop(key, None) or Follower(run.metrics)
        try:
            follower.read(shown)
        except OSError:
            return None
        self._followed[key] = follower
        while sum(other.table.cells for other in self._followed.values()) > MOST_CELLS:
            del self._followed[next(iter(self._followed))]
        return follower

    def _samples(self, key: str) -> bytes:
        """Return the newest samples of a run, latest first, as JSON.

        Raises ApiError (404) if there is no such run.
        """
        run = self.find(key)
        if run is None:
            text = "there is no such run: /runs/data lists those that are there"
            raise ApiError(404, "not_found", text)
        try:
            newest = newest_samples(run.folder, MOST_SAMPLES)
        except OSError:  # there is none, or it cannot be read
            newest = []
        return _json({"samples": [asdict(sample) for sample in newest]})


def _json(value: Any) -> bytes:
    """Return a value as ASCII JSON, since texts from files may hold unpaired surrogates."""
    return json.dumps(value, allow_nan=False).encode()


def _shown_runs(text: str) -> dict[str, tuple[str, int]]:
    """Parse the query `shown` into a dict from run key to the reader's edition and row count.

    Raises ApiError (400) if the query is malformed or names too many runs.
    """
    shown: dict[str, tuple[str, int]] = {}
    for item in text.split(",") if text else ():
        key, _, version = item.partition(".")
        edition, _, rows = version.partition(".")
        is_count = rows.isascii() and rows.isdecimal() and len(rows) < 10
        if not key or (rows and not is_count):
            rule = "shown must be KEY.EDITION.ROWS, with commas between"
            raise ApiError(400, "invalid_request", rule, "shown")
        shown[key] = (edition, int(rows or 0))
    if len(shown) > MOST_SHOWN:
        rule = f"shown may name {MOST_SHOWN} runs at most, got {len(shown)}"
        raise ApiError(400, "invalid_request", rule, "shown")
    return shown
