"""Tokenize the pieces of a corpus, each once, and keep them until all are finished.

A piece is finished when its ``N.json`` exists, which is written after its shards are on disk. Other files of
a piece come from a killed worker and are overwritten. Workers end on request, and by themselves when their
parent is killed.
"""

import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection, get_context, parent_process
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from myriad.data.corpus_manifest import Split
from myriad.data.file_documents import LONGEST_TEXT_BYTES
from myriad.data.indexed import IndexedWriter, token_type
from myriad.data.loss_mask import LOSS_SUFFIX
from myriad.data.records import Part, PartedText, RecordForm
from myriad.data.text_sources import Piece
from myriad.data.tokenizer import Tokenizer
from myriad.data.validation_split import HoldingOut
from myriad.errors import RunFailedError
from myriad.system.whole_file import replacing

__all__ = [
    "SPLITS",
    "PieceResult",
    "PieceWork",
    "encode_documents",
    "piece_mask",
    "piece_prefix",
    "run_pieces",
]

SPLITS: tuple[Split, ...] = ("train", "validation")

_BATCH_BYTES = 1 << 20
_AHEAD = 2


class PieceWork(NamedTuple):
    """What all pieces of one corpus have in common."""

    folder: Path
    tokenizer: Path
    form: RecordForm
    held_out: HoldingOut


class PieceResult(NamedTuple):
    """The result of a finished piece."""

    number: int
    text_bytes: dict[Split, int]
    skipped: dict[str, int]
    """Number of records without text that were left out, by ``null`` and ``empty``."""


def piece_prefix(folder: Path, number: int, split: Split) -> Path:
    """Return the path of a piece's shard, without suffix."""
    return folder / f"{number:06}.{split}"


def piece_mask(folder: Path, number: int, split: Split) -> Path:
    """Return the path of a piece's mask: one byte for each token."""
    return folder / f"{number:06}.{split}{LOSS_SUFFIX}"


def run_pieces(
    work: PieceWork, pieces: Sequence[Piece], workers: int, done: Callable[[PieceResult], None]
) -> list[PieceResult]:
    """Finish all pieces, and return their results in order; pieces already finished are not repeated."""
    results = {piece.number: found for piece in pieces if (found := _finished(work.folder, piece.number))}
    for result in results.values():
        done(result)
    missing = [piece for piece in pieces if piece.number not in results]
    finish = _in_this_process if workers == 1 or len(missing) < 2 else _in_processes
    for result in finish(work, missing, workers):
        results[result.number] = result
        done(result)
    return [results[piece.number] for piece in pieces]


def _finished(folder: Path, number: int) -> PieceResult | None:
    path = folder / f"{number:06}.json"
    if not path.is_file():
        return None
    content = json.loads(path.read_text())
    return PieceResult(number, **content) if "skipped" in content else None


def _in_this_process(work: PieceWork, pieces: Sequence[Piece], workers: int) -> Iterator[PieceResult]:
    tokenizer = Tokenizer.load(work.tokenizer)
    for piece in pieces:
        yield _tokenize(work, tokenizer, piece, threading.Event())


def _in_processes(work: PieceWork, pieces: Sequence[Piece], workers: int) -> Iterator[PieceResult]:
    context = get_context("spawn")
    stop = context.Event()
    pool = ProcessPoolExecutor(workers, context, _Worker.begin, (work, stop))
    try:
        yield from _outcomes(pool, pieces, workers * _AHEAD)
    except BrokenProcessPool:
        raise RunFailedError(
            "a worker was killed (out of memory?); run the same command again to continue"
        ) from None
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)


def _outcomes(pool: ProcessPoolExecutor, pieces: Sequence[Piece], ahead: int) -> Iterator["PieceResult"]:
    """Yield results as they complete, with a few pieces submitted ahead."""
    waiting = iter(pieces)
    running: set[Future[PieceResult]] = set()
    while True:
        while len(running) < ahead and (piece := next(waiting, None)):
            running.add(pool.submit(_Worker.finish, piece))
        if not running:
            return
        finished, running = wait(running, return_when=FIRST_COMPLETED)
        for future in finished:
            yield future.result()


class _Worker:
    """State of a pool's process, which the pool's initializer sets for its tasks."""

    work: PieceWork
    tokenizer: Tokenizer
    stop: Event

    @classmethod
    def begin(cls, work: PieceWork, stop: Event) -> None:
        """Initialize a worker process."""
        import signal

        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        threading.Thread(target=_end_with_parent, daemon=True).start()
        cls.work, cls.tokenizer, cls.stop = work, Tokenizer.load(work.tokenizer), stop

    @classmethod
    def finish(cls, piece: Piece) -> "PieceResult":
        """Tokenize one piece in this worker."""
        return _tokenize(cls.work, cls.tokenizer, piece, cls.stop)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None, "a worker has a parent"
    connection.wait([parent.sentinel])
    os._exit(1)


class _Stopped(Exception):
    """The parent has asked the worker to stop."""


def _tokenize(
    work: PieceWork, tokenizer: Tokenizer, piece: Piece, stop: "Event | threading.Event"
) -> PieceResult:
    dtype = token_type(tokenizer.vocabulary)
    text_bytes: dict[Split, int] = dict.fromkeys(SPLITS, 0)
    train, validation = (
        IndexedWriter(piece_prefix(work.folder, piece.number, split), dtype) for split in SPLITS
    )
    writers = {"train": train, "validation": validation}
    masks: dict[Split, list[NDArray[np.bool_]]] = {split: [] for split in SPLITS}
    skipped = Counter[str]()
    with train, validation:
        for batch in _batches(piece, work, skipped):
            if stop.is_set():
                raise _Stopped
            encoded = encode_documents(tokenizer, [document for _, document in batch])
            for (split, document), (tokens, mask) in zip(batch, encoded, strict=True):
                writers[split].add(tokens)
                masks[split].append(mask)
                text_bytes[split] += len(document.encode())
    if not work.form.is_text:
        for split, found in masks.items():
            mask = np.concatenate([np.empty(0, np.bool_), *found])
            piece_mask(work.folder, piece.number, split).write_bytes(mask.tobytes())
    path = work.folder / f"{piece.number:06}.json"
    with replacing(path) as draft:
        draft.write_text(json.dumps({"text_bytes": text_bytes, "skipped": skipped}))
    return PieceResult(piece.number, text_bytes, dict(skipped))


def encode_documents(
    tokenizer: Tokenizer, documents: Sequence[str]
) -> Iterator[tuple[NDArray[np.int32], NDArray[np.bool_]]]:
    """Yield the tokens of each document with its end token, and whether each has a loss.

    A long text is encoded in pieces, because its encoding takes some 170 times the memory of its text.
    """
    parts = [_parts(document) for document in documents]
    texts = (part.text for own in parts for part in own)
    short = iter(tokenizer.encode_batch([text for text in texts if len(text) <= LONGEST_TEXT_BYTES]))
    for own in parts:
        encoded = []
        for part in own:
            is_short = len(part.text) <= LONGEST_TEXT_BYTES
            tokens = next(short) if is_short else _encode_long(tokenizer, part.text)
            encoded.append(np.array(tokens, np.int32))
        encoded.append(np.array([tokenizer.end_of_document], np.int32))
        losses = [part.has_loss for part in own]
        mask = np.repeat([*losses, losses[-1]], [len(tokens) for tokens in encoded])
        yield np.concatenate(encoded), mask


def _parts(document: str) -> tuple[Part, ...]:
    return document.parts if isinstance(document, PartedText) else (Part(document, has_loss=True),)


def _encode_long(tokenizer: Tokenizer, text: str) -> list[int]:
    return [token for piece in _cut(text) for token in tokenizer.encode(piece)]


def _cut(document: str) -> Iterator[str]:
    """Yield a long text in pieces, cut at line ends, else at blanks, else anywhere."""
    start = 0
    while len(document) - start > LONGEST_TEXT_BYTES:
        last = start + LONGEST_TEXT_BYTES
        cuts = (document.rfind(mark, start, last) + 1 for mark in ("\n", " "))
        stop = next((cut for cut in cuts if cut > start), last)
        yield document[start:stop]
        start = stop
    yield document[start:]


def _batches(piece: Piece, work: PieceWork, skipped: Counter[str]) -> Iterator[list[tuple[Split, str]]]:
    """Yield documents in batches of about a megabyte; records without text are counted in ``skipped``."""
    batch: list[tuple[Split, str]] = []
    size = 0
    for split, document in work.held_out.splits(piece, work.form, skipped):
        batch.append((split, document))
        size += len(document)
        if size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
