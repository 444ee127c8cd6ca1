"""Turn text into a verified corpus: plan, tokenize in pieces by a pool of processes, merge into shards, write
a manifest.

    OUTPUT/.prepare/plan.json       what is being made; identifies an unfinished folder
    OUTPUT/.prepare/N.train.bin ... one piece; N.json is written last and makes it finished
    OUTPUT/train-00000.bin ...      merged shards, and the hashes of their blocks (.blocks)
    OUTPUT/manifest.json            written when all else is on disk: only now the folder is a corpus

After a kill at any instant, the same command continues with the finished pieces. Pieces and their order
follow from the inputs alone, so the number of workers changes nothing in the bytes.
"""

import errno
import fcntl
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from myriad.data.block_hashes import record_files
from myriad.data.corpus_manifest import MANIFEST_FILE, Manifest, ShardRecord, Split, read_manifest
from myriad.data.indexed import IndexedShard, IndexedWriter, token_type
from myriad.data.loss_mask import LOSS_SUFFIX, write_loss_mask
from myriad.data.records import RecordForm
from myriad.data.text_sources import Piece, SourceFile, cut_pieces, find_sources
from myriad.data.tokenize_pieces import SPLITS, PieceResult, PieceWork, piece_prefix, run_pieces
from myriad.data.tokenizer import TOKENIZER_FILE, Tokenizer
from myriad.data.validation_split import HoldingOut, holding_out
from myriad.errors import BadInputError, RunFailedError
from myriad.system.whole_file import write_whole

__all__ = ["PrepareOptions", "PrepareProgress", "prepare"]

_WORK_FOLDER = ".prepare"
_RECIPE = 1
_NO_PLACE = (errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG)
"""Errors of a path where no folder can be made; the command cannot continue there."""
_DIFFERENCES = {
    "sources": "inputs, or they changed since",
    "tokenizer": "tokenizer or --vocabulary",
    "key": "--key, or other fields or another chat template",
    "validation": "--validation",
    "shard_bytes": "--shard-size in bytes",
}
"""Keys of a corpus's plan, as phrases for messages."""
_MOST_LISTED_SOURCES = 1000
_PIECE_BYTES = 16 << 20
_TOKENIZER_SAMPLE_BYTES = 64 << 20
_TOKENIZER_SAMPLE_PIECES = 1024


class PrepareOptions(NamedTuple):
    """Options for making a corpus."""

    tokenizer: Path | None = None
    """A tokenizer.json or a folder with one; None: train one."""
    vocabulary: int = 32768
    """Vocabulary size of a tokenizer that is trained."""
    validation: float = 0.02
    """Share of the documents that is held out, or of the text's end if there are too few documents."""
    form: RecordForm = RecordForm()
    """How records of JSONL and Parquet hold their documents."""
    shard_bytes: int = 256 << 20
    """Largest size of a shard's .bin, unless a single piece is larger."""
    workers: int = 1
    """Number of processes that tokenize."""


class PrepareProgress(NamedTuple):
    """Progress of the preparation."""

    stage: str
    done_bytes: int = 0
    total_bytes: int = 0
    """Bytes of all inputs; 0 while unknown."""


def prepare(
    inputs: Sequence[str],
    output: Path,
    options: PrepareOptions,
    progress: Callable[[PrepareProgress], None] = lambda _: None,
) -> Manifest:
    """Make the corpus in ``output``, or continue making it; another corpus there is left untouched
    (`BadInputError`)."""
    _check_options(options)
    progress(PrepareProgress("listing the inputs"))
    sources = find_sources(inputs)
    identity = _identity(sources, options)
    if (output / MANIFEST_FILE).exists():
        manifest = _same_or_refuse(output, identity)
        shutil.rmtree(output / _WORK_FOLDER, ignore_errors=True)
        return manifest
    pieces = cut_pieces(sources, options.form, min(_PIECE_BYTES, options.shard_bytes))
    if not any(piece.size_bytes for piece in pieces):
        raise BadInputError("INPUT", ", ".join(inputs), "none of these files contains text")
    with _writable(output), _work_folder(output, identity) as work:
        held_out = _held_out(pieces, options, progress)
        tokenizer = _tokenizer(work, pieces, options, held_out, progress)
        task = PieceWork(work, work / TOKENIZER_FILE, options.form, held_out)
        results = run_pieces(task, pieces, options.workers, _piece_progress(pieces, progress))
        _check_text(inputs, results, work)
        progress(PrepareProgress("writing and hashing shards"))
        manifest = _merge(output, work, tokenizer, results, options.shard_bytes, identity)
        manifest.write(output)
    shutil.rmtree(output / _WORK_FOLDER)
    return manifest


def _check_options(options: PrepareOptions) -> None:
    if not 0 <= options.validation < 1:
        raise BadInputError(
            "--validation", options.validation, "a share of the documents, from 0 to less than 1"
        )
    if options.workers < 1:
        raise BadInputError("--workers", options.workers, "at least 1")
    if options.shard_bytes < 1 << 16:
        raise BadInputError("--shard-size", options.shard_bytes, "at least 64 KiB")


def _identity(sources: Sequence[SourceFile], options: PrepareOptions) -> dict[str, Any]:
    """Return everything that the corpus's bytes depend on."""
    own = None
    if options.tokenizer:
        brought = Tokenizer.load(options.tokenizer)
        brought.check_complete()
        own = brought.fingerprint
    return {
        "recipe": _RECIPE,
        "sources": [list(source) for source in sources],
        "tokenizer": own or {"train": options.vocabulary},
        "key": options.form.identity,
        "validation": options.validation,
        "shard_bytes": options.shard_bytes,
    }


def _short(identity: dict[str, Any]) -> dict[str, Any]:
    """Return the identity for the manifest, which every rank reads: a hash replaces thousands of sources."""
    sources = identity["sources"]
    if len(sources) <= _MOST_LISTED_SOURCES:
        return identity
    digest = xxhash.xxh3_128(json.dumps(sources).encode()).hexdigest()
    return {**identity, "sources": {"files": len(sources), "xxh3_128": digest}}


def _same_or_refuse(output: Path, identity: dict[str, Any]) -> Manifest:
    manifest = read_manifest(output)
    if manifest.plan not in (identity, _short(identity)):
        allowed = f"holds another corpus ({_differences(manifest.plan, identity)}); another folder, or remove"
        raise BadInputError("--output", str(output), f"{allowed} this one")
    return manifest


def _differences(made: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Describe how two corpora differ."""
    found = []
    for key, name in _DIFFERENCES.items():
        before, now = made.get(key), wanted[key]
        if before != now:
            plain = not isinstance(before, list | dict) and not isinstance(now, list | dict)
            found.append(f"{name} {before} instead of {now}" if plain else f"other {name}")
    return ", ".join(found) or "made in another way"


@contextmanager
def _writable(output: Path) -> Iterator[None]:
    """Report errors of writing the folder. Errors of the inputs are reported where they are read."""
    try:
        yield
    except OSError as error:
        if error.errno in _NO_PLACE:
            allowed = f"cannot be written: {error.strerror}"
            raise BadInputError("--output", str(output), allowed) from None
        raise RunFailedError(
            f"{output}: {error.strerror or error}; run the same command again to continue"
        ) from None


@contextmanager
def _work_folder(output: Path, identity: dict[str, Any]) -> Iterator[Path]:
    """Lock the folder of unfinished work for this process, and yield it."""
    work = output / _WORK_FOLDER
    plan = work / "plan.json"
    if output.exists() and (not output.is_dir() or (any(output.iterdir()) and not work.is_dir())):
        raise BadInputError("--output", str(output), "a new or empty folder, or one that this command began")
    work.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInputError("--output", str(output), "is being prepared by another process") from None
        if plan.is_file() and json.loads(plan.read_text()) != identity:
            _empty_or_refuse(output, work, identity)
        write_whole(plan, json.dumps(identity))
        yield work
    finally:
        os.close(descriptor)


def _empty_or_refuse(output: Path, work: Path, identity: Mapping[str, Any]) -> None:
    """Discard the unfinished work of another corpus if none of its pieces is finished, for example after a
    wrong key or file."""
    if any(work.glob("[0-9]*.json")):
        other = _differences(json.loads((work / "plan.json").read_text()), identity)
        allowed = f"was begun as another corpus ({other}); the same again, another folder, or remove this one"
        raise BadInputError("--output", str(output), allowed)
    (work / TOKENIZER_FILE).unlink(missing_ok=True)


def _check_text(inputs: Sequence[str], results: Sequence[PieceResult], work: Path) -> None:
    """Refuse inputs without any text, and discard the work on them."""
    if not any(result.text_bytes[split] for result in results for split in SPLITS):
        shutil.rmtree(work)
        raise BadInputError(
            "INPUT", ", ".join(inputs), f"none of these files contains text ({_skipped(results)})"
        )


def _skipped(results: Sequence[PieceResult]) -> dict[str, int]:
    return dict(sum((Counter(result.skipped) for result in results), Counter[str]()))


def _held_out(
    pieces: Sequence[Piece], options: PrepareOptions, progress: Callable[[PrepareProgress], None]
) -> HoldingOut:
    total = sum(piece.size_bytes for piece in pieces)
    begun: list[int] = []

    def show(piece_bytes: int) -> None:
        progress(PrepareProgress("choosing the held-out text", sum(begun), total))
        begun.append(piece_bytes)

    return holding_out(pieces, options.form, options.validation, show)


def _tokenizer(
    work: Path,
    pieces: Sequence[Piece],
    options: PrepareOptions,
    held_out: HoldingOut,
    progress: Callable[[PrepareProgress], None],
) -> Tokenizer:
    """Return the tokenizer of this corpus, which is in the work folder from its first use on."""
    path = work / TOKENIZER_FILE
    if path.is_file():
        return Tokenizer.load(path)
    if options.tokenizer:
        tokenizer = Tokenizer.load(options.tokenizer)
    else:
        sample = _sample(pieces, options.form, held_out)
        tokenizer = Tokenizer.train(
            sample,
            options.vocabulary,
            lambda stage, characters: progress(
                PrepareProgress(f"{stage} ({characters / 1e6:,.1f}M characters)")
            ),
        )
    partial = work / "tokenizer"
    partial.mkdir(exist_ok=True)
    tokenizer.save(partial).replace(path)
    return tokenizer


def _sample(pieces: Sequence[Piece], form: RecordForm, held_out: HoldingOut) -> Iterator[str]:
    """Yield the beginnings of pieces all over the corpus, without held-out text."""
    some = pieces[:: -(-len(pieces) // _TOKENIZER_SAMPLE_PIECES)]
    share = _TOKENIZER_SAMPLE_BYTES // len(some)
    for piece in some:
        left = share
        for split, document in held_out.splits(piece, form):
            if left <= 0:
                break
            if split == "train":
                yield document[:left]
                left -= len(document)


def _piece_progress(
    pieces: Sequence[Piece], progress: Callable[[PrepareProgress], None]
) -> Callable[[PieceResult], None]:
    sizes = {piece.number: piece.size_bytes for piece in pieces}
    total, finished = sum(sizes.values()), set[int]()

    def done(result: PieceResult) -> None:
        finished.add(result.number)
        progress(PrepareProgress("tokenizing", sum(sizes[number] for number in finished), total))

    progress(PrepareProgress("tokenizing", 0, total))  # one piece may take long
    return done


def _merge(
    output: Path,
    work: Path,
    tokenizer: Tokenizer,
    results: Sequence[PieceResult],
    shard_bytes: int,
    identity: dict[str, Any],
) -> Manifest:
    """Merge pieces into shards, in their order, and return the manifest that describes them."""
    for stale in (path for kind in ("bin", "idx", "blocks", "loss") for path in output.glob(f"*.{kind}*")):
        stale.unlink()
    shutil.copyfile(work / TOKENIZER_FILE, output / TOKENIZER_FILE)
    shards: list[ShardRecord] = []
    others = [TOKENIZER_FILE]
    for split in SPLITS:
        pieces = [IndexedShard(piece_prefix(work, result.number, split)) for result in results]
        full = [piece for piece in pieces if piece.num_documents]
        for number, group in enumerate(_groups(full, shard_bytes)):
            shards.append(_write_shard(output, f"{split}-{number:05}", split, group, tokenizer))
            others += _write_mask(output, shards[-1].name, group)
    return Manifest(
        format="myriad-corpus-1" if others == [TOKENIZER_FILE] else "myriad-corpus-2",
        fingerprint=tokenizer.fingerprint,
        vocabulary=tokenizer.vocabulary,
        end_of_document=tokenizer.end_of_document,
        shards=tuple(shards),
        text_bytes={split: sum(result.text_bytes[split] for result in results) for split in SPLITS},
        skipped=_skipped(results),
        files=record_files(output, [shard.name for shard in shards], others),
        plan=_short(identity),
    )


def _groups(pieces: Sequence[IndexedShard], shard_bytes: int) -> Iterator[list[IndexedShard]]:
    group: list[IndexedShard] = []
    for piece in pieces:
        if group and sum(one.tokens.nbytes for one in (*group, piece)) > shard_bytes:
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _write_shard(
    output: Path, name: str, split: Split, pieces: Sequence[IndexedShard], tokenizer: Tokenizer
) -> ShardRecord:
    with IndexedWriter(output / name, token_type(tokenizer.vocabulary)) as writer:
        for piece in pieces:
            writer.add_shard(piece)
    return ShardRecord(name=name, split=split, tokens=writer.num_tokens, documents=writer.num_documents)


def _write_mask(output: Path, name: str, pieces: Sequence[IndexedShard]) -> list[str]:
    """Write the mask of a shard, if its pieces have masks, and return the files written."""
    paths = [piece.prefix.with_name(piece.prefix.name + LOSS_SUFFIX) for piece in pieces]
    if not paths[0].is_file():
        return []
    mask = np.concatenate([np.fromfile(path, np.bool_) for path in paths])
    write_loss_mask(output / f"{name}{LOSS_SUFFIX}", mask)
    return [f"{name}{LOSS_SUFFIX}"]
