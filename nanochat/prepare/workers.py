"""Gives tasks to worker processes as lines of JSON, and collects their answers."""

import contextlib
import errno
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanochat.common import UserError
from nanochat.tokenizer import cores

ROOT = Path(__file__).resolve().parent.parent.parent
MOST_PROCESSES = 32  # by default, since each process holds a few hundred MB
BYTES_THAT_PAY = (
    8_000_000  # of shards; a process with less to do takes longer to start than to read them
)
Message = dict[str, Any]
Say = Callable[[Message], None]


# --- the parent ------------------------------------------------------------------------------------


def processes_for(size: int, tasks: int, asked: int | None) -> int:
    """How many processes to use for tasks that read `size` bytes of shards: what was asked for, or as many as save
    time; at most one for each task."""
    return min(asked or min(cores(), MOST_PROCESSES, size // BYTES_THAT_PAY), tasks)


def work(
    module: str,
    setup: Mapping[str, Any],
    tasks: Sequence[Mapping[str, Any]],
    processes: int,
    keep: Sequence[int] = (),
) -> Generator[tuple[int, Message], None, None]:
    """Let worker processes do tasks, and yield (number of the task, message) for every message as it arrives.

    The processes run `python -m module`, which calls serve(). The last message of a task has "result". A UserError or
    an OSError in a process is raised here too, and a process that was killed raises UserError. Leaving the iterator
    ends the processes; they also end when this process ends. They inherit the file descriptors `keep`.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    answers: queue.SimpleQueue[tuple[int, Message]] = queue.SimpleQueue()
    for number in range(len(tasks)):
        waiting.put(number)
    started: list[subprocess.Popen[str]] = []
    threads: list[threading.Thread] = []

    def drive(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        ahead = [setup]
        while True:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                return
            with contextlib.suppress(
                BrokenPipeError
            ):  # the process has ended, which reading will show
                print(
                    *map(json.dumps, (*ahead, tasks[number])),
                    sep="\n",
                    file=process.stdin,
                    flush=True,
                )
            ahead, message = [], Message()
            while not {"result", "raised"} & message.keys():
                line = process.stdout.readline()
                message = json.loads(line) if line else {"raised": "end", "code": process.wait()}
                answers.put((number, message))
            if "raised" in message:
                return

    try:
        for _ in range(min(processes, len(tasks))):
            started.append(_start(module, keep))
            threads.append(threading.Thread(target=drive, args=(started[-1],), daemon=True))
            threads[-1].start()
        left = len(tasks)
        while left:
            number, message = answers.get()
            if "raised" in message:
                raise _failure(message, tasks[number])
            left -= "result" in message
            yield number, message
    finally:
        for process in started:
            process.kill()
            process.wait()
        for thread in threads:
            thread.join()
        for process in started:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


def _start(module: str, keep: Sequence[int]) -> subprocess.Popen[str]:
    alone = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    }
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.Popen(
        [sys.executable, "-m", module],
        env={**alone, "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        pass_fds=tuple(keep),
    )


def _failure(message: Message, task: Mapping[str, Any]) -> BaseException:
    """The exception to raise for a process that did not finish a task."""
    if message["raised"] == "UserError":
        return UserError(message["text"], message["code"])
    if message["raised"] == "OSError":
        return OSError(message["errno"], message["text"], message["filename"])
    if message["raised"] == "end":
        code = message["code"]
        killed = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        memory = ", perhaps because memory ran out" if code == -signal.SIGKILL else ""
        return UserError(
            f"the process that worked on {task.get('name', 'a task')} {killed}{memory}. Finished work is kept: type "
            "the same command again to resume; if it fails again, use fewer processes: python -m nanochat.prepare -w N"
        )
    return RuntimeError(
        f"a process that worked on {task.get('name', 'a task')} failed:\n{message['text']}"
    )


# --- the workers -----------------------------------------------------------------------------------


def serve(begin: Callable[[Message], Callable[[Message, Say], Message]]) -> None:
    """Do tasks from standard input until it ends.

    `begin(setup)` returns a function that does one task and returns the result; meanwhile the function may send
    messages with its second argument.
    """
    with contextlib.suppress(ValueError):
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Ctrl-C goes to the parent, which ends this process
    wire = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout = sys.stderr
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        os._exit(
            0
        )  # the parent has no more tasks or has died; in both cases no unfinished task may be completed

    threading.Thread(target=listen, daemon=True).start()

    def say(message: Message) -> None:
        print(json.dumps(message), file=wire, flush=True)

    do = begin(json.loads(lines.get()))
    while True:
        task = json.loads(lines.get())
        try:
            say({"result": do(task, say)})
        except UserError as mistake:
            say({"raised": "UserError", "text": str(mistake), "code": mistake.exit_code})
        except OSError as failure:
            say(
                {
                    "raised": "OSError",
                    "errno": failure.errno or errno.EIO,
                    "text": failure.strerror or str(failure),
                    "filename": None if failure.filename is None else str(failure.filename),
                }
            )
        except Exception:  # the edge of a process: the parent raises it again
            say({"raised": "Exception", "text": traceback.format_exc()})
