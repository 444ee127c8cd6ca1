"""What people say about a run: a note, tags, and whether it is archived. Kept in RUN/notes.json:

    {"note": "diverges after step 900", "tags": ["baseline", "paper"], "archived": false}

An archived run is left out of lists unless they are asked for it; nothing of it is moved or changed. The file
may have been written by anyone who can write into the folder: one that is damaged or too large counts as
missing.
"""

import re
import threading
from collections.abc import Sequence

import msgspec

from myriad.errors import BadInputError
from myriad.run.run_folder import Run
from myriad.system.whole_file import parse_json, read_regular, write_whole

__all__ = ["NOTES_FILE", "RunNotes", "read_notes", "write_notes"]

NOTES_FILE = "notes.json"
_MOST_BYTES, _MOST_NOTE, _MOST_TAGS = 2**17, 10_000, 20
_TAG = re.compile(r"[\w.:/+-]{1,40}")
_ALLOWED_TAGS = f"at most {_MOST_TAGS}, each of 1 to 40 letters, digits and . : / + - _"
_ONE_WRITER = threading.Lock()


class RunNotes(msgspec.Struct, frozen=True):
    """The notes of a run."""

    note: str = ""
    tags: tuple[str, ...] = ()
    archived: bool = False

    def check(self) -> None:
        """Raise `BadInputError` for a note or a tag that is not allowed."""
        if len(self.note) > _MOST_NOTE:
            raise BadInputError("note", f"{len(self.note)} characters", f"at most {_MOST_NOTE}")
        if "\0" in self.note or any("\ud800" <= letter <= "\udfff" for letter in self.note):
            raise BadInputError("note", ascii(self.note[:40]), "must be text")
        if len(self.tags) > _MOST_TAGS:
            raise BadInputError("tags", f"{len(self.tags)} tags", _ALLOWED_TAGS)
        for tag in self.tags:
            if not _TAG.fullmatch(tag):
                raise BadInputError("tags", tag, _ALLOWED_TAGS)


def read_notes(run: Run) -> RunNotes:
    """Return the notes of a run; empty ones if the file is missing or wrong."""
    try:
        found = msgspec.convert(parse_json(read_regular(run.path / NOTES_FILE, _MOST_BYTES)), RunNotes)
        found.check()
    except (OSError, ValueError, BadInputError):
        return RunNotes()
    return found


def write_notes(
    run: Run, *, note: str | None = None, tags: Sequence[str] | None = None, archived: bool | None = None
) -> RunNotes:
    """Replace what is given, and return the notes. The file has the mode of the run's other files.

    Raises `BadInputError` for a wrong note or tag, ``OSError`` if the folder cannot be written."""
    with _ONE_WRITER:
        before = read_notes(run)
        found = RunNotes(
            before.note if note is None else note.strip(),
            before.tags if tags is None else tuple(sorted(set(tags))),
            before.archived if archived is None else archived,
        )
        found.check()
        with run.shared_as_folder():
            write_whole(run.path / NOTES_FILE, msgspec.json.encode(found) + b"\n")
    return found
