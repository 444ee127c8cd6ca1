"""If these break: parts of a micro-batch write over each other, a weight's gradient misses a part, or it is
multiplied part by part again."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.kernels import gradient
from myriad.kernels.gradient import GradientSink, LaterProducts, WeightProduct, apply_deferred
from myriad.kernels.side_by_side import places_of


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(1, 3), st.randoms())
def test_slots_of_all_parts_lie_beside_each_other(sizes, num_slots, random):
    places = places_of(sizes)
    slots = [[place.slot() for place in places] for _ in range(num_slots)]
    for row in slots:
        order = [*range(len(sizes))]
        random.shuffle(order)  # the backward takes the last part's first
        taken = {}
        for part in order:
            taken[part] = row[part].take(torch.empty(0), 2, sizes[part], 3)
            taken[part].fill_(part)
        for part, size in enumerate(sizes):
            assert taken[part].shape == (2, size, 3) and (taken[part] == part).all()
            start = taken[0].data_ptr() + 4 * 6 * sum(sizes[:part])
            assert taken[part].data_ptr() == start


def test_what_one_part_writes_is_no_change_of_what_another_keeps():
    first, second = (place.slot() for place in places_of([1, 1]))
    x = first.take(torch.empty(0), 3)
    x.fill_(2.0)
    weight = torch.ones(3, requires_grad=True)
    loss = (x * weight).sum()
    second.take(torch.empty(0), 3).fill_(5.0)
    loss.backward()
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


def parts_of_a_product(sizes, *, beside, outputs=3, inputs=2):
    """Operands of each part's product, and the sum over parts."""
    places, operands = places_of(sizes), []
    for width in (outputs, inputs):
        slots = [place.slot() for place in places]
        rows = [torch.randn(size, width) for size in sizes]
        if beside:
            rows = [slot.take(own, *own.shape).copy_(own) for slot, own in zip(slots, rows, strict=True)]
        operands.append(rows)
    pairs = [*zip(*operands, strict=True)]
    return pairs, sum(grads.t() @ x for grads, x in pairs)


@pytest.mark.parametrize(("beside", "num_products"), [(True, 1), (False, 3)])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_products_of_parts_are_one_where_their_operands_lie_so(beside, num_products, order, monkeypatch):
    calls, accumulate = [], gradient.accumulate_product
    monkeypatch.setattr(
        gradient, "accumulate_product", lambda *given, **how: (calls.append(1), accumulate(*given, **how))
    )
    pairs, expected = parts_of_a_product([4, 3, 3], beside=beside)
    sink = GradientSink(torch.zeros(3, 2))
    apply_deferred([WeightProduct(sink, *pairs[part], num_parts=3) for part in order])
    torch.testing.assert_close(sink.total, expected)
    assert len(calls) == num_products


def test_products_of_several_weights_keep_apart():
    sinks = [GradientSink(torch.zeros(3, 2)) for _ in range(2)]
    both = [parts_of_a_product([2, 2], beside=True) for _ in sinks]
    waiting = [WeightProduct(sinks[at], *both[at][0][part], num_parts=2) for part in (1, 0) for at in (0, 1)]
    apply_deferred(waiting)
    assert waiting == []
    for sink, (_, expected) in zip(sinks, both, strict=True):
        torch.testing.assert_close(sink.total, expected)


def test_a_product_waits_for_those_of_the_other_parts_and_nothing_else_does():
    done, later, sink = [], LaterProducts(), GradientSink(torch.zeros(3, 2))
    pairs, expected = parts_of_a_product([2, 2], beside=True)
    later += [lambda: done.append("other"), WeightProduct(sink, *pairs[1], num_parts=2)]
    alone = GradientSink(torch.zeros(3, 2))
    later.append(WeightProduct(alone, *pairs[0]))
    later.apply_complete()
    assert done == ["other"] and len(later) == 1
    torch.testing.assert_close(alone.total, pairs[0][0].t() @ pairs[0][1])
    assert (sink.total == 0).all()
    later.append(WeightProduct(sink, *pairs[0], num_parts=2))
    later.apply_complete()
    assert not later
    torch.testing.assert_close(sink.total, expected)
