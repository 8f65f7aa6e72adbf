"""Routes that start, resume and stop runs, for those whom check_sender() lets in."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request, Response

from nanochat import device
from nanochat.checkpoint_manager.locate import checkpoint_dir
from nanochat.common import UserError, parse_json
from nanochat.serve.connections import owner_of
from nanochat.serve.routes.answers import QUEUE_FULL, while_connected
from nanochat.serve.routes.fields import ApiError
from nanochat.serve.runs import command, record
from nanochat.serve.runs.describe import Run, facts_of
from nanochat.serve.runs.routes import Runs
from nanochat.serve.runs.script import CHECK
from nanochat.serve.runs.senders import check_sender
from nanochat.serve.runs.starter import Start, Starter, saved_config
from nanochat.serve.waiting import Turns

CHILD = "nanochat.serve.runs.script"
NEW = "tune"  # the stage that the page starts; it resumes every stage
BODY_BYTES = 1 << 18  # largest body of a request
CHILD_SECONDS = 600  # how long a forecast or a check may take
MOST_OUTPUT = 16_000  # characters of a child's output that are sent, the last ones
MOST_PROCESSES = 1024  # the most ranks of a run that is resumed
MOST_WAITING = 8  # requests that may wait for a child; one child runs at a time
LANGUAGES = ("en", "zh")


@dataclass(frozen=True)
class Form:
    """The form of a run that is started, or of a `run` that is resumed."""

    stage: str
    run: Run | None
    fields: Sequence[command.Field]  # all flags of the script
    values: Mapping[str, Any]  # the form of a run that is resumed
    processes: int

    @property
    def shown_fields(self) -> list[command.Field]:
        """The fields that the reader may fill in."""
        return command.form_fields(self.fields, self.run is not None)

    @property
    def forecasts(self) -> bool:
        """Whether the script can say what a run needs."""
        return any(field["name"] == command.FORECAST for field in self.fields)


@dataclass(frozen=True)
class Filled:
    """A form that has been filled in."""

    form: Form
    values: Mapping[str, Any]
    processes: int
    language: str

    @property
    def words(self) -> list[str]:
        """The flags of the run; raises ApiError (400) if a value cannot be used."""
        return command.arguments(self.form.fields, self.values)

    def argv(self, *more: str) -> list[str]:
        """Return the argument list of the run, with further flags."""
        script = command.script_of(self.form.stage)
        return command.command(script, [*self.words, *more], self.processes)


class Control:
    """Answers requests to start, resume and stop runs under a base folder."""

    def __init__(self, runs: Runs, starter: Starter):
        """Serve the page of `runs`."""
        self.runs = runs
        self.starter = starter
        self._turns = Turns(MOST_WAITING)
        self._fields: dict[str, list[command.Field]] = {}  # by stage

    def add_to(self, app: FastAPI) -> None:
        """Add the routes to an application."""
        app.add_api_route("/runs/form", self.form)
        app.add_api_route("/runs/log/{key}", self.log)
        posts = {
            "/runs/command": self.compose,
            "/runs/forecast": self.forecast,
            "/runs/start": self.start,
            "/runs/stop": self.stop,
        }
        for path, route in posts.items():
            app.add_api_route(path, route, methods=["POST"])

    # --- the routes ------------------------------------------------------------------------------

    async def form(self, request: Request) -> Response:
        """Answer GET /runs/form?run=KEY with the fields of a form; without a run, of a new one."""
        check_sender(request, self.runs.has_key)
        form = await self._form(request, request.query_params.get("run", ""))
        fields = form.shown_fields
        names = {field["name"] for field in fields}
        return _answer(
            {
                "stage": form.stage,
                "script": command.script_of(form.stage),
                "fields": fields,
                "values": {name: form.values[name] for name in form.values if name in names},
                "processes": form.processes,
                "most_processes": max(form.processes, _cards()),
                "forecasts": form.forecasts,
            }
        )

    async def compose(self, request: Request) -> Response:
        """Answer POST /runs/command with the command line of a form."""
        filled = await self._filled(request)
        return _answer({"command": command.shown(filled.argv())})

    async def forecast(self, request: Request) -> Response:
        """Answer POST /runs/forecast with what the script says about memory, disk and time."""
        filled = await self._filled(request)
        if not filled.form.forecasts:
            raise ApiError(400, "no_forecast", "the script of this stage has no --forecast")
        argv = filled.argv(f"--{command.FORECAST}=True")
        work = self._child(request, argv, filled.language)
        outcome = await while_connected(request.receive, work)
        if outcome is None:
            return Response()  # the client has left
        return _answer({"command": command.shown(filled.argv()), **outcome})

    async def start(self, request: Request) -> Response:
        """Answer POST /runs/start by starting or resuming a run, with its id and its command."""
        filled = await self._filled(request)
        argv = filled.argv()
        run = filled.form.run or await self._new_run(request, filled)
        start = Start(run, argv, filled.values, filled.processes, filled.language)
        await self.runs.run(request, lambda: self.starter.start(start))
        await self.runs.run(request, self.runs.refresh_next)
        return _answer({"id": run.key, "command": command.shown(argv)}, 201)

    async def stop(self, request: Request) -> Response:
        """Answer POST /runs/stop {"run": KEY} by asking a run to save and stop."""
        body = await self._body(request)
        run = await self._run_of(request, body.get("run"))
        await self.runs.run(request, lambda: self.starter.stop(run))
        await self.runs.run(request, self.runs.refresh_next)
        return _answer({"id": run.key})

    async def log(self, request: Request, key: str) -> Response:
        """Answer GET /runs/log/KEY?from=BYTE with what a run has printed from there on."""
        check_sender(request, self.runs.has_key)
        place = request.query_params.get("from", "")
        if place and not (place.isascii() and place.isdecimal() and len(place) < 16):
            raise ApiError(400, "invalid_request", "from must be a number of bytes", "from")
        first = int(place) if place else None
        run = await self._run_of(request, key)
        return _answer(await self.runs.run(request, lambda: self.starter.log(run, first)))

    # --- what they share -------------------------------------------------------------------------

    async def _body(self, request: Request) -> dict[str, Any]:
        """Return the JSON object in the body of a request that may start or stop runs.

        Raises ApiError (400, 413), and (403, 415) as check_sender() does. The body is read in any
        case, since the server closes a connection whose body it has not read.
        """
        body = bytearray()
        async for piece in request.stream():
            body += piece
            if len(body) > BODY_BYTES:
                text = f"the body must not be larger than {BODY_BYTES:,} bytes"
                raise ApiError(413, "body_too_large", text)
        check_sender(request, self.runs.has_key)
        with contextlib.suppress(ValueError):
            fields = parse_json(bytes(body))
            if isinstance(fields, dict):
                return fields
        raise ApiError(400, "invalid_json", "the body must be a JSON object")

    async def _run_of(self, request: Request, key: Any) -> Run:
        """Return the run with a key; raises ApiError (404) if there is none."""
        run = await self.runs.run(request, lambda: self.runs.find(str(key)))
        if run is None:
            text = "there is no such run: /runs/data lists those that are there"
            raise ApiError(404, "not_found", text, "run")
        return run

    async def _form(self, request: Request, key: str) -> Form:
        """Return the form of a new run, or the one that resumes the run with a key."""
        if not key:
            return Form(NEW, None, await self._fields_of(request, NEW), {}, max(_cards(), 1))
        run = await self._run_of(request, key)
        fields = await self._fields_of(request, run.stage)
        return await self.runs.run(request, lambda: _resuming(run, fields))

    async def _filled(self, request: Request) -> Filled:
        """Return the form in the body of a request, with the values of a run that it resumes."""
        body = await self._body(request)
        key = body.get("run") or ""
        values = body.get("values", {})
        if not isinstance(key, str) or not isinstance(values, dict):
            text = "run must be the id of a run, and values an object"
            raise ApiError(400, "invalid_request", text)
        form = await self._form(request, key)
        processes = body.get("processes", form.processes)
        max_processes = max(form.processes, _cards())
        if type(processes) is not int or not 1 <= processes <= max_processes:
            text = f"processes must be a whole number from 1 to {max_processes}"
            raise ApiError(400, "invalid_value", text, "processes")
        unknown = sorted(set(values) - {field["name"] for field in form.shown_fields})
        if unknown:
            text = f"{unknown[0][:80]} is not a field of this form"
            raise ApiError(400, "invalid_value", text, unknown[0][:80])
        language = body.get("language", "en")
        if language not in LANGUAGES:
            raise ApiError(400, "invalid_value", "language must be en or zh", "language")
        return Filled(form, {**form.values, **values}, processes, language)

    async def _new_run(self, request: Request, filled: Filled) -> Run:
        """Return the run that a new form names; raises ApiError (400) if the script refuses it."""
        script = command.script_of(NEW)
        argv = [sys.executable, "-m", CHILD, script, CHECK, *filled.words]
        outcome = await self._child(request, argv, filled.language)
        if outcome["code"] != 0:
            raise ApiError(400, "refused", outcome["text"])
        tag = parse_json(outcome["text"].splitlines()[-1])["tag"]
        try:
            return Run(NEW, checkpoint_dir(NEW, tag))
        except UserError as refusal:
            raise ApiError(400, "refused", str(refusal), "out_tag") from refusal

    async def _fields_of(self, request: Request, stage: str) -> list[command.Field]:
        """Return the flags of the script of a stage, which a child reads once."""
        if stage not in self._fields:
            argv = [sys.executable, "-m", CHILD, command.script_of(stage)]
            outcome = await self._child(request, argv, "en", max_characters=BODY_BYTES)
            if outcome["code"] != 0:
                raise ApiError(
                    500, "no_form", f"the flags cannot be read: {outcome['text'][-500:]}"
                )
            self._fields[stage] = parse_json(outcome["text"].splitlines()[-1])
        return self._fields[stage]

    async def _child(
        self,
        request: Request,
        argv: Sequence[str],
        language: str,
        max_characters: int = MOST_OUTPUT,
    ) -> dict[str, Any]:
        """Return the exit `code` of a program, and the end of what it printed, as `text`.

        Its processes end if the request does. Raises ApiError (429) if too many requests wait.
        """
        try:
            async with self._turns.turn(owner_of(request)):
                return await _output_of(argv, self.starter.environment(language), max_characters)
        except asyncio.QueueFull:
            raise ApiError(429, "queue_full", QUEUE_FULL, retry_after=2) from None


async def _output_of(
    argv: Sequence[str], environment: Mapping[str, str], max_characters: int
) -> dict[str, Any]:
    """Run a program, and return its exit `code` and the last `max_characters` of its output."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(environment),
        start_new_session=True,
    )
    try:
        output = await asyncio.wait_for(_end_of(process, 4 * max_characters), CHILD_SECONDS)
    except asyncio.TimeoutError:
        text = f"{command.shown(argv)} took longer than {CHILD_SECONDS} s and was ended"
        raise ApiError(504, "too_slow", text) from None
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return {"code": process.returncode, "text": output.decode(errors="replace")[-max_characters:]}


async def _end_of(process: asyncio.subprocess.Process, max_bytes: int) -> bytes:
    """Wait for a process to end, and return the last `max_bytes` bytes of its output."""
    assert process.stdout is not None
    output = b""
    while piece := await process.stdout.read(1 << 16):
        output = (output + piece)[-max_bytes:]
    await process.wait()
    return output


def _resuming(run: Run, fields: list[command.Field]) -> Form:
    """Return the form that resumes a run with the settings it began with."""
    started = record.read(run.folder)
    config = saved_config(run.folder)
    if config is None and started is not None:  # it has saved nothing: it begins again
        return Form(run.stage, run, fields, started.values, started.processes)
    if config is None:
        text = "the run has no checkpoint to resume from: start it again"
        raise ApiError(409, "nothing_saved", text, "run")
    values = command.saved_values(fields, run.stage, run.folder.name, config)
    ranks = facts_of(run.folder / "run.json").get("ranks")
    processes = ranks if isinstance(ranks, int) and 0 < ranks <= MOST_PROCESSES else 1
    return Form(run.stage, run, fields, values, processes)


def _cards() -> int:
    """Return how many devices there are, or 1 where a run computes on the CPU."""
    with contextlib.suppress(UserError):
        # Asking for more, such as their kind, would take memory of a device in this process.
        return max(device.PLATFORMS[device.chosen()[0]]().count(), 1)
    return 1


def _answer(value: Mapping[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(value).encode(), status, media_type="application/json")
