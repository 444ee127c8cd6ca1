"""What `myriad manifests` writes is what an API server takes: each object of Kubernetes' own against its
schemas, unknown keys refused; the JobSet against types, and against its CRD where MYRIAD_JOBSET_CRD names the
file (config/components/crd/bases/ of kubernetes-sigs/jobset)."""

import copy
import os
from pathlib import Path

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from myriad.cli.main import main
from myriad.errors import BadInputError
from myriad.job import load_job, parse_job
from myriad.launchers.kubernetes.cluster_settings import parse_toleration, quantity
from myriad.launchers.kubernetes.jobset_manifests import JobSet

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
_CRD = os.environ.get("MYRIAD_JOBSET_CRD")
_VERSIONS = ("1.29", "1.37")
_PLAIN = ("--image", "registry/myriad:1")
_FULL = (
    *_PLAIN,
    *("--run", "big", "--namespace", "research", "--claim", "shared", "--storage", "5 TiB"),
    *("--storage-class", "nfs", "--mount", "/mnt/runs", "--gpus", "8", "--gpu-resource", "amd.com/gpu"),
    *("--cpus", "96", "--memory", "1 TiB", "--resource", "rdma/hca=8", "--select", "example.com/pool=train"),
    *("--tolerate", "dedicated=training:NoSchedule", "--tolerate", "spot"),
)
_LAYOUT = ("--layout.dp", "4", "--resilience.nodes", "2", "--resilience.spares", "1")


def written(tmp_path: Path, *arguments: str) -> list[dict]:
    out = tmp_path / "run.yaml"
    with pytest.raises(SystemExit) as ended:
        main(["manifests", "tiny", *_LAYOUT, *arguments, "--out", str(out)])
    assert ended.value.code == 0
    return list(yaml.safe_load_all(out.read_text()))


def only(objects: list[dict], kind: str) -> dict:
    found = [one for one in objects if one["kind"] == kind]
    assert len(found) == 1, kind
    return found[0]


def templates(job_set: dict) -> dict[str, dict]:
    """The Jobs that JobSet will make, as objects of their own."""
    jobs = {one["name"]: one["template"] for one in job_set["spec"]["replicatedJobs"]}
    metadata = {"name": "made-by-jobset"}
    return {
        name: {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, **job}
        for name, job in jobs.items()
    }


@pytest.mark.parametrize("version", _VERSIONS)
@pytest.mark.parametrize(
    "options", [_PLAIN, _FULL, (*_PLAIN, "--no-cordon")], ids=["plain", "full", "no cordon"]
)
def test_every_object_is_one_that_kubernetes_knows(tmp_path, options, version):
    objects = written(tmp_path, *options)
    job_set = only(objects, "JobSet")
    for one in [*objects, *templates(job_set).values()]:
        if one is not job_set:
            kubernetes_validate.validate(one, version, strict=True)
    TypeAdapter(JobSet).validate_python(job_set)


def test_the_check_sees_a_wrong_key(tmp_path):
    """Else the test above says nothing."""
    job_set = only(written(tmp_path, *_PLAIN), "JobSet")
    job = copy.deepcopy(templates(job_set)["node"])
    job["spec"]["template"]["spec"]["containers"][0]["commands"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, _VERSIONS[-1], strict=True)
    job_set["spec"]["failurePolicy"]["maxRestart"] = 1
    with pytest.raises(ValidationError):
        TypeAdapter(JobSet).validate_python(job_set)


@pytest.mark.skipif(_CRD is None, reason="MYRIAD_JOBSET_CRD names no file")
@pytest.mark.parametrize("options", [_PLAIN, _FULL], ids=["plain", "full"])
def test_the_job_set_is_one_that_its_crd_allows(tmp_path, options):
    import jsonschema

    versions = yaml.safe_load(Path(str(_CRD)).read_text())["spec"]["versions"]
    schema = next(one["schema"]["openAPIV3Schema"] for one in versions if one["name"] == "v1alpha2")
    strict(schema)
    jsonschema.validate(only(written(tmp_path, *options), "JobSet"), schema)


def strict(schema: object) -> None:
    """An API server drops keys that it does not know; here they are an error."""
    if isinstance(schema, dict):
        if "properties" in schema and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
        for inner in schema.values():
            strict(inner)
    elif isinstance(schema, list):
        for inner in schema:
            strict(inner)


def test_a_pod_for_each_node_and_spare_and_none_beside_another(tmp_path):
    job = templates(only(written(tmp_path, *_PLAIN), "JobSet"))["node"]["spec"]
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (3, 3, "Indexed")
    (alone,) = job["template"]["spec"]["affinity"]["podAntiAffinity"].values()
    selected = alone[0]["labelSelector"]["matchLabels"]
    labels = job["template"]["metadata"]["labels"]
    assert selected.items() <= labels.items(), "pods do not avoid each other"
    assert alone[0]["topologyKey"] == "kubernetes.io/hostname"
    (container,) = job["template"]["spec"]["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "2"}, "two ranks a node"


def test_the_job_in_the_pod_is_the_job_that_was_given(tmp_path):
    """And the driver's pod mounts it at its path."""
    objects = written(tmp_path, *_PLAIN, "--train.steps", "77")
    (text,) = only(objects, "ConfigMap")["data"].values()
    expected = load_job(
        "tiny", ["train.steps=77", "layout.dp=4", "resilience.nodes=2", "resilience.spares=1"]
    )
    job = parse_job(text, "ConfigMap")
    assert job.resilience.engine == "kubernetes"
    assert job.model_copy(update={"resilience": expected.resilience}) == expected
    pod = templates(only(objects, "JobSet"))["driver"]["spec"]["template"]["spec"]
    path = Path(pod["containers"][0]["command"][2])
    mounts = {one["name"]: one["mountPath"] for one in pod["containers"][0]["volumeMounts"]}
    (volume,) = [one["name"] for one in pod["volumes"] if "configMap" in one]
    assert str(path.parent) == mounts[volume]
    assert path.name in only(objects, "ConfigMap")["data"]


def test_pods_can_do_no_more_than_they_need(tmp_path):
    """Only the driver speaks to the API server; without --cordon it may touch no machine."""
    objects = written(tmp_path, *_PLAIN, "--no-cordon")
    assert not [one for one in objects if one["kind"].startswith("ClusterRole")]
    assert only(objects, "Role")["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "delete"]}
    ]
    jobs = templates(only(objects, "JobSet"))
    assert jobs["node"]["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    account = jobs["driver"]["spec"]["template"]["spec"]["serviceAccountName"]
    assert account == only(objects, "ServiceAccount")["metadata"]["name"]
    binding = only(written(tmp_path, *_PLAIN), "ClusterRoleBinding")
    assert [one["name"] for one in binding["subjects"]] == [account]


def test_no_secret_is_written_and_applying_twice_changes_nothing(tmp_path):
    objects = written(tmp_path, *_FULL)
    assert objects == written(tmp_path, *_FULL)
    assert not [one for one in objects if one["kind"] == "Secret"]


def test_a_claim_is_made_only_when_asked_for(tmp_path):
    """Deleting what was applied must not delete everybody's runs."""
    assert not [one for one in written(tmp_path, *_PLAIN) if one["kind"] == "PersistentVolumeClaim"]
    claim = only(written(tmp_path, *_FULL), "PersistentVolumeClaim")
    assert claim["metadata"]["name"] == "shared"
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Ti"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--run", "Big_Run"], '--run = "Big_Run"'),
        (["--run", "a" * 60], "at most 48 characters"),
        (["--image", "two words"], '--image = "two words"'),
        (["--namespace", "-"], '--namespace = "-"'),
        (["--gpus", "-1"], "--gpus = -1"),
        (["--memory", "lots"], '--memory = "lots"'),
        (["--resource", "rdma/hca=-1"], '--resource = "rdma/hca=-1"'),
        (["--resource", "rdma/hca=many"], '--resource = "many"'),
        (["--select", "pool"], '--select = "pool"'),
        (["--tolerate", "spot:Sometimes"], "NoSchedule, PreferNoSchedule, NoExecute"),
        (["--mount", "runs"], '--mount = "runs"'),
        (["--resilience.nodes", "3"], "resilience.nodes = 3"),
        (["--out", "/nowhere/run.yaml"], '--out = "/nowhere/run.yaml"'),
    ],
)
def test_bad_input_is_reported_in_one_line_and_nothing_is_written(arguments, told, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["manifests", "tiny", *_LAYOUT, *_PLAIN, *arguments])
    captured = capsys.readouterr()
    assert ended.value.code == 2
    assert told in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


def test_json_is_one_object_that_kubectl_takes(tmp_path, capsys):
    import json

    with pytest.raises(SystemExit):
        main(["manifests", "tiny", *_LAYOUT, *_PLAIN, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["items"]) == ("List", written(tmp_path, *_PLAIN))


def test_tolerations_and_sizes_as_kubernetes_writes_them():
    assert parse_toleration("a/b=c:NoExecute").model_dump() == {
        "key": "a/b",
        "value": "c",
        "effect": "NoExecute",
    }
    assert parse_toleration("spot").value is None
    with pytest.raises(BadInputError):
        parse_toleration("=x")
    assert [quantity(size) for size in (1000, 1024, 3 * 2**20, 64 * 2**30, 5 * 2**40)] == [
        *("1000", "1Ki", "3Mi", "64Gi", "5Ti")
    ]
