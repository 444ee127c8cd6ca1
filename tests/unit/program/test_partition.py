"""If these break: a stage is empty or a layer is in none, one stage is larger than it must be, or a rule that
cannot be kept is told by a traceback."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.errors import BadInputError
from myriad.program.partition import partition_layers

KINDS = ("Embedding", *["Block"] * 8, "Head")


def sizes(
    rule: str, num_stages: int, kinds: tuple[str, ...] = KINDS, costs: list[float] | None = None
) -> list[int]:
    return [len(stage) for stage in partition_layers(rule, num_stages, kinds, costs)]


@pytest.mark.parametrize(
    ("rule", "num_stages", "expected"),
    [
        ("uniform", 1, [10]),
        ("uniform", 2, [5, 5]),
        ("uniform", 3, [4, 3, 3]),
        ("uniform", 4, [3, 2, 2, 3]),
        ("uniform", 10, [1] * 10),
        ("type:Block", 4, [3, 2, 2, 3]),
        ("type:^(Embedding|Head)$", 2, [9, 1]),
        ("type:.", 5, [2] * 5),
        ("manual:1", 2, [1, 9]),
        ("manual:5,6,9", 4, [5, 1, 3, 1]),
    ],
)
def test_rules(rule: str, num_stages: int, expected: list[int]) -> None:
    assert sizes(rule, num_stages) == expected


@pytest.mark.parametrize("rule", ["parameters", "profile"])
def test_a_heavy_head_gets_a_stage_of_its_own(rule: str) -> None:
    costs = [30.0, *[10.0] * 8, 60.0]
    assert sizes(rule, 3, costs=costs)[-1] == 1


rules = st.sampled_from(["uniform", "parameters", "profile", "type:A", "type:A|B", "type:C$"])
layers = st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, 50)), min_size=1, max_size=12)


@settings(max_examples=200, deadline=None)
@given(rules, st.integers(1, 12), layers)
def test_every_layer_is_in_exactly_one_stage_and_none_is_empty(
    rule: str, num_stages: int, described: list[tuple[str, int]]
) -> None:
    kinds, costs = [kind for kind, _ in described], [float(cost) for _, cost in described]
    try:
        stages = partition_layers(rule, num_stages, kinds, costs)
    except BadInputError as error:
        assert num_stages > len(kinds) or rule.startswith("type:")
        assert "\n" not in str(error)
        return
    assert len(stages) == num_stages
    assert [layer for stage in stages for layer in stage] == list(range(len(kinds)))
    assert all(len(stage) > 0 for stage in stages)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 100), min_size=1, max_size=9), st.integers(1, 9))
def test_no_other_cut_has_a_cheaper_costliest_stage(costs: list[int], num_stages: int) -> None:
    num_stages = min(num_stages, len(costs))
    stages = partition_layers(
        "parameters", num_stages, ["Block"] * len(costs), [float(cost) for cost in costs]
    )
    chosen = max(sum(costs[layer] for layer in stage) for stage in stages)
    every_cut = combinations(range(1, len(costs)), num_stages - 1)
    cheapest = min(max(sum(costs[a:b]) for a, b in pairwise([0, *cuts, len(costs)])) for cuts in every_cut)
    assert chosen == cheapest


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 20), st.integers(1, 20), st.integers(1, 4))
def test_uniform_shares_of_blocks_differ_by_at_most_one(
    num_blocks: int, num_stages: int, others: int
) -> None:
    num_blocks += others + 1
    kinds = ["Embedding"] * others + ["Block"] * num_blocks + ["Head"] * others
    num_stages = min(num_stages, num_blocks)
    stages = partition_layers("uniform", num_stages, kinds)
    blocks = [sum(kinds[layer] == "Block" for layer in stage) for stage in stages]
    assert max(blocks) - min(blocks) <= 1


@pytest.mark.parametrize(
    ("rule", "num_stages", "key", "says"),
    [
        ("uniform", 11, "layout.pp x layout.virtual_stages", "at most 10"),
        ("manual:5", 3, "layout.partition", "2 rising numbers from 1 to 9"),
        ("manual:5,5", 3, "layout.partition", "2 rising numbers from 1 to 9"),
        ("manual:0", 2, "layout.partition", "1 number from 1 to 9"),
        ("manual:10", 2, "layout.partition", "1 number from 1 to 9"),
        ("manual:", 2, "layout.partition", "manual:B1,B2"),
        ("manual:two", 2, "layout.partition", "manual:B1,B2"),
        ("type:Nothing", 2, "layout.partition", "kinds are Embedding, Block, Head"),
        ("type:Head", 2, "layout.partition", "at least 2 layers must match"),
        ("type:(", 2, "layout.partition", "not a regular expression"),
        ("evenly", 2, "layout.partition", "uniform, parameters, profile, type:REGEX or manual:"),
        ("parametres", 2, "layout.partition", "uniform, parameters, profile, type:REGEX or manual:"),
    ],
)
def test_what_cannot_be_cut_is_reported_in_one_line(rule: str, num_stages: int, key: str, says: str) -> None:
    with pytest.raises(BadInputError) as caught:
        partition_layers(rule, num_stages, KINDS, [1.0] * len(KINDS))
    assert caught.value.key == key and says in caught.value.allowed
    assert "\n" not in str(caught.value)
