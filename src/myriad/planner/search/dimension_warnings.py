"""Dimensions of a model that cost speed in a layout, each with the nearest value that does not.

NVIDIA's guide "Matrix Multiplication Background" (section 2.2) asks for widths that are multiples of 16
bytes: 8 values of 16 bits, 16 of float8, 32 of NVFP4.

    16 bits    other widths are less efficient, and before cuBLAS 11 left tensor cores unused
    float8     cuBLASLt multiplies no other widths (cuBLAS, cublasLtMatmul), nor does torch._scaled_mm
    heads      scores without a flash kernel leave tensor cores in batched products, as measured on A100 and
               V100 (`Accelerator.unaligned_flops_per_second`): the one of these costs that is predicted
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from myriad.model.product_widths import ProductWidth, product_widths
from myriad.planner.cluster_config import Cluster
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.cost.operator_costs import ALIGNED_BYTES
from myriad.planner.workload import Workload

__all__ = ["DimensionWarning", "dimension_warnings"]

_GUIDE = "NVIDIA, Matrix Multiplication Background, section 2.2"


@dataclass(frozen=True)
class DimensionWarning:
    """A width on a rank that is no multiple of what its products need."""

    width: str
    """Keys of the model and of the layout that make the width."""
    size: int
    """The width, in values."""
    multiple: int
    """What it is no multiple of, in values."""
    cost: str
    """Effect on the speed, as a clause with its source."""
    key: str
    """The key to change."""
    nearest: int
    """The value of that key nearest to its own with which the width is a multiple."""
    seconds: float | None = None
    """Seconds of an iteration that it costs, as predicted; ``None``: the prediction does not count it."""

    @property
    def line(self) -> str:
        """The warning as one line."""
        return (
            f"warning: {self.width} = {self.size} is no multiple of {self.multiple} (16 bytes): {self.cost}; "
            f"nearest: {self.key} = {self.nearest}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``--json``."""
        return asdict(self) | {"line": self.line}


def dimension_warnings(
    workload: Workload, cluster: Cluster, seconds: Callable[[Costs], float]
) -> list[DimensionWarning]:
    """Return the warnings about a model in a layout; none on CPU cores, and in 32 bits. ``seconds`` returns
    those of an iteration."""
    if cluster.on_cpu or workload.value_bytes != 2:
        return []
    return [*_head_warnings(workload, cluster, seconds), *_width_warnings(workload, cluster)]


def _head_warnings(
    workload: Workload, cluster: Cluster, seconds: Callable[[Costs], float]
) -> Iterator[DimensionWarning]:
    width, multiple = workload.model.head_width, ALIGNED_BYTES // workload.value_bytes
    if workload.profile.attention != "plain" or width % multiple == 0:
        return
    latent = workload.model.latent is not None
    key = "model.qk_nope_head_dim + model.qk_rope_head_dim" if latent else "model.head_dim"
    nearest = ProductWidth(key, key, width).nearest(multiple)
    cost, lost = f"scores leave tensor cores without a flash kernel ({_GUIDE}); the prediction omits it", None
    if cluster.accelerator.unaligned_flops_per_second is not None:
        aligned = {"unaligned_flops_per_second": None}
        accelerator = cluster.accelerator.model_copy(update=aligned)
        changed = cluster.model_copy(update={"accelerator": accelerator})
        found = seconds(Costs(workload, cluster))
        lost = found - seconds(Costs(workload, changed))
        cost = (
            f"scores leave tensor cores without a flash kernel, {lost / found:.1%} of the predicted iteration"
        )
    yield DimensionWarning(key, width, multiple, cost, key, nearest, lost)


def _width_warnings(workload: Workload, cluster: Cluster) -> Iterator[DimensionWarning]:
    model, layout = workload.model, workload.layout
    plain = ALIGNED_BYTES // workload.value_bytes
    inefficient = f"tensor cores are less efficient ({_GUIDE}); the prediction omits it"
    multiple = _quantized_multiple(workload, cluster) or plain
    cost = inefficient if multiple == plain else "cuBLASLt multiplies no such widths"
    for one in product_widths(model, layout.tp, layout.expert_tp):
        if one.size % multiple:
            yield DimensionWarning(one.name, one.size, multiple, cost, one.key, one.nearest(multiple))
    rows = model.vocabulary_rows(layout.tp)  # The head is in 16 bits with any quantization.
    if rows % plain:
        name = "padded model.vocabulary / layout.tp"
        yield DimensionWarning(name, rows, plain, inefficient, "model.vocabulary_multiple", plain * layout.tp)


def _quantized_multiple(workload: Workload, cluster: Cluster) -> int | None:
    """Return the number of values that make 16 bytes in the format of the products' inputs; ``None``: it is
    that of the other operators."""
    quantization = workload.profile.quantization
    if cluster.accelerator.quantized_peak(quantization) is None:
        return None
    return 2 * ALIGNED_BYTES if quantization == "nvfp4" else ALIGNED_BYTES
