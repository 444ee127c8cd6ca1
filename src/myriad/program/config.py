"""Which passes rewrite a program, and how far they go. No torch here."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from myriad.config import Config, Size

__all__ = ["OverlapConfig", "TensorKind", "TensorOverlap"]

TensorKind = Literal["turns", "slices"]
"""How tensor-parallel communication hides."""
_SWITCH = {True: "turns", "true": "turns", False: None, "false": None}
"""Values of before there were two kinds."""


def _read_switch(value: object) -> object:
    return _SWITCH.get(value, value) if isinstance(value, bool | str) else value


TensorOverlap = Literal["auto", "turns", "slices"] | None
"""Values of `OverlapConfig.tensor`; ``None``: off."""


class OverlapConfig(Config):
    """What communication hides behind; every switch leaves losses and parameters as they are."""

    pipeline: bool = True
    """Send and receive between stages as separate asynchronous actions, receives posted early; off:
    coupled and waited for."""
    receive_ahead: int = Field(2, ge=1, le=64)
    """Computes of a rank between posting a receive and using it: more hides slower links and holds more
    activations."""
    data: bool = True
    """Parameters gathered and gradients reduced chunk by chunk behind the compute; off: each where it is
    needed, waited for."""
    chunks: int | None = Field(None, ge=1)
    """Chunks that data parallelism cuts each stage's parameters in; off: one a layer, at most 8."""
    partition: Size = 4 * 2**20
    """Bytes of one data-parallel message; "4 MiB"."""
    credit: Size = 16 * 2**20
    """Bytes of data-parallel messages that may be under way from one rank at once; at least
    overlap.partition."""
    tensor: Annotated[TensorOverlap, BeforeValidator(_read_switch)] = "turns"
    """What tensor-parallel gathers and scatters hide behind. turns: parts of the micro-batch take turns, one
    computes while the others' tensors travel; slices: each gather and scatter travels in slices while the
    product that it belongs to is computed from those that have arrived, or makes the next (on GPUs by
    PyTorch's symmetric memory, within a node); auto: what is quickest for this model here, measured once and
    kept in the run's tensor_overlap.json; true is turns. Off: whole, waited for."""
    tensor_chunks: int = Field(2, ge=2, le=16)
    """Parts that take turns, or slices of what a rank gives to a gather or gets of a scatter; fewer where
    they would be smaller than tensor_message."""
    tensor_message: Size = 2**18
    """Bytes of a tensor-parallel message that are worth one of its own: a smaller one costs more than it
    hides."""
    optimizer: bool = True
    """Each chunk's parameters travel as soon as it is updated, while the next chunk is; off: all chunks
    are updated first."""
    optimizer_in_backward: bool = False
    """Each chunk is updated inside the last micro-batch's backward, as soon as its gradients are complete;
    needs optimizer.clip_norm = off, AdamW and overlap.optimizer. With one micro-batch its gradients' memory
    goes back then (layout.zero = 0 or 1). Off: all chunks are updated when the gradients' norm is known."""
    checkpoint: bool = True
    """A checkpoint is written from a copy while training goes on; off: training waits until it is
    committed."""

    @property
    def tensor_kind(self) -> TensorKind | None:
        """What `tensor` says, where ``auto`` has not been measured ``turns``; ``None``: off."""
        return "turns" if self.tensor == "auto" else self.tensor

    @property
    def updates_early(self) -> bool:
        """`optimizer_in_backward`, which comes after what `optimizer` does to a program."""
        return self.optimizer and self.optimizer_in_backward
