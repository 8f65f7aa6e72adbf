"""Calls the reward functions of a file, as a program of the sandbox, with the standard library only.

reward_calls.py sends this file's text to the sandbox, followed by a call of main(). Each result is a
line of JSON that is written at once, so that a function which ends the process costs its own result
only.
"""

import importlib.util
import inspect
import io
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any

LONGEST_REASON = 120  # characters of a message
# A call may take this many times its limit of processor time by the clock, since the machine may be
# busy and the call may wait.
WAITING = 5
# A call that keeps the processor busy for this many times its limit and notices no signal, such as
# one deep inside a C function, ends the process.
PATIENCE = 3


class OutOfTime(BaseException):
    """Raised inside a call that takes too long; no `except Exception` catches it."""


def main(request: Mapping[str, Any]) -> None:
    """Load a file and call its functions, and write the results to standard output.

    `request` has the `name` and the `source` of the file, the names of `functions`, the arguments
    of each of the `calls` by name, and the `seconds` that a call may take. The first line lists the
    functions of the file, or holds the reason why it cannot be loaded. Each other line is a result:
    [index of the call, index of the function, value, reason for the lack of a value].
    """
    results = os.fdopen(os.dup(1), "w")
    sys.stdout = sys.stderr = io.StringIO()  # what functions print would mix with the results

    def send(line: Any) -> None:
        results.write(json.dumps(line) + "\n")
        results.flush()

    seconds = request["seconds"]
    try:
        module = within(seconds, lambda: load(request["name"], request["source"]))
        send([None, sorted(functions_of(module))])
    except BaseException as failure:
        send([reason(failure, seconds), []])
        return
    for call_index, arguments in enumerate(request["calls"]):
        for function_index, name in enumerate(request["functions"]):
            value, problem = reward(getattr(module, name, None), arguments, seconds)
            send([call_index, function_index, value, problem])


def load(name: str, source: str) -> ModuleType:
    """Return the module in `source`, which is written to a file so that errors name its lines."""
    with open(name, "w", encoding="utf-8") as file:
        file.write(source)
    spec = importlib.util.spec_from_file_location("rewards", os.path.abspath(name))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rewards"] = module
    spec.loader.exec_module(module)
    return module


def functions_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """Return the functions that a file defines itself, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and name[0] != "_"
    }


def reward(
    function: Callable[..., Any] | None, arguments: Mapping[str, Any], seconds: float
) -> tuple[float | None, str]:
    """Return (reward, "") if a function returns a number, else (None, what went wrong)."""
    if function is None:
        return None, "there is no such function"
    try:
        named_arguments = arguments_of(function, arguments)
        value = within(seconds, lambda: function(**named_arguments))
        if not isinstance(value, int | float):
            return None, f"returned {type(value).__name__} instead of a number"
        if not math.isfinite(value):
            return None, f"returned {value}"
        return float(value), ""
    except BaseException as failure:
        return None, reason(failure, seconds)


def arguments_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function has parameters for, or all of them if it has **kwargs.

    Raises TypeError, naming all arguments, if a parameter without a default is not among them.
    """
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind == parameter.VAR_KEYWORD for parameter in parameters):
        return dict(arguments)
    unknown = [
        parameter.name
        for parameter in parameters
        if parameter.name not in arguments and parameter.default is parameter.empty
    ]
    if unknown:
        raise TypeError(f"parameter {unknown[0]!r} is none of {', '.join(arguments)}")
    names: Sequence[str] = [parameter.name for parameter in parameters]
    return {name: arguments[name] for name in names if name in arguments}


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return what `call` returns, raising OutOfTime in it after `seconds` of processor time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTime

    signal.signal(signal.SIGPROF, stop)
    signal.signal(signal.SIGALRM, stop)
    # SIGVTALRM, which the last timer sends, ends the process.
    limits = {
        signal.ITIMER_PROF: seconds,
        signal.ITIMER_REAL: WAITING * seconds,
        signal.ITIMER_VIRTUAL: PATIENCE * seconds,
    }
    for timer, limit in limits.items():
        signal.setitimer(timer, limit)
    try:
        return call()
    finally:
        for timer in limits:
            signal.setitimer(timer, 0)


def reason(failure: BaseException, seconds: float) -> str:
    """Return a short text that says what went wrong, and in which line of the file."""
    if isinstance(failure, OutOfTime):
        return f"took longer than {seconds:g} s"
    line = ""
    trace = failure.__traceback__
    while trace is not None:
        if trace.tb_frame.f_globals.get("__name__") == "rewards":
            line = f", line {trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(failure).__name__}: {failure}"[:LONGEST_REASON] + line
