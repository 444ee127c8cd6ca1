"""JobSet's own part of a manifest, as types: a wrong key is an error of the type checker, and at run time of
whoever validates with pydantic. What is inside a Job's template is Kubernetes' own.

From the API ``jobset.x-k8s.io/v1alpha2``: only what is used here, without feature gates, as it is since 0.8.
"""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

__all__ = ["DependsOn", "FailurePolicy", "FailureRule", "JobSet", "ReplicatedJob"]

_EXACT = ConfigDict(extra="forbid", strict=True)


@with_config(_EXACT)
class FailureRule(TypedDict):
    """What the JobSet does when a Job of it fails; the first rule that matches counts."""

    name: str
    action: Literal["FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts"]
    targetReplicatedJobs: list[str]
    onJobFailureReasons: list[Literal["PodFailurePolicy", "BackoffLimitExceeded"]]


@with_config(_EXACT)
class FailurePolicy(TypedDict):
    """Jobs that fail for another reason: all anew, ``maxRestarts`` times."""

    maxRestarts: int
    rules: list[FailureRule]


@with_config(_EXACT)
class SuccessPolicy(TypedDict):
    """When the JobSet is done."""

    operator: Literal["All", "Any"]
    targetReplicatedJobs: list[str]


@with_config(_EXACT)
class Network(TypedDict):
    """A headless service, made by JobSet: each pod has a name that all others can look up."""

    enableDNSHostnames: bool
    publishNotReadyAddresses: bool
    subdomain: str


@with_config(_EXACT)
class DependsOn(TypedDict):
    """Made only when another is ready."""

    name: str
    status: Literal["Ready", "Complete"]


@with_config(_EXACT)
class ReplicatedJob(TypedDict):
    """A Job, some times."""

    name: str
    replicas: int
    template: dict[str, Any]
    dependsOn: NotRequired[list[DependsOn]]


@with_config(_EXACT)
class JobSetSpec(TypedDict):
    """What is to be."""

    network: Network
    successPolicy: SuccessPolicy
    failurePolicy: FailurePolicy
    replicatedJobs: list[ReplicatedJob]


@with_config(_EXACT)
class JobSet(TypedDict):
    """The object."""

    apiVersion: Literal["jobset.x-k8s.io/v1alpha2"]
    kind: Literal["JobSet"]
    metadata: dict[str, Any]
    spec: JobSetSpec
