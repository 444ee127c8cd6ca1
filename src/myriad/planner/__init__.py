"""The planner: seconds and bytes of a layout on a cluster, without running it.

    plan        find_plans(LayoutProblem(model, batch, cluster)).plans[0]       search, memory, simulator
    simulate    simulate(Costs(workload, cluster)).seconds                      one layout, action by action
    memory      memory_of_ranks(workload)                                       peak bytes of pipeline ranks
    validate    predict_table(read_table("megascale_table2.csv", recipes))     against published runs

Names are imported on first use, so that a command loads only the modules that it needs.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from myriad.planner.cluster_config import Accelerator, Calibration, Cluster
    from myriad.planner.cluster_scaling import scale_cluster, usual_server
    from myriad.planner.cost.layout_costs import Costs
    from myriad.planner.fabric.cluster_fabric import builder_of, shape_of
    from myriad.planner.fabric.fabric_forecast import FabricDistribution
    from myriad.planner.fabric.nccl_tuning import EnvAdvice, tune, tuning_evidence
    from myriad.planner.frameworks import Framework, read_framework
    from myriad.planner.memory.closed_form_memory import fits_probability
    from myriad.planner.memory.rank_memory import memory_of_ranks
    from myriad.planner.memory.recompute_budget import layout_within
    from myriad.planner.search.dimension_warnings import DimensionWarning, dimension_warnings
    from myriad.planner.search.layout_problem import LayoutCandidate, LayoutProblem
    from myriad.planner.search.plan_ranking import SimulatedPlan
    from myriad.planner.search.planning import (
        PlanResult,
        best_plan,
        describe_layout,
        fewest_accelerators,
        find_plans,
    )
    from myriad.planner.simulation.iteration_summary import IterationSummary, summarize_iteration
    from myriad.planner.simulation.simulation_cache import SimulationCache
    from myriad.planner.simulation.simulator import Prediction, simulate
    from myriad.planner.validation.fitted_cluster import (
        ClusterFactors,
        FittedCluster,
        fit_cluster,
        scaled_cluster,
        steps_of,
    )
    from myriad.planner.validation.framework_errors import FrameworkErrors, framework_errors
    from myriad.planner.validation.layout_sweeps import (
        LayoutSweep,
        SweepSummary,
        layout_sweeps,
        summarize_sweeps,
    )
    from myriad.planner.validation.log_rows import log_cells
    from myriad.planner.validation.memory_errors import (
        MemoryErrors,
        PredictedMemory,
        memory_errors,
        predict_memory,
    )
    from myriad.planner.validation.prediction_errors import (
        ErrorScore,
        SystemRatio,
        TableResult,
        interval,
        intervals,
        predict_table,
        ratios,
    )
    from myriad.planner.validation.prediction_interval import describe_interval
    from myriad.planner.validation.published_rows import PublishedRow
    from myriad.planner.validation.published_tables import (
        CurvePoint,
        PublishedTable,
        TableOptions,
        builtin_tables,
        parse_table,
        read_table,
    )
    from myriad.planner.workload import AttendedShares, FrameworkProfile, Workload

__all__ = [
    "Accelerator",
    "AttendedShares",
    "Calibration",
    "Cluster",
    "ClusterFactors",
    "Costs",
    "CurvePoint",
    "DimensionWarning",
    "EnvAdvice",
    "ErrorScore",
    "FabricDistribution",
    "FittedCluster",
    "Framework",
    "FrameworkErrors",
    "FrameworkProfile",
    "IterationSummary",
    "LayoutCandidate",
    "LayoutProblem",
    "LayoutSweep",
    "MemoryErrors",
    "PlanResult",
    "PredictedMemory",
    "Prediction",
    "PublishedRow",
    "PublishedTable",
    "SimulatedPlan",
    "SimulationCache",
    "SweepSummary",
    "SystemRatio",
    "TableOptions",
    "TableResult",
    "Workload",
    "best_plan",
    "builder_of",
    "builtin_tables",
    "describe_interval",
    "describe_layout",
    "dimension_warnings",
    "fewest_accelerators",
    "find_plans",
    "fit_cluster",
    "fits_probability",
    "framework_errors",
    "interval",
    "intervals",
    "layout_sweeps",
    "layout_within",
    "log_cells",
    "memory_errors",
    "memory_of_ranks",
    "parse_table",
    "predict_memory",
    "predict_table",
    "ratios",
    "read_framework",
    "read_table",
    "scale_cluster",
    "scaled_cluster",
    "shape_of",
    "simulate",
    "steps_of",
    "summarize_iteration",
    "summarize_sweeps",
    "tune",
    "tuning_evidence",
    "usual_server",
]

_MODULE_OF = {
    "Accelerator": "cluster_config",
    "AttendedShares": "workload",
    "Calibration": "cluster_config",
    "Cluster": "cluster_config",
    "ClusterFactors": "validation.fitted_cluster",
    "Costs": "cost.layout_costs",
    "CurvePoint": "validation.published_tables",
    "DimensionWarning": "search.dimension_warnings",
    "EnvAdvice": "fabric.nccl_tuning",
    "ErrorScore": "validation.prediction_errors",
    "FabricDistribution": "fabric.fabric_forecast",
    "FittedCluster": "validation.fitted_cluster",
    "Framework": "frameworks",
    "FrameworkErrors": "validation.framework_errors",
    "FrameworkProfile": "workload",
    "IterationSummary": "simulation.iteration_summary",
    "LayoutCandidate": "search.layout_problem",
    "LayoutProblem": "search.layout_problem",
    "LayoutSweep": "validation.layout_sweeps",
    "MemoryErrors": "validation.memory_errors",
    "PlanResult": "search.planning",
    "PredictedMemory": "validation.memory_errors",
    "Prediction": "simulation.simulator",
    "PublishedRow": "validation.published_rows",
    "PublishedTable": "validation.published_tables",
    "SimulatedPlan": "search.plan_ranking",
    "SimulationCache": "simulation.simulation_cache",
    "SweepSummary": "validation.layout_sweeps",
    "SystemRatio": "validation.prediction_errors",
    "TableOptions": "validation.published_tables",
    "TableResult": "validation.prediction_errors",
    "Workload": "workload",
    "best_plan": "search.planning",
    "builder_of": "fabric.cluster_fabric",
    "builtin_tables": "validation.published_tables",
    "describe_interval": "validation.prediction_interval",
    "describe_layout": "search.planning",
    "dimension_warnings": "search.dimension_warnings",
    "fewest_accelerators": "search.planning",
    "find_plans": "search.planning",
    "fit_cluster": "validation.fitted_cluster",
    "fits_probability": "memory.closed_form_memory",
    "framework_errors": "validation.framework_errors",
    "interval": "validation.prediction_errors",
    "intervals": "validation.prediction_errors",
    "layout_sweeps": "validation.layout_sweeps",
    "layout_within": "memory.recompute_budget",
    "log_cells": "validation.log_rows",
    "memory_errors": "validation.memory_errors",
    "memory_of_ranks": "memory.rank_memory",
    "parse_table": "validation.published_tables",
    "predict_memory": "validation.memory_errors",
    "predict_table": "validation.prediction_errors",
    "ratios": "validation.prediction_errors",
    "read_framework": "frameworks",
    "read_table": "validation.published_tables",
    "scale_cluster": "cluster_scaling",
    "scaled_cluster": "validation.fitted_cluster",
    "shape_of": "fabric.cluster_fabric",
    "simulate": "simulation.simulator",
    "steps_of": "validation.fitted_cluster",
    "summarize_iteration": "simulation.iteration_summary",
    "summarize_sweeps": "validation.layout_sweeps",
    "tune": "fabric.nccl_tuning",
    "tuning_evidence": "fabric.nccl_tuning",
    "usual_server": "cluster_scaling",
}


def __getattr__(name: str) -> object:
    """Import a public name on first use. Raises `AttributeError`."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
