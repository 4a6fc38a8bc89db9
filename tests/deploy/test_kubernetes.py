"""Manifests for Kubernetes: written cleanly, in known fields, and at one with each other."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from lockstep.launcher.cli import parse as parse_generate
from lockstep.launcher.serve.command import parse as parse_serve

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "deploy").rglob("*.yaml"))
SCHEMA = yaml.safe_load((Path(__file__).parent / "kubernetes.schema.yaml").read_text())
RULES = "{extends: default, rules: {line-length: {max: 110}, braces: {max-spaces-inside: 0}}}"


def documents(name: str) -> dict[str, Any]:
    """Of one file, by kind."""
    (path,) = [path for path in FILES if path.name == name]
    return {each["kind"]: each for each in yaml.safe_load_all(path.read_text())}


ALL = {path.name: documents(path.name) for path in FILES}
CLUSTERS = {
    "raycluster": ALL["raycluster.yaml"]["RayCluster"]["spec"],
    "rayjob": ALL["rayjob.yaml"]["RayJob"]["spec"]["rayClusterSpec"],
}
FRONT, GPU = CLUSTERS["raycluster"]["workerGroupSpecs"]
SERVER = FRONT["template"]["spec"]["containers"][0]


def check(document: Any) -> None:
    jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft202012Validator)


def test_they_are_written_cleanly() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "yamllint", "--strict", "-d", RULES, *map(str, FILES)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "document", [d for file in ALL.values() for d in file.values()], ids=lambda d: d["kind"]
)
def test_they_have_known_fields_of_the_right_types(document: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    check(document)


def changed(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at that place."""
    copy = yaml.safe_load(yaml.safe_dump(document))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copy


WORKER = ("spec", "workerGroupSpecs", 1)
CONTAINER = (*WORKER, "template", "spec", "containers", 0)


@pytest.mark.parametrize(
    ("file", "kind", "place", "value"),
    [
        ("rayjob.yaml", "RayJob", ("spec", "submissonMode"), "K8sJobMode"),
        ("rayjob.yaml", "RayJob", ("spec", "backoffLimit"), "1"),
        ("rayjob.yaml", "RayJob", ("metadata", "name"), "Lockstep_Generate"),
        ("raycluster.yaml", "RayCluster", (*CONTAINER, "imagePullPolcy"), "Always"),
        ("raycluster.yaml", "RayCluster", (*CONTAINER, "image"), "lockstep:latest"),
        ("raycluster.yaml", "RayCluster", (*CONTAINER, "image"), "lockstep"),
        ("raycluster.yaml", "RayCluster", (*WORKER, "rayStartParams", "num-gpus"), "2"),
        ("raycluster.yaml", "RayCluster", ("spec", "authOptions"), {"mode": "disabled"}),
        ("raycluster.yaml", "Service", ("spec", "ports", 0, "port"), 80000),
        ("podmonitor.yaml", "PodMonitor", ("spec", "podMetricsEndpoints", 0, "prot"), "http"),
    ],
)
def test_a_slip_is_found(file: str, kind: str, place: tuple[Any, ...], value: Any) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check(changed(ALL[file][kind], place, value))


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_run_the_ray_that_is_tested(name: str) -> None:
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    assert f"ray=={CLUSTERS[name]['rayVersion']}" in pinned


@pytest.mark.parametrize("name", CLUSTERS)
def test_the_head_has_no_ranks_and_no_group_scales_by_itself(name: str) -> None:
    head, groups = CLUSTERS[name]["headGroupSpec"], CLUSTERS[name]["workerGroupSpecs"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    for group in groups:
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"]


def test_the_server_command_is_one_and_fits_the_gpus_and_the_grace() -> None:
    line = SERVER["command"][-1].partition("exec ")[2].replace("\\\n", " ").split()
    assert line[:2] == ["lockstep", "serve"]
    command = parse_serve(line[2:])
    launch = command.launch
    assert FRONT["template"]["spec"]["terminationGracePeriodSeconds"] >= (
        command.options.shutdown_timeout + 30
    )
    gpus = int(GPU["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus % launch.tensor_parallel_size == 0
    ranks = launch.tensor_parallel_size * launch.data_parallel_size
    assert ranks == gpus * GPU["replicas"]
    assert {"name": "http", "containerPort": command.options.port} in SERVER["ports"]


def test_the_job_command_is_one_and_fits_the_gpus(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hello"}\n')
    entrypoint = ALL["rayjob.yaml"]["RayJob"]["spec"]["entrypoint"]
    words = entrypoint.replace("/data", str(tmp_path)).split()
    assert words[:2] == ["lockstep", "generate"]
    launch = parse_generate(words[1:]).launch
    (group,) = CLUSTERS["rayjob"]["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) * group["replicas"] == launch.tensor_parallel_size


def test_probes_ask_for_life_and_readiness_where_the_service_and_the_scraper_go() -> None:
    asked = {kind: SERVER[f"{kind}Probe"]["httpGet"] for kind in ("liveness", "readiness")}
    assert asked == {
        "liveness": {"path": "/health", "port": "http"},
        "readiness": {"path": "/ready", "port": "http"},
    }
    front = FRONT["template"]["metadata"]["labels"]
    service = ALL["raycluster.yaml"]["Service"]["spec"]
    monitor = ALL["podmonitor.yaml"]["PodMonitor"]["spec"]
    assert service["selector"].items() <= front.items()
    assert monitor["selector"]["matchLabels"].items() <= front.items()
    assert not service["selector"].items() <= GPU["template"]["metadata"]["labels"].items()
    assert service["ports"][0]["targetPort"] == monitor["podMetricsEndpoints"][0]["port"] == "http"


def test_what_is_mounted_is_a_volume_and_what_kustomize_takes_is_there() -> None:
    for cluster in CLUSTERS.values():
        for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
            pod = group["template"]["spec"]
            volumes = {volume["name"] for volume in pod.get("volumes", [])}
            mounts = {m["name"] for c in pod["containers"] for m in c.get("volumeMounts", [])}
            assert mounts == volumes
    kustomization = ALL["kustomization.yaml"]["Kustomization"]
    (generated,) = kustomization["configMapGenerator"]
    named = [*kustomization["resources"], *(f.partition("=")[2] for f in generated["files"])]
    assert all((ROOT / "deploy" / "monitoring" / name).is_file() for name in named)
