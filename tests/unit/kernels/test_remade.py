"""If these break: a tensor that is made again is not the one of the forward, or is kept all the same."""

import weakref

import pytest
import torch

from myriad.kernels.activation import ACTIVATIONS
from myriad.kernels.config import GATED
from myriad.kernels.gradient import GradientSink, apply_deferred, set_sink
from myriad.kernels.linear import linear
from myriad.kernels.remade import Remade


def weights(*shapes):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gradients_have_the_same_bits(name):
    function = ACTIVATIONS[name]
    x, down = weights((3, 5, 16), (4, 8 if name in GATED else 16))
    found = []
    for remakes in (False, True):
        y = linear(function(x), down, remade=Remade(function, x) if remakes else None)
        found.append(torch.autograd.grad(y.square().sum(), (x, down)))
    for kept, remade in zip(*found, strict=True):
        assert torch.equal(kept, remade)


def test_two_products_share_one_making_and_nothing_is_left():
    calls = []

    def function(x):
        calls.append(1)
        return x.sin()

    x, one, two = weights((6, 4), (3, 4), (3, 4))
    remade = Remade(function, x, num_takers=2)
    shared = function(x)
    y = linear(shared, one, remade=remade) + linear(shared, two, remade=remade)
    of_shared = weakref.ref(shared)
    del shared
    y.sum().backward()
    assert len(calls) == 2
    assert of_shared() is None
    assert torch.equal(one.grad, torch.ones(6, 3).t() @ x.detach().sin())
    with pytest.raises(AssertionError):
        remade.take()


def test_a_product_left_for_later_has_what_was_made_again():
    x, down = weights((6, 4), (3, 4))
    sink = GradientSink(torch.zeros(3, 4), deferred=[])
    set_sink(down, sink)
    linear(x.sin(), down, remade=Remade(torch.sin, x)).sum().backward()
    assert not sink.total.any()
    apply_deferred(sink.deferred)
    torch.testing.assert_close(sink.total, torch.ones(6, 3).t() @ x.detach().sin())


def test_a_frozen_weight_needs_no_gradient_communication():
    x, down = weights((6, 4), (3, 4))

    def refuse(_):
        raise AssertionError

    linear(x, down.detach(), remade=Remade(refuse, x)).sum().backward()
    assert x.grad is not None
