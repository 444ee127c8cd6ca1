"""A rate read eight times too high makes the planner and the choice of a hierarchy wrong without a word."""

from collections.abc import Callable

import pytest

from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.units import (
    format_bytes,
    format_count,
    format_number,
    format_ranges,
    format_ranks,
    parse_bytes,
    parse_ranges,
    parse_rate,
)


@pytest.mark.parametrize(
    ("text", "bits_per_second"),
    [
        ("200 Mbit/s", 2e8),
        ("1.5Gbit", 1.5e9),
        ("25 GB/s", 2e11),
        ("200Gbps", 2e11),
        ("800 bit/s", 800),
        (9600, 9600),
    ],
)
def test_bits_and_bytes_are_distinguished(text, bits_per_second):
    assert parse_rate(text) == bits_per_second


@pytest.mark.parametrize("text", ["fast", "200 mb/s", "-1 Gbit/s", "0 bit/s"])
def test_a_rate_that_cannot_be_is_refused_in_one_line(text):
    with pytest.raises(BadInputError, match=r"^comm\.network_bandwidth = .*") as refused:
        load_job("tiny", [f"comm.network_bandwidth={text}"])
    assert "\n" not in str(refused.value)


def test_ranges_of_ranks_are_read_and_none_fills_memory() -> None:
    assert parse_ranges("3, 7,0-2", 8) == [range(3, 4), range(7, 8), range(3)]
    for text in ("", "3,", "-1", "7-3", "8", "0-999999999999", "three", "\u0663"):
        with pytest.raises(ValueError):
            parse_ranges(text, 8)
    assert format_ranges([5, 2, 3, 3, 9]) == "2-3, 5, 9"
    assert format_ranges(range(0, 9, 2), most=2) == "0, 2 and others"


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ([], "no rank"),
        ((7,), "rank 7"),
        ((9, 7), "ranks 7 and 9"),
        (range(8, 16), "ranks 8 to 15"),
        ((1, 5, 9), "ranks 1, 5 and 9"),
        (range(0, 12288, 2), "ranks 0, 2, 4, 6, 8, 10, 12, 14 and 6136 more"),
    ],
)
def test_ranks_are_reported_in_few_words(ranks, told):
    assert format_ranks(ranks) == told


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0"),
        (3421.0, "3,421"),
        (1000.4, "1,000"),
        (999.96, "1,000"),
        (12.345, "12.3"),
        (1.0, "1"),
        (0.000042, "0.000042"),
        (-2.5, "-2.5"),
        (7.6e8, "760,000,000"),
        (1e299, "1.00 x 10^299"),
    ],
)
def test_a_number_has_no_exponent(value: float, shown: str) -> None:
    assert format_number(value) == shown


def test_counts_and_bytes_carry_to_the_next_unit() -> None:
    assert format_count(999.9) == "1k" and format_count(999_960) == "1M" and format_count(4e15) == "4,000T"
    assert format_bytes(2.0**60) == "1,024.0 PiB"
    assert format_count(1e299) == "1.00 x 10^287T"


@pytest.mark.parametrize("parse", [parse_bytes, parse_rate])
def test_a_number_with_too_many_digits_is_refused(parse: Callable[[object], float]) -> None:
    unit = "MB" if parse is parse_bytes else "Mbit/s"
    with pytest.raises(ValueError, match="fewer digits"):
        parse("9" * 400 + unit)
    with pytest.raises(ValueError, match="fewer digits"):
        parse_rate(10**400)
