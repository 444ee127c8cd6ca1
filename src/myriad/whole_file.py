"""Files that are there whole or not at all, whenever the writer is killed."""

import os
from pathlib import Path

__all__ = ["write_whole"]


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Replaces a file, synced; ``mode`` before the umask. Raises ``OSError``: the old one is still there."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
