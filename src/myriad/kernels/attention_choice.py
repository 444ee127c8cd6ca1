"""Choice of the attention implementation, by device, type and shape. No other module chooses.

    blocks      batched products in blocks of queries: a CPU in float32, few keys        (`attention_blocks`)
    sdpa        one call of the library; FlashAttention-2 on a GPU, its flash kernel on a CPU
    cudnn       the same call, computed by cuDNN
    varlen      the library's FlashAttention-2 with its own window
    flex        the library's FlexAttention, compiled for the window
    triton      Myriad's kernels, whose loops end at the window                          (`attention_flash`)
    windows     the library, one block of queries at a time, if the window divides the sequence
    masked      the library with a mask: all pairs are computed, whatever the window
    scores      all scores in memory, for caps and sinks where neither blocks nor flex can run

These have not been timed on a GPU yet, so the rule below follows published numbers and the work that each
does. cuDNN's is the fastest of the library's kernels on Hopper (PyTorch 2.5's release blog: up to 1.75 times
FlashAttention-2), and has no window here. Of those that skip the keys outside the window, Myriad's own sums
in a fixed order, so that equal runs give equal bits. If ``benchmarks/kernels/gpu.py --choose`` has timed a
shape on a device of that name, the fastest measured one is used instead.

Ranks that share sequences attend to a list of pieces at a time (`myriad.kernels.attention_pieces`):

    triton      Myriad's kernels, all pieces in one launch each way
    library     a call for each piece; FlashAttention-2 on a GPU
    scores      tiles of scores, by the library's products

No torch here, so that tools can report the choice without it.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from myriad.errors import BadInputError
from myriad.kernels.choice import NO_TRITON, has_triton
from myriad.kernels.config import Kernels

__all__ = [
    "HEAD_SIZES",
    "AttentionChoice",
    "AttentionPath",
    "AttentionShape",
    "FastestAttention",
    "PieceChoice",
    "Scores",
    "check_attention",
    "choose_attention",
    "choose_inside_documents",
    "choose_pieces",
    "fallback_attention",
    "fallback_pieces",
    "hindrance",
    "read_times",
]

PiecePath = Literal["library", "triton", "scores"]
AttentionPath = Literal["blocks", "sdpa", "cudnn", "varlen", "flex", "triton", "windows", "masked", "scores"]

HEAD_SIZES = (16, 32, 64, 80, 96, 128)
"""Head sizes that Myriad's kernels support; 80 and 96 compute with 128 columns."""
_HALVES = ("bfloat16", "float16")
_MOST_WIDTH = 256
"""Largest head size in FlashAttention-2 and cuDNN; it must be a multiple of 8."""
_MOST_CALLS = 4
"""Largest number of pieces for which the library is called one by one: whole sequences have no more in a step
of a ring, packed documents have hundreds."""


class Scores(NamedTuple):
    """How scores are computed from queries and keys."""

    scale: float | None = None
    """Factor of the products of queries and keys; ``None``: 1 / sqrt(head size)."""
    softcap: float | None = None
    """Bound ``c`` of the scores, which become ``c tanh(score / c)`` (Gemma 2, arXiv 2408.00118); ``None``: no
    bound."""

    def factor(self, width: int) -> float:
        """Return the factor for heads of this size."""
        return width**-0.5 if self.scale is None else self.scale


class AttentionShape(NamedTuple):
    """The values that the choice depends on."""

    device: str
    """Device type, "cpu" or "cuda"."""
    dtype: str
    """Data type of queries, keys and values: "float32", "bfloat16" or "float16"."""
    sequence: int
    width: int
    """Head size in values."""
    window: int | None = None
    """None, or at least the sequence: queries see all keys before them."""
    blocks: bool = False
    """Whether `attention_blocks` supports the shape."""
    deterministic: bool = False
    """Whether torch.use_deterministic_algorithms is on, which excludes sums in no fixed order."""
    interpreted: bool = False
    """Whether Triton's kernels run in its interpreter, without a GPU."""
    capped: bool = False
    """Whether the scores have a bound, or heads have a sink."""

    @property
    def seen(self) -> int | None:
        """The window, if it is shorter than the sequence."""
        return self.window if self.window is not None and self.window < self.sequence else None


class AttentionChoice(NamedTuple):
    """An implementation and the reason for its choice."""

    path: AttentionPath
    why: str


class PieceChoice(NamedTuple):
    """How a list of pieces is computed, and the reason."""

    path: PiecePath
    why: str


class FastestAttention(NamedTuple):
    """The fastest implementation for a shape, forward and backward, as measured on a device."""

    device: str
    """The device's name, as torch.cuda.get_device_name returns it."""
    dtype: str
    sequence: int
    width: int
    window: int | None
    path: AttentionPath


def hindrance(path: AttentionPath, shape: AttentionShape) -> str:
    """Return why an implementation cannot compute a shape; empty if it can."""
    if path == "blocks":
        return "" if shape.blocks else "is for a CPU in float32, and for few keys"
    if path == "scores":
        return ""
    if shape.capped and path not in ("flex", "triton"):
        return "has no bound of scores and no sinks"
    if path == "windows":
        window = shape.seen
        fits = window is not None and shape.sequence % window == 0 and 2 * window < shape.sequence
        return "" if fits else "needs a window that divides the sequence into three parts or more"
    if path in ("sdpa", "cudnn") and shape.seen is not None:
        return "has no window"
    return _device_hindrance(path, shape)


def _device_hindrance(path: AttentionPath, shape: AttentionShape) -> str:
    if path in ("sdpa", "masked"):
        return ""
    if path == "triton":
        return _triton_hindrance(shape)
    if shape.device != "cuda":
        return "needs a CUDA device"
    if path == "flex":
        return "" if has_triton() else NO_TRITON
    return _flash_hindrance(shape) or ("adds up in no fixed order" if shape.deterministic else "")


def _flash_hindrance(shape: AttentionShape) -> str:
    """Return why FlashAttention-2 has no kernel for a shape on a GPU; empty if it has one."""
    if shape.dtype not in _HALVES:
        return f"has no {shape.dtype}, only {' and '.join(_HALVES)}"
    if shape.width % 8 or shape.width > _MOST_WIDTH:
        return f"has no head size {shape.width}, only multiples of 8 up to {_MOST_WIDTH}"
    return ""


def _triton_hindrance(shape: AttentionShape) -> str:
    if not has_triton():
        return NO_TRITON
    if shape.device != "cuda" and not shape.interpreted:
        return "needs a CUDA device"
    if shape.width not in HEAD_SIZES:
        return f"has no head size {shape.width}, only {', '.join(map(str, HEAD_SIZES))}"
    return ""


_ORDER: dict[tuple[bool, bool], tuple[tuple[AttentionPath, str], ...]] = {
    (False, False): (
        ("blocks", "two thirds of the time of the library's backward"),
        ("sdpa", "one call of the library"),
    ),
    (False, True): (
        ("blocks", "computes what the window leaves, in two thirds of the library's time"),
        ("windows", "computes twice the window"),
        ("masked", "nothing else takes this window here"),
    ),
    (True, False): (
        ("cudnn", "the quickest published for full attention on Hopper"),
        ("sdpa", "one call of the library"),
    ),
    (True, True): (
        ("triton", "computes what the window leaves, in a fixed order"),
        ("varlen", "the library's own window"),
        ("flex", "compiled for the window"),
        ("windows", "computes twice the window"),
        ("masked", "nothing else takes this window here"),
    ),
}
"""Preferences by (on a GPU, with a window): the first implementation that can run is chosen."""
_CAPPED_ORDER: tuple[tuple[AttentionPath, str], ...] = (
    ("blocks", "adjusts the scores of a block at a time"),
    ("triton", "bounds the scores that it computes, in a fixed order"),
    ("flex", "compiled for the scores"),
    ("scores", "nothing else takes these scores here"),
)
"""The same for bounded scores and sinks."""


def choose_attention(
    shape: AttentionShape, kernels: Kernels = "auto", timed: Sequence[FastestAttention] = (), name: str = ""
) -> AttentionChoice:
    """Choose the implementation for a shape. ``timed``: measurements, which apply if they name this device
    (``name``)."""
    if kernels == "triton" and not hindrance("triton", shape):
        return AttentionChoice("triton", "asked for")
    if kernels != "plain" and not shape.capped and (known := _measured(shape, timed, name)) is not None:
        return AttentionChoice(known, f"the quickest measured on {name}")
    return _default(shape, kernels)


def _measured(shape: AttentionShape, timed: Sequence[FastestAttention], name: str) -> AttentionPath | None:
    own = (name, shape.dtype, shape.sequence, shape.width, shape.seen)
    found = next((one.path for one in timed if one[:5] == own), None)
    return found if found is not None and not hindrance(found, shape) else None


def _default(shape: AttentionShape, kernels: Kernels) -> AttentionChoice:
    order = _CAPPED_ORDER if shape.capped else _ORDER[shape.device == "cuda", shape.seen is not None]
    able = ((path, why) for path, why in order if not hindrance(path, shape))
    by_triton = kernels != "plain" and shape.device == "cuda"
    path, why = next((path, why) for path, why in able if by_triton or path != "triton")
    return AttentionChoice(path, why)


def choose_inside_documents(shape: AttentionShape, kernels: Kernels) -> Literal["varlen", "triton", ""]:
    """Choose how packed documents attend: by one call for documents of any lengths. Empty: there is none
    here, and they are regrouped by length (`Documents.attend`)."""
    by_triton = not _piece_hindrance(shape, kernels)
    if by_triton and kernels == "triton":
        return "triton"
    if not hindrance("varlen", shape):
        return "varlen"
    return "triton" if by_triton else ""


def choose_pieces(
    shape: AttentionShape, kernels: Kernels = "auto", *, cut: bool = False, num_pieces: int = 1
) -> PieceChoice:
    """Choose how a list of pieces is computed. ``shape.capped``: scores have a bound. ``cut``: in some piece
    a query sees only some of the keys, apart from those after its own position."""
    without = _library_hindrance(shape, cut=cut)
    hindered = _piece_hindrance(shape, kernels)
    if not hindered and kernels == "triton":
        return PieceChoice("triton", "asked for")
    if not without and (num_pieces <= _MOST_CALLS or hindered):
        return PieceChoice("library", "a call for each piece")
    if not hindered:
        return PieceChoice("triton", f"one launch: the library {without or 'needs a call for each piece'}")
    return PieceChoice("scores", f"the library {without}, and Triton's kernel {hindered}")


def _library_hindrance(shape: AttentionShape, *, cut: bool) -> str:
    """Return why the library cannot compute some piece of a list; empty if it can."""
    if cut:
        return "has no window that cuts a piece"
    if shape.capped:
        return "has no bound of scores"
    return _flash_hindrance(shape) if shape.device == "cuda" else ""


def _piece_hindrance(shape: AttentionShape, kernels: Kernels) -> str:
    """Return why Triton's kernels do not compute pieces; empty if they do."""
    if kernels == "plain":
        return "was not asked for"
    if shape.device != "cuda" and kernels != "triton":
        return "needs a CUDA device"
    return _triton_hindrance(shape)


def check_attention(kernels: Kernels, shape: AttentionShape) -> None:
    """Raise `BadInputError` if Triton's kernel is required and cannot run."""
    if kernels == "triton" and (found := hindrance("triton", shape)):
        raise BadInputError("train.kernels", kernels, f"auto or plain here: attention by Triton {found}")


def fallback_attention(kernels: Kernels, shape: AttentionShape) -> str:
    """Return a one-line notice for a GPU on which Myriad's kernels cannot compute the window under "auto";
    else empty."""
    found = hindrance("triton", shape)
    if kernels != "auto" or shape.device != "cuda" or not found:
        return ""
    if shape.capped:
        return f"attention with bounded scores or sinks goes by {_default(shape, kernels).path}"
    if shape.seen is None:
        return ""
    return f"attention with a window goes by {_default(shape, kernels).path}: Triton's {found}"


def fallback_pieces(kernels: Kernels, shape: AttentionShape) -> str:
    """Return a one-line notice for a GPU whose pieces are computed by scores under "auto"; else empty."""
    choice = choose_pieces(shape, kernels, cut=shape.seen is not None)
    if kernels != "auto" or shape.device != "cuda" or choice.path != "scores":
        return ""
    return f"attention of ranks that share sequences goes by tiles of scores: {choice.why}"


@lru_cache(maxsize=4)
def read_times(path: Path) -> tuple[FastestAttention, ...]:
    """Read the measurements of ``benchmarks/kernels/gpu.py --choose``; empty if there is no file. Raises
    `BadInputError` if the file has another format."""
    if not path.is_file():
        return ()
    try:
        rows = json.loads(path.read_text())["attention"]
        return tuple(_timed(row) for row in rows)
    except (ValueError, KeyError, TypeError) as error:
        raise BadInputError("kernel times", str(path), f"not as --choose writes them: {error}") from None


def _timed(row: Mapping[str, object]) -> FastestAttention:
    one = FastestAttention(**row)  # type: ignore[arg-type]
    if one.path not in get_args(AttentionPath):
        raise ValueError(f"no path {one.path!r}")
    return one
