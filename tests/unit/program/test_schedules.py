"""What breaks for the user: a pipeline that idles more, or holds more activations, than its schedule says."""

import pytest
from hypothesis import given, settings
from program_shapes import computes

from myriad.errors import BadInputError
from myriad.program.actions import Kind
from myriad.program.checker import check
from myriad.program.lower import lower
from myriad.program.passes import decouple
from myriad.program.schedules import schedule
from myriad.program.timeline import timeline, unit_costs

SHAPES = [(ranks, ranks * factor + extra) for ranks in (2, 3, 4, 8) for factor in (1, 3) for extra in (0, 1)]


@pytest.mark.parametrize(("ranks", "micro_batches"), SHAPES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "eager-1f1b"])
def test_gpipe_and_1f1b_idle_three_forwards_for_each_other_rank(name, ranks, micro_batches):
    report = check(schedule(name, ranks, 1, micro_batches))
    assert report.bubble == pytest.approx([3 * (ranks - 1)] * ranks)


@pytest.mark.parametrize("virtual_stages", [2, 3, 4])
@pytest.mark.parametrize(("ranks", "micro_batches"), SHAPES)
def test_interleaving_divides_the_bubble_by_the_virtual_stages(ranks, micro_batches, virtual_stages):
    report = check(schedule("interleaved", ranks, virtual_stages, micro_batches))
    assert report.bubble == pytest.approx([3 * (ranks - 1) / virtual_stages] * ranks)


@pytest.mark.parametrize(("ranks", "micro_batches"), SHAPES)
def test_zero_bubble_idles_a_third_of_1f1b_with_its_largest_memory(ranks, micro_batches):
    report = check(schedule("zero-bubble", ranks, 1, micro_batches))
    plain = check(schedule("1f1b", ranks, 1, micro_batches))
    assert report.bubble == pytest.approx([ranks - 1] * ranks)
    assert max(report.peak_in_flight) == max(plain.peak_in_flight) == ranks


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (2, 9), (3, 6), (4, 8), (4, 17), (6, 24)])
def test_the_v_idles_half_of_zero_bubble_with_the_memory_of_1f1b(ranks, micro_batches):
    report = check(schedule("zero-bubble-v", ranks, 2, micro_batches))
    assert report.bubble == pytest.approx([(ranks - 1) / 2] * ranks)
    assert max(report.peak_in_flight) <= ranks


@pytest.mark.parametrize("ranks", [8, 16])
def test_the_v_of_many_ranks_still_idles_less_than_zero_bubble(ranks):
    report = check(schedule("zero-bubble-v", ranks, 2, 4 * ranks))
    assert max(report.bubble) < ranks - 1 and max(report.peak_in_flight) <= ranks


@pytest.mark.parametrize(
    ("ranks", "micro_batches"), [(1, 2), (2, 4), (2, 9), (3, 6), (4, 17), (8, 16), (12, 24)]
)
def test_dualpipe_idles_half_of_zero_bubble_with_half_a_micro_batch_more(ranks, micro_batches):
    report = check(schedule("dualpipe-v", ranks, 2, micro_batches))
    assert report.bubble == pytest.approx([(ranks - 1) / 2] * ranks)
    assert max(report.peak_in_flight) == ranks + 1 / 2


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_in_dualpipe_no_micro_batch_more_waits_for_a_transfer(ranks):
    """Half as long as a forward. The V of zero-bubble waits for several of each micro-batch."""
    for name, waits in (("dualpipe-v", False), ("zero-bubble-v", True)):
        spans = []
        for factor in (4, 5):
            lowered = lower(schedule(name, ranks, 2, factor * ranks), zero=0, reduce="last", tied=False)
            program = decouple(lowered)
            spans.append(timeline(program, unit_costs(program), lambda transfer: 1 / 4).makespan)
        assert (spans[1] - spans[0] > 3 * ranks + 1e-6) == waits


def test_1f1b_holds_at_most_the_ranks_that_follow():
    assert check(schedule("1f1b", 4, 1, 16)).peak_in_flight == (4, 3, 2, 1)
    assert check(schedule("gpipe", 4, 1, 16)).peak_in_flight == (16, 16, 16, 16)
    assert check(schedule("1f1b", 4, 1, 2)).peak_in_flight == (2, 2, 2, 1)


def test_eager_1f1b_hides_transfers_that_1f1b_waits_for_and_holds_more():
    """A transfer as long as a forward: in 1F1B each micro-batch waits for the way there and back."""
    eager, plain = (
        decouple(lower(schedule(name, 4, 1, 16), zero=0, reduce="last", tied=False), 4)
        for name in ("eager-1f1b", "1f1b")
    )
    spans = [timeline(program, unit_costs(program), lambda transfer: 1.0) for program in (eager, plain)]
    assert spans[0].makespan < spans[1].makespan - 16
    assert check(eager).peak_in_flight == (7, 5, 3, 1)


def test_interleaving_keeps_the_activations_of_megatrons_formula():
    # (p - 1) / v rounds more than 1F1B on the first rank: p (1 + (p - 1) / (p v))
    assert check(schedule("interleaved", 4, 2, 16)).peak_in_flight[0] == pytest.approx(4 + 3 / 2)


@given(computes())
@settings(max_examples=150, deadline=None)
def test_every_shape_is_complete_and_no_worse_than_one_micro_batch_at_a_time(program):
    report = check(program)
    assert report.makespan <= 3 * program.num_micro_batches * program.num_ranks + 1e-6
    assert all(0 <= idle <= report.makespan for idle in report.bubble)


@given(computes())
@settings(max_examples=100, deadline=None)
def test_communication_that_takes_no_time_costs_no_time(program):
    """Coupled and interleaved it may cost the lockstep of two stages' forwards, and in dualpipe-v of those of
    all ranks, however long the program."""
    alone = check(program)
    coupled = lower(program, zero=0, reduce="last", tied=False)
    lockstep = 2 / program.virtual_stages if program.virtual_stages > 1 else 0
    if program.schedule == "dualpipe-v":
        lockstep = max(lockstep, program.num_ranks - 3 / 2)
    assert check(coupled).makespan <= alone.makespan + lockstep + 1e-6
    assert check(decouple(coupled)).makespan == pytest.approx(alone.makespan)


def test_one_rank_computes_without_a_pause():
    for name in ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble"):
        assert check(schedule(name, 1, 1, 5)).bubble == (0.0,)
    assert check(schedule("interleaved", 1, 3, 5)).bubble == pytest.approx((0.0,), abs=1e-9)


def test_the_split_backward_is_two_halves():
    kinds = {action.kind for _, action in schedule("zero-bubble", 2, 1, 3)}
    assert kinds == {Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT}


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("2f2b", 2, 1, 4), "layout.schedule"),
        (("1f1b", 2, 2, 4), "layout.virtual_stages"),
        (("zero-bubble", 2, 3, 4), "layout.virtual_stages"),
        (("interleaved", 2, 0, 4), "layout.virtual_stages"),
        (("gpipe", 0, 1, 4), "layout.pp"),
        (("gpipe", 2, 1, 0), "num_micro_batches"),
        (("1f1b", 2, 1, 10**11), "num_micro_batches"),
    ],
)
def test_an_impossible_shape_is_refused_by_the_key_to_change(arguments, key):
    with pytest.raises(BadInputError) as raised:
        schedule(*arguments)
    assert raised.value.key == key
