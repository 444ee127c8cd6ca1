"""The values of a job: its sections, every key, and quantities derived from them.

`myriad.job` adds reading, checking and changing a job. A section that belongs to one room is declared in that
room's ``config.py``; the others are declared here.
"""

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from myriad.alerts.config import AlertsConfig
from myriad.checkpoint.config import CheckpointConfig
from myriad.comm.config import CommConfig
from myriad.comm.layout import Layout
from myriad.config import Config
from myriad.data.config import DataConfig
from myriad.evaluation.config import EvalConfig
from myriad.job.phase_values import BatchRamp, Phase, TrainConfig
from myriad.kernels.document_shares import DocumentSharing
from myriad.model.config import ModelConfig
from myriad.optim.config import LossScaleConfig, OptimizerConfig, float8_scaling
from myriad.program.config import OverlapConfig
from myriad.telemetry.config import TelemetryConfig

if TYPE_CHECKING:
    from myriad.planner import Workload
    from myriad.planner.workload import NewtonSchulz
    from myriad.program.device_needs import DeviceJob

__all__ = [
    "SPIKE_STEPS_AFTER",
    "SPIKE_STEPS_BEFORE",
    "BatchRamp",
    "JobValues",
    "Phase",
    "ResilienceConfig",
    "RunConfig",
    "TrainConfig",
    "device_job_of",
    "newton_schulz_of",
    "work_of",
]


SPIKE_STEPS_BEFORE, SPIKE_STEPS_AFTER = 100, 100
"""Steps that `resilience.on_spike = "rollback"` goes back before a spike, and batches that it skips after it.
PaLM (arXiv 2204.02311, section 5.1) went back 100 steps and skipped 200 to 500 batches."""


class ResilienceConfig(Config):
    """What starts the nodes, and how faults are handled."""

    engine: Literal["local", "join", "slurm", "ray", "kubernetes"] = "local"
    """What starts the nodes of the run. local: this machine. join: `myriad join`, which you start on each
    node. slurm, ray: those managers. kubernetes: the pods of `myriad manifests`."""
    nodes: int = Field(1, ge=1)
    """Nodes that the ranks are spread over, the same number of ranks on each."""
    spares: int = Field(0, ge=0)
    """Additional nodes that wait to replace a lost node."""
    listen: str = "127.0.0.1"
    """Address or HOST[:PORT] on which the driver listens. The default, loopback, accepts only this
    machine."""
    encrypt: bool = False
    """Encrypt the connections between the driver and the nodes, and copies of snapshots between nodes, with
    TLS 1.3: for networks whose hosts may not read weights. Copies take more processor time. Connections are
    authenticated either way; the store and the ranks' own connections are not encrypted."""
    journal: str = "file"
    """Where the driver records its decisions. file: RUN/journal.jsonl. redis[s]://[USER@]HOST:PORT[/DB]:
    there as well, with a lease that lets a standby driver take over (`myriad train RUN --standby`). The
    password is in the environment variable MYRIAD_REDIS_PASSWORD."""
    timeout_scale: float = Field(1.0, gt=0)
    """Factor on every timeout of fault detection; 2 waits twice as long before a silent rank or node counts
    as lost. Increase it on machines that are slow or shared."""
    restarts: int = Field(3, ge=0)
    """Restarts allowed for one fault without a completed step in between; then the run stops. 0: stop at
    the first fault."""
    verify_every: int = Field(10, ge=0)
    """Steps between bitwise comparisons of the state that data-parallel replicas share; 0: never."""
    on_nan: Literal["replay", "stop", "skip"] = "replay"
    """Response to a non-finite loss or gradient. replay: repeat the step, then on another node; stop the
    run if it is non-finite everywhere. skip: the same, but continue without that batch. stop: stop at
    once."""
    on_spike: Literal["report", "skip", "rollback"] = "report"
    """Response to a loss or gradient norm far above recent steps. report: only write an event. skip: repeat
    the step, and leave the batch out if it spikes again. rollback: the same, but return to a checkpoint
    from 100 steps before and skip the batches up to 100 steps after the spike."""
    on_slow: Literal["move", "swap", "report"] = "move"
    """Response to a rank or node that computes 1.3 times as long as its peers. move: give its replica fewer
    micro-batches, or its stage fewer layers, where that pays. swap: replace it by a spare node, or move
    without one. report: only write an event."""
    on_lost: Literal["fewer", "wait"] = "fewer"
    """Response to a lost node without a spare. fewer: continue with fewer data-parallel replicas and the
    same batches, if the layout allows it. wait: wait for a node. Under Slurm the job is requeued."""
    wait_seconds: float = Field(30.0, ge=0)
    """Seconds to wait for a lost node before the run continues with fewer replicas."""
    check_hours: float | None = Field(1.0, ge=0)
    """Hours between checks of matrix products, memory and collectives on training ranks. They run in gaps
    of the program, during checkpoints or validations, and take at most 0.1 % of the time. 0: only during
    checkpoints and validations; off: never."""
    doctor: Literal["off", "spares", "start"] = "spares"
    """Nodes that the doctor examines automatically. spares: waiting spares, and nodes suspected of a fault.
    start: also every node before the ranks start, which takes seconds. off: none."""


def _four_digits(value: object) -> object:
    """Accept 750 for "0750": an option without quotes is read as a number."""
    return f"0{value}" if str(value) in ("700", "750", "755") else value


class RunConfig(Config):
    """Access to the run's folder."""

    mode: Annotated[Literal["0700", "0750", "0755"], BeforeValidator(_four_digits)] = "0700"
    """Who may read the run's folder and what the run writes: weights, logs, traces. 0700: only the user who
    starts it. 0750: the folder's group, too. 0755: all users of the machines. The run's secret stays private.
    Changing it when a run is resumed changes its existing files."""


class JobValues(Config):
    """Every value that a run depends on."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run folder under runs/."""
    model: ModelConfig = ModelConfig()
    """The transformer; in a job file also the name of a recipe: model = "gpt2-124m"."""
    data: DataConfig = DataConfig()
    """Training text: corpora, mixture, order of samples."""
    layout: Layout = Layout()
    """The parallel layout: how an iteration is divided among ranks."""
    overlap: OverlapConfig = OverlapConfig()
    """Overlap of communication with computation."""
    comm: CommConfig = CommConfig()
    """Communication: rendezvous, collectives, compression."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer and the learning-rate schedule."""
    loss_scale: LossScaleConfig = LossScaleConfig()
    """Loss scaling for float16."""
    train: TrainConfig = TrainConfig()
    """Length, batch size, precision and device of the training."""
    phases: tuple[Phase, ...] = ()
    """Changes of the job at given steps, in order: a list of tables, each with at_step or at_tokens, a name,
    and new values of keys, such as data.mixture, model.sequence, train.global_batch and
    optimizer.learning_rate (`[[phases]]` in a job file)."""
    eval: EvalConfig = EvalConfig()
    """Scores of the model on tasks, during training."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and snapshots: how often, where, how many."""
    resilience: ResilienceConfig = ResilienceConfig()
    """What starts the nodes, and how faults are handled."""
    alerts: AlertsConfig = AlertsConfig()
    """Which events and log lines raise an alarm, and where alarms are sent."""
    run: RunConfig = RunConfig()
    """Access to the run's folder."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """Spans and metrics: what ranks record, and where it goes."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of each data-parallel replica in one iteration."""
        return self.layout.shares_of(self.train.global_batch)

    @property
    def targets(self) -> int:
        """Tokens per iteration; the loss is the mean over them."""
        return self.train.global_batch * self.model.sequence

    @property
    def document_sharing(self) -> DocumentSharing:
        """How the ranks of a ring share packed documents."""
        return DocumentSharing(self.model.window, self.layout.whole_documents)

    @property
    def compares_replicas(self) -> bool:
        """Whether data-parallel replicas compare digests of the state that they share."""
        layout = self.layout
        share = layout.num_shard_groups > 1 or (layout.num_holders > 1 and layout.zero < 3)
        return self.resilience.verify_every > 0 and share

    @property
    def generates(self) -> bool:
        """Whether texts may be generated between steps, with caches of keys and values: `eval.tasks` may ask
        for it, but float8 has no caches."""
        return bool(self.eval.tasks) and float8_scaling(self.train.precision) is None

    @property
    def snapshot_holders(self) -> int:
        """Nodes whose snapshots may hold each part of the state, of those whose ranks hold the same."""
        wanted = 1 if self.comm.sync_every > 1 else self.checkpoint.holders
        return self.layout.num_snapshot_holders(wanted, self.checkpoint.copies_every)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches per rank and iteration; with unequal shares, the largest number."""
        return max(self.shares)


def work_of(job: JobValues, value_bytes: int = 2) -> "Workload":
    """Return the planner's workload of one iteration, without snapshots; ``value_bytes`` is the size of an
    activation value."""
    from myriad.planner import Workload

    return Workload(
        job.model,
        job.layout,
        job.train.global_batch,
        job.overlap,
        comm=job.comm,
        optimizer=job.optimizer.name,
        newton_schulz=newton_schulz_of(job),
        qk_clip=job.optimizer.qk_clip is not None,
        ema_every=job.optimizer.ema_steps,
        copies_gradients=job.telemetry.noise_scale and job.layout.dp == 1,
        generates=job.generates,
        value_bytes=value_bytes,
    )


def newton_schulz_of(job: JobValues) -> "NewtonSchulz":
    """Return how Muon orthogonalizes, as the planner sees it."""
    from myriad.planner.workload import NewtonSchulz

    optimizer, precision = job.optimizer, job.train.precision
    same = optimizer.muon_precision == "auto" and precision != "float16"
    value_bytes = None if same else 2 if optimizer.muon_precision == "bfloat16" else 4
    return NewtonSchulz(optimizer.muon_iterations, value_bytes)


def device_job_of(job: JobValues) -> "DeviceJob":
    """Return what the device checks need to know about a job. The number of chunks per stage is not known
    before the ranks partition the model."""
    from myriad.program.device_needs import DeviceJob

    return DeviceJob(
        job.layout,
        job.overlap,
        job.comm,
        job.shares,
        job.model.shares_embedding,
        orthogonalizes=job.optimizer.orthogonalizes,
    )
