"""``myriad manifests``: the Kubernetes manifests of a run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.job_key_options import OverrideCommand
from myriad.errors import BadInputError
from myriad.system.whole_file import write_whole

if TYPE_CHECKING:
    from myriad.job import Job
    from myriad.launchers.kubernetes.cluster_settings import PodSettings

__all__ = ["manifests", "register"]


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("manifests", cls=OverrideCommand, options_metavar="[OPTIONS] [--KEY VALUE]...")(manifests)


def manifests(
    context: typer.Context,
    job: Annotated[str, typer.Argument(metavar="JOB", help="Job file or recipe.", show_default=False)],
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Container image with Myriad in it.", show_default=False)
    ],
    run: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name of the run and of all objects. Default: the job's name."),
    ] = None,
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Namespace of all objects.")] = "default",
    claim: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="Volume claim for the run folder; all pods must be able to write to it."
        ),
    ] = "myriad-runs",
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Create that claim, with this size; `kubectl delete -f` then deletes its data.",
        ),
    ] = None,
    storage_class: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Storage class of the new claim. Default: the cluster's."),
    ] = None,
    mount: Annotated[str, typer.Option(metavar="PATH", help="Mount path of the volume.")] = "/runs",
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="GPUs of a node. Default: one for each rank, none with train.device cpu."
        ),
    ] = None,
    gpu_resource: Annotated[
        str, typer.Option(metavar="NAME", help="Resource name of a GPU.")
    ] = "nvidia.com/gpu",
    cpus: Annotated[int | None, typer.Option(metavar="N", help="Cores of a node: request.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a node: request and limit.")
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="Another resource of a node, e.g. rdma/hca=1; repeatable."),
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL=VALUE", help="Use only machines with this label; repeatable."),
    ] = None,
    tolerate: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY[=VALUE][:EFFECT]", help="Allow machines with this taint; repeatable."),
    ] = None,
    no_cordon: Annotated[
        bool,
        typer.Option("--no-cordon", help="Do not cordon faulty machines; the run then needs no ClusterRole."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file. Default: standard output.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object (a List) instead of YAML.")
    ] = False,
) -> None:
    """Write the Kubernetes manifests of a job, for `kubectl apply -f`.

    A JobSet with a pod for the driver and one for each of resilience.nodes and resilience.spares.

    The pods need a secret, which no manifest contains. Create it once for a run:

    openssl rand -hex 32 | kubectl create secret generic NAME --from-file=secret=/dev/stdin

    Exit code: 0 done, 2 bad input.
    """
    from myriad.job import load_job
    from myriad.launchers.kubernetes.jobset_manifests import make_manifests

    resolved = load_job(job, [*OverrideCommand.of(context), "resilience.engine=kubernetes"])
    given = {
        "run": run or resolved.name,
        "image": image,
        "namespace": namespace,
        "claim": claim,
        "storage": storage,
        "storage_class": storage_class,
        "mount": mount,
        "gpus": _gpus_of(resolved) if gpus is None else gpus,
        "gpu_resource": gpu_resource,
        "cpus": cpus,
        "memory": memory,
        "cordon": not no_cordon,
    }
    settings = _settings(given, resource or (), select or (), tolerate or ())
    _write(make_manifests(resolved, settings), out, as_json)


def _gpus_of(job: "Job") -> int:
    return 0 if job.train.device == "cpu" else job.layout.world // job.resilience.nodes


def _settings(
    given: dict[str, Any], resource: Sequence[str], select: Sequence[str], tolerate: Sequence[str]
) -> "PodSettings":
    from pydantic import ValidationError

    from myriad.config import explain
    from myriad.launchers.kubernetes.cluster_settings import PodSettings, parse_pairs, parse_toleration

    given["resources"] = parse_pairs("--resource", resource)
    given["select"] = parse_pairs("--select", select)
    given["tolerate"] = tuple(map(parse_toleration, tolerate))
    try:
        return PodSettings.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        option = "--" + str(first["loc"][0]).replace("_", "-").replace("resources", "resource")
        raise BadInputError(option, first["input"], explain(first)) from None


def _write(objects: list[dict[str, Any]], out: Path | None, as_json: bool) -> None:
    if as_json:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}, indent=2) + "\n"
    else:
        text = _as_yaml(objects)
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        write_whole(out, text)
    except OSError as error:
        raise BadInputError("--out", str(out), f"cannot be written: {error.strerror}") from None


def _as_yaml(objects: list[dict[str, Any]]) -> str:
    """Return YAML in block style, without anchors and aliases."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    def represent(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    text: str = yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=110)
    return text
