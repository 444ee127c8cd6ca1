"""A benchmark that finds a drift where there is none, or misses one, or counts bytes that were never sent, is
worse than none."""

import socket

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from diloco import tcp_bytes_sent
from drift import Collections, Found, Setting, line, slope, summarise


@settings(max_examples=50, deadline=None)
@given(st.floats(-5, 5), st.integers(0, 2**32 - 1), st.sampled_from([300, 2000, 1999]))
def test_the_slope_of_noisy_steps_is_found(milliseconds: float, seed: int, steps: int) -> None:
    """Within four times its interval: a fair one is missed once in 20, this one practically never."""
    noise = np.random.default_rng(seed).gamma(2.0, 1e-3, steps)
    rate, interval = slope(0.1 + milliseconds * 1e-6 * np.arange(steps) + noise)
    assert abs(rate - milliseconds) < 4 * interval + 0.05


def test_steps_that_stay_the_same_have_no_slope() -> None:
    rate, interval = slope(np.full(2000, 0.01))
    assert abs(rate) < 1e-9 and interval < 1e-9


def rank(offset_seconds: float, collecting_seconds: float) -> Found:
    begun = 1.7e9 + np.arange(451) * 0.01
    found = Found(begun, begun + 0.004 + offset_seconds)
    found.collections = Collections(collecting_seconds, 3, collecting_seconds / 2)
    found.memory_bytes, found.objects = [2**20, *[2**20 + 1024 * n for n in range(8)]], [100, 107]
    return found


def test_a_row_has_the_spread_of_launches_and_the_time_in_garbage_collection() -> None:
    row = summarise(Setting("x", 100, 0), [rank(0.0, 0.2), rank(0.003, 0.6)])
    assert row.steps == 400
    np.testing.assert_allclose([row.p50_ms, row.p99_ms, row.max_ms, row.mean_ms], 10, rtol=1e-4)
    np.testing.assert_allclose([row.launch_spread_p50_ms, row.launch_spread_p99_ms], 3, rtol=1e-3)
    np.testing.assert_allclose(row.collecting_percent, 100 * 0.4 / 4, rtol=1e-4)
    assert row.growth_kib[0] == [0, 1, 2, 3, 4, 5, 6, 7] and row.growth_objects == [7, 7]
    assert line(row).count("|") == 14


def test_bytes_are_those_that_connections_have_sent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        before = tcp_bytes_sent()
        with socket.create_connection(server.getsockname()) as ours, server.accept()[0] as theirs:
            ours.sendall(bytes(100_000))
            received = 0
            while received < 100_000:
                received += len(theirs.recv(2**16))
            assert tcp_bytes_sent() - before == 100_000
