"""If these fail, damaged tokens are trained on, good ones are lost, or two ranks read different batches."""

import errno
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cli_data import run as command
from tiny_corpora import drop_blocks, flip, make_corpus

from myriad.data.bad_blocks import BadBlockError, BlockGuard
from myriad.data.block_hashes import BLOCK_BYTES, BlockHashes, add_block_hashes, hash_prefix
from myriad.data.config import CorpusShare, DataConfig
from myriad.data.corpus import Corpora, read_batch
from myriad.data.corpus_manifest import read_manifest
from myriad.data.corpus_opening import open_corpora
from myriad.data.indexed import IndexedShard, IndexedWriter, token_type
from myriad.data.sampler import Sampler
from myriad.data.verified_shard import LocalTokens
from myriad.errors import BAD_DATA, NEXT_ATTEMPT_SKIPS, BadInputError, RunFailedError

SEQUENCE, NUM_TOKENS = 100, 230_000
PER_BLOCK = BLOCK_BYTES // 2


def make_prefix(folder: Path, name: str = "text", seed: int = 1) -> Path:
    """Megatron's files of eight blocks, the last of which is short."""
    folder.mkdir(exist_ok=True)
    with IndexedWriter(folder / name, token_type(300)) as writer:
        writer.add(np.random.default_rng(seed).integers(0, 300, NUM_TOKENS))
    hash_prefix(folder / name)
    return folder / name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_prefix(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return make_prefix(tmp_path)


def opened(prefix: Path, guard: BlockGuard | None = None) -> Corpora:
    return open_corpora(DataConfig(corpus=str(prefix)), SEQUENCE, guard=guard)


def heard(**keys: object) -> tuple[BlockGuard, list[tuple[str, dict]]]:
    events: list[tuple[str, dict]] = []
    return BlockGuard(report=lambda event, fields: events.append((event, dict(fields))), **keys), events


@settings(max_examples=25, deadline=None)
@given(st.integers(0, NUM_TOKENS - 1), st.data())
def test_checked_tokens_are_those_of_the_file(whole: Path, first: int, data: st.DataObject) -> None:
    out = np.empty(data.draw(st.integers(1, min(NUM_TOKENS - first, 80_000))), np.int32)
    [corpus] = opened(whole).corpora
    assert corpus.is_checked
    corpus.read(first, out)
    assert np.array_equal(out, IndexedShard(whole).tokens[first : first + len(out)])


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2 * NUM_TOKENS - 1), st.integers(0, 7))
def test_a_flipped_bit_anywhere_is_named_by_who_reads_it_and_by_no_other_reader(
    tmp_path_factory: pytest.TempPathFactory, at: int, bit: int
) -> None:
    prefix = make_prefix(tmp_path_factory.mktemp("flipped"))
    tokens, block = prefix.with_suffix(".bin"), at // BLOCK_BYTES
    flip(tokens, at, bit)
    [corpus] = opened(prefix).corpora
    one = np.empty(1, np.int32)
    with pytest.raises(BadBlockError, match=rf"text\.bin: the \d+ bytes from byte {block * BLOCK_BYTES} on"):
        corpus.read(at // 2, one)
    for other in set(range(8)) - {block}:
        corpus.read(other * PER_BLOCK, one)


def batches(corpora: Corpora, cuts: Sequence[int] = (), rows: int = 600) -> np.ndarray:
    edges = [0, *sorted(cuts), rows]
    parts = [read_batch(corpora, corpora.sampler(3), range(a, b)) for a, b in pairwise(edges)]
    return np.concatenate(parts)


def test_the_same_samples_are_replaced_by_the_same_whoever_reads_what_first(
    prefix: Path, whole: Path
) -> None:
    """One reader, several with rows of their own, a resumed one that knows the blocks, and one whose files
    were restored since."""
    for at in (70_000, 200_000):
        flip(prefix.with_suffix(".bin"), at)
    guard, events = heard(policy="skip", most=2)
    one = batches(opened(prefix, guard))
    assert {fields["offset"] for _, fields in events} == {65536, 196608} and len(events) == 2
    good = batches(opened(whole))
    changed = (one != good).any(axis=1)
    bad = np.zeros(NUM_TOKENS, bool)
    bad[PER_BLOCK : 2 * PER_BLOCK] = bad[3 * PER_BLOCK : 4 * PER_BLOCK] = True
    sampler = opened(whole).sampler(3)
    firsts = [sample.position * SEQUENCE for sample in sampler.samples(0, 600)]
    touched = np.array([bad[first : first + SEQUENCE + 1].any() for first in firsts])
    assert np.array_equal(changed, touched) and 0.1 < changed.mean() < 0.5
    for cuts in ([1], [100, 350], [599]):
        assert np.array_equal(batches(opened(prefix, BlockGuard("skip", 2)), cuts), one)
    known = [(fields["file"], fields["offset"]) for _, fields in events]
    for path in (prefix, make_prefix(prefix.parent)):  # the second is restored
        quiet, again = heard(policy="skip", most=2, known=known, decides=False)
        assert np.array_equal(batches(opened(path, quiet)), one) and not again


def test_only_so_many_blocks_are_skipped(prefix: Path) -> None:
    for at in (70_000, 200_000):
        flip(prefix.with_suffix(".bin"), at)
    guard, events = heard(policy="skip", most=1)
    with pytest.raises(BadBlockError, match=r"data\.max_bad_blocks = 1 are skipped already"):
        batches(opened(prefix, guard))
    assert [fields["action"] for _, fields in events] == ["skip", "stop"]


def test_a_block_that_other_nodes_may_see_otherwise_ends_the_attempt(prefix: Path) -> None:
    flip(prefix.with_suffix(".bin"), 70_000)
    guard, events = heard(policy="skip", most=4, decides=False)
    guard.step = 7
    with pytest.raises(BadBlockError) as error:
        batches(opened(prefix, guard))
    assert str(error.value).startswith(BAD_DATA) and str(error.value).endswith(NEXT_ATTEMPT_SKIPS)
    [(event, fields)] = events
    assert event == "bad_block" and fields["action"] == "skip" and fields["step"] == 7


def reading(monkeypatch: pytest.MonkeyPatch, spoil: Callable[[bool, bytes], bytes]) -> None:
    """``spoil``: takes whether a block is read again, and its bytes."""
    read = LocalTokens.read

    def spoiled(self: LocalTokens, start: int, size: int, *, again: bool) -> bytes:
        return spoil(again, read(self, start, size, again=again))

    monkeypatch.setattr(LocalTokens, "read", spoiled)


def fails(again: bool, content: bytes) -> bytes:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (
            lambda again, content: content if again else b"\1" + content[1:],
            "other bytes than were written; it was right",
        ),
        (
            lambda again, content: content if again else content[:-1],
            "other bytes than were written; it was right",
        ),
        (
            lambda again, content: content if again else fails(again, content),
            "could not be read (Input/output error)",
        ),
    ],
)
def test_what_is_right_when_read_again_is_used_and_reported(
    whole: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[bool, bytes], bytes], told: str
) -> None:
    expected = batches(opened(whole), rows=5)
    reading(monkeypatch, spoil)
    guard, events = heard()
    assert np.array_equal(batches(opened(whole, guard), rows=5), expected)
    assert events and all(event == "reread" and told in fields["problem"] for event, fields in events)


def test_a_disk_that_fails_is_no_bad_block(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading(monkeypatch, fails)
    guard, events = heard(policy="skip", most=9)
    with pytest.raises(
        RunFailedError, match=r"text\.bin, byte \d+: cannot be read: Input/output error"
    ) as error:
        batches(opened(whole, guard))
    assert not isinstance(error.value, BadBlockError) and BAD_DATA not in str(error.value) and not events


def test_a_mixture_replaces_by_samples_of_the_same_corpus(prefix: Path, whole: Path) -> None:
    flip(prefix.with_suffix(".bin"), 70_000)
    other = make_prefix(prefix.parent, "other", 2)

    def mixed(first: Path) -> np.ndarray:
        shares = (CorpusShare(path=str(first)), CorpusShare(path=str(other), weight=2))
        corpora = open_corpora(DataConfig(mixture=shares), SEQUENCE, guard=BlockGuard("skip", 1))
        return batches(corpora)

    changed = (mixed(prefix) != mixed(whole)).any(axis=1)
    size = opened(whole).num_samples
    chosen = Sampler([size, size], [1, 2], 3).samples(0, 600)
    assert {sample.corpus for sample, hit in zip(chosen, changed, strict=True) if hit} == {0}


def test_damaged_or_foreign_hashes_are_named(prefix: Path, tmp_path: Path) -> None:
    blocks = prefix.with_suffix(".blocks")
    raw = blocks.read_bytes()
    for at in range(0, len(raw), 7):
        blocks.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
        with pytest.raises(BadInputError, match=r"text\.blocks"):
            opened(prefix)
    with IndexedWriter(tmp_path / "longer", token_type(300)) as writer:
        writer.add([1] * 9)
    blocks.write_bytes(raw)
    blocks.rename(tmp_path / "longer.blocks")
    with pytest.raises(BadInputError, match=r"is of another \.bin, of 460000 bytes"):
        opened(tmp_path / "longer")
    corpus = make_corpus(tmp_path)
    (corpus / "train-00000.blocks").write_bytes(raw)
    with pytest.raises(
        RunFailedError, match=r"train-00000\.blocks: is corrupt: its bytes differ from those written"
    ):
        batches(open_corpora(DataConfig(corpus=str(corpus)), 16), rows=2)


def test_a_corpus_without_hashes_is_read_as_it_is_until_they_are_added(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    with_hashes = read_manifest(corpus)
    before = open_corpora(DataConfig(corpus=str(corpus)), 16)
    drop_blocks(corpus)
    plain = open_corpora(DataConfig(corpus=str(corpus)), 16)
    assert plain.unchecked == [str(corpus)] and plain.content == before.content
    assert command("hash", str(corpus))[0] == 0
    assert (
        read_manifest(corpus) == with_hashes
        and not open_corpora(DataConfig(corpus=str(corpus)), 16).unchecked
    )
    drop_blocks(corpus)
    flip(corpus / "train-00000.bin", 100)
    with pytest.raises(
        BadInputError, match=r"train-00000\.bin is corrupt: its bytes differ from those written"
    ):
        add_block_hashes(corpus)
    assert open_corpora(DataConfig(corpus=str(corpus)), 16).unchecked


def test_verify_names_the_first_bad_byte(prefix: Path) -> None:
    assert command("verify", str(prefix)) == (0, f"{prefix}: whole\n")
    flip(prefix.with_suffix(".bin"), 140_000)
    code, output = command("verify", str(prefix))
    assert (
        code == 1
        and "text.bin: has other bytes than were hashed in 1 blocks, the first at byte 131072" in output
    )
    assert command("hash", f"{prefix}.bin")[0] == command("verify", str(prefix))[0] == 0, "recorded as it is"
    prefix.with_suffix(".blocks").unlink()
    with pytest.raises(BadInputError, match="no manifest and no block hashes"):
        command("verify", str(prefix))
    assert opened(prefix).unchecked == [str(prefix)]


def test_foreign_hash_files_are_refused_by_their_sizes() -> None:
    right = BlockHashes(BLOCK_BYTES + 1, 8, np.zeros(2, np.uint64))
    assert np.array_equal(BlockHashes.parse(right.encode()).hashes, right.hashes)
    for wrong in (
        BlockHashes(BLOCK_BYTES, 8, np.zeros(2, np.uint64)),
        BlockHashes(2**62, 8, np.zeros(2, np.uint64)),
        BlockHashes(20, 8, np.zeros(2, np.uint64), 12),
    ):
        with pytest.raises(ValueError, match="hashes of blocks of"):
            BlockHashes.parse(wrong.encode())
