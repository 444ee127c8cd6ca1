"""If these fail, `benchmarks/parity/pairs.py` leaves out pairs of features, or counts possible ones as
refused."""

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from covering_array import Row, covering_array, pairs_of


@st.composite
def spaces(draw: st.DrawFn) -> tuple[dict[str, tuple[int, ...]], list[dict[str, int]]]:
    """Values of some parameters, and combinations of two or three values that no row may have."""
    values = {f"p{n}": tuple(range(draw(st.integers(1, 4)))) for n in range(draw(st.integers(2, 5)))}
    forbidden = []
    for _ in range(draw(st.integers(0, 5))):
        names = draw(st.sets(st.sampled_from(sorted(values)), min_size=2, max_size=3))
        forbidden.append({name: draw(st.sampled_from(values[name])) for name in names})
    first = dict.fromkeys(values, 0)
    return values, [one for one in forbidden if not one.items() <= first.items()]


@given(spaces(), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_rows_are_allowed_and_hold_every_pair_that_any_allowed_row_holds(
    space: tuple[dict[str, tuple[int, ...]], list[dict[str, int]]], seed: int
) -> None:
    values, forbidden = space

    def reasons(row: Row) -> list[str]:
        return [str(one) for one in forbidden if one.items() <= row.items()]

    every = [dict(zip(values, row, strict=True)) for row in product(*values.values())]
    allowed = [row for row in every if not reasons(row)]
    found = covering_array(values, reasons, seed=seed)
    assert all(row in allowed for row in found.rows)
    possible = {pair for row in allowed for pair in pairs_of(row)}
    assert {pair for row in found.rows for pair in pairs_of(row)} == possible == found.covered
    assert found.refused == {pair for row in every for pair in pairs_of(row)} - possible


def test_rows_are_few() -> None:
    values = {f"p{n}": (0, 1, 2) for n in range(13)}
    assert len(covering_array(values, lambda row: ()).rows) <= 24  # of 3**13; 15 are enough
