"""Files of one JSON object a line, added to with one write each: a reader skips a torn last line, so a kill
at any instant leaves a file that can be read and added to.
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["JsonlTail", "Record", "append_line"]

Record = dict[str, Any]


class JsonlTail:
    """Reads the complete lines added to a file since the last look. A torn or foreign line is left out."""

    def __init__(self, path: Path, *, from_end: bool = False, offset: int = 0) -> None:
        """``offset``: bytes that were read before."""
        self._path = path
        self._offset = path.stat().st_size if from_end and path.exists() else offset

    @property
    def offset(self) -> int:
        """Bytes that have been read."""
        return self._offset

    def poll(self) -> list[Record]:
        """New lines; none when the file is not there yet."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [record for line in complete.splitlines() if (record := _parse_line(line)) is not None]


def _parse_line(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """One line by one write, after whatever a killed writer has left; what is not finite becomes null."""
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    text = json.dumps(plain, ensure_ascii=False)
    line = text.encode(errors="backslashreplace") + b"\n"  # half a surrogate pair, as JSON writes it
    handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
        os.write(handle, b"\n" + line if torn else line)
    finally:
        os.close(handle)
