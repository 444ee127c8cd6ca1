"""The whole job as one typed value: read, checked across its parts, saved with the run.

    job = load_job("tiny", ["layout.tp=2", "layout.pp=2"])     a path or the name of a recipe, then overrides
    job.check()                                                every cross-field rule; one line when it fails

No torch here: a job can be read, checked and explained on a machine that cannot run it.
"""

import difflib
import tomllib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from myriad.checkpoint.config import CheckpointConfig
from myriad.comm.attempt_layout import AttemptLayout
from myriad.comm.config import CommConfig
from myriad.comm.hierarchy import check_hierarchy
from myriad.comm.layout import Layout, check_layout, lacks_for_graphs
from myriad.comm.node_order import check_node_order
from myriad.comm.store_address import check_package, check_store
from myriad.config import Config, Size
from myriad.data.config import DataConfig
from myriad.errors import BadInputError
from myriad.kernels.choice import check_kernels
from myriad.kernels.config import Kernels
from myriad.model.config import ModelConfig
from myriad.optim.config import OptimizerConfig, Precision
from myriad.program.config import OverlapConfig
from myriad.program.partition import partition_layers
from myriad.recipes import read_recipe, recipe_names
from myriad.telemetry.config import TelemetryConfig, is_address
from myriad.toml_text import dump_toml, parse_override, set_dotted

if TYPE_CHECKING:
    from myriad.planner.work import Work

__all__ = [
    "CheckpointConfig",
    "Job",
    "ResilienceConfig",
    "TrainConfig",
    "dump_toml",
    "job_keys",
    "load_job",
    "parse_job",
    "recipe_names",
    "work_of",
]


class TrainConfig(Config):
    """How long, how much at a time, on what."""

    steps: int = Field(100, ge=1)
    """Iterations of the whole run."""
    global_batch: int = Field(8, ge=1)
    """Sequences in one iteration, over all ranks and micro-batches."""
    seed: int = Field(1, ge=0)
    """Of initial weights, sample order and dropout."""
    precision: Precision = "auto"
    """float32, bfloat16, or auto: bfloat16 where the device multiplies it natively. float8: the blocks'
    products in 8 bits with a scale for each tensor, float8-blocks with one for each 128 neighbours; emulated
    on a CPU, refused on a GPU that cannot."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    kernels: Kernels = "auto"
    """auto: Myriad's Triton kernels on a GPU, where triton is installed and the shape fits (`myriad doctor`
    says which); plain: the library's operators; triton: refuse where one of Triton's cannot run."""
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
    doctor: Literal["off", "spares", "start"] = "spares"
    """Which nodes `myriad doctor` looks at by itself. spares: those that stand by, while others train, and
    nodes that may be the cause of a fault; start: also each before the ranks start, which takes seconds; off:
    none."""


class Job(Config):
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
    train: TrainConfig = TrainConfig()
    """How long, how much at a time, on what."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """What is kept."""
    resilience: ResilienceConfig = ResilienceConfig()
    """Where the run is started, and how faults are met."""
    telemetry: TelemetryConfig = TelemetryConfig()
    """What ranks record of themselves."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Micro-batches of each data-parallel replica in one iteration."""
        return self.layout.shares_of(self.train.global_batch)

    @property
    def compares_replicas(self) -> bool:
        """Some ranks are to hold the same, and tell what they hold."""
        return self.resilience.verify_every > 0 and self.layout.dp > 1 and self.layout.zero < 3

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one rank in one iteration; where shares differ, of one that has most."""
        return max(self.shares)

    def in_attempt(self, changed: AttemptLayout) -> "Job":
        """As the ranks of an attempt compute it: the same batches in another layout, on as many nodes as hold
        its ranks. Raises `BadInputError` for what it cannot be."""
        layout, how = changed.of(self.layout), self.resilience
        update: dict[str, Any] = {"layout": layout}
        if layout.world != self.layout.world:
            each = self.layout.world // how.nodes
            whole = how.nodes == 1 or layout.world % each == 0
            _need(whole, "layout.dp", layout.dp, f"must fill nodes of {each} ranks")
            update["resilience"] = how.model_copy(update={"nodes": max(1, layout.world // each)})
            update["comm"] = self.comm.model_copy(update={"node_order": None})
        return self.model_copy(update=update).check()

    def check(self) -> "Job":
        """Every rule that spans fields. Raises `BadInputError`."""
        for rule in _RULES:
            rule(self)
        return self


def _need(condition: bool, key: str, value: object, allowed: str) -> None:
    if not condition:
        raise BadInputError(key, value, allowed)


def _check_layout(job: Job) -> None:
    check_layout(job.layout)


def _check_heads(job: Job) -> None:
    model, kv_heads, width = job.model, job.model.num_kv_heads, job.model.head_width
    allowed = f"must be divisible by model.heads = {model.heads}, or give model.head_dim"
    _need(
        model.head_dim is not None or model.hidden % model.heads == 0, "model.hidden", model.hidden, allowed
    )
    allowed = f"must be divisible by model.kv_heads = {kv_heads}"
    _need(model.heads % kv_heads == 0, "model.heads", model.heads, allowed)
    allowed = "must be even for rotary positions (off: hidden / heads)"
    _need(model.position != "rotary" or width % 2 == 0, "model.head_dim", width, allowed)


def _check_tensor_parallel(job: Job) -> None:
    model, tp, kv_heads = job.model, job.layout.tp, job.model.num_kv_heads
    divisors = ", ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0)
    allowed = f"must divide the key/value heads ({kv_heads}): one of {divisors}"
    _need(kv_heads % tp == 0, "layout.tp", tp, allowed)
    _need(model.ffn_width % tp == 0, "layout.tp", tp, f"must divide model.ffn_hidden = {model.ffn_width}")
    _need(model.sequence % tp == 0, "layout.tp", tp, f"must divide model.sequence = {model.sequence}")
    model.padded_vocabulary(tp)


def _check_stages(job: Job) -> None:
    layout, pieces = job.layout, job.model.layers + 2
    allowed = f"at most {pieces} stages for {job.model.layers} blocks, embedding and head"
    stages = layout.num_stages
    _need(stages <= pieces, "layout.pp x layout.virtual_stages", stages, allowed)


def _check_partition(job: Job) -> None:
    kinds = ("Embedding", *("Block" for _ in range(job.model.layers)), "Head")
    partition_layers(job.layout.partition, job.layout.num_stages, kinds, [1.0] * len(kinds))


def _check_batch(job: Job) -> None:
    shares = job.layout.shares_of(job.train.global_batch)
    alone = job.comm.sync_every > 1 and len(set(shares)) > 1
    allowed = "needs comm.sync_every = 1: replicas that train alone count alike"
    _need(not alone, "layout.shares", list(shares), allowed)


def _check_window(job: Job) -> None:
    window, sequence = job.model.window, job.model.sequence
    allowed = f"at most model.sequence = {sequence}; off for full attention"
    _need(window is None or window <= sequence, "model.window", window, allowed)
    _need(len(job.model.window_pattern) > 0, "model.window_pattern", [], "at least one of true, false")


def _check_vocabulary(job: Job) -> None:
    embedded = job.data.corpus == "embedded" and not job.data.mixture
    trained, vocabulary = job.data.vocabulary, job.model.vocabulary
    allowed = f"at most model.vocabulary = {vocabulary}"
    _need(not embedded or trained <= vocabulary, "data.vocabulary", trained, allowed)


def _check_credit(job: Job) -> None:
    partition, credit = job.overlap.partition, job.overlap.credit
    _need(credit >= partition, "overlap.credit", credit, f"at least overlap.partition = {partition} bytes")


def _check_lossy(job: Job) -> None:
    comm, layout = job.comm, job.layout
    _need(
        comm.compress_parameters is None or layout.zero in (1, 2),
        "comm.compress_parameters",
        comm.compress_parameters,
        "needs layout.zero = 1 or 2: only there do parameters travel and stay",
    )
    _need(
        comm.sync_every == 1 or layout.zero == 0,
        "comm.sync_every",
        comm.sync_every,
        "needs layout.zero = 0: each replica trains alone and holds everything",
    )
    _need(
        comm.sync_every == 1 or comm.compress_gradients is None,
        "comm.compress_gradients",
        comm.compress_gradients,
        "needs comm.sync_every = 1: replicas that train alone send no gradients",
    )


def _check_skip(job: Job) -> None:
    _need(
        job.resilience.on_nan != "skip" or job.comm.sync_every == 1,
        "resilience.on_nan",
        job.resilience.on_nan,
        "needs comm.sync_every = 1: replicas that train alone count the steps that moved",
    )


def _check_spikes(job: Job) -> None:
    how, kept = job.resilience.on_spike, job.checkpoint
    allowed = "needs comm.sync_every = 1: replicas that train alone have a gradient norm each"
    _need(how == "tell" or job.comm.sync_every == 1, "resilience.on_spike", how, allowed)
    reaches = (kept.keep - 1) * kept.every >= SPIKE_STEPS_BEFORE
    allowed = f"needs checkpoint.every x (checkpoint.keep - 1) of at least {SPIKE_STEPS_BEFORE} steps"
    _need(how != "rollback" or reaches, "resilience.on_spike", how, allowed)


def _check_updates_in_backward(job: Job) -> None:
    if not job.overlap.optimizer_in_backward:
        return
    clips = job.optimizer.clip_norm is not None
    for wrong, needs in (
        (clips, "optimizer.clip_norm = off: clipping waits for the norm of all gradients"),
        (job.optimizer.name != "adamw", "optimizer.name = adamw: LAMB waits for the norms of all updates"),
        (job.resilience.on_spike != "tell", "resilience.on_spike = tell: what has moved is not taken back"),
        (not job.overlap.optimizer, "overlap.optimizer = true: the optimizer goes chunk by chunk"),
    ):
        _need(not wrong, "overlap.optimizer_in_backward", True, f"needs {needs}")


def _check_cuda_graphs(job: Job) -> None:
    if not job.train.cuda_graphs:
        return
    lacks = lacks_for_graphs(job.layout)
    for wrong, needs in (
        (bool(lacks), lacks),
        (job.train.memory_budget is not None, "train.memory_budget = off: give layout.recompute instead"),
        (job.overlap.optimizer_in_backward, "overlap.optimizer_in_backward = false: gradient sums stay"),
    ):
        _need(not wrong, "train.cuda_graphs", True, f"needs {needs}")


def _check_agreement(job: Job) -> None:
    """Replicas that train alone save, validate and end only where they agree."""
    every = job.comm.sync_every
    for key, steps in (
        ("train.steps", job.train.steps),
        ("train.validate_every", job.train.validate_every),
        ("checkpoint.every", job.checkpoint.every),
    ):
        _need(steps % every == 0, key, steps, f"must be a multiple of comm.sync_every = {every}")


def _check_nodes(job: Job) -> None:
    comm, world = job.comm, job.layout.world
    check_node_order(comm.node_order, world)
    node = comm.node_size
    _need(node is None or world % node == 0, "comm.node_size", node, f"must divide the {world} ranks")
    switch = comm.switch_size
    if switch is not None:
        _need(node is not None, "comm.switch_size", switch, "needs comm.node_size")
        nodes = world // (node or 1)
        _need(nodes % switch == 0, "comm.switch_size", switch, f"must divide the {nodes} nodes")
    _need(
        comm.hierarchy != "switch" or switch is not None,
        "comm.hierarchy",
        comm.hierarchy,
        "needs comm.switch_size",
    )
    check_hierarchy(job.layout, comm)


def _check_store(job: Job) -> None:
    check_store(job.comm)
    check_package(job.resilience.journal, "resilience.journal", "file")


def _check_collector(job: Job) -> None:
    address = job.telemetry.collector
    allowed = "off, or http://HOST:PORT of who collects spans"
    _need(address is None or is_address(address), "telemetry.collector", address, allowed)


def _check_precision(job: Job) -> None:
    """Float8's instructions take lengths that are multiples of 16; what is not would silently stay as it
    is."""
    if job.train.precision not in ("float8", "float8-blocks"):
        return
    model, tp = job.model, job.layout.tp
    up = model.ffn_width * (2 if model.activation == "swiglu" else 1)
    lengths = {
        "model.hidden": model.hidden,
        "model.ffn_hidden / layout.tp": up // tp,
        "model.heads x model.head_dim / layout.tp": model.heads * model.head_width // tp,
        "model.kv_heads x model.head_dim / layout.tp": model.num_kv_heads * model.head_width // tp,
        "layout.micro_batch x model.sequence": job.layout.micro_batch * model.sequence,
    }
    for key, length in lengths.items():
        allowed = f"a multiple of 16, for train.precision = {job.train.precision}"
        _need(length % 16 == 0, key, length, allowed)


def _check_recompute_ratio(job: Job) -> None:
    layout, allowed = job.layout, "1.0, unless layout.recompute = full"
    needs = layout.recompute != "full" and layout.recompute_ratio != 1.0
    _need(not needs, "layout.recompute_ratio", layout.recompute_ratio, allowed)


def _check_memory_budget(job: Job) -> None:
    budget = job.train.memory_budget
    if budget is None:
        return
    from myriad.planner.budget import check_budget  # numpy: for jobs with a budget alone

    check_budget(work_of(job), budget, job.train.device, job.train.precision)


def work_of(job: Job, value_bytes: int = 2) -> "Work":
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


def _check_kernels(job: Job) -> None:
    if job.train.device == "cpu":  # of another device the ranks know more
        check_kernels(job.train.kernels, "cpu", "float32", job.model.kernel_widths)


def _check_warmup(job: Job) -> None:
    warmup, steps = job.optimizer.warmup_steps, job.train.steps
    _need(warmup <= steps, "optimizer.warmup_steps", warmup, f"at most train.steps = {steps}")


def _check_started_nodes(job: Job) -> None:
    nodes, world = job.resilience.nodes, job.layout.world
    divisors = ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)
    _need(world % nodes == 0, "resilience.nodes", nodes, f"must divide the {world} ranks: one of {divisors}")


_RULES: tuple[Callable[[Job], None], ...] = (
    _check_layout,
    _check_heads,
    _check_tensor_parallel,
    _check_stages,
    _check_partition,
    _check_batch,
    _check_window,
    _check_vocabulary,
    _check_warmup,
    _check_kernels,
    _check_precision,
    _check_recompute_ratio,
    _check_memory_budget,
    _check_credit,
    _check_lossy,
    _check_agreement,
    _check_skip,
    _check_spikes,
    _check_updates_in_backward,
    _check_cuda_graphs,
    _check_nodes,
    _check_started_nodes,
    _check_store,
    _check_collector,
)


def _expand_model(tree: dict[str, Any]) -> None:
    """``model = "name"`` or ``model.recipe = "name"`` become the recipe's values, own keys on top."""
    model = tree.get("model")
    if isinstance(model, str):
        model = {"recipe": model}
    if isinstance(model, dict) and "recipe" in model:
        own = {key: value for key, value in model.items() if key != "recipe"}
        tree["model"] = read_recipe("models", str(model["recipe"]), "model") | own


def load_job(name_or_path: str, overrides: Sequence[str] = ()) -> Job:
    """A job from a file or recipe with ``key=value`` overrides, checked. Raises `BadInputError`."""
    tree = read_recipe("jobs", name_or_path, "job")
    return _job_of(tree, overrides)


def parse_job(text: str, source: str, overrides: Sequence[str] = ()) -> Job:
    """A job from the text of a file, checked; ``source`` names it in messages. Raises `BadInputError`."""
    try:
        return _job_of(tomllib.loads(text), overrides)
    except tomllib.TOMLDecodeError as error:
        raise BadInputError("job", source, f"not valid TOML: {error}") from None


def _job_of(tree: dict[str, Any], overrides: Sequence[str]) -> Job:
    for override in overrides:
        set_dotted(tree, *parse_override(override))
    _expand_model(tree)
    try:
        job = Job.model_validate(tree)
    except ValidationError as error:
        raise _as_bad_input(error.errors()[0]) from None
    return job.check()


def _as_bad_input(error: ErrorDetails) -> BadInputError:
    key, value = ".".join(str(part) for part in error["loc"]), error["input"]
    if error["type"] == "extra_forbidden":
        while isinstance(value, dict) and value:  # of an unknown section: its first key is what was typed
            name, value = next(iter(value.items()))
            key = f"{key}.{name}"
        return BadInputError(key, value, f"unknown key; {_hint(key)}")
    if error["type"] == "model_type":
        keys = ", ".join(known for known, _ in job_keys() if known.startswith(f"{key}."))
        return BadInputError(key, value, f"is a section with the keys {keys}")
    message = error["msg"][0].lower() + error["msg"][1:]
    return BadInputError(key, value, message.removeprefix("input ").removeprefix("value error, "))


def _hint(key: str) -> str:
    known = [dotted for dotted, _ in job_keys()]
    last = key.rpartition(".")[2]
    near = [dotted for dotted in known if dotted.endswith(f".{last}")]
    near = near or difflib.get_close_matches(key, known, 1, 0.5)
    if near:
        return f"did you mean {near[0]}?"
    return f"top-level keys are {', '.join(Job.model_fields)}"


def job_keys(config: type[BaseModel] = Job, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a job as ``(dotted name, pydantic FieldInfo)``, in order."""
    for name, field in config.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from job_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field
