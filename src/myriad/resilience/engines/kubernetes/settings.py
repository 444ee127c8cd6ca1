"""What Kubernetes must be told beside the job: image, volume, what a node has, where pods may go."""

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
    """A taint that pods put up with."""

    key: str
    value: str | None = None
    """None: any."""
    effect: Effect | None = None
    """None: each."""


class PodSettings(Config):
    """Of one run."""

    run: str
    """Names all that is made."""
    image: str
    """Has Myriad in it, and what the job needs."""
    namespace: str = "default"
    claim: str = "myriad-runs"
    """A volume claim that all nodes can write."""
    storage: Size | None = None
    """Bytes of it, if it is to be made; None: it is there."""
    storage_class: str | None = None
    """Of the claim that is made; None: the cluster's default."""
    mount: str = "/runs"
    """Where pods see the volume; the run is a folder of it."""
    gpus: int = Field(0, ge=0)
    """Of a node."""
    gpu_resource: str = "nvidia.com/gpu"
    cpus: int | None = Field(None, ge=1)
    """Of a node; None: not said."""
    memory: Size | None = None
    """Of a node, in bytes; None: not said."""
    resources: dict[str, int] = Field({})
    """Others of a node, as device plugins name them: network adapters."""
    select: dict[str, str] = Field({})
    """Labels that a machine must have."""
    tolerate: tuple[Toleration, ...] = ()
    cordon: bool = True
    """Whether the run may take bad machines out of service."""

    def check(self, pods: int) -> "PodSettings":
        """Names that the API server would refuse, ``pods`` being those of the nodes. Raises
        `BadInputError`."""
        longest = f"{self.run}-node-0-{pods - 1}-abcde"  # as JobSet and the Job name a pod
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
        raise BadInputError(option, key, "a name as Kubernetes has them: pool, example.com/pool")


def parse_pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """``["pool=train", ...]``, checked. Raises `BadInputError`."""
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not _KEY.fullmatch(key) or not _VALUE.fullmatch(value):
            raise BadInputError(
                option, text, "NAME=VALUE, both as Kubernetes has them: example.com/pool=train"
            )
        pairs[key] = value
    return pairs


def parse_toleration(text: str) -> Toleration:
    """``KEY``, ``KEY=VALUE``, ``KEY:EFFECT`` or ``KEY=VALUE:EFFECT``. Raises `BadInputError`."""
    pair, colon, effect = text.partition(":")
    key, equals, value = pair.partition("=")
    good = _KEY.fullmatch(key) and _VALUE.fullmatch(value) and (not colon or effect in _EFFECTS)
    if not good:
        allowed = f"KEY[=VALUE][:EFFECT], the effect one of {', '.join(_EFFECTS)}"
        raise BadInputError("--tolerate", text, allowed)
    values = {"key": key, "value": value if equals else None, "effect": effect or None}
    return Toleration.model_validate(values)


def quantity(size: int) -> str:
    """Bytes as Kubernetes writes them, exactly."""
    for unit in ("", "Ki", "Mi", "Gi"):
        if size % 2**10:
            return f"{size}{unit}"
        size //= 2**10
    return f"{size}Ti"
