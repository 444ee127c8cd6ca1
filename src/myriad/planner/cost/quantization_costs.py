"""Bytes that float8 and NVFP4 add to matrix products: what is converted, when, and in how many forms.

`float8_traffic` counts the bytes that float8 adds to the products, as in Myriad's kernels
(`myriad.kernels.triton.scaling`). A matrix is read once for its values in one form or both, a byte each. With
one scale for the whole matrix, it is read once more before that to find the largest value:

    forward      x and W as they lie              (tensor: searched)
    inputs       g in both forms, W transposed    (tensor: g searched; of W it is known)
    weights      x transposed                     (tensor: known too)

Scales have 4 bytes: one for a matrix, for 128 neighbours of a row, or for 128 x 128 values of a weight. In
blocks, the product itself adds a weight's gradient to the gradient buffer. With one scale, the library's
product writes it in the precision of training, and a separate pass reads and adds it.

`library_traffic` counts the same of Transformer Engine's modules (v1.11 and v2.4, pytorch/module/base.py,
linear.py and layernorm_linear.py), which convert a matrix once: x for its forward and its weight's gradient,
g for both, W once. With one scale for a matrix, Hopper's products need a transposed form of each; Blackwell's
(`Accelerator.float8_any_order`) need none. Scales of 32 neighbours (MXFP8) have a byte; a form of rows and
one of columns are written. What ranks gather in float8 is converted before, a part of it by each, and
transposed after. NVFP4 (v2.14, pytorch/csrc/quantizer.cpp, NVFP4Quantizer) has half a byte for a value, and a
byte of scale for 16 neighbours: one pass finds the largest values of a matrix and of its rotated columns
(`nvte_hadamard_transform_amax`), and another writes both forms. Ranks gather both (distributed.py,
`_all_gather_nvfp4`).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from myriad.planner.cost.operator_costs import Number
from myriad.planner.workload import FrameworkProfile

__all__ = [
    "Gathered",
    "Quantization",
    "QuantizationLibrary",
    "QuantizationTraffic",
    "float8_traffic",
    "form_bytes",
    "kept_form_bytes",
    "library_traffic",
    "operand_bytes",
]

Float8Scaling = Literal["tensor", "blocks"]
"""One scale for a whole matrix, or one for each block."""
Quantization = Float8Scaling | Literal["nvfp4"]
"""Format of a product's inputs: float8 by its scaling, or four-bit values with a scale for 16 neighbours."""
Gathered = Literal["x", "grad"]
"""A matrix of a product that ranks gather: its input, or its gradient."""
_BLOCK = 128
_FORM_BYTES = {
    "tensor": 1.0,
    "lines": 1 + 4 / _BLOCK,
    "squares": 1 + 4 / _BLOCK**2,
    "nvfp4": 1 / 2 + 1 / 16,
}
"""Bytes of a value in one form, with its share of a scale."""


class QuantizationTraffic(NamedTuple):
    """Memory traffic of float8 in one pass of one weight."""

    num_bytes: Number
    operators: Number

    def plus(self, other: "QuantizationTraffic") -> "QuantizationTraffic":
        """Return the traffic of both."""
        return QuantizationTraffic(self.num_bytes + other.num_bytes, self.operators + other.operators)

    def times(self, factor: float) -> "QuantizationTraffic":
        """Return the traffic of so many."""
        return QuantizationTraffic(self.num_bytes * factor, self.operators * factor)


def form_bytes(quantization: Quantization) -> float:
    """Return the bytes of a value in one form, as ranks keep and gather it, without float8's few scales."""
    return _FORM_BYTES["nvfp4" if quantization == "nvfp4" else "tensor"]


def kept_form_bytes(profile: FrameworkProfile) -> float:
    """Return the bytes that a parameter's converted forms take beside its compute type from one micro-batch
    to the next; 0: it is converted for each, or kept in no other type."""
    keeps = profile.keeps_quantized and not profile.cuda_graphs and not profile.memory.quantized_parameters
    return 2 * form_bytes(profile.quantization) if profile.quantization and keeps else 0.0


def operand_bytes(kind: str, value_bytes: int, num_forms: int, *, searched: bool) -> float:
    """Return the bytes moved for each value of a matrix that is converted in so many forms."""
    reads = 2 if searched else 1
    return reads * value_bytes + num_forms * _FORM_BYTES[kind]


def float8_traffic(
    scaling: Float8Scaling,
    value_bytes: int,
    x: Number,
    grad: Number,
    weight: Number,
    sum_bytes: int,
    kept_over: int = 1,
    *,
    apart: bool = True,
) -> tuple[QuantizationTraffic, QuantizationTraffic, QuantizationTraffic]:
    """Return the traffic of forward, input gradient and weight gradient. ``x``, ``grad``, ``weight``: numbers
    of values. ``kept_over``: micro-batches for which a weight is converted to float8 once; the result is
    their mean. ``apart``: with one scale, another pass than the product adds a weight's gradient."""
    whole = scaling == "tensor"
    apart = apart and whole
    lines, squares = ("tensor", "tensor") if whole else ("lines", "squares")
    new = operand_bytes(lines, value_bytes, 1, searched=whole)
    both = operand_bytes(lines, value_bytes, 2, searched=whole)
    known = operand_bytes(lines, value_bytes, 1, searched=False)
    of_weight = operand_bytes(squares, value_bytes, 1, searched=whole)
    again = operand_bytes(squares, value_bytes, 1, searched=False)
    added = weight * (value_bytes + 2 * sum_bytes) if apart else 0.0
    of_x, casts = (2, 2) if whole else (1, 1)
    in_forward, in_backward = float(casts), 1.0
    if kept_over > 1:  # The first micro-batch's forward converts: one search, one read for both forms.
        of_weight = operand_bytes(squares, value_bytes, 2, searched=whole) / kept_over
        again, in_forward, in_backward = 0.0, casts / kept_over, 0.0
    return (
        QuantizationTraffic(new * x + of_weight * weight, of_x + in_forward),
        QuantizationTraffic(both * grad + again * weight, (2 if whole else 1) + in_backward),
        QuantizationTraffic(known * x + added, 2 if apart else 1),
    )


@dataclass(frozen=True)
class QuantizationLibrary:
    """How a library that keeps converted inputs converts them."""

    quantization: Quantization
    value_bytes: int
    known_scales: bool
    """Whether scales of whole matrices follow from earlier steps."""
    any_order: bool
    """Whether products of whole matrices need no transposed form."""
    gather_ranks: Number = 1.0
    """Ranks that gather what each has converted a part of; 1: each converts all of it."""

    @property
    def norms_convert(self) -> bool:
        """Whether a norm writes float8, which needs its scale before."""
        return self.known_scales and self.quantization == "tensor"

    @property
    def num_forms(self) -> int:
        """Forms of a matrix that two products need."""
        return 1 if self.quantization == "tensor" and self.any_order else 2

    def converted(self, values: Number, num_forms: int) -> QuantizationTraffic:
        """Return the traffic of a conversion."""
        kind = "lines" if self.quantization == "blocks" else self.quantization
        searched = self.quantization == "nvfp4" or (self.quantization == "tensor" and not self.known_scales)
        each = operand_bytes(kind, self.value_bytes, num_forms, searched=searched)
        return QuantizationTraffic(each * values, 2 if searched else 1)

    def gathered(self, values: Number) -> QuantizationTraffic:
        """Return the traffic of a conversion before ranks gather the matrix."""
        num_forms = 1 if self.quantization == "tensor" else 2
        return self.converted(values / self.gather_ranks, num_forms)

    def transposed(self, values: Number) -> QuantizationTraffic:
        """Return the traffic of the transposed form of a gathered matrix."""
        if self.quantization != "tensor" or self.any_order:
            return QuantizationTraffic(0.0, 0.0)
        return QuantizationTraffic(2.0 * values, 1)


def library_traffic(
    library: QuantizationLibrary,
    x: Number,
    grad: Number,
    weight: Number,
    added: float,
    kept_over: int,
    gathers: Gathered | None = None,
) -> tuple[QuantizationTraffic, QuantizationTraffic, QuantizationTraffic]:
    """Return the traffic of forward, input gradient and weight gradient. ``x``, ``grad``, ``weight``: numbers
    of values. ``added``: bytes that another pass than the product moves for each value of the weight to add
    its gradient. ``kept_over``: as for `float8_traffic`. ``gathers``: the matrix that ranks gather."""
    forward, inputs = (library.converted(each, library.num_forms) for each in (x, grad))
    weights = QuantizationTraffic(added * weight, 1 if added else 0)
    if gathers == "x":
        forward = QuantizationTraffic(0.0, 0.0) if library.norms_convert else library.gathered(x)
        weights = weights.plus(library.transposed(x))
    elif gathers == "grad":
        among = library.gathered(grad).plus(library.transposed(grad))
        shared = np.asarray(library.gather_ranks) > 1
        inputs = QuantizationTraffic(*(np.where(shared, *both) for both in zip(among, inputs, strict=True)))
    once = library.converted(weight, library.num_forms)
    return forward.plus(once.times(1 / kept_over)), inputs, weights
