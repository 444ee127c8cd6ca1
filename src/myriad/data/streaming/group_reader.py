"""Read and tokenize groups of a stream: the pieces of a group in several threads, groups ahead of their use.

    position known ──► its group is in memory ──► read
           │                   └── not: tokenized (again) from its start, which the index has
           └── not: groups are tokenized in their order, until it is; their tokens are dropped again

The threads belong to the process that reads, because the tokenizer releases Python's lock, and a loader that
waits for them uses processor time, by which its owner sees that it works. Memory is bounded by the groups in
use and a few more ahead, by the text of a group, and by the size of a document.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from myriad.data.config import Documents, OnBadRecord
from myriad.data.corpus_manifest import Split
from myriad.data.file_documents import END_OF_FILE, Found, ReadRules, read_found, shown_name
from myriad.data.records import RecordForm
from myriad.data.streaming.group_index import GroupIndex, GroupRecord
from myriad.data.streaming.group_order import Cursor, GroupOrder, GroupStart
from myriad.data.text_sources import Piece
from myriad.data.tokenize_pieces import encode_documents
from myriad.data.tokenizer import Tokenizer
from myriad.data.validation_split import split_of
from myriad.data.windows import JoinedWindows, PackedWindows, pack_documents
from myriad.errors import BAD_DATA, BadInputError, MyriadError, RunFailedError

__all__ = ["LONGEST_DOCUMENT_BYTES", "Group", "GroupMaker", "GroupReader"]

LONGEST_DOCUMENT_BYTES = 1 << 25
"""Largest line of streamed JSONL, and largest text: up to 16 are in memory as a whole."""
_MOST_EMPTY_BYTES = 1 << 30
"""Bytes of a file without any text that are read for one group; then the file is refused."""
_BATCH_CHARACTERS = 1 << 18
"""Text that a thread tokenizes at once: its encoding takes some 170 times its memory."""
_MOST_NAMES = 3
"""Files that a message names."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Group(NamedTuple):
    """A group in memory."""

    record: GroupRecord
    tokens: NDArray[np.int32]
    windows: JoinedWindows | PackedWindows
    order: NDArray[np.int64]
    """The window of each sample of the group."""

    def window(self, place: int) -> int:
        """Return the window of a sample of the group."""
        return int(self.order[place])

    def read_tokens(self, start: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with the group's tokens from number ``start`` on."""
        out[:] = self.tokens[start : start + len(out)]


@dataclass
class _Segment:
    """What a group takes from one piece."""

    cursor: Cursor
    documents: list[NDArray[np.int32]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class GroupMaker:
    """Make groups from their starts."""

    name: str
    """The corpus, as in the job."""
    order: GroupOrder
    form: RecordForm
    tokenizer: Tokenizer
    split: Split
    held_out: float
    sequence: int
    documents: Documents
    group_bytes: int
    """Characters of text in a group, of all splits."""
    first_bytes: int
    """Characters in the first group of the stream; the next ones double, so that training starts soon."""
    on_bad_record: OnBadRecord = "stop"
    num_threads: int = 1
    report: Callable[[str], None] = lambda problem: None
    """Receives why a record is left out."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set: groups are not needed any more."""
    _open: dict[int, tuple[Cursor, Iterator[Found]]] = field(default_factory=dict)
    """The pieces that the last group left off in, by number: a compressed file is not unpacked again."""

    def make(self, number: int, start: GroupStart) -> Group:
        """Read and tokenize a group. Raises `RunFailedError`."""
        pieces, cursors = self.order.bundle(start), self.order.cursors(start)
        active = [at for at, piece in enumerate(pieces) if cursors[at].span < len(piece.spans)]
        share = max(1, self._size(start) // max(1, len(active)))
        opened = dict(self._open)
        self._open.clear()

        def read(at: int) -> _Segment:
            known = opened.get(pieces[at].number)
            found = known[1] if known is not None and known[0] == cursors[at] else None
            return self._segment(pieces[at], cursors[at], share, found)

        segments = _in_threads(read, active, self.num_threads)
        after = list(cursors)
        for at, segment in zip(active, segments, strict=True):
            after[at] = segment.cursor
            for problem in segment.problems:
                self.report(problem)
        following = self.order.next_start(start, after)
        if following.bundle != start.bundle or following.epoch != start.epoch:
            self._open.clear()
        return self._group(number, start, segments, following)

    def _size(self, start: GroupStart) -> int:
        """Return the characters of text in a group."""
        is_early = start.epoch == start.bundle == 0 and start.number < self.group_bytes.bit_length()
        return min(self.group_bytes, self.first_bytes << start.number) if is_early else self.group_bytes

    def _group(
        self, number: int, start: GroupStart, segments: Sequence[_Segment], following: GroupStart
    ) -> Group:
        found = [document for segment in segments for document in segment.documents]
        found = [found[at] for at in self.order.shuffled(len(found), start, "documents")] if found else []
        tokens = np.concatenate([np.empty(0, np.int32), *found])
        windows: JoinedWindows | PackedWindows = JoinedWindows(len(tokens), self.sequence)
        if self.documents == "packed":
            lengths = np.array([len(one) for one in found], np.int64)
            windows = PackedWindows(pack_documents(lengths, self.sequence), self.sequence)
        skipped = sum((segment.skipped for segment in segments), Counter[str]())
        digest = xxhash.xxh3_64_hexdigest(tokens.tobytes())
        record = GroupRecord(number, windows.count, len(tokens), len(found), dict(skipped), digest, following)
        count = windows.count
        order = self.order.shuffled(count, start, "windows") if count else np.empty(0, np.int64)
        return Group(record, tokens, windows, order)

    def _segment(self, piece: Piece, cursor: Cursor, share: int, found: Iterator[Found] | None) -> _Segment:
        """Read and tokenize the next documents of a piece: at least ``share`` characters, or its rest."""
        segment = _Segment(cursor)
        texts: list[str] = []
        left, waiting, empty_since = share, 0, cursor.next or 0
        while left > 0 and segment.cursor.span < len(piece.spans):
            span = segment.cursor.span
            found = found or self._found(piece, segment.cursor)
            one = next(found, None)
            if one is None:
                segment.cursor, found, empty_since = Cursor(span + 1), None, 0
                continue
            segment.cursor = Cursor(span, one.next)
            if self.stop.is_set():
                raise RunFailedError(f"{self.name}: reading was ended")
            if one.document:
                self._check_size(piece.spans[span].url, one)
                left, waiting = left - len(one.document), waiting + len(one.document)
                empty_since = one.next
                if split_of(one.document, self.held_out) == self.split:
                    texts.append(one.document)
            else:
                self._skip(piece.spans[span].url, one, segment, empty_since)
            if one.next == END_OF_FILE:
                segment.cursor, found, empty_since = Cursor(span + 1), None, 0
            if waiting >= _BATCH_CHARACTERS:
                segment.documents += self._encode(texts)
                texts, waiting = [], 0
        segment.documents += self._encode(texts)
        if found is not None:
            self._open[piece.number] = segment.cursor, found
        return segment

    def _found(self, piece: Piece, cursor: Cursor) -> Iterator[Found]:
        """Yield what a file range of a piece holds from a position on. Raises `RunFailedError`."""
        rules = ReadRules(LONGEST_DOCUMENT_BYTES, skips_bad=self.on_bad_record == "skip")
        span = piece.spans[cursor.span]._replace(resume=cursor.next)
        try:
            yield from read_found(span, self.form, rules)
        except BadInputError as error:
            raise self._refusal(error) from None
        except OSError as error:
            raise RunFailedError(f"{span.url.removeprefix('file://')}: cannot be read: {error}") from None

    def _refusal(self, error: BadInputError) -> RunFailedError:
        """Return the error of a record or a file, in the words of the job."""
        allowed = error.allowed.replace("--key ", "data.text_key = ")
        key = "data.text_key" if error.key == "--key" else "data.corpus"
        text = BadInputError(key, error.value, allowed)
        if allowed.startswith("cannot be read"):  # another attempt may read it
            return RunFailedError(str(text))
        return RunFailedError(f"{BAD_DATA}{text}; repair it, or give --data.on-bad-record skip")

    def _check_size(self, url: str, found: Found) -> None:
        if found.document is not None and len(found.document) > LONGEST_DOCUMENT_BYTES:
            file = url.removeprefix("file://")
            longest = f"a document of {len(found.document)} characters; at most {LONGEST_DOCUMENT_BYTES}"
            raise RunFailedError(f"{BAD_DATA}data.corpus: {file} holds {longest}")

    def _skip(self, url: str, found: Found, segment: _Segment, empty_since: int) -> None:
        """Count a record without text, or one that cannot be read."""
        if found.problem:
            segment.skipped["bad"] += 1
            segment.problems.append(found.problem)
        else:
            segment.skipped["null" if found.document is None else "empty"] += 1
        if END_OF_FILE > found.next > empty_since + _MOST_EMPTY_BYTES:
            file = url.removeprefix("file://")
            place = f"no text in the {_MOST_EMPTY_BYTES} bytes from byte {empty_since} on"
            raise RunFailedError(f"{BAD_DATA}data.corpus: {file} has {place}; leave it out")

    def _encode(self, texts: Sequence[str]) -> list[NDArray[np.int32]]:
        return [tokens for tokens, _ in encode_documents(self.tokenizer, texts)] if texts else []


class GroupReader:
    """Samples of a stream, by their positions."""

    def __init__(self, maker: GroupMaker, index: GroupIndex, ahead: int = 0, most_kept: int = 0) -> None:
        """``ahead``: groups that a thread makes beyond those that are in use; 0: there is no thread.
        ``most_kept``: groups that are kept after their use."""
        self._maker, self._index, self._ahead, self._most_kept = maker, index, ahead, most_kept
        self._groups: dict[int, Group] = {}
        self._first, self._last = 0, -1
        self._changed = threading.Condition()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None

    def expect(self, first: int, last: int) -> None:
        """Prepare the groups of the samples ``first`` to ``last``; groups before them are dropped."""
        start = self._find(first, None)[0]
        stop = self._find(last, start)[0]
        with self._changed:
            self._first, self._last = start, stop
            for number in sorted(self._groups):
                is_old = number < start and len(self._groups) > self._most_kept + stop - start + 1
                if is_old or number > stop + self._ahead:
                    del self._groups[number]
            self._changed.notify_all()

    def get(self, position: int) -> tuple[Group, int]:
        """Return the group of a sample, and the sample's place in it. Raises `RunFailedError`."""
        number, place = self._find(position, self._first)
        with self._changed:
            self._first, self._last = min(self._first, number), max(self._last, number)
        return self._wait(lambda: self._groups.get(number), number), place

    def _find(self, position: int, first: int | None) -> tuple[int, int]:
        """Return the group of a sample; groups whose windows are unknown are tokenized for that.

        ``first``: first group to keep meanwhile; ``None``: none."""
        while (found := self._index.find(position)) is None:
            known = len(self._index)
            with self._changed:
                self._first, self._last = known if first is None else first, known
                for number in [one for one in self._groups if one < self._first]:
                    if len(self._groups) > self._most_kept:
                        del self._groups[number]
            self._wait(lambda known=known: len(self._index) > known or None, known)  # type: ignore[misc]
        return found

    def _wait(self, done: Callable[[], _Result | None], number: int) -> _Result:
        """Return what ``done`` returns once it is not ``None``; group ``number`` is made for that."""
        if self._ahead and self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()
        while (found := done()) is None:
            if not self._ahead:
                self._make(number)
                continue
            with self._changed:
                self._changed.notify_all()
                if self._error is not None:
                    raise self._error
                self._changed.wait(0.1)
        return found

    def _work(self) -> None:
        """Make the groups that are in use, and those ahead of them."""
        while not self._maker.stop.is_set():
            with self._changed:
                wanted = range(self._first, self._last + self._ahead + 1)
                number = next((one for one in wanted if one not in self._groups), None)
                if number is None:
                    self._changed.wait(1.0)
                    continue
            try:
                self._make(number)
            except Exception as error:
                with self._changed:
                    self._error = error if isinstance(error, MyriadError) else RunFailedError(repr(error))
                    self._changed.notify_all()
                return

    def close(self) -> None:
        """End the thread, which drops the group that it makes."""
        self._maker.stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2)

    def _make(self, number: int) -> None:
        """Make a group, or the first unknown one if that comes before it."""
        number = min(number, len(self._index))
        group = self._maker.make(number, self._index.start(number))
        if number == len(self._index):
            self._check_epoch(group.record)
            self._index.append(group.record)
            self._check_nodes()
        elif group.record.digest != self._index.digest(number):
            raise RunFailedError(f"{BAD_DATA}{self._maker.name}: a file changed while the run reads it")
        with self._changed:
            if self._first <= number <= self._last + self._ahead:
                self._groups[number] = group
            self._changed.notify_all()

    def _check_nodes(self) -> None:
        """Refuse text that another node read differently: its ranks would train on other samples."""
        number = self._index.find_difference()
        if number is not None:
            pieces = self._maker.order.bundle(self._index.start(number))
            files = sorted({shown_name(span.url) for piece in pieces for span in piece.spans})
            names = ", ".join(files[:_MOST_NAMES]) + ", ..." * (len(files) > _MOST_NAMES)
            allowed = f"nodes of the run read different text in group {number}, of {names}"
            raise RunFailedError(f"{BAD_DATA}{self._maker.name}: {allowed}; give all nodes the same files")

    def _check_epoch(self, record: GroupRecord) -> None:
        """Refuse a text that fills no window, which no further epoch would change."""
        if record.following.epoch == 1 and self._index.num_windows + record.windows == 0:
            needs = f"the {self._maker.split} text is shorter than one window of model.sequence tokens"
            raise RunFailedError(f"{BAD_DATA}data.corpus: {self._maker.name}: {needs}")


def _in_threads(do: Callable[[_Item], _Result], items: Sequence[_Item], num_threads: int) -> list[_Result]:
    """Return ``do`` of each item, several at once. The threads do not outlive the process, as a pool's do."""
    if num_threads == 1 or len(items) < 2:
        return [do(item) for item in items]
    todo: SimpleQueue[int] = SimpleQueue()
    for number in range(len(items)):
        todo.put(number)
    results: dict[int, _Result] = {}
    errors: dict[int, BaseException] = {}

    def work() -> None:
        while not errors:
            try:
                number = todo.get_nowait()
            except Empty:
                return
            try:
                results[number] = do(items[number])
            except BaseException as error:
                errors[number] = error

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(num_threads, len(items)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[number] for number in range(len(items))]
