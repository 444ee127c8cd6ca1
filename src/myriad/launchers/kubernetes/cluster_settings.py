"""The settings of a run on Kubernetes besides its job: image, volume, node resources, placement of pods."""

import re
from collections.abc import Iterable
from typing import Literal

from pydantic import Field

from myriad.config import Config, Size
from myriad.errors import BadInputError

__all__ = ["Effect", "PodSettings", "Toleration", "parse_pairs", "parse_toleration", "quantity"]

Effect = Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]
_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
_LABEL = r"[a-z]([a-z0-9-]*[a-z0-9])?"
_PART = r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?"
_KEY = re.compile(rf"([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_PART}")
_VALUE = re.compile(rf"({_PART})?")
_LONGEST = 63


class Toleration(Config):
    """A taint that pods tolerate."""

    key: str
    value: str | None = None
    """Value of the taint; None: any value."""
    effect: Effect | None = None
    """Effect of the taint; None: every effect."""


class PodSettings(Config):
    """Settings of one run."""

    run: str
    """Name of the run, and of all objects that are created."""
    image: str
    """Container image with Myriad and the requirements of the job."""
    namespace: str = "default"
    claim: str = "myriad-runs"
    """Name of a volume claim that all nodes can write."""
    storage: Size | None = None
    """Bytes of the claim, if it is to be created; None: it exists."""
    storage_class: str | None = None
    """Storage class of the created claim; None: the cluster's default."""
    mount: str = "/runs"
    """Mount path of the volume in pods; the run is a folder in it."""
    gpus: int = Field(0, ge=0)
    """Number of GPUs of a node."""
    gpu_resource: str = "nvidia.com/gpu"
    cpus: int | None = Field(None, ge=1)
    """Number of CPUs of a node; None: not requested."""
    memory: Size | None = None
    """Memory of a node in bytes; None: not requested."""
    resources: dict[str, int] = Field({})
    """Other resources of a node, by the names of device plugins, such as network adapters."""
    select: dict[str, str] = Field({})
    """Labels that a machine must have."""
    tolerate: tuple[Toleration, ...] = ()
    cordon: bool = True
    """Whether the run may cordon bad machines."""

    def check(self, pods: int) -> "PodSettings":
        """Check names that the API server would refuse; ``pods``: number of node pods. Raises
        `BadInputError`."""
        longest = f"{self.run}-node-0-{pods - 1}-abcde"  # the name that JobSet and the Job give to a pod
        room = _LONGEST - (len(longest) - len(self.run))
        _check_name("--run", self.run, room)
        _check_name("--namespace", self.namespace, _LONGEST)
        for option, name in (("--claim", self.claim), ("--storage-class", self.storage_class)):
            if name is not None and not re.fullmatch(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", name):
                raise BadInputError(option, name, "lower-case letters, digits, dots and dashes")
        if not re.fullmatch(r"\S+", self.image):
            raise BadInputError("--image", self.image, "a container image: registry/name:tag")
        if not re.fullmatch(r"(/[A-Za-z0-9._-]+)+", self.mount):
            raise BadInputError("--mount", self.mount, "an absolute path, not / itself")
        for name in (self.gpu_resource, *self.resources):
            _check_key("--resource", name)
        return self


def _check_name(option: str, name: str, longest: int) -> None:
    if len(name) > longest or not re.fullmatch(_LABEL, name):
        allowed = f"a letter, then letters, digits and dashes, all lower-case, at most {longest} characters"
        raise BadInputError(option, name, allowed)


def _check_key(option: str, key: str) -> None:
    if not _KEY.fullmatch(key):
        raise BadInputError(option, key, "a valid Kubernetes name, such as pool, example.com/pool")


def parse_pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Parse and check texts such as ``["pool=train", ...]``. Raises `BadInputError`."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise BadInputError(
                option, text, "NAME=VALUE, both valid in Kubernetes, such as example.com/pool=train"
            )
        pairs[key] = value
    return pairs


def parse_toleration(text: str) -> Toleration:
    """Parse ``KEY``, ``KEY=VALUE``, ``KEY:EFFECT`` or ``KEY=VALUE:EFFECT``. Raises `BadInputError`."""
    pair, colon, effect = text.partition(":")
    key, equals, value = pair.partition("=")
    good = _KEY.fullmatch(key) and _VALUE.fullmatch(value) and (not colon or effect in _EFFECTS)
    if not good:
        allowed = f"KEY[=VALUE][:EFFECT], the effect one of {', '.join(_EFFECTS)}"
        raise BadInputError("--tolerate", text, allowed)
    values = {"key": key, "value": value if equals else None, "effect": effect or None}
    return Toleration.model_validate(values)


def quantity(size: int) -> str:
    """Format bytes exactly as a Kubernetes quantity."""
    for unit in ("", "Ki", "Mi", "Gi"):
        if size % 2**10:
            return f"{size}{unit}"
        size //= 2**10
    return f"{size}Ti"
