"""The thread that owns an engine, and the way to it from an asyncio loop."""

import asyncio
import queue
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar


class EngineEvent(Protocol):
    """A token of one request; `finish` says why it is the last one."""

    @property
    def request(self) -> int: ...

    @property
    def finish(self) -> str | None: ...


NEWS_SECONDS = 0.02  # too short to see

E = TypeVar("E", bound=EngineEvent)
E_co = TypeVar("E_co", bound=EngineEvent, covariant=True)


class StepEngine(Protocol[E_co]):
    """What a thread needs of an engine; engine.Engine has it."""

    @property
    def busy(self) -> bool: ...

    @property
    def free_slots(self) -> int: ...

    def submit(self, prompt: list[int], sampling: Any) -> int: ...

    def step(self) -> Sequence[E_co]: ...

    def cancel(self, request: int) -> bool: ...


class Job(Generic[E]):
    """One request on its way to the engine, and its events on their way back."""

    def __init__(self, prompt: list[int], sampling: Any):
        self.prompt = prompt
        self.sampling = sampling
        self.request: int | None = None  # the engine's number, known to its thread only
        self._news: asyncio.Queue[E | Exception] = asyncio.Queue()

    def tell(self, news: E | Exception) -> None:
        self._news.put_nowait(news)

    async def events(self) -> list[E]:
        """What has come since the last call, at least one event. Raises what the engine raised."""
        news = [await self._news.get()]
        while not self._news.empty():
            news.append(self._news.get_nowait())
        events: list[E] = []
        for item in news:
            if isinstance(item, Exception):
                raise item
            events.append(item)
        return events


class EngineThread(Generic[E]):
    """The only thread that touches the engine; its methods are called on the event loop.

    Commands go in through a queue that is emptied before every step, and one callback for the events of all jobs
    brings them back, at most every NEWS_SECONDS: Python runs one thread at a time, and what the loop spends on every
    piece it sends, the engine waits. So the loop never waits for the model, nor the model for a client.
    """

    def __init__(self, engine: StepEngine[E], waiting: int):
        """`waiting` jobs may be there beyond those that have a slot."""
        self.slots = self.free_slots = engine.free_slots
        self.jobs: set[Job[E]] = set()  # submitted and not yet released
        self._engine = engine
        self._most = self.slots + waiting
        self._inbox: queue.SimpleQueue[tuple[Job[E], bool] | None] = queue.SimpleQueue()
        self._running: dict[int, Job[E]] = {}  # by the engine's number; this and the next are its thread's own
        self._news: list[tuple[Job[E], E | Exception]] = []  # not published yet
        self._published = 0.0  # when
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Begin to serve the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after the step it is in."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def submit(self, job: Job[E]) -> None:
        """Queue a job, which the caller must release. Raises asyncio.QueueFull when too many wait already."""
        if len(self.jobs) >= self._most:
            raise asyncio.QueueFull
        self.jobs.add(job)
        self._inbox.put((job, True))

    def release(self, job: Job[E]) -> None:
        """Let go of a job; if it is not finished the engine drops it before its next step, and its slot is free."""
        self.jobs.discard(job)
        self._inbox.put((job, False))

    def dismiss(self, reason: Exception) -> None:
        """Tell all jobs that they will not be finished; their owners release them."""
        for job in self.jobs:
            job.tell(reason)

    # --- in the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while self._obey():
            try:
                events = self._engine.step()
            except Exception as failure:  # the edge of the thread: chats in flight fail, later ones may not
                traceback.print_exc()
                self._fail(failure)
            else:
                self._news += [(self._running[event.request], event) for event in events]
                for event in events:
                    if event.finish is not None:
                        del self._running[event.request]
            self.free_slots = self._engine.free_slots
            if time.monotonic() - self._published >= NEWS_SECONDS:
                self._publish()

    def _obey(self) -> bool:
        """Carry out the commands, waiting for one if there is nothing to compute. False: the thread must end."""
        while not self._inbox.empty() or not self._engine.busy:
            if self._inbox.empty():
                self._publish()  # a cancel may have left news behind
            command = self._inbox.get()
            if command is None:
                return False
            job, wanted = command
            if wanted:
                self._admit(job)
            elif job.request is not None and self._running.pop(job.request, None) is not None:
                self._engine.cancel(job.request)
            self.free_slots = self._engine.free_slots
        return True

    def _admit(self, job: Job[E]) -> None:
        try:
            job.request = self._engine.submit(job.prompt, job.sampling)
        except Exception as failure:  # as in _run; the caller has checked the prompt, so none is expected
            traceback.print_exc()
            self._news.append((job, failure))
        else:
            self._running[job.request] = job

    def _fail(self, failure: Exception) -> None:
        self._news += [(job, failure) for job in self._running.values()]
        for request in self._running:
            self._engine.cancel(request)
        self._running.clear()

    def _publish(self) -> None:
        assert self._loop is not None
        if self._news:
            self._loop.call_soon_threadsafe(_deliver, self._news)
            self._news, self._published = [], time.monotonic()


def _deliver(news: Sequence[tuple[Job[Any], Any]]) -> None:
    for job, item in news:
        job.tell(item)
