"""If these fail, documents are lost, doubled or cut in the wrong place, or a bad input is named badly."""

import gzip
import io
import json
import os
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar

import fsspec
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from myriad.data import file_documents, http_input, text_sources, zstd_input
from myriad.data.file_documents import END_OF_FILE, FileRange, ReadRules, read_documents, read_found
from myriad.data.records import RecordForm
from myriad.data.text_sources import cut_pieces, find_sources
from myriad.errors import BadInputError

SAME_FOLDER = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None
)


def read_all(inputs: list[str], piece_bytes: int = 1 << 20, key: str = "text") -> list[str]:
    form = RecordForm(key)
    pieces = cut_pieces(find_sources(inputs), form, piece_bytes)
    assert [piece.number for piece in pieces] == list(range(len(pieces)))
    return [text for piece in pieces for span in piece.spans for text in read_documents(span, form)]


@SAME_FOLDER
@given(
    texts=st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=20), piece_bytes=st.integers(5, 300)
)
def test_every_record_is_read_once_however_a_file_is_cut(
    tmp_path: Path, texts: list[str], piece_bytes: int
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    assert read_all([str(path)], piece_bytes) == texts


@SAME_FOLDER
@given(
    text=st.text(st.sampled_from("aé漢\n"), min_size=1, max_size=200),
    piece_bytes=st.integers(4, 300),
    longest=st.integers(4, 40),
)
def test_a_long_text_is_cut_without_losing_a_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, piece_bytes: int, longest: int
) -> None:
    for module in (file_documents, text_sources):
        monkeypatch.setattr(module, "LONGEST_TEXT_BYTES", longest)
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode())
    documents = read_all([str(path)], piece_bytes)
    assert "".join(documents) == text
    assert all(len(document.encode()) <= longest + 3 for document in documents)  # the rest of a character


def test_a_short_text_is_one_document_without_its_mark(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert read_all([str(tmp_path / "a.txt")]) == ["one\r\ntwo\n"]


def test_all_kinds_by_folder_glob_and_url(tmp_path: Path) -> None:
    table = arrow.table({"text": ["p1", None, "p2", ""], "other": [1, 2, 3, 4]})
    parquet.write_table(table, tmp_path / "c.parquet", row_group_size=1)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write('{"text": "packed"}\n\n')
    (tmp_path / "a.txt").write_text("plain")
    (tmp_path / "code.py").write_text("code")
    (tmp_path / ".hidden.txt").write_text("hidden")
    assert read_all([str(tmp_path)]) == ["plain", "packed", "p1", "p2"]
    assert read_all([str(tmp_path)], piece_bytes=1) == ["plain", "packed", "p1", "p2"]
    assert read_all([f"{tmp_path}/*.py", str(tmp_path / "a.txt"), f"{tmp_path}/a*"]) == ["code", "plain"]
    with fsspec.open("memory://shelf/x.txt", "w") as file:
        file.write("from a store")
    assert read_all(["memory://shelf"]) == ["from a store"]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.jsonl", b'{"text": "x"}\n{"text": 3}\n', "line at byte 14 has no text under the key 'text'"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', "line at byte 14 has no text"),
        ("a.jsonl", b"{\n", "line at byte 0 is not JSON"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "x", "n": 1}\n', r"under the key 'text'; --key body\?"),
        ("a.jsonl", b'{"text": "a\\ud83d"}\n', r"byte 0 has half of a surrogate pair, \\ud83d"),
        ("a.jsonl", b'{"text": "\xfc"}\n', r"not UTF-8 \(byte 10 is 0xfc\)"),
        ("a.txt", b"fine\nd\xff\n", r"not UTF-8 \(byte 6 is 0xff\).*iconv"),
        ("a.txt", b"fine\nd\xc3", r"not UTF-8 \(byte 6 is 0xc3\)"),
        ("a.txt.gz", b"not packed", "cannot be read"),
        ("a.parquet", b"not parquet", "not a Parquet file"),
    ],
)
def test_bad_content_is_named_with_its_place(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInputError, match=says) as caught:
        read_all([str(tmp_path / name)])
    assert name in str(caught.value)


def test_an_input_that_names_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"")
    for given_name in (str(tmp_path / "none.txt"), str(tmp_path), f"{tmp_path}/*.txt", "nosuch://x"):
        with pytest.raises(BadInputError, match="INPUT"):
            find_sources([given_name])


@pytest.mark.parametrize("kind", [arrow.large_string(), arrow.string_view(), None], ids=str)
def test_every_column_of_text_is_read(tmp_path: Path, kind: arrow.DataType | None) -> None:
    texts = arrow.array(["one", None, "two"], kind or arrow.string())
    column = texts if kind else texts.dictionary_encode()
    parquet.write_table(arrow.table({"text": column}), tmp_path / "a.parquet")
    assert read_all([str(tmp_path / "a.parquet")]) == ["one", "two"]


def test_a_pipe_in_a_folder_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    assert set(read_all([str(tmp_path)])) == {"text"}
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(BadInputError, match=r"b\.txt.*a pipe or a device"):
        find_sources([str(tmp_path)])


def test_a_packed_file_that_nothing_here_unpacks_is_not_read_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zstd_input, "find_spec", lambda name: None)
    (tmp_path / "a.txt.zst").write_text("plain")
    for read in (lambda path: find_sources([path]), lambda path: list(read_found(packed(path), TEXT))):
        with pytest.raises(BadInputError, match=r"pip install 'myriad-train\[zst\]'"):
            read(str(tmp_path / "a.txt.zst"))


TEXT = RecordForm("text")


def packed(path: str | Path) -> FileRange:
    return FileRange(str(path) if "://" in str(path) else f"file://{path}", "jsonl", 0, None)


def test_all_frames_of_a_packed_file_are_read_and_a_torn_one_is_refused(tmp_path: Path) -> None:
    """The readers that libraries offer take a file that ends inside a frame for a whole one."""
    zstandard = pytest.importorskip("zstandard")
    texts = [f"text {number}" for number in range(3000)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    parts = [zstandard.compress("".join(lines[at : at + 1000]).encode()) for at in range(0, 3000, 1000)]
    skipped = (0x184D2A50).to_bytes(4, "little") + (4).to_bytes(4, "little") + b"left"
    whole, path = parts[0] + skipped + parts[1] + parts[2], tmp_path / "a.jsonl.zst"
    path.write_bytes(whole)
    fsspec.filesystem("memory").pipe("/zst/a.jsonl.zst", whole)
    assert read_all([str(path)]) == read_all(["memory://zst/a.jsonl.zst"]) == texts
    middle = list(read_found(packed(path), TEXT))[1500].next
    rest = read_found(packed(path)._replace(resume=middle), TEXT)
    assert [found.document for found in rest] == texts[1501:]

    settings = zstandard.ZstdCompressionParameters.from_level(3, window_log=28)
    wide = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    for content, problem in (
        (whole[:-5], "it ends inside a Zstandard frame"),
        (whole[: len(parts[0]) + 3], "it ends inside a Zstandard frame"),
        (parts[0] + b"not packed", "it is no Zstandard, or damaged"),
        (wide.compress(b"text") + wide.flush(), "a window above 128 MiB: pack it again without --long"),
    ):
        path.write_bytes(content)
        with pytest.raises(BadInputError, match=f"a.jsonl.zst.*cannot be read: .*{problem}"):
            read_all([str(path)])
        *good, bad = read_found(packed(path), TEXT, ReadRules(skips_bad=True))
        assert bad.next == END_OF_FILE and problem in bad.problem
        assert [found.document for found in good] == texts[: len(good)]


def test_a_few_packed_bytes_never_unpack_to_more_than_fits_in_memory(tmp_path: Path) -> None:
    """64 MiB of zeros are one line of JSONL."""
    zstandard = pytest.importorskip("zstandard")
    content = zstandard.compress(bytes(1 << 26))
    assert len(content) < 4 << 10
    sizes: list[int] = []
    source = zstd_input.ZstdInput(io.BytesIO(content), "a.zst")
    unpack = source._unpack
    source._unpack = lambda part: sizes.append(len(found := unpack(part))) or found  # type: ignore[method-assign]
    assert sum(len(part) for part in iter(lambda: source.read(1 << 24), b"")) == 1 << 26
    assert max(sizes) <= 32 << 20


class _Shelf(BaseHTTPRequestHandler):
    """Serves 600 records; under ``short`` fewer bytes than it promises, under ``silent`` nothing, and under
    ``busy`` nothing to the first two requests."""

    hung: ClassVar[list[str]] = []

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if "busy" in self.path and self.command == "GET":
            self.hung.append(self.path)
            if len(self.hung) < 3:
                time.sleep(1.0)
                return
        if "silent" in self.path:
            time.sleep(1.0)
            return
        if "old" in self.path:
            self.send_response(302)
            self.send_header("Location", "/a.jsonl")
            self.end_headers()
            return
        content = b'{"text": "from far away"}\n' * 600
        self.send_response(200)
        self.send_header("Content-Length", str(len(content) + 9 * ("short" in self.path)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def test_a_url_is_read_line_by_line_and_a_broken_download_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="what fsspec reads http with")
    monkeypatch.setattr(http_input, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(http_input, "SILENCE_SECONDS", 0.2)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Shelf) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        shelf = f"http://127.0.0.1:{server.server_port}"
        for name in ("a.jsonl", "old.jsonl", "a.jsonl?token=x", "busy.jsonl"):
            assert read_all([f"{shelf}/{name}"]) == ["from far away"] * 600
        with pytest.raises(BadInputError, match=r"short\.jsonl.*cannot be read"):
            read_all([f"{shelf}/short.jsonl"])
        with pytest.raises(BadInputError, match=r"silent\.jsonl.*no byte came for 0\.2 s, 3 times"):
            read_all([f"{shelf}/silent.jsonl"])
        assert _Shelf.hung[:3] == ["/busy.jsonl"] * 3
        server.shutdown()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", b'[{"text": "one"}]', "one record a line, as jq"),
        ("a.json", b'[\n{"text": "one"}\n]', "one record a line, as jq"),
        ("a.jsonl", b'{"text": ' + b"[" * 10**5, "not JSON that can be read"),
        ("a.jsonl", b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "not JSON that can be read"),
        ("a.jsonl", b'{"text": "' + b"a" * 3000 + b'"}', r"byte 0 is longer; at most 2\.0 KiB"),
        ("a.txt", "text".encode("utf-16"), "iconv -f UTF-16"),
        ("a.jsonl", '{"text": "one"}'.encode("utf-16"), "iconv -f UTF-16"),
    ],
)
def test_a_record_that_cannot_be_read_is_one_line_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes, says: str
) -> None:
    longest = 2048 if says.startswith("byte 0") else 1 << 28
    monkeypatch.setattr(file_documents, "LONGEST_LINE_BYTES", longest)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInputError, match=says):
        read_all([str(tmp_path / name)])


def test_a_damaged_column_of_parquet_is_refused(tmp_path: Path) -> None:
    offsets, data = arrow.py_buffer(bytes([0, 0, 0, 0, 2, 0, 0, 0])), arrow.py_buffer(b"\xff\xfe")
    bad = arrow.Array.from_buffers(arrow.string(), 1, [None, offsets, data])
    parquet.write_table(arrow.table({"text": bad}), tmp_path / "bad.parquet")
    parquet.write_table(arrow.table([bad, bad], names=["text", "text"]), tmp_path / "two.parquet")
    parquet.write_table(arrow.table({"text": ["word " * 999]}), tmp_path / "cut.parquet", compression="gzip")
    whole = (tmp_path / "cut.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(whole[:60] + b"\0" * 8 + whole[68:])
    for name, says in (("bad", "not UTF-8"), ("two", "one column"), ("cut", "cannot be read")):
        with pytest.raises(BadInputError, match=says):
            read_all([str(tmp_path / f"{name}.parquet")])


def test_a_name_with_the_marks_of_a_glob_is_a_name_where_there_is_such_a_file(tmp_path: Path) -> None:
    (tmp_path / "a[1].txt").write_text("text")
    assert read_all([str(tmp_path / "a[1].txt")]) == ["text"]
    with pytest.raises(BadInputError, match="a file, a folder, a glob or a URL"):
        find_sources([""])


def test_a_column_that_is_not_there_or_not_text_is_refused(tmp_path: Path) -> None:
    parquet.write_table(arrow.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    for key, says in (("text", "has the columns body, n"), ("n", "column of int64")):
        with pytest.raises(BadInputError, match=says):
            read_all([str(tmp_path / "a.parquet")], key=key)
