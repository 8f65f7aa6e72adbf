"""Writes TensorBoard event files, in the tracker's own process."""

# pyright: reportAttributeAccessIssue=false
# The classes of protocol buffers are created on import, so a type checker cannot see them.

import json
import time
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, types_pb2
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from nanochat.runtime.trackers.start import Start, numbers


class Tensorboard:
    """Writes event files to the folder `tensorboard` of the stage, without needing TensorFlow.

    `tensorboard --logdir` reads the files.
    """

    def __init__(self, start: Start):
        """Open a new event file, and write the settings to it.

        TensorBoard then hides metrics of steps after `start.step`, which an interrupted run has
        left, just as metrics.jsonl drops them.
        """
        self._writer = EventFileWriter(str(start.folder / "tensorboard"))
        session = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(event_pb2.Event(session_log=session), start.step + 1)
        self._add_summary([self._settings(start.settings)], start.step)

    def _settings(self, settings: dict[str, Any]) -> Any:
        """Return the settings as a summary value that TensorBoard shows as text."""
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        lines = [f"    {name}: {json.dumps(value)}" for name, value in settings.items()]
        text = "\n".join(lines).encode()
        content = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text])
        content.tensor_shape.dim.add(size=1)
        return summary_pb2.Summary.Value(
            tag="settings/text_summary",
            metadata=summary_pb2.SummaryMetadata(plugin_data=plugin),
            tensor=content,
        )

    def _add(self, event: Any, step: int) -> None:
        event.step = step
        event.wall_time = time.time()
        self._writer.add_event(event)

    def _add_summary(self, values: list[Any], step: int) -> None:
        summary = summary_pb2.Summary(value=values)
        self._add(event_pb2.Event(summary=summary), step)

    def log(self, figures: dict[str, Any]) -> None:
        """Write the finite numbers of one step."""
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in numbers(figures).items()
        ]
        self._add_summary(values, figures.get("step", 0))
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()
