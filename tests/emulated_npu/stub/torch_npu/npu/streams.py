"""Streams and events. The emulated device works immediately, so they only order deferred copies."""

import time
from typing import Any

import torch


class Stream(torch.Stream):
    """A queue of work for one device."""

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> "Stream":
        if "stream_id" in kwargs:
            return super().__new__(cls, **kwargs)
        from torch_npu.npu.utils import _get_device_index

        where = torch.device("npu", _get_device_index(device, optional=True))
        return super().__new__(cls, device=where, priority=priority)

    @property
    def npu_stream(self) -> int:
        """The handle of the stream; here, its number."""
        return self.stream_id

    def record_event(self, event: Any = None) -> Any:
        """Record an event that happens when the work so far is done."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        """Make later work of this stream wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        """Make later work of this stream wait for the work of another stream so far."""
        self.wait_event(stream.record_event())


class Event(torch.Event):
    """A mark in a stream. torch's elapsed_time refuses subclasses, so this class keeps the time."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
    ) -> "Event":
        event = super().__new__(cls, device="npu", enable_timing=enable_timing, blocking=blocking)
        event._timed, event._time = enable_timing, None
        return event

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def record(self, stream: Any = None) -> None:
        """Put this mark into the stream, by default the current one."""
        if stream is None:
            from torch_npu.npu.utils import current_stream

            stream = current_stream()
        super().record(stream)
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Make the stream, by default the current one, wait for this mark."""
        if stream is None:
            from torch_npu.npu.utils import current_stream

            stream = current_stream()
        super().wait(stream)

    def elapsed_time(self, end_event: "Event") -> float:
        """The milliseconds between two recorded events with timing."""
        if not (self._timed and end_event._timed):
            raise RuntimeError("Both events must be created with argument 'enable_timing=True'.")
        if self._time is None or end_event._time is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time - self._time) * 1000
