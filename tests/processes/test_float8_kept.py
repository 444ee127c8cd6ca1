"""If these fail, a step in float8 multiplies by weights of an earlier one: their float8 forms, which serve
all micro-batches of a step, outlived something that changed the weights.

Each job is trained twice, with forms that are kept and with forms that are made for each product, through the
same events, and must have the same bits.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from parity_case import TINY, Case, batch_of_rank, make_engine, train_steps
from ranks import reuse_ranks
from replaying import Replaying

from myriad.comm.groups import close_world
from myriad.kernels.float8 import Float8, KeptForms, Scaling
from myriad.kernels.gradient import sink_of
from myriad.parallel.engine import Engine

B16 = torch.bfloat16
TARGETS = 8 * TINY["sequence"]


def float8_engine(case: Case, *, keeps: bool, scaling: Scaling = "tensor") -> Engine:
    return make_engine(case, float8=Float8(scaling), keeps_float8=keeps)


def kept_forms(engine: Engine) -> list[KeptForms]:
    sinks = [sink for chunk in engine.model.chunks for sink in chunk.sinks]
    return [sink.forms for sink in sinks if sink.forms is not None]


class Twins:
    """Two engines of one process with the same state, of which one keeps forms."""

    def __init__(self) -> None:
        self.case = Case({"micro_batch": 2}, {"layers": 2}, dtype=B16, steps=50)
        self.both = [float8_engine(self.case, keeps=keeps) for keeps in (True, False)]
        self.saved = [self._copy(engine) for engine in self.both]
        self.step = 0

    def _copy(self, engine: Engine) -> list[torch.Tensor]:
        return [part.values.clone() for part in engine.all_shards()]

    def train(self) -> list[Any]:
        self.step += 1
        return [train_steps(self.case, engine, self.step - 1, self.step) for engine in self.both]

    def skip(self) -> list[Any]:
        return [
            engine.train_step(lambda e=engine: batch_of_rank(self.case, e, 3), 0.1, TARGETS, skip=True).loss
            for engine in self.both
        ]

    def evaluate(self) -> list[Any]:
        return [engine.evaluate(lambda e=engine: batch_of_rank(self.case, e, 5)) for engine in self.both]

    def save(self) -> None:
        self.saved = [self._copy(engine) for engine in self.both]

    def load(self) -> None:
        for engine, state in zip(self.both, self.saved, strict=True):
            for part, values in zip(engine.all_shards(), state, strict=True):
                part.values.copy_(values)
            engine.loaded()

    def draw(self) -> None:
        for engine in self.both:
            engine.draw_initial()
            engine.loaded()

    def warm_up(self) -> None:
        for engine in self.both:
            engine.warm_up()

    def flip(self) -> None:
        """As a device that spoils a bit of the values (`myriad faults`)."""
        for engine in self.both:
            chunk = engine.model.chunks[0]
            words = chunk.values.view(torch.int16)
            words[len(words) // 2] ^= 1 << 6

    def write(self) -> None:
        """As a callback of a user that writes a parameter."""
        for engine in self.both:
            with torch.no_grad():
                for layer in engine.model.stages[0].layers.values():
                    for weight in layer.parameters():
                        weight.mul_(1.01)


EVENTS = ("train", "skip", "evaluate", "save", "load", "draw", "warm_up", "flip", "write")


@settings(max_examples=5, deadline=None)
@given(st.lists(st.sampled_from(EVENTS), min_size=1, max_size=6))
def test_whatever_happens_to_weights_the_next_step_has_them(events: list[str]) -> None:
    twins = Twins()
    for event in ["train", *events, "evaluate", "train", "evaluate"]:
        kept, made = getattr(twins, event)() or (0, 0)
        assert kept == made, event


@pytest.mark.parametrize("event", ["train", "load", "flip"])
def test_forms_that_are_not_forgotten_are_noticed(event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the property above rests on can fail."""
    twins = Twins()
    twins.train()
    monkeypatch.setattr(KeptForms, "forget", lambda self: None)
    twins.evaluate()
    for name in ("train", "train", event):
        getattr(twins, name)()
    kept, made = twins.evaluate()
    assert kept != made


def test_a_write_between_two_micro_batches_is_seen() -> None:
    """The version of the parameter, the only one of the safeguards that is at work inside a program."""
    forms, how = KeptForms(), Float8("tensor")
    weight = torch.nn.Parameter(torch.randn(32, 48))
    first = forms.seen(weight, how)
    assert forms.seen(weight, how).forms is first.forms
    with torch.no_grad():
        weight.mul_(3.0)
    again = forms.seen(weight, how).forms
    assert again is not None and first.forms is not None
    assert torch.equal(again[0].restored(torch.float32), how.weight_forms(weight)[0].restored(torch.float32))
    other = torch.nn.Parameter(torch.randn(32, 48))
    assert forms.seen(other, how).forms is not again


@pytest.mark.parametrize("scaling", ["tensor", "blocks"])
def test_weights_are_made_float8_once_a_step_and_dropped_after_it(
    scaling: Scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = Float8.weight_forms
    monkeypatch.setattr(Float8, "weight_forms", lambda self, weight: (made.append(1), make(self, weight))[1])
    case = Case({"micro_batch": 2}, dtype=B16)
    engine = float8_engine(case, keeps=True, scaling=scaling)
    for step in range(2):
        made.clear()
        train_steps(case, engine, step, step + 1)
        assert len(made) == len(kept_forms(engine)) > 0
    assert all(forms._forms is None and forms._weight is None for forms in kept_forms(engine))


@pytest.mark.usefixtures("dynamo")
def test_a_captured_backward_makes_forms_each_time() -> None:
    case = Case({"micro_batch": 2}, dtype=B16, steps=3)
    found = []
    for captures in (True, False):
        engine = float8_engine(case, keeps=True)
        if captures:
            engine.capture(Replaying(), lambda e=engine: batch_of_rank(case, e, 0), TARGETS)
            assert kept_forms(engine) == []
        found.append(train_steps(case, engine, 0, 3))
    assert found[0] == found[1]


CASES = {
    "zero-1": Case({"dp": 2, "zero": 1, "micro_batch": 2}, dtype=B16, steps=2),
    "zero-2-each": Case({"dp": 2, "zero": 2, "reduce": "each", "micro_batch": 2}, dtype=B16, steps=2),
    "zero-3": Case({"dp": 2, "zero": 3, "micro_batch": 2}, dtype=B16, steps=2),
    "zero-bubble": Case({"pp": 2, "schedule": "zero-bubble", "micro_batch": 2}, dtype=B16, steps=2),
    "interleaved": Case({"pp": 2, "virtual_stages": 2, "micro_batch": 2}, dtype=B16, steps=2),
    "tensor": Case({"tp": 2, "micro_batch": 2}, dtype=B16, steps=2),
    "full-recompute": Case({"micro_batch": 2, "recompute": "full"}, dtype=B16, steps=2),
    "early": Case(
        {"dp": 2, "zero": 1, "micro_batch": 2},
        dtype=B16,
        steps=2,
        optimizer={"clip_norm": None},
        overlap={"optimizer_in_backward": True},
    ),
    "diloco": Case({"dp": 2, "micro_batch": 2}, dtype=B16, steps=3, comm={"sync_every": 2}),
    "compressed": Case(
        {"dp": 2, "zero": 1, "micro_batch": 2}, dtype=B16, steps=2, comm={"compress_parameters": "int8"}
    ),
}
CASES = {
    name: case if "virtual_stages" in case.layout else replace(case, model={"layers": 2})
    for name, case in CASES.items()
}


def train(case: Case, keeps: bool) -> tuple[list[Any], list[bytes]]:
    engine = float8_engine(case, keeps=keeps)
    evaluate: Callable[[], Any] = lambda: engine.evaluate(lambda: batch_of_rank(case, engine, 7))  # noqa: E731
    losses: list[Any] = [evaluate()]
    for step in range(case.steps):
        losses += [train_steps(case, engine, step, step + 1), evaluate()]
    masters = [chunk.master.numpy().tobytes() for chunk in engine.model.chunks]
    engine.close()
    close_world()
    return losses, masters


@pytest.mark.parametrize("name", CASES)
def test_kept_forms_change_no_bit(name: str) -> None:
    case = CASES[name]
    kept, made = (reuse_ranks(case.world, train, case, keeps) for keeps in (True, False))
    assert kept == made


@pytest.mark.parametrize(
    ("layout", "keeps", "expected"),
    [
        ({"micro_batch": 2}, True, True),
        ({"micro_batch": 2}, False, False),
        ({"micro_batch": 8}, True, False),
    ],
)
def test_forms_are_kept_where_they_serve_several_micro_batches(
    layout: dict[str, Any], keeps: bool, expected: bool
) -> None:
    engine = float8_engine(Case(layout, dtype=B16), keeps=keeps)
    weights = [w for layer in engine.model.stages[0].layers.values() for w in layer.parameters()]
    assert any((sink := sink_of(w)) is not None and sink.float8 for w in weights)
    assert bool(kept_forms(engine)) == expected
