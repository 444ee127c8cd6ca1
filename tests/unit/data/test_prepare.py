"""If these fail, a corpus is not what its input says, or preparing one damages another."""

import json
from pathlib import Path

import numpy as np
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from tiny_corpora import lines, make_corpus, options

from myriad.data import prepare as module
from myriad.data import tokenize_pieces
from myriad.data.block_hashes import verify_corpus
from myriad.data.corpus_manifest import Split, read_manifest
from myriad.data.corpus_opening import open_corpus
from myriad.data.prepare import prepare
from myriad.data.records import RecordForm
from myriad.data.tokenizer import Tokenizer
from myriad.errors import BadInputError, RunFailedError


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_all_text_is_there_once_and_split_by_content(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path, count=80)
    manifest, texts = read_manifest(corpus), []
    for split in ("train", "validation"):
        opened = open_corpus(str(corpus), split)
        for shard in opened.shards:
            documents = [shard.document(number).tolist() for number in range(shard.num_documents)]
            assert all(document[-1] == manifest.end_of_document for document in documents)
            texts += [opened.tokenizer.decode(document[:-1]) for document in documents]
    assert sorted(texts) == sorted(lines(80))
    assert manifest.text_bytes["train"] + manifest.text_bytes["validation"] == sum(
        map(len, map(str.encode, texts))
    )
    assert verify_corpus(corpus) == []
    assert not (corpus / ".prepare").exists()


def test_equal_documents_are_never_on_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines(40) * 3))
    manifest = prepare([str(path)], tmp_path / "out", options())
    assert manifest.num_documents("train") % 3 == manifest.num_documents("validation") % 3 == 0


def text_of(corpus: Path, split: Split) -> str:
    opened = open_corpus(str(corpus), split)
    documents = [shard.document(n).tolist() for shard in opened.shards for n in range(shard.num_documents)]
    return "".join(opened.tokenizer.decode(document[:-1]) for document in documents)


@pytest.mark.parametrize("share", [0.02, 0.1, 0.95])
@pytest.mark.parametrize("files", [1, 3])
def test_the_end_of_a_short_text_is_held_out(tmp_path: Path, files: int, share: float) -> None:
    """By their hashes none of these documents would be, or all."""
    names, text = [str(tmp_path / f"{number}.txt") for number in range(files)], "\n".join(lines(300))
    for number, name in enumerate(names):
        Path(name).write_text(f"chapter {number}\n{text}\n")
    prepare(names, tmp_path / "out", options(validation=share))
    train, held_out = (text_of(tmp_path / "out", split) for split in ("train", "validation"))
    assert train + held_out == "".join(Path(name).read_text() for name in names)
    assert train.endswith("\n") and share <= len(held_out) / len(train + held_out) < share + 0.01
    assert not verify_corpus(tmp_path / "out")


def test_nothing_is_held_out_where_nothing_is_to_be(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n".join(lines(300)))
    manifest = prepare([str(tmp_path / "a.txt")], tmp_path / "out", options(validation=0.0))
    assert manifest.text_bytes["validation"] == 0 and manifest.num_documents("train") == 1


def test_a_wrong_key_leaves_nothing_that_refuses_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"body": line}) + "\n" for line in lines(9)))
    with pytest.raises(BadInputError, match="--key body"):
        prepare([str(path)], tmp_path / "out", options())
    assert prepare([str(path)], tmp_path / "out", options(form=RecordForm("body"))).num_documents("train")


def test_small_shards_hold_the_same_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 4096)
    many = make_corpus(tmp_path, "many", count=400)
    monkeypatch.setattr(module, "_PIECE_BYTES", 16 << 20)
    streams = []
    one = prepare(
        [str(tmp_path / "many-text")], tmp_path / "one", options(tokenizer=many, shard_bytes=1 << 30)
    )
    for folder in (many, tmp_path / "one"):
        opened = open_corpus(str(folder), "train")
        stream = np.empty(opened.num_tokens, np.int32)
        opened.read(0, stream)
        streams.append(stream.tolist())
    assert streams[0] == streams[1]
    assert len(one.of("train")) == 1


def test_the_same_again_changes_nothing(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in corpus.iterdir()}
    make_corpus_again = prepare([str(tmp_path / "corpus-text")], corpus, options())
    assert make_corpus_again == read_manifest(corpus)
    assert {path: path.stat().st_mtime_ns for path in corpus.iterdir()} == before


def test_the_manifest_of_many_files_stays_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank reads it: with 100,000 files in it that took a second."""
    listed = make_corpus(tmp_path)
    monkeypatch.setattr(module, "_MOST_LISTED_SOURCES", 3)
    assert prepare([str(tmp_path / "corpus-text")], listed, options()) == read_manifest(listed), "as before"
    for _ in range(2):
        made = prepare([str(tmp_path / "corpus-text")], tmp_path / "short", options())
        assert made.plan["sources"]["files"] > 3
    with pytest.raises(BadInputError, match="other inputs, or they changed since"):
        prepare([str(next((tmp_path / "corpus-text").iterdir()))], tmp_path / "short", options())


@pytest.mark.parametrize("change", [{"validation": 0.5}, {"vocabulary": 310}, {"shard_bytes": 1 << 20}])
def test_another_corpus_in_the_folder_is_left_as_it_is(tmp_path: Path, change: dict[str, object]) -> None:
    corpus = make_corpus(tmp_path)
    before = content(corpus)
    with pytest.raises(BadInputError, match="another corpus"):
        prepare([str(tmp_path / "corpus-text")], corpus, options(**change))
    assert content(corpus) == before


def test_a_long_record_is_encoded_in_parts_and_stays_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoding takes some 170 times the memory of its text."""
    monkeypatch.setattr(tokenize_pieces, "LONGEST_TEXT_BYTES", 50)
    texts = ["short", "x" * 170, "\n".join(f"line {i} of many" for i in range(30)), "", "after"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    longest: list[int] = []
    encode = Tokenizer.encode_batch
    monkeypatch.setattr(
        Tokenizer, "encode_batch", lambda self, some: longest.extend(map(len, some)) or encode(self, some)
    )
    made = prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", options(validation=0))
    assert made.num_documents("train") == 4 and max(longest) <= 50
    assert text_of(tmp_path / "out", "train") == "".join(texts)


def test_a_folder_of_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("dear")
    for output in (tmp_path / "home", tmp_path / "a.txt"):
        with pytest.raises(BadInputError, match="--output"):
            prepare([str(tmp_path / "a.txt")], output, options())
    assert content(tmp_path) == {"a.txt": b"text", "home/letter.txt": b"dear"}


def test_an_unfinished_corpus_continues_with_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PIECE_BYTES", 2048)
    whole = content(make_corpus(tmp_path, "whole", count=200))
    tokenized: list[int] = []

    def die_in_piece_3(*arguments: object) -> tokenize_pieces.PieceResult:
        tokenized.append(arguments[2].number)
        if len(tokenized) == 4:
            raise KeyboardInterrupt
        return original(*arguments)

    original = tokenize_pieces._tokenize
    monkeypatch.setattr(tokenize_pieces, "_tokenize", die_in_piece_3)
    source = [str(tmp_path / "whole-text")]
    with pytest.raises(KeyboardInterrupt):
        prepare(source, tmp_path / "out", options())
    with pytest.raises(BadInputError, match=r"no manifest\.json"):
        open_corpus(str(tmp_path / "out"), "train")
    with pytest.raises(
        BadInputError, match=r"begun as another corpus \(--validation 0\.\d instead of 0\.\d\)"
    ):
        prepare(source, tmp_path / "out", options(validation=0.3))
    prepare(source, tmp_path / "out", options())
    assert sorted(tokenized) == [0, 1, 2, 3, *range(3, max(tokenized) + 1)]
    assert content(tmp_path / "out") == whole


@pytest.mark.parametrize(
    "change",
    [{"validation": 1.0}, {"validation": -0.1}, {"workers": 0}, {"shard_bytes": 5}, {"vocabulary": 9}],
)
def test_bad_options_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    with pytest.raises(BadInputError):
        make_corpus(tmp_path, **change)


def test_a_bad_record_stops_it_and_the_folder_is_no_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\nbroken\n')
    with pytest.raises(BadInputError, match="line at byte 17"):
        prepare([str(tmp_path / "a.jsonl")], tmp_path / "out", options())
    with pytest.raises(BadInputError, match=r"no manifest\.json"):
        read_manifest(tmp_path / "out")


def test_files_without_text_are_refused_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(BadInputError, match="none of these files contains text"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", options())
    assert not (tmp_path / "out").exists()


def test_records_without_text_are_counted_the_same_in_every_kind_of_file(tmp_path: Path) -> None:
    texts = ["one", None, "", "two", None]
    records = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "a.jsonl").write_text(records)
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.parquet"):
        manifest = prepare([str(tmp_path / name)], tmp_path / f"{name}-out", options())
        assert manifest.skipped == {"null": 2, "empty": 1}
        assert read_manifest(tmp_path / f"{name}-out").skipped == manifest.skipped
    (tmp_path / "a.txt").touch()
    manifest = prepare([str(tmp_path / "a.txt"), str(tmp_path / "a.jsonl")], tmp_path / "out", options())
    assert manifest.skipped == {"null": 2, "empty": 2}


def test_records_without_any_text_are_refused_and_leave_no_work(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n{"text": ""}\n')
    with pytest.raises(BadInputError, match=r"none of these files contains text .*null.*1.*empty.*1"):
        prepare([str(path)], tmp_path / "out", options())
    path.write_text('{"text": "some"}\n')
    assert prepare([str(path)], tmp_path / "out", options()).text_bytes["train"]


def test_a_full_disk_is_reported_and_the_same_command_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = content(make_corpus(tmp_path, "whole", count=200))
    with monkeypatch.context() as full:
        full.setattr(module, "_write_shard", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        with pytest.raises(
            RunFailedError, match="out: No space left; run the same command again to continue"
        ):
            prepare([str(tmp_path / "whole-text")], tmp_path / "out", options())
    prepare([str(tmp_path / "whole-text")], tmp_path / "out", options())
    assert content(tmp_path / "out") == whole
