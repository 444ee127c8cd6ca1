"""On NCCL tensor-parallel ranks keep several sequences position by position in memory, so that nothing is
copied before and after each message (`myriad.kernels.memory_order`). If these break, that changes what is
learned, or copies come back. On CPUs over `nccl_like`; gloo keeps sequence by sequence."""

from typing import Any

import pytest
import torch
from nccl_like import install
from parity_case import Case, batch_of_rank, make_engine, run_case
from ranks import run_ranks
from test_parity import assert_equal, train
from test_tensor_overlap import cut, one_process, short

from myriad.comm.groups import close_world
from myriad.kernels import gradient
from myriad.parallel import tp_async

LAYOUTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("serial", {"tp": 2, "micro_batch": 6}, {"tensor_chunks": 2}),
    ("serial", {"tp": 2, "micro_batch": 3, "recompute": "selective"}, {"tensor": None}),
    ("serial", {"tp": 2, "micro_batch": 6, "recompute": "full"}, {"tensor_chunks": 2}),
    ("gpt2", {"tp": 2, "pp": 2, "micro_batch": 3, "schedule": "zero-bubble"}, {"tensor": None}),
    ("parallel-window", {"tp": 2, "micro_batch": 6}, {"tensor_chunks": 3}),
    ("serial", {"tp": 2, "micro_batch": 1}, {"tensor_chunks": 3}),  # 2, 2, 1, 1, 1, 1 positions of a rank
    ("gpt2", {"tp": 2, "pp": 2, "micro_batch": 1, "schedule": "zero-bubble"}, {"tensor_chunks": 2}),
    ("parallel-window", {"tp": 2, "micro_batch": 1, "recompute": "full"}, {"tensor_chunks": 2}),
]


def run_like_nccl(case: Case) -> Any:
    install()
    return run_case(case)


@pytest.mark.parametrize(("model", "layout", "overlap"), LAYOUTS, ids=str)
def test_any_layout_gives_the_loss_and_parameters_of_one_process(
    model: str, layout: dict[str, Any], overlap: dict[str, Any]
) -> None:
    case = cut(model, layout, overlap)
    assert_equal(case, one_process(model, case.global_batch), run_like_nccl)


def test_equal_runs_have_equal_bits() -> None:
    case = Case(layout={"tp": 2, "micro_batch": 3}, model=short("gpt2"), steps=2, global_batch=6)
    (losses, parameters), (again, same) = train(case, run_like_nccl), train(case, run_like_nccl)
    assert losses == again
    assert all((values == same[name]).all() for name, values in parameters.items())


def note_copies(case: Case) -> tuple[list[str], int]:
    """One rank's side: where one step copies what it sends or receives, and how many messages it takes."""
    install()
    copies: list[str] = []
    count = 0

    class Noted(tp_async._TensorParallelState):
        def post(self, x: torch.Tensor, *, forward: bool) -> None:
            nonlocal count
            super().post(x, forward=forward)
            count += 1
            assert self._collective is not None
            if self._collective._kept.data_ptr() != x.data_ptr():
                copies.append(f"sends a copy of {tuple(x.shape)}")

        def arrive(self) -> torch.Tensor:
            posted = self._collective
            y = super().arrive()
            stack = posted._stack if isinstance(posted, tp_async.AsyncStack) else posted._parts[0]
            if stack.data_ptr() != y.data_ptr():
                copies.append(f"copies {tuple(y.shape)} after a gather")
            return y

    tp_async._TensorParallelState = Noted
    engine = make_engine(case)
    engine.train_step(lambda: batch_of_rank(case, engine, 0), 1e-3, 100)
    engine.close()
    close_world()
    return copies, count


def note_products(case: Case) -> tuple[dict[tuple[int, ...], int], int]:
    """One rank's side: how many products a step's weight gradients take, by shape, and what is left over."""
    install()
    counts: dict[tuple[int, ...], int] = {}
    accumulate = gradient.accumulate_product

    def noting(total: torch.Tensor, *operands: torch.Tensor, **how: bool) -> None:
        counts[tuple(total.shape)] = counts.get(tuple(total.shape), 0) + 1
        accumulate(total, *operands, **how)

    gradient.accumulate_product = noting
    engine = make_engine(case)
    engine.train_step(lambda: batch_of_rank(case, engine, 0), 1e-3, 100)
    left_over = len(engine.boundary.later or [])
    engine.close()
    close_world()
    return counts, left_over


def test_gradients_of_a_sequence_in_parts_are_one_product_where_operands_lie_beside_each_other() -> None:
    """Attention's are one for all four parts. The MLP's are where Triton's kernels write them:
    `tests/unit/kernels_triton/test_kernel_order.py`, and the launches of `tests/unit/fake_cuda`."""
    case = Case(layout={"tp": 2, "micro_batch": 1}, model={"layers": 2, "ffn_hidden": 80}, global_batch=1)
    qkv, out, up, down = (48, 32), (32, 16), (40, 32), (32, 40)
    for counts, left_over in run_ranks(2, note_products, case):
        assert left_over == 0
        assert [counts[shape] for shape in (qkv, out, up, down)] == [2, 2, 8, 8]


@pytest.mark.parametrize(("micro_batch", "chunks"), [(4, 2), (2, 1), (1, 2)])
def test_messages_are_sent_from_where_their_tensors_lie(micro_batch: int, chunks: int) -> None:
    case = Case(
        layout={"tp": 2, "micro_batch": micro_batch},
        model=short("serial"),
        overlap={"tensor_chunks": chunks} if chunks > 1 else {"tensor": None},
        global_batch=micro_batch,
    )
    for copies, count in run_ranks(2, note_copies, case):
        assert copies == []
        assert count >= 2 * (2 * 4 + 2), "messages of the blocks, the embedding and the head, both ways"
