"""If these fail, a training with overlap.tensor = "slices" learns something else than one without, waits for
what it could hide, or two ranks wait for each other."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import run_ranks
from test_parity import assert_equal
from test_tensor_overlap import cut, one_process

from myriad.comm.groups import close_world, open_world
from myriad.comm.layout import Layout
from myriad.errors import BadInputError
from myriad.job import load_job
from myriad.kernels.gradient import GradientSink, apply_deferred, set_sink, sink_of
from myriad.kernels.memory_order import lay_sequence_first
from myriad.kernels.remade import Remade
from myriad.model.boundary import Factors
from myriad.parallel import sliced_products, symmetric_memory
from myriad.parallel.tensor_parallel import GroupBoundary
from myriad.run.event_text import event_text
from myriad.telemetry.spans import Recorder
from myriad.train.autotune import tp_overlap as settling

CPU = torch.device("cpu")

LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("serial", {"tp": 2, "micro_batch": 3, "recompute": "selective"}, {"tensor_chunks": 5}),
    (
        "parallel-window",
        {"tp": 2, "pp": 2, "micro_batch": 3, "schedule": "zero-bubble"},
        {"tensor_chunks": 3},
    ),
    ("gpt2", {"tp": 4, "micro_batch": 1}, {"tensor_chunks": 16}),  # dropout, biases, learned positions
    ("gpt2", {"tp": 2, "dp": 2, "zero": 3, "micro_batch": 3, "recompute": "full"}, {"tensor_chunks": 2}),
]


@pytest.mark.parametrize(("model", "layout", "overlap"), LAYOUTS, ids=str)
def test_slices_give_the_loss_and_parameters_of_one_process(
    model: str, layout: dict[str, Any], overlap: dict[str, Any]
) -> None:
    case = cut(model, layout, overlap | {"tensor": "slices"})
    assert_equal(case, one_process(model, case.global_batch))


def make_boundary(tp: int, **keys: Any) -> GroupBoundary:
    groups = open_world(Layout(tp=tp), CPU)
    return GroupBoundary(groups.along("tp"), groups.grid.index("tp"), tp, Recorder(), **keys)


Draw = dict[str, Any]


def draw_shapes(tp: int, number: int) -> list[Draw]:
    """Products of any sizes: shares of a few rows, one or two products, with and without a bias."""
    pick = random.Random(number)
    return [
        {
            "sequences": pick.choice([1, 1, 2, 3, 5]),
            "positions": tp * pick.randint(1, 9),
            "hidden": pick.randint(1, 24),
            "widths": [pick.randint(1, 20) for _ in range(pick.choice([1, 2]))],
            "has_bias": pick.random() < 0.5,
            "remakes": pick.random() < 0.5,
            "sequence_first": pick.random() < 0.5,
            "chunks": pick.randint(2, 16),
            "message_bytes": pick.choice([1, 64, 1000, 10**6]),
            "dtype": pick.choice([torch.float32, torch.bfloat16]),
            "seed": pick.randint(0, 10**6),
        }
        for _ in range(12)
    ]


def differentiate(boundary: GroupBoundary, draw: Draw, *, sinks: bool) -> list[torch.Tensor]:
    """A gather into products, and a scatter out of them: results, and gradients of everything."""
    random = torch.Generator().manual_seed(draw["seed"] + boundary.rank)
    hidden, dtype, share = draw["hidden"], draw["dtype"], draw["positions"] // boundary.size

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random).to(dtype).requires_grad_()

    x = make(draw["sequences"], share, hidden)
    ups = [make(width, hidden) for width in draw["widths"]]
    biases = [make(width) if draw["has_bias"] else None for width in draw["widths"]]
    downs = [make(hidden, width) for width in draw["widths"]]
    if sinks:
        for weight in (*ups, *downs):
            set_sink(weight, GradientSink(torch.zeros(weight.shape)))

    def doubled(kept: torch.Tensor) -> torch.Tensor:
        return lay_sequence_first(kept * 2) if draw["sequence_first"] else kept * 2

    stream = doubled(x)
    remade = Remade(doubled, x, len(ups)) if draw["remakes"] and boundary.in_slices else None
    inner = [own.tanh() for own in boundary.gather_products(stream, ups, biases, remade)]
    out = boundary.scatter_products([Factors(own, down) for own, down in zip(inner, downs, strict=True)])
    gradient = torch.randn(out.shape[-1], generator=random).to(dtype)
    out.backward(gradient.expand_as(out))
    apply_deferred(boundary.later or [])
    grads = [own.grad for own in (x, *(bias for bias in biases if bias is not None))]
    if sinks:
        grads += [sink_of(weight).total for weight in (*ups, *downs)]
    else:
        grads += [weight.grad for weight in (*ups, *downs)]
    return [out.detach(), *grads]


def use_pytorchs_fallbacks() -> torch.library.Library:
    """PyTorch's own definitions of its two fused operators, for CPUs, where it has none."""
    import torch.distributed._symmetric_memory as symmetric_memory

    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    return library


def compare_carriers(tp: int) -> list[str]:
    """One rank's side: what of any draw differs between slices and whole tensors."""
    whole, wrong = make_boundary(tp), []
    library = use_pytorchs_fallbacks()
    for draw in draw_shapes(tp, number=tp):
        keys = {"slices": draw["chunks"], "message_bytes": draw["message_bytes"]}
        cut = GroupBoundary(whole.group, whole.rank, tp, Recorder(), **keys)
        fused = GroupBoundary(whole.group, whole.rank, tp, Recorder(), **keys)
        fused.slice_transport = symmetric_memory.SymmetricSliceTransport(fused)
        expected = differentiate(whole, draw, sinks=True)
        found = differentiate(cut, draw, sinks=True)
        again = differentiate(cut, draw, sinks=True)
        others = [differentiate(fused, draw, sinks=True), differentiate(cut, draw, sinks=False)]
        if not all(torch.equal(one, other) for one, other in zip(found, again, strict=True)):
            wrong.append(f"{draw}: other bits the second time")
        rounding = 1e-5 if draw["dtype"] == torch.float32 else 6e-2
        for number, other in enumerate([found, *others]):
            for one, own in zip(expected, other, strict=True):
                if (one - own).float().norm() > rounding * one.float().norm() + 1e-12:
                    wrong.append(f"{draw}: way {number} differs by {(one - own).abs().max()}")
    del library
    close_world()
    return wrong


@pytest.mark.parametrize("tp", [2, 4])
def test_any_slices_give_the_products_and_gradients_of_whole_tensors(tp: int) -> None:
    assert run_ranks(tp, compare_carriers, tp) == [[]] * tp


Note = tuple[str, int]


def note_order() -> list[list[Note]]:
    """One rank's side: what a gather and a scatter with their products do, in order, with the rows."""
    boundary = make_boundary(2, slices=3)
    notes: list[Note] = []
    slice_transport, multiply = boundary.slice_transport, sliced_products._multiply
    assert isinstance(slice_transport, sliced_products.GlooSliceTransport)
    receive, send, wait = slice_transport._receive, slice_transport._send, slice_transport._wait

    def noting(name: str, function: Any, rows_of: Any) -> Any:
        def note(*arguments: Any) -> Any:
            notes.append((name, rows_of(*arguments)))
            return function(*arguments)

        return note

    slice_transport._receive = noting("receive", receive, lambda into, peer: len(into))
    slice_transport._send = noting("send", send, lambda rows, peer: len(rows))
    slice_transport._wait = noting("wait", wait, len)
    sliced_products._multiply = noting("multiply", multiply, lambda products, out, bias=None: len(out))
    rows, matrix = torch.randn(7, 4), torch.randn(4, 5)
    _, (product,) = slice_transport.gather_products(rows, [matrix], [None], lambda: notes.append(("more", 0)))
    gathered = list(notes)
    notes.clear()
    slice_transport.scatter_products([(product, matrix.t())], lambda: notes.append(("more", 0)))
    close_world()
    return [gathered, notes]


def test_slices_travel_while_the_others_are_multiplied() -> None:
    for gather, scatter in run_ranks(2, note_order):
        assert gather[:6] == [("receive", n) for n in (3, 2, 2)] + [("send", n) for n in (3, 2, 2)]
        assert gather[6:8] == [("multiply", 7), ("more", 0)], "own rows and what is left over come first"
        assert gather[8:14] == [note for n in (3, 2, 2) for note in (("wait", 1), ("multiply", n))]
        assert scatter[:3] == [("receive", n) for n in (3, 2, 2)]
        assert scatter[3:9] == [note for n in (3, 2, 2) for note in (("multiply", n), ("send", n))]
        assert scatter[9:11] == [("multiply", 7), ("more", 0)], "own rows are made while the last ones travel"
        assert {what for what, _ in scatter[11:]} == {"wait"}


KEYS = ["layout.tp=2", "model.layers=1", "train.device=cpu", "overlap.tensor_message=1"]


def settle(kept: Any) -> tuple[list[Any], list[Any]]:
    """One rank's side: what ``auto`` chooses, and chooses when a choice is kept; and its events."""
    job = load_job("tiny", [*KEYS, "overlap.tensor=auto"])
    groups, events = open_world(job.layout, CPU), []
    where = settling.TuningContext(job, groups, CPU, torch.float32, "auto")

    def report(event: str, **fields: Any) -> None:
        events.append({"event": event, **fields})

    chosen = [settling.choose_tp_overlap(where, kept, report).tensor for _ in range(2)]
    close_world()
    return chosen, events


def test_auto_measures_once_and_every_rank_takes_the_same(tmp_path: Any) -> None:
    kept = tmp_path / "tensor_overlap.json"
    (chosen, events), other = run_ranks(2, settle, kept)
    assert chosen[0] == chosen[1] and other[0] == chosen
    (choice,), (event,) = settling.read_measured(kept, settling._are_choices), events
    assert choice["tensor"] == (chosen[0] or "off") == event["tensor"]
    assert set(choice["seconds"]) == {"turns", "slices", "off"}
    assert min(choice["seconds"].values()) > 0
    assert f"slices {1e3 * choice['seconds']['slices']:.1f} ms" in event_text(event)
    kept.write_text('[{"where": {}, "tensor": "both"}]')
    with pytest.raises(BadInputError, match="damaged"):
        settling.read_measured(kept, settling._are_choices)


@pytest.mark.parametrize(
    ("dtype", "ranks_of_node", "says"),
    [
        (torch.float64, "4", "float32, bfloat16 and float16, not float64"),
        (torch.bfloat16, "3", "layout.tp = 2 ranks are not within a node of 3"),
        (torch.bfloat16, "4", "no CUDA device"),
    ],
)
def test_gpus_that_cannot_are_named_in_one_line(
    dtype: torch.dtype, ranks_of_node: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks_of_node)
    lacks = symmetric_memory.lacks_symmetric_memory(CPU, dtype, 2)
    assert says in lacks and "\n" not in lacks


@pytest.mark.parametrize(
    ("visible", "says"),
    [(1, "each rank sees 1 of the GPUs of a node's 2 ranks"), (2, "no symmetric memory: busy")],
)
def test_a_rank_requests_what_it_can_see_before_others_wait_for_it(
    visible: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a GPU of its own for each rank all are number 0; a driver that gives no memory says so in time."""
    from torch.distributed import _symmetric_memory

    def refuse(*size: int, **options: object) -> None:
        raise RuntimeError("busy\nbacktrace")

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(_symmetric_memory, "empty", refuse)
    assert symmetric_memory.lacks_symmetric_memory(torch.device("cuda", 0), torch.bfloat16, 2).startswith(
        says
    )


def measure_refused() -> tuple[dict[str | None, float], int]:
    """One rank's side: rank 1's device refuses the operators of slices, once all have come through them."""
    job = load_job("tiny", KEYS)
    groups, runs = open_world(job.layout, CPU), []
    original, where = settling._clocked, settling.TuningContext(job, groups, CPU, torch.float32, "auto")

    def clocked(iterate: Callable[[], None], device: torch.device) -> float:
        runs.append(seconds := original(iterate, device))
        return math.inf if groups.grid.rank == 1 and len(runs) == 2 else seconds

    settling._clocked = clocked
    found = settling.measure_kinds(where, ["turns", "slices", None])
    close_world()
    return found, len(runs)


def test_what_one_rank_refuses_no_rank_starts_again() -> None:
    """It would wait there for a rank that does not come."""
    (found, runs), other = run_ranks(2, measure_refused)
    assert (found, runs) == other
    assert found["slices"] == math.inf and found["turns"] < math.inf
    assert runs == 3 * 4 - 3, "slices ran in the first of four rounds alone"


def refuse(tensor: str) -> str:
    """One rank's side of a run on GPUs that do not reach each other's memory: what slices are answered."""
    job = load_job("tiny", [*KEYS, f"overlap.tensor={tensor}"])
    groups, events = open_world(job.layout, CPU), []
    where = settling.TuningContext(job, groups, torch.device("cuda", 0), torch.float32, "auto")
    only_first = "GPU 0 has no access to the memory of GPU 1" if groups.grid.rank == 0 else ""
    settling.lacks_symmetric_memory = lambda *_: only_first  # type: ignore[assignment]
    settling.measure_kinds = lambda where, kinds: dict.fromkeys(kinds, 1.0)  # type: ignore[assignment]
    try:
        kind = settling.choose_tp_overlap(where, None, lambda _, **fields: events.append(fields)).tensor
        return f"{kind}: {events[0]['problem']}"
    except BadInputError as error:
        return str(error)
    finally:
        close_world()


@pytest.mark.parametrize(
    ("tensor", "says"),
    [("slices", 'overlap.tensor = "slices": turns, auto or off here'), ("auto", "turns: no slices")],
)
def test_every_rank_refuses_slices_or_does_without_where_one_cannot(tensor: str, says: str) -> None:
    answers = run_ranks(2, refuse, tensor)
    assert answers[0] == answers[1]
    assert answers[0] == f"{says}: GPU 0 has no access to the memory of GPU 1"
