"""If these fail, a plan's seconds or memory are not those of the whole program that its ranks would run."""

from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planned import candidates, problem_of

from myriad.comm.layout import Layout
from myriad.model.config import ModelConfig
from myriad.planner.cost.layout_costs import Costs
from myriad.planner.memory.rank_memory import memory_of_ranks
from myriad.planner.search.layout_problem import LayoutCandidate
from myriad.planner.simulation import simulation_cache
from myriad.planner.simulation.compiled_simulator import CompiledProgram
from myriad.planner.simulation.simulation_cache import SimulationCache
from myriad.planner.simulation.simulator import iteration_program, simulate
from myriad.planner.simulation.steady_state import steady_states
from myriad.planner.workload import Workload
from myriad.program import build
from myriad.program.config import OverlapConfig
from myriad.program.schedules import IN_A_V, SCHEDULES
from myriad.recipes.cluster import load_cluster

SOME = settings(derandomize=True, max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def deep_works(draw: st.DrawFn) -> Workload:
    """Of many micro-batches, under any schedule."""
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    pp = draw(st.sampled_from([2, 3, 4]))
    several = {"interleaved": draw(st.sampled_from([2, 3]))} | dict.fromkeys(IN_A_V, 2)
    v = several.get(name, 1)
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    layout = Layout(
        dp=2,
        pp=pp,
        virtual_stages=v,
        schedule=name,
        zero=zero,
        reduce=draw(st.sampled_from(["last", "each"])) if zero > 1 else "last",
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        offload_activations=draw(st.sampled_from([0.0, 1.0])),
        offload_optimizer=draw(st.booleans()),
        offload_optimizer_ratio=draw(st.sampled_from([0.5, 1.0])),
    )
    overlap = OverlapConfig(
        pipeline=draw(st.booleans()),
        data=draw(st.booleans()),
        optimizer=layout.offload_optimizer or draw(st.booleans()),
        offload_ahead=draw(st.sampled_from([0, 1, 2])),
        receive_ahead=draw(st.sampled_from([1, 2, 4])),
    )
    blocks = pp * v * draw(st.sampled_from([1, 2]))
    model = ModelConfig(layers=blocks, hidden=256, heads=8, sequence=128, vocabulary=8192)
    batch, optimizer = 2 * draw(st.integers(25, 45)), draw(st.sampled_from(["adamw", "muon"]))
    return Workload(model, layout, batch, overlap=overlap, optimizer=optimizer)


@given(candidates())
@SOME
def test_a_straight_line_takes_the_simulators_seconds_to_the_last_bit(candidate: LayoutCandidate) -> None:
    problem = problem_of()
    costs = Costs(candidate.workload(problem), problem.cluster)
    simulated = simulate(costs, spans=False)
    line = CompiledProgram(simulated.program)
    assert line.seconds(line.costs_of(costs)) == simulated.seconds


@given(deep_works(), st.integers(0, 2**32 - 1))
@SOME
def test_a_straight_line_is_right_whatever_things_cost(workload: Workload, seed: int) -> None:
    """Messages, gathers and reductions that take far longer than computes, or no time."""
    costs = Costs(workload, load_cluster("megascale-256xa100"))
    chosen, names = np.random.default_rng(seed), ("forward", "backward_input", "backward_weight")
    for stage in costs.stages:
        for name in (*names, "gather", "reduce", "update", "copy_activations", "copy_state"):
            object.__setattr__(stage, name, float(chosen.exponential() * chosen.integers(0, 4)))
    costs.__dict__["message"] = float(chosen.exponential())
    line = CompiledProgram(iteration_program(costs, 10))
    simulated = simulate(costs, program=line.program, spans=False).seconds
    assert line.seconds(line.costs_of(costs)) == simulated


@pytest.mark.slow
@given(deep_works())
@SOME
def test_the_memory_of_the_whole_program_follows_from_the_steady_part(workload: Workload) -> None:
    costs = Costs(workload, load_cluster("megascale-256xa100"))
    whole = memory_of_ranks(workload, iteration_program(costs, workload.num_micro_batches))
    assert SimulationCache().memory(costs) == whole


@pytest.mark.parametrize(
    ("name", "v"), [("1f1b", 1), ("eager-1f1b", 1), ("interleaved", 3), ("zero-bubble", 1)]
)
@pytest.mark.parametrize("batches", [1000, 1003])
def test_a_long_iteration_is_known_from_short_programs(name: str, v: int, batches: int) -> None:
    """Else plans of hundreds of micro-batches take minutes."""
    layout = Layout(dp=2, pp=4, virtual_stages=v, schedule=name, zero=1)
    model = ModelConfig(layers=12, hidden=256, heads=8, sequence=128, vocabulary=8192)
    costs = Costs(Workload(model, layout, 2 * batches), load_cluster("megascale-256xa100"))
    with patch.object(simulation_cache, "iteration_program", wraps=iteration_program) as written:
        simulations = SimulationCache()
        assert simulations.seconds(costs) > 0 and len(simulations.memory(costs)) == 4
    assert written.call_args_list and all(call.args[1] < 100 for call in written.call_args_list)


def test_a_program_is_proved_when_its_memory_is_counted_and_not_when_it_is_only_simulated() -> None:
    layout = Layout(dp=2, pp=4, schedule="1f1b", zero=1)
    model = ModelConfig(layers=12, hidden=256, heads=8, sequence=128, vocabulary=8192)
    costs = Costs(Workload(model, layout, 16), load_cluster("megascale-256xa100"))
    with patch.object(build, "check", wraps=build.check) as proof:
        simulations = SimulationCache()
        simulations.seconds(costs)
        assert not proof.called
        simulations.memory(costs)
        proved = proof.call_count
        assert proved > 0
        simulations.memory(costs)
        assert proof.call_count == proved


def test_gpipe_holds_all_micro_batches() -> None:
    """Its two short programs look alike at both ends, and yet nothing in them repeats."""
    layout = Layout(dp=1, pp=4, schedule="gpipe")
    model = ModelConfig(layers=4, hidden=256, heads=8, sequence=128, vocabulary=8192)
    costs = Costs(Workload(model, layout, 60), load_cluster("megascale-256xa100"))
    assert steady_states(iteration_program(costs, 8), iteration_program(costs, 12)) is None
