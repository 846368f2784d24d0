"""The files for Kubernetes and SkyPilot in CONTRIBUTING.md run the command that they show.

Their fields are those of kubeflow-training 1.9.4 (``KubeflowOrgV1PyTorchJobSpec`` and what it
holds) and of skypilot 0.14.1 (``get_task_schema``), read by hand: neither package is a dependency.
"""

import re
import subprocess

import pytest
import yaml

from runner.cli import plan
from tests.process import ROOT

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", CONTRIBUTING, re.DOTALL)]

SPEC = {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
ELASTIC = {"maxReplicas", "maxRestarts", "metrics", "minReplicas", "nProcPerNode", "rdzvBackend"}
ELASTIC |= {"rdzvConf", "rdzvHost", "rdzvId", "rdzvPort", "standalone"}
REPLICAS = {"replicas", "restartPolicy", "template"}
TASK = {
    "name",
    "workdir",
    "num_nodes",
    "resources",
    "file_mounts",
    "volumes",
    "setup",
    "run",
    "envs",
}


def parsed(arguments):
    """Arguments of ``torchrun`` as its own parser reads them."""
    run = pytest.importorskip("torch.distributed.run")
    return run.get_args_parser().parse_args(arguments)


def planned(words, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert plan.main(words) == 0
    return capsys.readouterr().out.splitlines()[-1]


def test_the_job_of_kubernetes(capsys, monkeypatch, outputs):
    [job] = [one for one in FILES if one.get("kind") == "PyTorchJob"]
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert job["apiVersion"] == "kubeflow.org/v1"
    spec, elastic = job["spec"], job["spec"]["elasticPolicy"]
    assert set(spec) <= SPEC
    assert {"pytorchReplicaSpecs", "runPolicy"} <= set(spec)  # required
    assert isinstance(spec["nprocPerNode"], str)
    assert set(elastic) <= ELASTIC
    [(kind, replicas)] = spec["pytorchReplicaSpecs"].items()
    assert kind == "Worker"  # with an elastic policy there is no master
    assert set(replicas) <= REPLICAS
    assert replicas["restartPolicy"] in ("Always", "OnFailure", "Never", "ExitCode")
    pod = replicas["template"]["spec"]
    [container] = pod["containers"]
    assert container["name"] == "pytorch"  # the operator sets the variables of this container
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in pod["volumes"]}
    assert {"name": "RUNNER_OUTPUTS", "value": "/outputs"} in container["env"]
    nodes = elastic["minReplicas"], elastic["maxReplicas"]
    assert nodes == (replicas["replicas"],) * 2
    monkeypatch.setenv("PET_NNODES", "{}:{}".format(*nodes))  # as the operator sets them
    monkeypatch.setenv("PET_NPROC_PER_NODE", spec["nprocPerNode"])
    torchrun, *arguments = container["command"]
    args = parsed(arguments)
    assert (torchrun, args.module, args.training_script) == ("torchrun", True, "runner")
    assert (args.nnodes, args.nproc_per_node) == ("2:2", "8")
    last = planned(args.training_script_args, capsys, monkeypatch)
    assert last.endswith("on 2 machines of 8 ranks")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_the_task_of_skypilot(capsys, monkeypatch, outputs):
    [task] = [one for one in FILES if "num_nodes" in one]
    assert set(task) <= TASK
    assert isinstance(task["num_nodes"], int)
    assert all(isinstance(task[key], dict) for key in ("resources", "volumes"))
    assert all(isinstance(task[key], str) for key in ("name", "workdir", "setup", "run"))
    given = {
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_TASK_ID": "sky-1",
    }
    shell = 'torchrun() { printf "%s\\n" "$@"; }\n' + task["run"] + '\necho "$RUNNER_OUTPUTS"\n'
    printed = subprocess.run(
        ["bash", "-euc", shell],
        env={"PATH": "/usr/bin:/bin", **given},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout.splitlines()
    *arguments, disk = printed
    assert disk in task["volumes"]
    args = parsed(arguments)
    assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("2", "8", 3)
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "10.0.0.1:29400")
    assert (args.rdzv_id, args.module, args.training_script) == ("sky-1", True, "runner")
    last = planned(args.training_script_args, capsys, monkeypatch)
    assert last.endswith("on 2 machines of at least 1 rank")
