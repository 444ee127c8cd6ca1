"""Our search beside Calculon's (github.com/calculon-ai/calculon): the same model, batch and number of GPUs.

    python benchmarks/planner/plan_search.py --calculon FOLDER [--gpus 12288] [--seconds 120]
    python benchmarks/planner/plan_search.py --plans 3

The second form prints the processor time of whole plans instead, with reading the job, explanation and
output: of each command of `PLANS`, run so many times in a process of its own, the least.

FOLDER is a checkout of Calculon with its own requirements (psutil, pandas) on the path. Calculon searches in
processes, for hours at this size, and reports at the end: so it is given one process and a limit of seconds,
over its own list of searches in a random order, and its rate is what it did in that time. Seconds are of one
core (`process_time`), so that what else runs on the machine does not count. All its layouts are counted by
its own dry run. Each tool's times are of its own model: they cannot be compared, its rate can.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from myriad.forecasts.planned_job import problem_of
from myriad.job import load_job_to_plan
from myriad.planner import scale_cluster
from myriad.planner.search.layout_problem import LayoutProblem
from myriad.planner.search.layout_search import search_layouts
from myriad.planner.search.plan_ranking import simulate_candidates
from myriad.planner.search.planning import describe_layout
from myriad.recipes.cluster import load_cluster

INSIDE = """
import json, logging, random, sys, time
import calculon
from calculon.llm import *
from calculon.llm.optimal_execution import OptimalExecution as Search
from calculon.util import pick
model, system, gpus, batch, limit = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
app, syst = Llm.Application(calculon.io.read_json_file(model)), System(calculon.io.read_json_file(system))
logging.disable(logging.CRITICAL)
params = []
for tp in Llm.get_all_tensor_parallelisms(gpus, app.hidden, app.attn_heads):
  for pp in Llm.get_all_pipeline_parallelisms(gpus, tp, app.num_blocks):
    dp = Llm.get_data_parallelism(gpus, tp, pp)
    for ppint in Llm.get_valid_pipeline_interleavings(app.num_blocks, pp):
      size = Search.get_batch_size(dp, batch)
      if size is None:
        continue
      for recompute in ["full", "attn_only", "none"]:
        for sharding in pick(dp > 1, [True, False], [False]):
          for kind in ["ar", "p2p_rs_ag", "rs_ag"]:
            params.append((gpus, batch, "float16", app, syst, tp, pp, dp, ppint, size, recompute, sharding,
                           kind, [True], False, True, True))
total = sum(Search.search(True, 1, False, *one)[1] for one in params)
random.Random(1).shuffle(params)
tried, best, start = 0, [], time.process_time()
for one in params:
  if time.process_time() - start > limit:
    break
  found = Search.search(False, 1, False, *one)
  tried, best = tried + found[1], Search.update_list(best, found[0], 1)
seconds = time.process_time() - start
print(json.dumps({"total": total, "tried": tried, "seconds": seconds, "best": best[0][1] if best else None,
                  "batch_seconds": best[0][1]["batch_size"] / best[0][0] if best else None}))
"""


_EXPERTS = "megascale-moe-352b --model.recipe"
PLANS = (
    "megascale-175b-12288 --cluster megascale-12288xa100",
    "megascale-175b-12288 --cluster megascale-12288xa100 --gpus 64",
    "llama3-70b --cluster gb200-576xgb200 --gpus 144",
    "llama3-405b --cluster llama3-8192xh100",
    "megascale-moe-352b --cluster megascale-1440xh800",
    f"{_EXPERTS} qwen3-235b-a22b --train.global_batch 2880 --cluster megascale-1440xh800",
    f"{_EXPERTS} deepseek-v3 --train.global_batch 15360 --cluster deepseek-2048xh800",
    "llama3-8b-128k --cluster eos-3072xh100 --gpus 128",
    "llama3-405b-131k --cluster llama3-8192xh100",
)
"""Arguments of `myriad plan`: a dense model on many and on few accelerators, deep pipelines, offloading,
experts, and long sequences."""


def plan_seconds(words: str) -> float:
    """The processor time of one plan, in a process of its own on one thread."""
    command = [sys.executable, "-m", "myriad.cli.main", "plan", *words.split(), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    if code := os.waitstatus_to_exitcode(status):
        raise SystemExit(f"exit code {code}: {' '.join(command)}")
    return usage.ru_utime + usage.ru_stime


def print_plans(rounds: int) -> None:
    """A row for each of `PLANS`."""
    print("| `myriad plan` | CPU-seconds |\n|---|---|")
    for words in PLANS:
        print(f"| `{words}` | {min(plan_seconds(words) for _ in range(rounds)):.1f} |", flush=True)


def ours(problem: LayoutProblem) -> dict[str, Any]:
    """The search alone, then the first hundred by the simulator."""
    start = time.process_time()
    found = search_layouts(problem)
    searched = time.process_time() - start
    best = simulate_candidates(problem, found.best)[0]
    return {
        "total": found.num_layouts,
        "tried": found.num_layouts,
        "seconds": searched,
        "simulated_seconds": time.process_time() - start - searched,
        "best": describe_layout(best.candidate),
        "batch_seconds": best.seconds,
    }


def calculons(folder: Path, problem: LayoutProblem, seconds: int) -> dict[str, Any]:
    """In a process of its own, on one core."""
    model = problem.model
    described = {
        "hidden": model.hidden,
        "feedforward": model.ffn_width,
        "seq_size": model.sequence,
        "attn_heads": model.heads,
        "attn_size": model.head_width,
        "num_blocks": model.layers,
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(described, file)
        file.flush()
        words = [file.name, "systems/a100_80g.json", problem.cluster.world, problem.global_batch, seconds]
        command = [sys.executable, "-c", INSIDE, *map(str, words)]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["best"]:
        run = found["best"]
        found["best"] = (
            f"dp {run['data_par']} tp {run['tensor_par']} pp {run['pipeline_par']} x "
            f"{run['pipeline_interleaving']}, micro-batch {run['microbatch_size']}, recompute "
            f"{run['activation_recompute']}"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--calculon", type=Path)
    parser.add_argument("--gpus", type=int, default=12288)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--plans", type=int, metavar="ROUNDS")
    arguments = parser.parse_args()
    if arguments.plans is not None:
        print_plans(arguments.plans)
        return
    job = load_job_to_plan("megascale-175b-12288", ["model.block=serial", "model.window=off"])
    cluster = scale_cluster(load_cluster("megascale-12288xa100"), arguments.gpus)
    problem = problem_of(job, cluster)
    rows = {"Myriad": ours(problem)}
    if arguments.calculon is not None:
        rows["Calculon"] = calculons(arguments.calculon, problem, arguments.seconds)
    print(f"175B, batch {problem.global_batch}, {arguments.gpus} GPUs, one core\n")
    print(
        "| tool | layouts | judged | seconds | layouts/s | all would take | best found | in its own model |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for name, row in rows.items():
        rate = row["tried"] / row["seconds"]
        figures = f"{row['total']:,} | {row['tried']:,} | {row['seconds']:.1f} | {rate:,.0f}"
        best = "none yet | " if row["best"] is None else f"{row['best']} | {row['batch_seconds']:.2f} s"
        print(f"| {name} | {figures} | {told_seconds(row['total'] / rate)} | {best} |")
    print(f"\nand our first hundred simulated: {rows['Myriad']['simulated_seconds']:.1f} s")


def told_seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds < 3600 else f"{seconds / 3600:.1f} h"


if __name__ == "__main__":
    main()
