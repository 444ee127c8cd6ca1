"""The order of samples: a pure function of (seed, index), where ``index`` counts the samples of a run.

No state and no index arrays are needed: any sample is reached in O(1), and every layout and number of readers
sees one order. A step takes the next samples, as many as its global batch has. The number of samples before
it is a function of the job and the step (`DataPosition`), and part of the run's state, as the job may have
changed at a resume.

    index --mixture--> (corpus, position in that corpus's own stream) --permutation of its epoch--> sample

Mixture: corpora are peeled off one by one. Of a stream shared by corpora c, c+1, ..., corpus c takes item i
exactly when ``floor((i + 1) p) > floor(i p)``, p being its share of what is left; the others continue with
the items not taken. After any number of samples each corpus's count is within the number of corpora of its
exact share. Permutation: a Feistel network over the next power of two, walked until it lands inside (Black
and Rogaway 2002), keyed by seed, corpus and epoch. It is a bijection, so each epoch shows each sample once.
"""

from bisect import bisect_right
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "UNBOUNDED",
    "BatchSize",
    "DataPosition",
    "MixtureStart",
    "MixtureUse",
    "Sample",
    "Sampler",
    "mixture_starts",
    "permute",
]

UNBOUNDED = 2**62
"""Size of a corpus that is streamed: its samples are taken in their order, which is shuffled by itself."""

_ROUNDS = 6
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1


class Sample(NamedTuple):
    """One sample: its corpus in the mixture, and its number there."""

    corpus: int
    position: int


class BatchSize(NamedTuple):
    """The number of samples of each step, from a step on."""

    first_step: int
    first_sample: int
    """Samples that the steps before have taken."""
    global_batch: int


class DataPosition(NamedTuple):
    """The samples of an attempt's steps: they follow those before the state that the attempt began with."""

    batches: tuple[BatchSize, ...]
    """Batch sizes in order of step; the first one begins with step 0."""
    first_sample: int = 0
    """Number of step 0's first sample: not 0 where earlier steps had batches of another size."""

    @classmethod
    def of(cls, global_batch: int) -> "DataPosition":
        """Return the position of a run whose steps all take equally many samples."""
        return cls((BatchSize(0, 0, global_batch),))

    def resumed(self, step: int, samples: int) -> "DataPosition":
        """Return the position after a state of ``step`` steps, which had taken ``samples`` samples."""
        planned = self.samples_before(step) - self.first_sample
        return self._replace(first_sample=samples - planned)

    def batch(self, step: int) -> int:
        """Return the number of samples that a step takes."""
        return self._size(step).global_batch

    def samples_before(self, step: int) -> int:
        """Return the number of samples that ``step`` steps have taken, which is also the number of the
        next sample."""
        size = self._size(step)
        return self.first_sample + size.first_sample + (step - size.first_step) * size.global_batch

    def _size(self, step: int) -> BatchSize:
        return self.batches[max(0, bisect_right(self.batches, step, key=lambda one: one.first_step) - 1)]


class MixtureStart(NamedTuple):
    """Where a mixture begins: its corpora continue after the samples that earlier mixtures took of them."""

    first_sample: int = 0
    """Number of the mixture's first sample in the run."""
    taken: tuple[int, ...] | None = None
    """Samples of each corpus that were taken before. ``None``: none."""
    streams: tuple[int, ...] | None = None
    """Number of each corpus's stream of samples, which selects its permutations. ``None``: its number in the
    mixture."""


class MixtureUse(NamedTuple):
    """A mixture of corpora that a run reads from a sample on."""

    first_sample: int
    names: tuple[str, ...]
    """Corpora; a corpus that is read at another sequence length has another name here."""
    weights: tuple[float, ...]


def mixture_starts(uses: Sequence[MixtureUse]) -> list[MixtureStart]:
    """Return where each of the mixtures that a run reads one after the other begins.

    A corpus that several of them hold is one stream: no sample of an epoch is repeated or left out."""
    streams: dict[tuple[str, int], int] = {}
    taken: dict[int, int] = {}
    starts = []
    for index, use in enumerate(uses):
        keys = [(name, use.names[:place].count(name)) for place, name in enumerate(use.names)]
        numbers = tuple(streams.setdefault(key, len(streams)) for key in keys)
        before = tuple(taken.get(number, 0) for number in numbers)
        starts.append(MixtureStart(use.first_sample, before, numbers))
        if index + 1 < len(uses):
            counts = _counts(_shares(use.weights), uses[index + 1].first_sample - use.first_sample)
            taken |= {
                number: done + count for number, done, count in zip(numbers, before, counts, strict=True)
            }
    return starts


def _shares(weights: Sequence[float]) -> list[Fraction]:
    """Return each corpus's share of what the corpora before it leave."""
    exact = [Fraction(str(weight)) for weight in weights]
    return [exact[corpus] / sum(exact[corpus:]) for corpus in range(len(exact))]


def _counts(shares: Sequence[Fraction], samples: int) -> list[int]:
    """Return how many of a mixture's first ``samples`` samples each corpus takes."""
    counts = []
    for share in shares:
        counts.append(samples * share.numerator // share.denominator)
        samples -= counts[-1]
    return counts


class Sampler:
    """The order of samples over a mixture of corpora."""

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        start: MixtureStart = MixtureStart(),
    ) -> None:
        """``sizes`` are in samples and ``weights`` in any unit, one for each corpus. ``start``: where the
        mixture begins."""
        assert len(sizes) == len(weights) > 0, "one weight for each corpus"
        assert all(size > 0 for size in sizes), "a corpus holds at least one sample"
        assert all(weight > 0 for weight in weights), "weights are positive"
        self._sizes, self._seed = tuple(sizes), seed
        self._shares, self._first_sample = _shares(weights), start.first_sample
        self._taken = start.taken or (0,) * len(sizes)
        self._streams = start.streams or tuple(range(len(sizes)))
        assert len(self._taken) == len(self._streams) == len(sizes), "one number for each corpus"

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
        index -= self._first_sample
        for corpus, share in enumerate(self._shares):
            taken = index * share.numerator // share.denominator
            if (index + 1) * share.numerator // share.denominator > taken:
                return corpus, self._taken[corpus] + taken
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
                rows, permute(inside, size, _mix(self._seed, self._streams[corpus], epoch)), strict=True
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
