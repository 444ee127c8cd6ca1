"""The order of samples: a pure function of (seed, index), where ``index`` counts the samples of a run.

No state and no index arrays are needed: any sample is reached in O(1), and every layout and number of readers
sees one order. A step takes the next train.global_batch samples. The number of samples before it is part of
the run's state, as the batch may have changed (``index = step * global_batch + row`` if it has not).

    index --mixture--> (corpus, position in that corpus's own stream) --permutation of its epoch--> sample

Mixture: corpora are peeled off one by one. Of a stream shared by corpora c, c+1, ..., corpus c takes item i
exactly when ``floor((i + 1) p) > floor(i p)``, p being its share of what is left; the others continue with
the items not taken. After any number of samples each corpus's count is within the number of corpora of its
exact share. Permutation: a Feistel network over the next power of two, walked until it lands inside (Black
and Rogaway 2002), keyed by seed, corpus and epoch. It is a bijection, so each epoch shows each sample once.
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["UNBOUNDED", "DataPosition", "Sample", "Sampler", "permute"]

UNBOUNDED = 2**62
"""Size of a corpus that is streamed: its samples are taken in their order, which is shuffled by itself."""

_ROUNDS = 6
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


class Sample(NamedTuple):
    """One sample: its corpus in the mixture, and its number there."""

    corpus: int
    position: int


class DataPosition(NamedTuple):
    """The samples of an attempt's steps: they follow those before the state that the attempt began with."""

    global_batch: int
    first_sample: int = 0
    """Number of step 0's first sample: not 0 where earlier steps had batches of another size."""

    @classmethod
    def resumed(cls, global_batch: int, step: int, samples: int) -> "DataPosition":
        """Return the position after a state of ``step`` steps, which had taken ``samples`` samples."""
        return cls(global_batch, samples - step * global_batch)

    def samples_before(self, step: int) -> int:
        """Return the number of samples that ``step`` steps have taken, which is also the number of the
        next sample."""
        return self.first_sample + step * self.global_batch


class Sampler:
    """The order of samples over a mixture of corpora."""

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """``sizes`` are in samples and ``weights`` in any unit, one for each corpus."""
        assert len(sizes) == len(weights) > 0, "one weight for each corpus"
        assert all(size > 0 for size in sizes), "a corpus holds at least one sample"
        assert all(weight > 0 for weight in weights), "weights are positive"
        self._sizes, self._seed = tuple(sizes), seed
        exact = [Fraction(str(weight)) for weight in weights]
        self._shares = [exact[corpus] / sum(exact[corpus:]) for corpus in range(len(exact))]

    def sample(self, index: int) -> Sample:
        """Return the sample with a global number."""
        return self.samples(index, index + 1)[0]

    def samples(self, start: int, stop: int) -> list[Sample]:
        """Return the samples ``start`` to ``stop - 1``."""
        streams = [self._stream(index) for index in range(start, stop)]
        found = [Sample(0, 0)] * len(streams)
        for corpus in {corpus for corpus, _ in streams}:
            rows = [row for row, stream in enumerate(streams) if stream[0] == corpus]
            positions = self._positions(corpus, [streams[row][1] for row in rows])
            for row, position in zip(rows, positions, strict=True):
                found[row] = Sample(corpus, position)
        return found

    def epoch(self, index: int) -> int:
        """Return the epoch of sample ``index`` over its own corpus."""
        corpus, offset = self._stream(index)
        return offset // self._sizes[corpus]

    def _stream(self, index: int) -> tuple[int, int]:
        """Return the corpus of a global number, and the number of that corpus's samples before it."""
        for corpus, share in enumerate(self._shares):
            taken = index * share.numerator // share.denominator
            if (index + 1) * share.numerator // share.denominator > taken:
                return corpus, taken
            index -= taken
        raise AssertionError("the last corpus takes all that is left")

    def _positions(self, corpus: int, offsets: list[int]) -> list[int]:
        size = self._sizes[corpus]
        if size == UNBOUNDED:
            return offsets
        positions = [0] * len(offsets)
        for epoch in {offset // size for offset in offsets}:
            rows = [row for row, offset in enumerate(offsets) if offset // size == epoch]
            inside = np.array([offsets[row] % size for row in rows], np.uint64)
            for row, position in zip(
                rows, permute(inside, size, _mix(self._seed, corpus, epoch)), strict=True
            ):
                positions[row] = int(position)
        return positions


def permute(values: NDArray[np.uint64], size: int, key: int) -> NDArray[np.uint64]:
    """Map ``values`` in [0, size) through the bijection of that range that ``key`` selects."""
    bits = max(2, (size - 1).bit_length())
    keys = [_mix(key, number) for number in range(_ROUNDS)]
    result = _feistel(values, bits, keys)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], bits, keys)
    return result


def _feistel(values: NDArray[np.uint64], bits: int, keys: Sequence[int]) -> NDArray[np.uint64]:
    """Map values through a bijection of [0, 2^bits): the halves (unequal if bits is odd) alternately
    change each other."""
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** (bits - bits // 2) - 1)
    high, low = values >> low_bits, values & low_mask
    for high_key, low_key in zip(keys[::2], keys[1::2], strict=True):
        high = high ^ _scramble(low ^ np.uint64(high_key)) & high_mask
        low = low ^ _scramble(high ^ np.uint64(low_key)) & low_mask
    return high << low_bits | low


def _scramble(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (Steele et al. 2014) to arrays; products wrap."""
    values = (values ^ values >> np.uint64(30)) * np.uint64(_FIRST)
    values = (values ^ values >> np.uint64(27)) * np.uint64(_SECOND)
    return values ^ values >> np.uint64(31)


def _mix(*parts: int) -> int:
    """Mix integers to 64 bits by the same finalizer; the order matters."""
    state = 0
    for part in parts:
        state = (state ^ part & _MASK) + _GOLDEN & _MASK
        state = (state ^ state >> 30) * _FIRST & _MASK
        state = (state ^ state >> 27) * _SECOND & _MASK
        state ^= state >> 31
    return state
