"""If these fail, a run that streams its text trains on other tokens after a restart, or loses documents."""

import gzip
import importlib
import json
import shutil
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from tiny_corpora import lines

from myriad.data import range_input
from myriad.data.config import DataConfig
from myriad.data.corpus import BatchReader, Corpora
from myriad.data.corpus_opening import open_corpora, open_corpus
from myriad.data.prepare import PrepareOptions, prepare
from myriad.data.sampler import UNBOUNDED
from myriad.data.streaming import group_order, group_reader
from myriad.data.streaming.group_index import GroupIndex
from myriad.data.streaming.streamed_corpus import StreamPlace
from myriad.data.text_names import is_streamed
from myriad.data.tokenizer import Tokenizer
from myriad.data.windows import PackedRows
from myriad.errors import BadInputError, RunFailedError

SEQUENCE = 16
BATCH = 8


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text, JSONL, gzip and Parquet, with a tokenizer."""
    folder = tmp_path_factory.mktemp("streaming") / "texts"
    folder.mkdir()
    found = lines(400)
    records = [json.dumps({"text": line}) + "\n" for line in found]
    (folder / "a.txt").write_text(found[0])
    (folder / "b.jsonl").write_text("".join(records[1:200]))
    with gzip.open(folder / "c.jsonl.gz", "wt") as file:
        file.writelines(records[200:300])
    table = arrow.table({"text": found[300:]})
    parquet.write_table(table, folder / "d.parquet", row_group_size=30)
    Tokenizer.train(found, 300).save(folder.parent)
    return folder


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several bundles and groups of a few kilobytes."""
    monkeypatch.setattr(group_order, "_PIECE_BYTES", 3000)
    monkeypatch.setattr(group_order, "_BUNDLE_PIECES", 3)


def data(texts: Path, **keys: object) -> DataConfig:
    made = {"corpus": f"raw:{texts}", "tokenizer": str(texts.parent), "tokenizer_threads": 2, **keys}
    return DataConfig.model_validate(made)


def opened(config: DataConfig, place: StreamPlace = StreamPlace(), split: str = "train") -> Corpora:
    found = open_corpora(config, SEQUENCE, split, streams=place)  # type: ignore[arg-type]
    for corpus in found.streamed:  # the least of the key is larger than these texts
        corpus._config = config.model_copy(update={"shuffle_bytes": 1500})
    return found


def batch(corpora: Corpora, step: int, rows: range = range(BATCH), seed: int = 3) -> np.ndarray:
    out = np.empty((len(rows), corpora.width), np.int32)
    BatchReader(corpora, seed, BATCH, (BATCH,), 1, None).read(step * BATCH, rows, out)
    return out


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    from myriad.data.streaming import streamed_corpus

    monkeypatch.setattr(streamed_corpus, "_LEAST_WINDOWS", 1)


@pytest.mark.parametrize("documents", ["joined", "packed"])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_step_has_the_same_tokens_in_any_order_of_reading_and_any_number_of_threads(
    texts: Path, documents: str, ahead: int
) -> None:
    config = data(texts, documents=documents)
    corpora = opened(config)
    first = [batch(corpora, step) for step in range(60)]
    other = opened(data(texts, documents=documents, tokenizer_threads=1), StreamPlace(ahead=ahead))
    for step in (59, 3, 4, 31):
        assert np.array_equal(batch(other, step, range(2, 5)), first[step][2:5])
    other.close()
    assert not np.array_equal(first[0], batch(opened(config, StreamPlace(seed=9)), 0)), "another seed"


def test_an_epoch_has_each_document_once_with_the_tokens_that_prepare_gives_it(
    texts: Path, tmp_path: Path
) -> None:
    options = PrepareOptions(tokenizer=texts.parent, validation=0.2)
    prepare(
        [str(texts / name) for name in ("a.txt", "b.jsonl", "c.jsonl.gz", "d.parquet")],
        tmp_path / "c",
        options,
    )
    for split in ("train", "validation"):
        [shard] = open_corpus(str(tmp_path / "c"), split).shards  # type: ignore[arg-type]
        prepared = Counter(tuple(shard.document(one).tolist()) for one in range(shard.num_documents))
        corpora = open_corpora(data(texts, documents="packed", held_out=0.2), 512, split)  # type: ignore[arg-type]
        [windows] = corpora.windows
        streamed: Counter[tuple[int, ...]] = Counter()
        position, row = 0, np.empty(corpora.width, np.int32)
        while sum(streamed.values()) < sum(prepared.values()):
            windows.read(corpora.corpora[0].read, position, row)
            streamed.update(documents_of(row))
            position += 1
        assert streamed == prepared, split


def documents_of(row: np.ndarray) -> list[tuple[int, ...]]:
    """The documents of a packed row."""
    inputs, targets, positions = PackedRows.of(row)
    starts = [*np.flatnonzero(positions == 0), len(positions)]
    pairs = pairwise(starts)
    return [(*inputs[at:end].tolist(), int(targets[end - 1])) for at, end in pairs if targets[at] >= 0]


def test_a_resume_reads_only_the_group_of_its_step(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = data(texts)
    first = opened(config, StreamPlace(tmp_path, writer="0"))
    first.streamed[0].keep_sources()
    expected = [batch(first, step) for step in range(50)]
    [index] = tmp_path.glob("*/*-0.jsonl")
    index.write_bytes(index.read_bytes()[:-20] + b"\n{torn")  # a kill, and another writer
    made = []
    make = group_reader.GroupMaker.make
    monkeypatch.setattr(
        group_reader.GroupMaker,
        "make",
        lambda self, number, start: made.append(number) or make(self, number, start),
    )
    again = opened(config, StreamPlace(tmp_path, writer="1"))
    assert np.array_equal(batch(again, 40), expected[40])
    assert 0 < len(made) <= 3 and min(made) > 2, "what lies before is not tokenized"
    assert np.array_equal(batch(again, 49), expected[49])


def test_nodes_that_read_different_text_stop_the_run_which_goes_on_once_they_read_the_same(
    texts: Path, tmp_path: Path
) -> None:
    """As from local copies of which one is damaged. Whichever node comes later notices, and its lines of that
    group and of later ones do not count after a restart."""
    copy, streams = tmp_path / "texts", tmp_path / "streams"
    shutil.copytree(texts, copy)
    config = data(texts, corpus=f"raw:{copy}")
    [listed] = opened(config, StreamPlace(streams)).streamed
    listed.keep_sources()
    right, wrong = (opened(config, StreamPlace(streams, writer=writer)) for writer in "01")
    assert right.windows and wrong.windows, "both have read the index, which is empty"
    first = [batch(right, step) for step in range(12)]
    good = (copy / "b.jsonl").read_bytes()
    (copy / "b.jsonl").write_bytes(good.replace(b" ", b"_").replace(b":_", b": "))
    says = r"damaged data: .*nodes of the run read different text in group \d+, of .*/b.jsonl.*same files"
    with pytest.raises(RunFailedError, match=says):
        for step in range(12):
            batch(wrong, step)
    (copy / "b.jsonl").write_bytes(good)
    for writer in "01":
        again = opened(config, StreamPlace(streams, writer=writer))
        assert np.array_equal([batch(again, step) for step in range(12)], first)
    assert opened(config, StreamPlace(streams)).windows[0]._reader._index.num_windows >= 12 * BATCH  # type: ignore[union-attr]


def test_without_an_index_a_resume_counts_what_lies_before(texts: Path) -> None:
    first, again = opened(data(texts)), opened(data(texts), StreamPlace(ahead=1))
    expected = [batch(first, step) for step in range(20)][-1]
    assert np.array_equal(batch(again, 19), expected)
    again.close()


def test_a_file_that_changed_or_is_missing_is_refused_and_a_new_one_is_ignored(
    texts: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(f"{name} text " * 50)
    config = data(texts, corpus=f"{folder}/*.txt")
    place = StreamPlace(tmp_path / "streams")
    [corpus] = open_corpora(config, SEQUENCE, streams=place).streamed
    corpus.keep_sources()
    (folder / "c.txt").write_text("new")
    [later] = open_corpora(config, SEQUENCE, streams=place).streamed
    later.check_sources()
    assert later.sources == corpus.sources and later.hashes == corpus.hashes
    (folder / "b.txt").write_text("b text " * 51)
    with pytest.raises(
        BadInputError, match=r"b.txt has 357 bytes instead of 350 since the run began; restore"
    ):
        later.check_sources()
    (folder / "b.txt").unlink()
    with pytest.raises(BadInputError, match=r"b.txt is missing since"):
        later.check_sources()


def test_a_bad_record_stops_with_its_place_or_is_counted(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n{"text": 3}\n{"text": null}\n' * 9 + "{")
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"text": "four five"}\n' * 500)
    whole = (tmp_path / "b.jsonl.gz").read_bytes()
    (tmp_path / "b.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    config = data(texts, corpus=f"raw:{tmp_path}")
    with pytest.raises(
        RunFailedError, match=r"damaged data: .*a.jsonl.*line at byte 26 has no text"
    ) as error:
        batch(opened(config), 0)
    assert "data.on-bad-record skip" in str(error.value)
    problems: list[str] = []
    place = StreamPlace(tmp_path / "streams", writer="0", report=problems.append)
    corpora = opened(data(texts, corpus=f"raw:{tmp_path}", on_bad_record="skip"), place)
    batch(corpora, 0)
    index = corpora.windows[0]._reader._index  # type: ignore[union-attr]
    while index.start(len(index)).epoch == 0:
        batch(corpora, index.num_windows // BATCH + 1)
    assert index.skipped["bad"] >= 11 and index.skipped["null"] >= 9
    assert any("line at byte 26" in one for one in problems) and any("b.jsonl.gz" in one for one in problems)


def test_bombs_are_refused(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_reader, "LONGEST_DOCUMENT_BYTES", 5000)
    monkeypatch.setattr(group_reader, "_MOST_EMPTY_BYTES", 5000)
    packers = {"gz": gzip.compress}
    with suppress(ImportError):
        packers["zst"] = importlib.import_module("zstandard").compress
    for content, says in (
        (b"[" * 9000, "line at byte 0 is longer"),
        (b'{"text": ""}\n' * 999, "no text in the"),
    ):
        for ending, pack in packers.items():
            path = tmp_path / f"a.jsonl.{ending}"
            path.write_bytes(pack(content))
            with pytest.raises(RunFailedError, match=says):
                batch(opened(data(texts, corpus=str(path))), 0)


def test_text_too_short_for_a_window_is_refused(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    with pytest.raises(RunFailedError, match="shorter than one window"):
        batch(opened(data(texts, corpus=str(tmp_path / "a.txt"))), 0)


def test_any_file_system_gives_the_tokens_of_a_local_one(
    texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that fail are sent again."""
    memory = fsspec.filesystem("memory")
    for path in texts.iterdir():
        memory.pipe(f"/stream/{path.name}", path.read_bytes())
    failed: list[str] = []
    cat = type(memory).cat_file

    def flaky(self: object, path: str, start: int | None = None, end: int | None = None) -> bytes:
        if len(failed) < 2:
            failed.append(path)
            raise ConnectionResetError("reset by peer")
        return bytes(cat(self, path, start=start, end=end))

    monkeypatch.setattr(type(memory), "cat_file", flaky)
    monkeypatch.setattr(range_input, "_PAUSE_SECONDS", 0.0)
    far, near = opened(data(texts, corpus="memory://stream/*")), opened(data(texts))
    assert far.num_samples == near.num_samples == UNBOUNDED
    for step in range(30):
        assert np.array_equal(batch(far, step), batch(near, step))
    assert len(failed) == 2
    failed.clear()
    monkeypatch.setattr(range_input, "TRIES", 1)
    with pytest.raises(RunFailedError, match="cannot be read: reset by peer") as error:
        batch(opened(data(texts, corpus="memory://stream/*")), 0)
    assert "damaged" not in str(error.value), "another attempt may read it"


def test_names_of_text_and_of_corpora(tmp_path: Path) -> None:
    (tmp_path / "one.txt.idx").touch()
    (tmp_path / "two.jsonl").mkdir()
    assert (
        is_streamed("s3://b/*.jsonl.zst")
        and is_streamed("https://h/a.parquet")
        and is_streamed("raw:hdfs://n/x")
    )
    for name in ("corpus", "s3://b/corpus", str(tmp_path / "one.txt"), str(tmp_path / "two.jsonl")):
        assert not is_streamed(name)
    with pytest.raises(BadInputError, match=r"data.tokenizer = \"off\": a tokenizer.json for the text of"):
        open_corpora(DataConfig(corpus="raw:texts"), SEQUENCE)


def test_index_lines_that_are_damaged_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "x-0.jsonl").write_text('{"number": 0, "hash": "0"}\n{"number": []}\n\x00\n[1]\n')
    assert len(GroupIndex(tmp_path, "x")) == 0
