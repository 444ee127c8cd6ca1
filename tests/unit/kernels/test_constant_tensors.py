"""If these break: a replayed CUDA graph reads a mask or a rotation from memory that was freed, or a long chat
keeps the masks of all its lengths."""

import threading
import weakref

import torch

from myriad.kernels.constant_tensors import constant_tensor, constants_kept_in


@constant_tensor
def numbers(length: int) -> torch.Tensor:
    return torch.arange(length)


def test_what_a_capture_used_outlives_the_cache_as_long_as_its_owner() -> None:
    references: list[torch.Tensor] = []
    numbers(3)
    with constants_kept_in(references):
        # Autograd runs the backward of a capture in another thread.
        thread = threading.Thread(target=numbers, args=(3,))
        thread.start()
        thread.join()
        assert numbers(3) is numbers(3)
    assert [one.tolist() for one in references] == [[0, 1, 2]]
    captured, other = weakref.ref(references[0]), weakref.ref(numbers(99))
    for length in range(4, 40):
        numbers(length)
    assert other() is None
    assert captured() is not None and numbers(3) is not captured()
    references.clear()
    assert captured() is None
