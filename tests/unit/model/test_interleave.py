"""If these break: parts of a micro-batch compute out of order, see each other's positions, or wait idle where
another part could run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from myriad.model.boundary import Arrived, Boundary
from myriad.model.config import ModelConfig
from myriad.model.definition import Context
from myriad.model.gpt import GPT, build_full
from myriad.model.interleave import SteppedLayer, Whole, run_layers

TINY = ModelConfig(layers=2, hidden=32, heads=4, vocabulary=100, vocabulary_multiple=8, sequence=24)


class Pair(Boundary):
    """One of two ranks that hold the same: what comes from the other is what this one has, as far as shapes
    and order go."""

    size = 2

    def __init__(self, chunks):
        self.chunks = chunks

    def start_all_gather(self, x):
        return Arrived(torch.cat([x, x], 1))

    def start_reduce_scatter(self, x):
        return Arrived(x.chunk(2, 1)[0])

    def start_stack(self, x):
        return Arrived(torch.stack([x, x]))


class Noted(SteppedLayer):
    """Notes who runs when."""

    def __init__(self, boundary, name, notes, num_steps=1):
        super().__init__()
        self.boundary, self.name, self.notes, self.num_steps = boundary, name, notes, num_steps

    def steps(self, x, context):
        part = x.flatten()[0].item()
        for step in range(self.num_steps):
            self.notes.append((self.name, step, part))
            yield None
        return x + 0


class Meeting(SteppedLayer):
    """Needs every position: gives the sum of those before each. The other rank's are zeros."""

    def __init__(self, boundary):
        super().__init__()
        self.boundary = boundary

    def steps(self, x, context):
        whole = Whole(lambda all_positions: all_positions.cumsum(1), torch.cat([x, torch.zeros_like(x)], 1))
        yield whole
        return whole.result[:, : x.shape[1]]


@pytest.mark.parametrize(
    ("shape", "message_bytes", "parts"),
    [((4, 6, 8), 1, 2), ((4, 6, 8), 384, 2), ((4, 6, 8), 385, 1), ((1, 6, 8), 48, 4), ((1, 6, 8), 96, 2),
     ((1, 6, 8), 97, 1), ((1, 6, 8), 10**9, 1)],
)  # fmt: skip
def test_parts_are_not_cut_into_messages_that_cost_more_than_they_hide(shape, message_bytes, parts):
    notes, boundary = [], Pair(2)
    boundary.message_bytes = message_bytes
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    assert run_layers([Noted(boundary, "a", notes)], x, Context()).shape == x.shape
    assert len(notes) == parts


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((1, 34, 8), [9, 9, 8, 8]), ((1, 136, 8), [40, 32, 32, 32]), ((4, 4, 8), [2, 2]), ((2, 132, 8), [2]),
     ((3, 8, 8), [2, 1])],
)  # fmt: skip
def test_products_of_float8_find_parts_of_16_tokens_wherever_the_whole_has_them(shape, sizes):
    """A GPU multiplies nothing else, and would stop the run in its first backward."""
    found, boundary = [], Pair(2)
    boundary.token_multiple = 16

    class Sized(Noted):
        def steps(self, x, context):
            found.append(x.shape[0] if shape[0] > 1 else x.shape[1])
            return (yield from super().steps(x, context))

    run_layers([Sized(boundary, "a", [])], torch.zeros(shape), Context())
    assert sorted(found, reverse=True) == sorted(sizes, reverse=True)


def test_parts_of_a_sequence_are_stretches_of_which_each_rank_has_a_share():
    seen, boundary = [], Pair(1)
    boundary.chunks, boundary.rank = 2, 1  # of a CPU: 4 parts

    class Told(SteppedLayer):
        takes_tokens = True

        def __init__(self):
            super().__init__()
            self.boundary = boundary

        def position_bytes(self, x):
            return 8

        def steps(self, x, context):
            seen.append((x.tolist(), context.targets.tolist(), context.first_position))
            yield None
            return x[:, ::2]

    tokens = torch.arange(12)[None]
    out = run_layers([Told()], tokens, Context(targets=tokens + 1))
    stretches = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [10, 11]]
    targets = [[token + 1 for token in stretch] for stretch in stretches]
    expected = zip(stretches, targets, [2, 6, 9, 11], strict=True)
    assert seen == [([own], [following], first) for own, following, first in expected]
    assert out.tolist() == [[0, 2, 4, 6, 8, 10]]


def test_while_a_part_waits_the_next_one_runs_a_turn_behind():
    notes, boundary = [], Pair(2)
    run_layers(
        [Noted(boundary, "a", notes, 2), Noted(boundary, "b", notes)],
        torch.arange(2.0)[:, None, None],
        Context(),
    )
    assert notes == [("a", 0, 0), ("a", 1, 0), ("a", 0, 1), ("b", 0, 0), ("a", 1, 1), ("b", 0, 1)]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 5), st.integers(1, 4), st.integers(1, 4))
def test_any_cut_gives_what_no_cut_gives(batch, share, chunks, num_layers, num_steps):
    x = torch.randn(batch, share, 3)
    notes = []
    outputs = []
    for boundary in (Pair(1), Pair(chunks)):
        layers = [Noted(boundary, str(layer), notes, num_steps) for layer in range(num_layers)]
        outputs.append(run_layers([*layers, Meeting(boundary), *layers], x, Context()))
    torch.testing.assert_close(outputs[1], outputs[0])


@pytest.mark.parametrize("block", ["serial", "parallel"])
@pytest.mark.parametrize(("batch", "chunks"), [(4, 2), (3, 2), (5, 3), (2, 16)])
def test_a_model_in_parts_gives_the_loss_and_gradients_of_one_in_one_piece(block, batch, chunks):
    """Of parts of one sequence each rank has other positions: `tests/processes/test_tensor_overlap.py`."""
    config = TINY.model_copy(update={"block": block, "position": "learned", "dropout": 0.1})
    tokens = torch.randint(config.vocabulary, (batch, config.sequence + 1))
    context = Context(targets=tokens[:, 1:], samples=torch.arange(batch), seed=5)
    found = []
    for boundary in (Pair(1), Pair(chunks)):
        definition = GPT(config, 1)
        layers = [definition.build(index, boundary) for index in range(config.layers + 2)]
        generator = torch.Generator().manual_seed(2)
        for layer in layers:
            for parameter in layer.parameters():
                parameter.data.normal_(0.0, 0.1, generator=generator)
        loss = run_layers(layers, tokens[:, :-1], context)
        loss.backward()
        found.append([loss.detach(), *(p.grad for layer in layers for p in layer.parameters())])
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-4)


def test_layers_without_wait_points_run_whole_between_layers_with_them():
    seen = []

    class Plain(torch.nn.Module):
        def forward(self, x, context):
            seen.append(x.shape)
            return x * 2

    notes, boundary = [], Pair(3)
    layers = [Noted(boundary, "a", notes), Plain(), Noted(boundary, "b", notes)]
    x = torch.randn(3, 4, 2)
    torch.testing.assert_close(run_layers(layers, x, Context()), 2 * x)
    assert seen == [x.shape]
    assert len(notes) == 6


def test_on_one_device_nothing_is_cut():
    layers = build_full(TINY, 1)
    tokens = torch.randint(TINY.vocabulary, (4, TINY.sequence + 1))
    context = Context(targets=tokens[:, 1:], samples=torch.arange(4))
    x = tokens[:, :-1]
    for layer in layers:
        x = layer(x, context)
    assert torch.equal(run_layers(layers, tokens[:, :-1], context), x)
