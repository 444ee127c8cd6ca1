"""The ``[overlap]`` section of a job: which passes rewrite a program. No torch here."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from myriad.config import Config, Size

__all__ = ["OverlapConfig", "TensorKind", "TensorOverlap"]

TensorKind = Literal["turns", "slices"]
"""Ways to hide tensor-parallel communication."""
_SWITCH = {True: "turns", "true": "turns", False: None, "false": None}
"""Values that older job files use."""


def _read_switch(value: object) -> object:
    return _SWITCH.get(value, value) if isinstance(value, bool | str) else value


TensorOverlap = Literal["auto", "turns", "slices"] | None
"""Values of `OverlapConfig.tensor`; ``None``: off."""


class OverlapConfig(Config):
    """Overlap of communication with computation. No switch changes losses or parameters."""

    pipeline: bool = True
    """Send and receive activations asynchronously, with receives posted early. off: wait for each
    transfer."""
    receive_ahead: int = Field(2, ge=1, le=64)
    """Compute actions of a rank between posting a receive and using it. More hides slower links and holds
    more activations."""
    data: bool = True
    """Gather parameters and reduce gradients chunk by chunk during the computation. off: communicate
    where the result is used, without overlap."""
    chunks: int | None = Field(None, ge=1)
    """Chunks per stage for data-parallel communication; off: one per layer, at most 8."""
    message_bytes: Size = 4 * 2**20
    """Size of one data-parallel message, e.g. "4 MiB"."""
    max_in_flight_bytes: Size = 16 * 2**20
    """Data-parallel bytes that one rank may have in flight, e.g. "16 MiB"; at least overlap.message_bytes.
    More uses the link better, less lets urgent messages go first."""
    tensor: Annotated[TensorOverlap, BeforeValidator(_read_switch)] = "turns"
    """What hides tensor-parallel communication. turns: two parts of the micro-batch alternate between
    computing and communicating. slices: each gather or scatter is cut in slices that travel while the
    matrix product next to it computes (on GPUs with PyTorch's symmetric memory, within a node). auto: the
    faster one for this model and machine, measured once and stored in RUN/tensor_overlap.json. true: turns.
    off: wait for each."""
    tensor_chunks: int = Field(2, ge=2, le=16)
    """Parts of the micro-batch (turns), or slices of a message (slices); fewer if they would be smaller
    than overlap.tensor_message."""
    tensor_message: Size = 2**18
    """Smallest tensor-parallel message in bytes. A smaller one costs more than it hides."""
    pairs: bool = False
    """Pair the forward of a micro-batch with the backward of the one before it: tokens of one travel to
    their experts, and back, while the other computes. Needs layout.ep > 1 and several micro-batches in a
    step, and keeps the activations of one more. It replaces overlap.tensor = turns for experts."""
    optimizer: bool = True
    """Send each chunk's parameters as soon as they are updated. off: update all chunks first."""
    optimizer_in_backward: bool = False
    """Update each chunk inside the backward of the last micro-batch, as soon as its gradients are complete.
    Needs optimizer.clip_norm = off, AdamW and overlap.optimizer. With one micro-batch and layout.zero = 0
    or 1 it also frees the gradients' memory. off: update when the gradient norm is known."""
    offload_ahead: int = Field(1, ge=0, le=64)
    """Compute actions of a rank that overlap with each copy of activations to host memory and back, with
    layout.offload_activations. 0: wait for each copy, also of optimizer state."""
    checkpoint: bool = True
    """Write checkpoints from a copy while training continues. off: training waits until a checkpoint is
    committed."""

    @property
    def tensor_kind(self) -> TensorKind | None:
        """The value of `tensor`, with ``turns`` for an unmeasured ``auto``; ``None``: off, as with `pairs`,
        whose forwards are not cut in parts."""
        if self.pairs:
            return None
        return "turns" if self.tensor == "auto" else self.tensor

    @property
    def updates_early(self) -> bool:
        """Whether `optimizer_in_backward` applies; it needs the pass of `optimizer`."""
        return self.optimizer and self.optimizer_in_backward
