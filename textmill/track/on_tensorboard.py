"""TensorBoard event files in the run folder, written by TensorBoard's own writer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from textmill.config import TrackConfig

FLUSH_SECONDS = 10


class TensorBoard:
    """One scalar per metric; each start adds an event file, and TensorBoard reads all of them as one run."""

    def __init__(self, folder: Path, start: int) -> None:
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_SECONDS)
        # TensorBoard then drops what an earlier, killed process logged after this step.
        session = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=start + 1, session_log=session))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Write all values of a step as one event."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def mark(self, step: int, text: str) -> None:
        """Write a text that TensorBoard shows next to the curves."""
        metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
        summary = Summary(value=[Summary.Value(tag="change", metadata=metadata, tensor=tensor)])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write the queued events."""
        self._writer.close()


def new_tracker(config: TrackConfig, folder: Path, start: int, settings: dict[str, Any]) -> TensorBoard:
    """Event files under tensorboard/ in the run folder; view them with: tensorboard --logdir FOLDER."""
    return TensorBoard(folder / "tensorboard", start)
