"""If these fail, a sample comes twice or never, a mixture has other shares, or a resumed run other data."""

from collections import Counter
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.data.sampler import DataPosition, Sampler, permute

SIZES = st.integers(1, 400)
SEEDS = st.integers(0, 2**64 - 1)
WEIGHTS = st.lists(st.sampled_from([1.0, 0.1, 0.7, 3.0, 1e-3, 2.5]), min_size=1, max_size=5)


@settings(deadline=None)
@given(SIZES, SEEDS)
def test_permutation_is_a_bijection(size: int, key: int) -> None:
    assert sorted(permute(np.arange(size, dtype=np.uint64), size, key).tolist()) == list(range(size))


@settings(deadline=None)
@given(st.integers(2**31, 2**62), SEEDS)
def test_permutation_of_a_corpus_too_large_for_an_array_stays_inside(size: int, key: int) -> None:
    values = np.array([0, 1, size // 2, size - 1], np.uint64)
    permuted = permute(values, size, key)
    assert len(set(permuted.tolist())) == 4 and (permuted < size).all()


def test_permutation_spreads_neighbours() -> None:
    size = 10_000
    order = permute(np.arange(size, dtype=np.uint64), size, 7).astype(np.int64)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.05
    assert abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.05


@settings(deadline=None)
@given(SIZES, st.integers(0, 3), SEEDS)
def test_each_epoch_shows_each_sample_once(size: int, epoch: int, seed: int) -> None:
    sampler = Sampler([size], [1.0], seed)
    seen = [sample.position for sample in sampler.samples(epoch * size, (epoch + 1) * size)]
    assert sorted(seen) == list(range(size))
    assert sampler.epoch(epoch * size) == epoch


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [Sampler([64], [1.0], seed).samples(start, start + 64) for seed in (1, 2) for start in (0, 64)]
    assert len({tuple(order) for order in orders}) == 4


@settings(max_examples=50, deadline=None)
@given(WEIGHTS, st.integers(0, 2000))
def test_every_corpus_has_its_share_at_every_moment(weights: list[float], count: int) -> None:
    sampler = Sampler([1000] * len(weights), weights, 1)
    counts = Counter(sample.corpus for sample in sampler.samples(0, count))
    for corpus, weight in enumerate(weights):
        assert abs(counts[corpus] - count * weight / sum(weights)) <= len(weights)


@settings(max_examples=50, deadline=None)
@given(WEIGHTS, SEEDS)
def test_a_mixture_goes_through_each_corpus_without_gap(weights: list[float], seed: int) -> None:
    sampler = Sampler([17] * len(weights), weights, seed)
    samples = sampler.samples(0, 400)
    for corpus in range(len(weights)):
        positions = [sample.position for sample in samples if sample.corpus == corpus]
        for start in range(0, len(positions) - 16, 17):
            assert sorted(positions[start : start + 17]) == list(range(17))


@settings(max_examples=50, deadline=None)
@given(WEIGHTS, SEEDS, st.integers(0, 10**12), st.lists(st.integers(0, 24), max_size=4))
def test_any_step_in_any_parts_is_the_same_as_in_one(
    weights: list[float], seed: int, start: int, cuts: list[int]
) -> None:
    sampler = Sampler([5 + corpus for corpus in range(len(weights))], weights, seed)
    whole = sampler.samples(start, start + 24)
    edges = [0, *sorted(cuts), 24]
    parts = [sampler.samples(start + a, start + b) for a, b in pairwise(edges)]
    assert list(chain(*parts)) == whole
    assert [sampler.sample(start + row) for row in range(24)] == whole


@pytest.mark.parametrize("sizes", [[], [0], [3, 0]])
def test_a_corpus_without_samples_is_a_mistake_of_the_caller(sizes: list[int]) -> None:
    with pytest.raises(AssertionError):
        Sampler(sizes, [1.0] * len(sizes), 1)


def test_the_order_is_the_one_that_earlier_runs_were_trained_on() -> None:
    samples = Sampler([1000, 77], [0.7, 0.3], 1).samples(10**6, 10**6 + 6)
    assert [tuple(sample) for sample in samples] == EXPECTED


EXPECTED = [(1, 44), (0, 632), (0, 869), (1, 62), (0, 642), (0, 985)]


@given(
    attempts=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 7), st.integers(0, 12)), min_size=1),
)
def test_no_sample_is_left_out_or_repeated_whatever_batches_and_resumes_there_were(
    attempts: list[tuple[int, int, int]],
) -> None:
    """Each attempt has a batch of its own, trains some steps, and loses the newest of all steps."""
    states = [0]
    """Samples that the state after each step had taken, in the order of the run that remains."""
    taken: list[range] = []
    for global_batch, steps, lost in attempts:
        begun = len(states) - 1
        position = DataPosition.of(global_batch).resumed(begun, states[-1])
        for step in range(begun, begun + steps):
            taken.append(range(position.samples_before(step), position.samples_before(step) + global_batch))
            states.append(taken[-1].stop)
        del states[max(1, len(states) - lost) :], taken[max(0, len(taken) - lost) :]
    assert [sample for samples in taken for sample in samples] == list(range(states[-1]))
