"""The files for Kubernetes and SkyPilot in CONTRIBUTING.md run the command that they show."""

import re
import subprocess

import pytest
import yaml

from runner.cli import plan
from tests.process import ROOT

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
FILES = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", CONTRIBUTING, re.DOTALL)]


@pytest.fixture
def planned(capsys, monkeypatch, outputs):
    """What the command of a torchrun would do, and the arguments as torchrun reads them."""
    run = pytest.importorskip("torch.distributed.run")

    def planned(arguments):
        args = run.get_args_parser().parse_args(arguments)
        assert (args.module, args.training_script) == (True, "runner")
        assert plan.main(args.training_script_args) == 0
        return args, capsys.readouterr().out.splitlines()[-1]

    return planned


def test_the_job_of_kubernetes(planned, monkeypatch):
    [job] = [one for one in FILES if one.get("kind") == "PyTorchJob"]
    assert job["apiVersion"] == "kubeflow.org/v1"
    spec, elastic = job["spec"], job["spec"]["elasticPolicy"]
    [(kind, replicas)] = spec["pytorchReplicaSpecs"].items()
    assert kind == "Worker"  # with an elastic policy there is no master
    pod = replicas["template"]["spec"]
    [container] = pod["containers"]
    assert container["name"] == "pytorch"  # the operator sets the variables of this container
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in pod["volumes"]}
    nodes = elastic["minReplicas"], elastic["maxReplicas"]
    assert nodes == (replicas["replicas"],) * 2
    monkeypatch.setenv("PET_NNODES", "{}:{}".format(*nodes))  # as the operator sets them
    monkeypatch.setenv("PET_NPROC_PER_NODE", spec["nprocPerNode"])
    torchrun, *arguments = container["command"]
    args, last = planned(arguments)
    assert (torchrun, args.nnodes, args.nproc_per_node) == ("torchrun", "2:2", "8")
    assert last.endswith("on 2 machines of 8 ranks")
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 8


def test_the_task_of_skypilot(planned):
    [task] = [one for one in FILES if "num_nodes" in one]
    given = {
        "PATH": "/usr/bin:/bin",
        "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
        "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_TASK_ID": "sky-1",
    }
    shell = 'torchrun() { printf "%s\\n" "$@"; }\n' + task["run"] + '\necho "$RUNNER_OUTPUTS"\n'
    command = ["bash", "-euc", shell]
    printed = subprocess.run(command, env=given, capture_output=True, text=True, check=True).stdout
    *arguments, disk = printed.splitlines()
    assert disk in task["volumes"]
    args, last = planned(arguments)
    assert (args.nnodes, args.nproc_per_node, args.max_restarts) == ("2", "8", 3)
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("c10d", "10.0.0.1:29400")
    assert args.rdzv_id == "sky-1"
    assert last.endswith("on 2 machines of at least 1 rank")
