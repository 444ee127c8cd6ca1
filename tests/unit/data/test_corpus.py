"""If these fail, a run reads other tokens than its corpus holds, or bad data stops it only after it began."""

import struct
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_corpora import drop_blocks, make_corpus, options

from myriad.data.config import CorpusShare, DataConfig
from myriad.data.corpus import BatchReader, Corpus, read_batch
from myriad.data.corpus_opening import open_corpora, open_corpus
from myriad.data.http_input import http_range
from myriad.data.indexed import IndexedShard, IndexedWriter, parse_header, token_type
from myriad.data.sampler import DataPosition
from myriad.data.tokenizer import Tokenizer
from myriad.data.windows import BatchWords, PackedRows
from myriad.errors import BadInputError

SEQUENCE = 16


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 0), st.data())
def test_shards_are_read_as_one_stream(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], data: st.DataObject
) -> None:
    folder, stream, shards = tmp_path_factory.mktemp("shards"), np.arange(sum(sizes)), []
    for number, size in enumerate(sizes):
        first = sum(sizes[:number])
        with IndexedWriter(folder / str(number), token_type(300)) as writer:
            writer.add(stream[first : first + size])
        shards.append(IndexedShard(folder / str(number)))
    start = data.draw(st.integers(0, len(stream) - 1))
    out = np.empty(data.draw(st.integers(1, len(stream) - start)), np.int32)
    Corpus(folder, shards, None).read(start, out)
    assert out.tolist() == stream[start : start + len(out)].tolist()


@settings(max_examples=25, deadline=None)
@given(
    sequence=st.integers(1, 20),
    attempts=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6), st.integers(1, 5)), min_size=1),
    seed=st.integers(0, 2**32),
)
def test_an_epoch_predicts_every_token_once_in_any_layout_and_after_any_resume(
    tmp_path_factory: pytest.TempPathFactory, sequence: int, attempts: list[tuple[int, int, int]], seed: int
) -> None:
    """Each attempt has replicas, rows of each and steps of its own; replicas read their rows alone."""
    prefix = tmp_path_factory.mktemp("corpus") / "text"
    with IndexedWriter(prefix, token_type(70000)) as writer:
        writer.add(np.arange(300))
    opened = open_corpora(DataConfig(corpus=str(prefix)), sequence)
    read: list[int] = []
    samples, step = 0, 0
    while samples < opened.num_samples:
        for replicas, rows, steps in attempts:
            position = DataPosition.of(replicas * rows).resumed(step, samples)
            for now in range(step, step + steps):
                first = position.samples_before(now)
                for replica in range(replicas):
                    own = range(first + replica * rows, first + (replica + 1) * rows)
                    read += read_batch(opened, opened.sampler(seed), own)[:, 1:].flatten().tolist()
            step, samples = step + steps, position.samples_before(step + steps)
    predicted = opened.num_samples * sequence
    assert sorted(read[:predicted]) == list(range(1, predicted + 1))
    assert 300 - 1 - predicted < sequence, "the rest is shorter than a sample"


def test_neighbouring_samples_share_the_token_between_them(corpus: Path) -> None:
    opened = open_corpora(DataConfig(corpus=str(corpus)), SEQUENCE)
    rows = np.empty((2, SEQUENCE + 1), np.int32)
    for position in range(2):
        opened.corpora[0].read(position * SEQUENCE, rows[position])
    assert rows[0, -1] == rows[1, 0]
    assert opened.num_samples == (opened.num_tokens - 1) // SEQUENCE


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**9), st.lists(st.integers(0, 24), max_size=5))
def test_any_split_of_the_rows_over_readers_reads_the_same_batch(
    corpus: Path, step: int, cuts: list[int]
) -> None:
    config = DataConfig(
        mixture=(CorpusShare(path=str(corpus), weight=2), CorpusShare(path=str(corpus), weight=1))
    )
    opened = open_corpora(config, SEQUENCE)
    whole = read_batch(opened, opened.sampler(3), range(24 * step, 24 * step + 24))
    edges = [0, *sorted(cuts), 24]
    parts = [
        read_batch(opened, opened.sampler(3), range(24 * step + a, 24 * step + b)) for a, b in pairwise(edges)
    ]
    assert np.array_equal(np.concatenate(parts), whole)


def test_the_text_comes_back_from_the_batch(corpus: Path) -> None:
    opened = open_corpora(DataConfig(corpus=str(corpus)), SEQUENCE)
    assert opened.tokenizer is not None and opened.vocabulary == opened.tokenizer.vocabulary
    batch = read_batch(opened, opened.sampler(1), range(4))
    all_text = {path.read_text() for path in corpus.with_name("corpus-text").iterdir()}
    piece = opened.tokenizer.decode(batch[0]).split("<|endoftext|>")[0].strip("\ufffd")
    assert piece and any(piece in text for text in all_text)


def test_validation_is_other_text(corpus: Path) -> None:
    train = open_corpora(DataConfig(corpus=str(corpus)), SEQUENCE)
    held_out = open_corpora(DataConfig(corpus=str(corpus)), SEQUENCE, "validation")
    assert 0 < held_out.num_tokens < train.num_tokens


def test_no_held_out_text_is_no_samples(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, validation=0.0)
    assert open_corpora(DataConfig(corpus=str(corpus)), SEQUENCE, "validation").num_samples == 0


def test_megatron_prefix_opens_with_either_suffix_or_none(corpus: Path) -> None:
    prefix = corpus / "train-00000"
    for name in (prefix, f"{prefix}.bin", f"{prefix}.idx"):
        opened = open_corpus(str(name), "train")
        assert opened.num_tokens == open_corpus(str(corpus), "train").num_tokens
        assert isinstance(opened.tokenizer, Tokenizer)  # lies beside it
    assert open_corpus(str(prefix), "validation").num_tokens == 0


def refused(match: str, sequence: int = SEQUENCE, **config: object) -> None:
    with pytest.raises(BadInputError, match=match):
        open_corpora(DataConfig(**config), sequence)


def test_bad_corpora_are_refused_in_one_line_that_names_them(corpus: Path, tmp_path: Path) -> None:
    refused("no such corpus", corpus=str(tmp_path / "nothing"))
    (tmp_path / "empty").mkdir()
    refused("no manifest.json", corpus=str(tmp_path / "empty"))
    refused(r"model.sequence \+ 1 = 100001", sequence=100_000, corpus=str(corpus))
    other = make_corpus(tmp_path, seed=9)
    mixed = (CorpusShare(path=str(corpus), weight=1), CorpusShare(path=str(other), weight=1))
    refused("another tokenizer", mixture=mixed)


def test_an_unfinished_corpus_is_refused(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    (corpus / "manifest.json").rename(corpus / ".manifest.json.partial")
    refused("no manifest.json", corpus=str(corpus))


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.idx"])
@pytest.mark.parametrize("change", [-1, 1, None])
def test_a_shard_of_another_size_is_named(tmp_path: Path, name: str, change: int | None) -> None:
    corpus = make_corpus(tmp_path)
    path = corpus / name
    raw = path.read_bytes()
    path.unlink() if change is None else path.write_bytes(raw[:-1] if change < 0 else raw + b"\0")
    refused(name, corpus=str(corpus))


def test_a_token_outside_the_vocabulary_names_the_shard(tmp_path: Path) -> None:
    corpus = drop_blocks(make_corpus(tmp_path))
    path = corpus / "train-00000.bin"
    path.write_bytes(b"\xff" * path.stat().st_size)
    opened = open_corpora(DataConfig(corpus=str(corpus)), SEQUENCE)
    with pytest.raises(BadInputError, match="train-00000"):
        read_batch(opened, opened.sampler(1), range(4))


def test_corpora_made_with_one_tokenizer_mix(corpus: Path, tmp_path: Path) -> None:
    other = make_corpus(tmp_path, seed=9, tokenizer=corpus)
    mixed = (CorpusShare(path=str(corpus), weight=3), CorpusShare(path=str(other), weight=1))
    opened = open_corpora(DataConfig(mixture=mixed), SEQUENCE)
    samples = opened.sampler(1).samples(0, 400)
    assert sum(sample.corpus == 0 for sample in samples) == 300
    assert options(tokenizer=corpus).tokenizer == corpus


class _WholeFiles(BaseHTTPRequestHandler):
    """A server that ignores ranges of bytes, as Python's own does."""

    sent = 0

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(1 << 40))
        self.end_headers()
        with suppress(OSError):
            while type(self).sent < 1 << 28:
                self.wfile.write(bytes(1 << 20))
                type(self).sent += 1 << 20

    def log_message(self, *_: object) -> None: ...


def test_a_server_without_ranges_is_refused_before_its_whole_file_is_read() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _WholeFiles) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/text.bin"
        for start in (0, 1000):
            with pytest.raises(OSError, match="does not support range requests"):
                http_range(url, start, start + 100)
        server.shutdown()
    assert _WholeFiles.sent < 1 << 26


def test_an_index_that_came_whole_has_the_header_of_its_first_bytes() -> None:
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, 2, 3)
    assert parse_header(head + bytes(40)) == parse_header(head)


@pytest.mark.parametrize("shares", [(6,), (3, 3), (4, 2)])
def test_any_layout_reads_the_same_packed_windows(corpus: Path, shares: tuple[int, ...]) -> None:
    corpora = open_corpora(DataConfig(corpus=str(corpus), documents="packed"), SEQUENCE)
    found: list[dict[int, bytes]] = []
    for layout, micro_batch in (((12,), 1), (shares, 2)):
        reader = BatchReader(corpora, 1, 12, layout, micro_batch, None)
        rows = np.empty((12, corpora.width), np.int32)
        ends = np.cumsum(layout) * micro_batch
        for start, stop in pairwise([0, *ends.tolist()]):
            reader.read(24, range(start, stop), rows[start:stop])
        assert sum(int((PackedRows.of(row).targets >= 0).sum()) for row in rows) == (
            BatchWords.read(rows[0]).num_targets
        )
        found.append({BatchWords.read(row).offset: row.tobytes() for row in rows})
    assert len(found[0]) == 12 and found[0] == found[1]


def test_a_remote_corpus_is_packed_like_its_files(corpus: Path) -> None:
    data = DataConfig(corpus=str(corpus), documents="packed")
    near = open_corpora(data, SEQUENCE)
    far = open_corpora(data.model_copy(update={"corpus": f"local://{corpus}"}), SEQUENCE)
    assert far.num_samples == near.num_samples > 0
    rows = [read_batch(one, one.sampler(1), range(5)) for one in (near, far)]
    assert (rows[0][:, : 3 * SEQUENCE] == rows[1][:, : 3 * SEQUENCE]).all()


def test_a_damaged_index_is_refused_before_documents_are_packed(corpus: Path, tmp_path: Path) -> None:
    index = next(corpus.glob("*train*.idx"))
    for path in corpus.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    raw = bytearray(index.read_bytes())
    raw[-8:] = struct.pack("<q", 10**9)
    (tmp_path / index.name).write_bytes(raw)
    with pytest.raises(BadInputError, match="documents do not cover the sequences"):
        _ = open_corpora(DataConfig(corpus=str(tmp_path), documents="packed"), SEQUENCE).windows
