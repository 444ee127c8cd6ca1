"""What a job holds: its sections with every key, and what follows from them without a rule.

`myriad.job` adds what a job does: it is checked, changed for an attempt, read and written. Sections of one
room stand in that room's ``config.py``; those that no room below a job owns stand here.
"""

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from myriad.alerts.config import AlertsConfig
from myriad.checkpoint.config import CheckpointConfig
from myriad.comm.config import CommConfig
from myriad.comm.layout import Layout
from myriad.config import Config, Size
from myriad.data.config import DataConfig
from myriad.kernels.config import Kernels
from myriad.model.config import ModelConfig
from myriad.optim.config import LossScaleConfig, OptimizerConfig, Precision
from myriad.program.config import OverlapConfig
from myriad.telemetry.config import TelemetryConfig

if TYPE_CHECKING:
    from myriad.planner.work import Work
    from myriad.program.device_needs import DeviceJob

__all__ = [
    "SPIKE_STEPS_AFTER",
    "SPIKE_STEPS_BEFORE",
    "JobValues",
    "ResilienceConfig",
    "TrainConfig",
    "device_job_of",
    "work_of",
]


class TrainConfig(Config):
    """How long, how much at a time, on what."""

    steps: int = Field(100, ge=1)
    """Iterations of the whole run."""
    global_batch: int = Field(8, ge=1, le=2**24)
    """Sequences in one iteration, over all ranks and micro-batches."""
    seed: int = Field(1, ge=0)
    """Seed of initial weights, sample order and dropout."""
    precision: Precision = "auto"
    """float32, bfloat16, float16 (with a dynamic loss scale: see loss_scale), or auto: bfloat16 where the
    device multiplies it natively, float16 on GPUs that multiply only that (V100). float8: the blocks'
    products in 8 bits with a scale for each tensor, float8-blocks with one for each 128 neighbours; emulated
    on a CPU, refused on a GPU that cannot."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is a GPU for each rank of the machine, else cpu. cuda: refused where there is
    not."""
    kernels: Kernels = "auto"
    """auto: Myriad's Triton kernels on a GPU, where triton is installed and the shape fits (`myriad doctor`
    says which); plain: the library's operators; triton: refuse where one of Triton's cannot run."""
    deterministic: bool = False
    """On a GPU: kernels that add in a fixed order, so that equal runs have equal bits; slower. Refused with
    train.kernels = plain. Off: what is quickest, equal within rounding. CPUs always add in a fixed order."""
    cuda_graphs: bool = False
    """On a GPU the operators of a forward or a backward are started at once, as a captured CUDA graph: for
    small models in small micro-batches. Needs tp, pp, cp, ep and virtual_stages of 1, layout.zero of 0 or 1,
    no layout.recompute = full, train.memory_budget off and overlap.optimizer_in_backward = false. Off: one by
    one."""
    memory_budget: Size | None = Field(None, ge=1)
    """What a rank may hold, as the planner counts it: where the layout would need more, as little more as
    makes it fit is computed again in the backward; off: no limit."""
    threads: int = Field(0, ge=0)
    """Threads of each rank on CPU; 0: the cores divided among the node's ranks."""
    validate_every: int = Field(0, ge=0)
    """Steps between validations on held-out text; the last step always has one. 0: only the last."""
    collect_garbage_every: int = Field(100, ge=0)
    """Steps between collections of Python's garbage, on all ranks after the same step; 0: whenever Python
    does it."""
    init_from: str | None = None
    """Weights to begin with: of a run, a checkpoint or a Hugging Face folder; off: from the seed."""
    sample_prompt: str | None = None
    """Text to continue at the end; off: no sample."""


SPIKE_STEPS_BEFORE, SPIKE_STEPS_AFTER = 100, 100
"""How far `resilience.on_spike = "rollback"` goes back, and to how far after the spike it skips batches: PaLM
(arXiv 2204.02311, section 5.1) went back 100 steps and skipped 200 to 500 batches."""


class ResilienceConfig(Config):
    """Where the run is started, and how faults are met."""

    engine: Literal["local", "join", "slurm", "ray", "kubernetes"] = "local"
    """What starts the nodes: this machine, all of them; nothing (`myriad join` on each of them does); Slurm;
    Ray; Kubernetes, as `myriad manifests` has it."""
    nodes: int = Field(1, ge=1)
    """On which the ranks are spread, equally many on each."""
    spares: int = Field(0, ge=0)
    """Nodes more than that, each ready to take the place of one that is lost."""
    listen: str = "127.0.0.1"
    """Address or host name of this machine (with :PORT, if it may not be any) at which other nodes reach it;
    the one given: none can."""
    journal: str = "file"
    """Where the driver writes what it decides: file, RUN/journal.jsonl alone; redis://HOST:PORT[/DB], there
    as well, with a lease by which one machine drives at a time: another can stand by (`myriad train RUN
    --standby`)."""
    patience: float = Field(1.0, gt=0)
    """Scales every deadline: 2 waits twice as long before a silent rank or node is given up."""
    restarts: int = Field(3, ge=0)
    """How often one fault may end the ranks, without a step done in between, before the run stops; 0: the
    first fault of any kind stops it."""
    verify_every: int = Field(10, ge=0)
    """Steps between comparisons of what data-parallel replicas are to hold alike, bit for bit; 0: none."""
    on_nan: Literal["replay", "stop", "skip"] = "replay"
    """When a loss or a gradient is not finite. replay: the step again, then on another node, and stop if it
    comes everywhere; skip: the same, but go on without that batch; stop: at once."""
    on_spike: Literal["tell", "skip", "rollback"] = "tell"
    """When the loss or the gradient norm is far above that of the steps before. tell: write the event alone;
    skip: compute the step again in place, and if it is a spike again, nothing moves in it; rollback: the
    same, but go back to a checkpoint from 100 steps before, and skip the batches from there to 100 steps
    after."""
    on_slow: Literal["move", "swap", "tell"] = "move"
    """When a rank or a node computes 1.3 times as long as others do: move gives its replica fewer
    micro-batches, or its stage fewer layers (where that pays), swap puts a spare node in its place (move
    where there is none), tell writes the event alone."""
    on_lost: Literal["fewer", "wait"] = "fewer"
    """When a node is lost and no spare is there: fewer goes on with fewer data-parallel replicas and the same
    batches until one is (where the layout allows it), wait waits. Under Slurm the job is requeued."""
    wait_seconds: float = Field(30.0, ge=0)
    """How long a lost node is waited for before the run goes on with fewer replicas."""
    check_hours: float | None = Field(1.0, ge=0)
    """Hours after which ranks that train check products, memory and collectives in a gap of the program, for
    at most 0.1 % of the time; a checkpoint or a validation is taken as the gap whenever there is time for
    one. 0: only then; off: never."""
    doctor: Literal["off", "spares", "start"] = "spares"
    """Which nodes `myriad doctor` looks at by itself. spares: those that stand by, while others train, and
    nodes that may be the cause of a fault; start: also each before the ranks start, which takes seconds; off:
    none."""


class JobValues(Config):
    """Everything a run depends on."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run folder under runs/."""
    model: ModelConfig = ModelConfig()
    """The transformer; in a job file also the name of a recipe: model = "gpt2-124m"."""
    data: DataConfig = DataConfig()
    """What it reads."""
    layout: Layout = Layout()
    """How it is spread over ranks."""
    overlap: OverlapConfig = OverlapConfig()
    """What communication hides behind."""
    comm: CommConfig = CommConfig()
    """How ranks meet, and what they send."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """How parameters move."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """What the loss is multiplied by in float16."""
    train: TrainConfig = TrainConfig()
    """How long, how much at a time, on what."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept."""
    resilience: ResilienceConfig = ResilienceConfig()
    """Where the run is started, and how faults are met."""
    alerts: AlertsConfig = AlertsConfig()
    """Which events and log lines raise an alarm, and where alarms are sent."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What ranks record of themselves."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of each data-parallel replica in one iteration."""
        return self.layout.shares_of(self.train.global_batch)

    @property
    def targets(self) -> int:
        """Tokens of one iteration, over which its loss is averaged."""
        return self.train.global_batch * self.model.sequence

    @property
    def compares_replicas(self) -> bool:
        """Some ranks are to hold the same, and tell what they hold."""
        return self.resilience.verify_every > 0 and self.layout.dp > 1 and self.layout.zero < 3

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one rank in one iteration; where shares differ, of one that has most."""
        return max(self.shares)


def work_of(job: JobValues, value_bytes: int = 2) -> "Work":
    """What an iteration of it is to the planner, without snapshots, computed in numbers of so many bytes."""
    from myriad.planner.work import Work

    return Work(
        job.model,
        job.layout,
        job.train.global_batch,
        job.overlap,
        comm=job.comm,
        optimizer=job.optimizer.name,
        value_bytes=value_bytes,
    )


def device_job_of(job: JobValues) -> "DeviceJob":
    """What its ranks would give GPUs; they know in how many chunks each stage is when they have cut the
    model."""
    from myriad.program.device_needs import DeviceJob

    return DeviceJob(job.layout, job.overlap, job.comm, job.shares, job.model.tied)
