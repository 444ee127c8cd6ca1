"""If these break: layers run again are others than those that ran, or run again without need."""

import pytest
import torch
from torch import nn

from myriad.comm.layout import Layout
from myriad.model.definition import Context
from myriad.parallel import recompute
from myriad.parallel.recompute import Segment, differentiate, run_in_segments
from myriad.program.build import build_program
from myriad.program.config import OverlapConfig
from myriad.program.in_flight import next_is_backward


class Counted(nn.Module):
    """A layer that counts its runs."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.runs = inner, 0

    def forward(self, x, context):
        self.runs += 1
        return self.inner(x)


def make_layers(*inner):
    torch.manual_seed(2)
    return [Counted(make()) for make in inner]


def gradients(layers, x, *, full, keep_last=False, ratio=1.0):
    """Of the input and of every parameter, and the output."""
    torch.manual_seed(3)
    for layer in layers:
        layer.zero_grad()
    x = x.detach().requires_grad_(x.is_floating_point() and x.requires_grad)
    if full:
        segments, y = run_in_segments(layers, x, Context(), keep_last=keep_last, ratio=ratio)
    else:
        y = x
        for layer in layers:
            y = layer(y, Context())
        segments = [Segment(layers, x, y)]
    entering = differentiate(segments, torch.ones_like(y) / 3, Context())
    assert not segments
    return [y.detach(), entering, *(p.grad for layer in layers for p in layer.parameters())]


def test_generators_are_asked_once_between_two_layers(monkeypatch):
    """Each question costs a copy of 5 KB, on a GPU's host tens of microseconds a layer."""
    asked, original = [], torch.random.get_rng_state
    monkeypatch.setattr(torch.random, "get_rng_state", lambda: asked.append(1) or original())
    layers = make_layers(wide, wide, wide, wide)
    run_in_segments(layers, torch.randn(5, 8), Context(), keep_last=False)
    assert len(asked) == 5


class DeviceGenerator:
    """A GPU's: a seed and an offset."""

    seed, offset = 7, 40

    def initial_seed(self):
        return self.seed

    def get_offset(self):
        return self.offset

    def manual_seed(self, seed):
        self.seed, self.offset = seed, 0

    def set_offset(self, offset):
        self.offset = offset


def test_a_gpu_s_generator_is_set_back_to_its_seed_and_offset(monkeypatch):
    generator, cuda = DeviceGenerator(), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    before = recompute.RandomState.of(cuda)
    assert recompute.RandomState.of(cuda).equals(before)
    generator.seed, generator.offset = 9, 44
    assert not recompute.RandomState.of(cuda).equals(before)
    before.set(cuda)
    assert (generator.seed, generator.offset) == (7, 40)


def wide():
    return nn.Linear(8, 8)


@pytest.mark.parametrize("keep_last", [False, True])
def test_a_segment_for_each_layer_gives_the_same_bits(keep_last):
    layers = make_layers(wide, nn.GELU, lambda: nn.Dropout(0.4), wide, lambda: nn.Dropout(0.4))
    x = torch.randn(5, 8, requires_grad=True)
    expected = gradients(layers, x, full=False)
    for a, b in zip(expected, gradients(layers, x, full=True, keep_last=keep_last), strict=True):
        assert torch.equal(a, b)
    assert [layer.runs for layer in layers] == [3, 3, 3, 3, 2 if keep_last else 3]


@pytest.mark.parametrize("keep_last", [False, True])
@pytest.mark.parametrize(("ratio", "again"), [(0.2, 1), (0.5, 3), (1.0, 5)])
def test_a_share_of_the_layers_runs_again_and_gives_the_same_bits(ratio, again, keep_last):
    layers = make_layers(wide, nn.GELU, lambda: nn.Dropout(0.4), wide, wide)
    x = torch.randn(5, 8, requires_grad=True)
    expected = gradients(layers, x, full=False)
    for a, b in zip(expected, gradients(layers, x, full=True, keep_last=keep_last, ratio=ratio), strict=True):
        assert torch.equal(a, b)
    twice = min(again, 4 if keep_last else 5)
    assert [layer.runs for layer in layers] == [3] * twice + [2] * (5 - twice)


def test_generators_are_as_if_nothing_had_run_again():
    layers = make_layers(wide, lambda: nn.Dropout(0.4))
    after = []
    for full in (False, True):
        gradients(layers, torch.randn(5, 8), full=full)
        after.append(torch.random.get_rng_state())
    assert torch.equal(*after)


def test_generators_are_kept_only_for_layers_that_draw():
    layers = make_layers(wide, lambda: nn.Dropout(0.4), nn.GELU)
    segments, _ = run_in_segments(layers, torch.randn(5, 8), Context(), keep_last=False)
    assert [segment.random_state is not None for segment in segments] == [False, True, False]


def test_first_layers_without_parameters_ask_for_no_gradient():
    layers = make_layers(nn.GELU, wide)
    assert gradients(layers, torch.randn(5, 8), full=True)[1] is None
    layers = make_layers(lambda: nn.Embedding(9, 8), wide)
    ids = torch.arange(5)
    expected, found = (gradients(layers, ids, full=full) for full in (False, True))
    assert torch.equal(expected[2], found[2])


def test_what_is_kept_without_recomputation_is_not_run_again():
    layers = make_layers(wide, wide)
    gradients(layers, torch.randn(5, 8), full=False)
    assert [layer.runs for layer in layers] == [1, 1]


def test_a_loss_without_a_gradient_is_an_error():
    with pytest.raises(RuntimeError, match="does not require grad"):
        differentiate([Segment([], torch.ones(3), torch.ones(()))], torch.ones(()), Context())


@pytest.mark.parametrize(
    ("keys", "stage", "expected"),
    [
        ({"pp": 1}, 0, {0, 1, 2, 3}),
        ({"pp": 2}, 0, set()),
        ({"pp": 2}, 1, {0, 1, 2, 3}),
        ({"pp": 2, "schedule": "gpipe"}, 1, set()),
        ({"pp": 2, "schedule": "zero-bubble"}, 1, {0, 1, 2, 3}),
    ],
    ids=str,
)
def test_turns_are_found(keys, stage, expected):
    layout = Layout(**keys)
    program = build_program(layout, OverlapConfig(), 4, tied=False, training=True)
    rank = program.stage_rank[stage]
    found = next_is_backward(program.ranks[rank])
    assert {micro_batch for at, micro_batch in found if at == stage} == expected
