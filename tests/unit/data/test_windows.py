"""If these break: packed windows lose, repeat or cut documents, waste space, or load replicas unevenly."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.data.windows import (
    BatchWords,
    PackedRows,
    PackedWindows,
    attended_pairs,
    balanced_order,
    pack_documents,
    row_width,
)


def spaces_left(lengths: list[int], sequence: int) -> Counter[int]:
    """Best-fit decreasing, piece by piece."""
    free: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [at for at, space in enumerate(free) if space >= length]
        best = min(fitting, key=lambda at: free[at], default=None)
        if best is None:
            free.append(sequence - length)
        else:
            free[best] -= length
    return Counter(free)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 16))
def test_every_token_is_predicted_once_from_its_own_document(documents: list[int], sequence: int) -> None:
    lengths = np.array(documents, np.int64)
    windows = PackedWindows(pack_documents(lengths, sequence), sequence)
    document = np.repeat(np.arange(len(lengths)), lengths)
    stream = np.arange(len(document), dtype=np.int32)

    def read(start: int, out: np.ndarray) -> None:
        out[:] = stream[start : start + len(out)]

    predicted: Counter[int] = Counter()
    free: Counter[int] = Counter()
    for number in range(windows.count):
        row = np.empty(row_width(sequence, "packed"), np.int32)
        windows.read(read, number, row)
        inputs, targets, positions = PackedRows.of(row)
        real = targets >= 0
        assert (targets[real] == inputs[real] + 1).all()
        assert (document[targets[real]] == document[inputs[real]]).all()
        assert positions[0] == 0
        begins = np.flatnonzero(positions == 0)
        sizes = np.diff(begins, append=sequence)
        assert (positions == np.arange(sequence) - np.repeat(begins, sizes)).all()
        predicted.update(targets[real].tolist())
        free[sequence - int(real.sum())] += 1
        assert windows.counted(number, 3) == BatchWords(
            0,
            int(real.sum()),
            int(real.sum()),
            int((positions[real] + 1).sum()),
            int(np.minimum(positions[real] + 1, 3).sum()),
        )
    firsts = np.cumsum(lengths) - lengths
    expected = set(stream.tolist()) - set(firsts[lengths > 0].tolist())
    assert predicted == Counter(expected)
    pieces = [min(n - 1 - at, sequence) for n in documents for at in range(0, n - 1, sequence)]
    assert free == spaces_left(pieces, sequence)
    assert windows.packing.num_split == sum(n - 1 > sequence for n in documents)


def test_many_documents_are_packed_by_compiled_code_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = np.random.default_rng(1).integers(0, 300, 2000)
    plain = pack_documents(documents, 256)
    monkeypatch.setattr("myriad.data.windows._MANY_PIECES", 0)
    compiled = pack_documents(documents, 256)
    assert all(np.array_equal(one, other) for one, other in zip(plain, compiled, strict=True))


@given(st.integers(0, 50), st.integers(1, 60))
def test_pairs_of_a_window(length: int, window: int) -> None:
    expected = sum(min(query + 1, window) for query in range(length))
    assert attended_pairs(np.array([length]), window)[0] == expected


@settings(max_examples=25)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any), st.integers(1, 3), st.data())
def test_each_row_is_computed_once(shares: list[int], micro_batch: int, data: st.DataObject) -> None:
    rows = sum(shares) * micro_batch
    costs = data.draw(st.lists(st.integers(0, 100), min_size=rows, max_size=rows))
    assert sorted(balanced_order(costs, shares, micro_batch)) == list(range(rows))


def test_replicas_and_micro_batches_are_about_equally_expensive() -> None:
    costs = np.random.default_rng(1).integers(1, 1000, 64).tolist()
    ordered = np.array([costs[row] for row in balanced_order(costs, [8, 8], 4)]).reshape(2, 8, 4).sum(2)
    plain = np.array(costs).reshape(2, 8, 4).sum(2)
    assert np.ptp(ordered.sum(1)) < 0.01 * ordered.sum(1).mean()
    assert np.ptp(ordered) < 0.1 * ordered.mean() < np.ptp(plain)
    assert (np.diff(ordered) <= 0).all()


def test_replicas_take_turns_with_the_most_expensive_rows() -> None:
    """Else the first replica would always have them, and be taken for slow."""
    work = np.zeros(4)
    for turn in range(8):
        costs = np.random.default_rng(turn).integers(1, 1000, 4)
        ordered = [costs[row] for row in balanced_order(costs.tolist(), [1] * 4, 1, turn)]
        assert np.argmax(ordered) == turn % 4
        work += np.array(ordered) == costs.max()
    assert (work == 2).all()


@pytest.mark.parametrize("words", [BatchWords(3, 2**40, 7, 2**50, 5)])
def test_words_of_a_row_come_back(words: BatchWords) -> None:
    row = np.zeros(row_width(5, "packed"), np.int32)
    words.write(row)
    assert BatchWords.read(row) == words
