"""A cluster that evicts the wrong node loses a good one and keeps the bad one: the rounds must name exactly
who it is, be few enough to wait for, and name nobody when a test was slow by chance."""

from collections.abc import Callable
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.doctor.pair_tests.pair_rounds import Pair, PairRounds, PairTestOutcome, find_suspects

GOOD = 1e9


def cluster(
    slow: Callable[[Pair], bool],
    noise: Callable[[], float] = lambda: 1.0,
    slow_ratio: float = 0.5,
    late: int = -1,
) -> Callable[[list[Pair]], dict[Pair, float]]:
    """Nodes that measure; the ``late``-th test of all is slow by chance."""
    count = 0

    def measure(pairs: list[Pair]) -> dict[Pair, float]:
        nonlocal count
        nodes = [node for pair in pairs for node in pair]
        assert len(nodes) == len(set(nodes)), "a node in two pairs of a round shares its link"
        found = {}
        for pair in pairs:
            chance = 0.1 if count == late else 1.0
            found[pair] = GOOD * noise() * chance * (slow_ratio if slow(pair) else 1.0)
            count += 1
        return found

    return measure


def named(outcome: PairTestOutcome) -> list[tuple[str, tuple[int, ...]]]:
    return [(culprit.kind, culprit.nodes) for culprit in outcome.culprits]


sizes = st.integers(4, 65)
ratios = st.sampled_from([0.0, 0.1, 0.5, 0.6])
noises = st.integers(0, 2**32).map(lambda seed: Random(seed))


def within_10_percent(random) -> Callable[[], float]:
    return lambda: random.uniform(0.9, 1.1)


@given(st.data(), sizes, ratios, noises, st.integers(-1, 40))
@settings(max_examples=300, deadline=None)
def test_one_bad_node_is_named_whoever_it_is(data, size, ratio, random, late):
    bad = data.draw(st.integers(0, size - 1))
    measure = cluster(lambda pair: bad in pair, within_10_percent(random), ratio, late)
    outcome = find_suspects(size, measure)
    assert named(outcome) == [("node", (bad,))]
    assert outcome.rounds <= (8 if late >= 0 else 5 if size < 6 else 4)


@given(st.data(), sizes, ratios, noises, st.integers(-1, 200))
@settings(max_examples=200, deadline=None)
def test_one_bad_link_is_named_when_all_are_tested(data, size, ratio, random, late):
    pair = tuple(sorted(data.draw(st.permutations(range(size)))[:2]))
    measure = cluster(lambda one: one == pair, within_10_percent(random), ratio, late)
    outcome = find_suspects(size, measure, links=True)
    assert named(outcome) == [("link", pair)]
    assert outcome.rounds <= size + 5


@given(sizes, noises, st.integers(-1, 200), st.booleans())
@settings(max_examples=200, deadline=None)
def test_no_node_is_named_where_all_are_healthy(size, random, late, links):
    assert (
        named(
            find_suspects(size, cluster(lambda _: False, within_10_percent(random), late=late), links=links)
        )
        == []
    )


@given(st.data(), st.integers(12, 65), noises)
@settings(max_examples=100, deadline=None)
def test_several_bad_nodes_are_named_together(data, size, random):
    bad = set(data.draw(st.permutations(range(size)))[: size // 6])
    outcome = find_suspects(size, cluster(lambda pair: bool(bad & set(pair)), within_10_percent(random)))
    assert {nodes for _, nodes in named(outcome)} == {(node,) for node in bad}
    assert outcome.rounds <= 8


def test_a_healthy_cluster_is_done_after_one_round():
    assert find_suspects(1536, cluster(lambda _: False)).rounds == 1
    assert find_suspects(1537, cluster(lambda _: False)).rounds == 2
    assert find_suspects(1536, cluster(lambda pair: 700 in pair)).rounds == 3


@given(st.data(), st.integers(6, 65), noises)
@settings(max_examples=100, deadline=None)
def test_randomly_slow_tests_name_no_healthy_node(data, size, random):
    """One in eight: other work on the nodes."""
    bad = data.draw(st.integers(0, size - 1))

    def noise() -> float:
        return random.uniform(0.9, 1.1) * (0.2 if random.random() < 1 / 8 else 1.0)

    counts = sum(
        named(find_suspects(size, cluster(lambda pair: bad in pair, noise))) == [("node", (bad,))]
        for _ in range(10)
    )
    assert counts >= 8


def test_every_pair_is_tested_in_no_more_rounds_than_needed():
    rounds, seen = PairRounds(16, links=True), set()
    while pairs := rounds.next_round():
        seen |= set(pairs)
        rounds.report(pairs, dict.fromkeys(pairs, GOOD))
    assert len(seen) == 16 * 15 // 2
    assert rounds.outcome().rounds <= 16


def test_of_two_nodes_the_pair_is_named_and_of_three_the_node_or_the_link():
    def outcome(size, slow):
        return named(find_suspects(size, cluster(slow), expected=GOOD))

    assert outcome(2, lambda _: True) == [("pair", (0, 1))]
    assert outcome(2, lambda _: False) == []
    assert outcome(3, lambda pair: 1 in pair) == [("node", (1,))]
    assert outcome(3, lambda pair: pair == (0, 2)) == [("link", (0, 2))]
    assert named(find_suspects(3, cluster(lambda pair: 1 in pair))) == [("node", (1,))]
    assert outcome(1, lambda _: True) == []


def test_when_all_are_below_the_baseline_no_node_is_named_as_the_cause():
    outcome = find_suspects(8, cluster(lambda _: True), expected=GOOD)
    assert [kind for kind, _ in named(outcome)] == ["all"]
    assert outcome.rounds == 3
