"""The flow level says which flows of a hashed fabric are slow. If real packets disagree on the order, its
advice on placement and queue pairs is wrong too."""

from collections import defaultdict
from statistics import mean

import pytest

from hashed_paths import lay_paths, measure_rates, path_of
from network_real import predicted, without_dctcp

WANTED = {0: 1, 1: 3, 2: 6}
"""Flows on each path."""


def ports_by_path(hosts, wanted: dict[int, int]) -> dict[int, int]:
    """Source ports that the kernel hashes to the paths as wanted; path by port."""
    left, found = dict(wanted), {}
    for port in range(41_000, 41_400):
        path = path_of(hosts, port)
        if left.get(path):
            left[path] -= 1
            found[port] = path
    assert not any(left.values()), "the hash reaches every path"
    return found


def test_hashed_flows_are_as_unequal_as_the_flow_model_predicts(hosts):
    made = hosts(2)
    lay_paths(made, len(WANTED), "20mbit")
    paths = ports_by_path(made, WANTED)
    assert {path_of(made, port) for port in paths} == set(WANTED)  # the same flow, the same path
    rates = measure_rates(made, list(paths), 3.0)
    shares = dict(zip(paths, predicted(list(paths.values()), len(WANTED)), strict=True))
    of_path = defaultdict(list)
    for port, path in paths.items():
        of_path[path].append(rates.get(port, 0.0))
    means = [mean(of_path[path]) for path in sorted(WANTED)]
    assert means == sorted(means, reverse=True)
    assert [mean(shares[port] for port in paths if paths[port] == path) for path in WANTED] == pytest.approx(
        [1, 1 / 3, 1 / 6]
    )
    assert means[0] > 2 * means[1] * 0.75 and means[1] > 1.2 * means[2]


def test_what_cannot_be_measured_here_is_named(hosts):
    hosts(1)
    assert all("DCTCP" in one or "marks" in one for one in without_dctcp())
