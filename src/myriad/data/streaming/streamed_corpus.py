"""A corpus of text that is tokenized as it is read, behind the interface of `myriad.data.corpus.Corpus`.

Its samples have no number within an epoch, because their number is unknown before all text was
tokenized. They are numbered through all epochs, in the order of `myriad.data.streaming.group_order`. Every
node's loader tokenizes all groups, as its samples are spread over all of them.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from myriad.data.config import DataConfig, Documents
from myriad.data.corpus_manifest import Split
from myriad.data.records import RecordForm
from myriad.data.sampler import UNBOUNDED
from myriad.data.streaming.group_index import GroupIndex
from myriad.data.streaming.group_order import GroupOrder
from myriad.data.streaming.group_reader import GroupMaker, GroupReader
from myriad.data.streaming.source_list import (
    SourceList,
    check_unchanged,
    list_sources,
    read_sources,
    stream_folder,
)
from myriad.data.tokenizer import Tokenizer
from myriad.data.windows import BatchWords, PackedWindows, ReadTokens, row_width
from myriad.errors import BadInputError
from myriad.system.machine import num_cores

__all__ = ["StreamPlace", "StreamWindows", "StreamedCorpus"]

_LEAST_WINDOWS = 64
"""Windows of a group of long windows: the rest of a group, half a window on average, is left out."""
_FIRST_PART = 16
"""The first group is this part of the others."""
_TOKEN_BYTES = 4
"""Text of a token, for that estimate."""
_KEPT_GROUPS = 64
"""Groups of held-out text that stay in memory, because each validation reads the same ones."""


class StreamPlace(NamedTuple):
    """What the streamed corpora of a run need, beside the job's section."""

    streams: Path | None = None
    """Folder of the run's streams; ``None``: the files are listed each time, and no index is kept."""
    seed: int = 0
    """Seed of the order of documents."""
    writer: str | None = None
    """Name of this process's index files; ``None``: it writes none."""
    ahead: int = 0
    """Groups to tokenize ahead, in threads; 0: none."""
    report: Callable[[str], None] = lambda problem: None
    """Receives why a record is left out."""


class StreamedCorpus:
    """One split of a corpus of text."""

    is_far = True
    """Its tokens are expected before they are read."""
    is_checked = True
    """Tokens that are made again are compared with a hash of the first ones."""
    num_tokens: int | None = None
    """Unknown before all text was tokenized."""

    def __init__(self, name: str, config: DataConfig, split: Split, place: StreamPlace) -> None:
        """Raises `BadInputError` if there is no tokenizer."""
        self.name, self._config, self._split, self._place = name, config, split, place
        if config.tokenizer is None:
            allowed = f"a tokenizer.json for the text of {name}; or myriad data prepare, which can train one"
            raise BadInputError("data.tokenizer", "off", allowed)
        self.path = Path(config.tokenizer).expanduser()
        self._readers: list[GroupReader] = []

    @property
    def has_text(self) -> bool:
        """Whether the split may have documents."""
        return self._split == "train" or self._config.held_out > 0

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of data.tokenizer. Raises `BadInputError`."""
        try:
            found = Tokenizer.load(self.path)
            found.check_complete()
        except BadInputError as error:
            raise BadInputError("data.tokenizer", str(error.value), error.allowed) from None
        return found

    @cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the tokenizer."""
        return self.tokenizer.fingerprint

    @cached_property
    def vocabulary(self) -> int:
        """Vocabulary size of the tokenizer."""
        return self.tokenizer.vocabulary

    @property
    def folder(self) -> Path | None:
        """Folder of the corpus in the run; ``None``: there is no run."""
        return None if self._place.streams is None else stream_folder(self._place.streams, self.name)

    @cached_property
    def sources(self) -> SourceList:
        """The files: those that the run has listed, else those that are there now. Raises `BadInputError`."""
        kept = None if self.folder is None else read_sources(self.folder)
        return kept or list_sources(self.name)

    def check_sources(self) -> None:
        """Compare the files with the run's list, if it has one. Raises `BadInputError`."""
        if self.folder is not None and read_sources(self.folder) is not None:
            check_unchanged(self.sources, list_sources(self.name), self.folder)

    def keep_sources(self) -> None:
        """Write the list of files into the run, unless it is there."""
        if self.folder is not None and read_sources(self.folder) is None:
            self.sources.write(self.folder)

    @property
    def hashes(self) -> dict[str, str]:
        """What the tokens depend on."""
        own = (self.sources.content, self.fingerprint, self._config.text_key, self._config.held_out)
        return {"stream": _hash(own)}

    def windows(self, sequence: int, documents: Documents) -> "StreamWindows":
        """Return the windows of ``sequence`` positions that the text is cut into."""
        config, place = self._config, self._place
        least = _LEAST_WINDOWS * _TOKEN_BYTES * sequence
        group_bytes, first_bytes = (max(config.shuffle_bytes // part, least) for part in (1, _FIRST_PART))
        parts = (*self.hashes.values(), self._split, place.seed, sequence, documents, group_bytes)
        form = RecordForm(config.text_key)
        maker = GroupMaker(
            self.name,
            GroupOrder(self.sources.sources, form, place.seed),
            form,
            self.tokenizer,
            self._split,
            config.held_out,
            sequence,
            documents,
            group_bytes,
            first_bytes,
            config.on_bad_record,
            config.tokenizer_threads or max(1, num_cores() // 4),
            place.report,
        )
        index = GroupIndex(self.folder, _hash(parts)[:16], place.writer)
        kept = _KEPT_GROUPS if self._split == "validation" else 0
        self._readers.append(GroupReader(maker, index, place.ahead, kept))
        return StreamWindows(self._readers[-1], sequence, documents)

    def read(self, start: int, out: NDArray[np.int32]) -> None:
        """Do nothing: `StreamWindows.read` reads its own tokens."""

    def fetch(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Tokenize the samples in the ranges, which `StreamWindows.ranges` returns."""
        samples = [sample for one in ranges for sample in (one[0], one[1] - 1)]
        if samples:
            self._readers[-1].expect(min(samples), max(samples))

    def close(self) -> None:
        """Stop the threads that read and tokenize."""
        for reader in self._readers:
            reader.close()


class StreamWindows:
    """The windows of a streamed corpus, which are its samples in their order."""

    count = UNBOUNDED
    """Number of windows, over all epochs."""

    def __init__(self, reader: GroupReader, sequence: int, documents: Documents) -> None:
        self._reader, self.documents = reader, documents
        self.width = row_width(sequence, documents)
        """Words of a row."""

    def ranges(self, window: int) -> Sequence[tuple[int, int]]:
        """Return the window as the range that `StreamedCorpus.fetch` takes."""
        return ((window, window + 1),)

    def read(self, read: ReadTokens, window: int, out: NDArray[np.int32]) -> None:
        """Fill ``out`` with a window's row. ``read`` is not used."""
        group, place = self._reader.get(window)
        group.windows.read(group.read_tokens, group.window(place), out)

    def counted(self, number: int, window: int | None) -> BatchWords:
        """Return what a packed window adds to a batch's sums (`PackedWindows.counted`)."""
        group, place = self._reader.get(number)
        assert isinstance(group.windows, PackedWindows), "only packed rows are counted"
        return group.windows.counted(group.window(place), window)


def _hash(parts: object) -> str:
    return xxhash.xxh3_128_hexdigest(repr(parts).encode())
