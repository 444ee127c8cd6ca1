"""``myriad manifests``: a run as Kubernetes wants to be told of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from myriad.cli.overrides import OverrideCommand
from myriad.errors import BadInputError
from myriad.whole_file import write_whole

if TYPE_CHECKING:
    from myriad.job import Job
    from myriad.resilience.engines.kubernetes.settings import PodSettings

__all__ = ["manifests", "register"]


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command("manifests", cls=OverrideCommand, options_metavar="[OPTIONS] [--KEY VALUE]...")(manifests)


def manifests(
    context: typer.Context,
    job: Annotated[
        str, typer.Argument(metavar="JOB", help="A job file, or a recipe's name.", show_default=False)
    ],
    image: Annotated[
        str, typer.Option(metavar="IMAGE", help="Container image with Myriad in it.", show_default=False)
    ],
    run: Annotated[
        str | None, typer.Option(metavar="NAME", help="Names the run and all objects; else the job's name.")
    ] = None,
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Namespace of all objects.")] = "default",
    claim: Annotated[
        str, typer.Option(metavar="NAME", help="Volume claim for runs, which all pods can write.")
    ] = "myriad-runs",
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Make that claim, too; deleting what was applied then deletes all in it."
        ),
    ] = None,
    storage_class: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Storage class of the new claim. Default: the cluster's."),
    ] = None,
    mount: Annotated[str, typer.Option(metavar="PATH", help="Where pods see the volume.")] = "/runs",
    gpus: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="GPUs of a node. Default: one for each rank, none with train.device cpu."
        ),
    ] = None,
    gpu_resource: Annotated[
        str, typer.Option(metavar="NAME", help="What a GPU is called.")
    ] = "nvidia.com/gpu",
    cpus: Annotated[int | None, typer.Option(metavar="N", help="Cores of a node: request.")] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Memory of a node: request and limit.")
    ] = None,
    resource: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="Another resource of a node (rdma/hca=1); again for more."),
    ] = None,
    select: Annotated[
        list[str] | None,
        typer.Option(metavar="LABEL=VALUE", help="Use only machines with this label; again for more."),
    ] = None,
    tolerate: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY[=VALUE][:EFFECT]", help="Allow machines with this taint; again for more."),
    ] = None,
    no_cordon: Annotated[
        bool,
        typer.Option(
            "--no-cordon", help="The run takes no machine out of service, and needs no ClusterRole."
        ),
    ] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write there, not to the screen.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object, a List, in place of YAML.")
    ] = False,
) -> None:
    """Write what starts a job on Kubernetes, for `kubectl apply -f`.

    A JobSet with a pod for the driver and one for each of resilience.nodes and resilience.spares.

    The pods need a secret, which is in no file. Made once for a run:

    kubectl create secret generic NAME --from-literal=secret=$(openssl rand -hex 32)

    Exit code: 0 done, 2 bad input.
    """
    from myriad.job import load_job
    from myriad.resilience.engines.kubernetes.manifests import make_manifests

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
    from myriad.resilience.engines.kubernetes.settings import PodSettings, parse_pairs, parse_toleration

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
    """As people write it: text of several lines as it is, nothing by reference."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

    def represent(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent)
    text: str = yaml.dump_all(objects, Dumper=Dumper, sort_keys=False, width=110)
    return text
