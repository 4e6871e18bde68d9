"""The recipes for clusters, dry: which command they would run, read by the parsers that would read it."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml
from torch.distributed.run import parse_args

from aotdist.launch.config import parse_options
from tests.house.tree import ROOT

RECIPES = ROOT / "launch"
SCRIPTS = ["slurm/train.sbatch", "torchrun/train.sh"]

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_JOB_NAME": "llama",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[3-4]",
}


@pytest.fixture
def commands(tmp_path):
    """A folder of commands that write down how they were called; what is written down, by command."""
    folder = tmp_path / "commands"
    folder.mkdir()

    def define(name, then):
        script = folder / name
        script.write_text(
            f"#!{sys.executable}\nimport json, sys, time\n"
            f"with open({str(folder / name)!r} + '.calls', 'a') as file:\n"
            f"    print(json.dumps(sys.argv[1:]), file=file)\n{then}\n"
        )
        script.chmod(0o755)

    define("srun", "")
    define("torchrun", "")
    define("scontrol", "print('node3\\nnode4')")
    return folder, define


def calls(folder, name):
    written = folder / f"{name}.calls"
    return [json.loads(line) for line in written.read_text().splitlines()] if written.exists() else []


def start(script, folder, variables, *words):
    environment = {**os.environ, **variables, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.Popen(["bash", str(RECIPES / script), *words], env=environment, cwd=folder)


def understood(words):
    """What torchrun makes of its words, and the trainer of the rest."""
    launch = parse_args(words)
    assert (launch.module, launch.training_script) == (True, "aotdist.launch.train")
    return launch, parse_options(launch.training_script_args, speaks=False)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_are_scripts(script):
    subprocess.run(["bash", "-n", str(RECIPES / script)], check=True)


def test_slurm_starts_one_torchrun_on_each_machine(commands):
    folder, _ = commands
    assert start(SCRIPTS[0], folder, {**SLURM, "RUNS": "out"}, "--optim.steps", "7").wait(timeout=20) == 0
    assert calls(folder, "scontrol") == [["show", "hostnames", "node[3-4]"]]
    ((program, *words),) = calls(folder, "srun")
    assert program == "torchrun"
    launch, options = understood(words)
    assert (launch.nnodes, launch.nproc_per_node, launch.max_restarts) == ("2", "gpu", 3)
    assert (launch.rdzv_backend, launch.rdzv_endpoint, launch.rdzv_id) == ("c10d", "node3:24711", "4711")
    assert (options.resume, str(options.run.folder), options.run.name) == ("auto", "out", "llama-4711")
    assert options.optim.steps == 7


def test_slurm_queues_the_job_again_when_it_has_to_leave(commands):
    folder, define = commands
    define("srun", "import signal\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(1))\ntime.sleep(60)")
    job = start(SCRIPTS[0], folder, SLURM)
    deadline = time.monotonic() + 20
    while not calls(folder, "srun") and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)  # from its note to its handler
    job.send_signal(signal.SIGTERM)
    job.wait(timeout=20)
    assert calls(folder, "scontrol")[-1] == ["requeue", "4711"]


def test_a_run_that_fails_is_not_queued_again(commands):
    folder, define = commands
    define("srun", "sys.exit(3)")
    assert start(SCRIPTS[0], folder, SLURM).wait(timeout=20) == 3
    assert len(calls(folder, "scontrol")) == 1


def test_machines_without_a_scheduler_meet_at_an_address(commands):
    folder, _ = commands
    variables = {"HEAD": "10.0.0.1:29500", "NODES": "4", "RUN": "first", "NPROC": "8"}
    assert start(SCRIPTS[1], folder, variables, "--model.dim=64").wait(timeout=20) == 0
    launch, options = understood(calls(folder, "torchrun")[0])
    assert (launch.nnodes, launch.nproc_per_node, launch.rdzv_endpoint) == ("4", "8", "10.0.0.1:29500")
    assert (options.resume, options.run.name, options.model.dim) == ("auto", "first", 64)


def container_of_pytorchjob(spec):
    (container,) = spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize(
    ("file", "kind", "container"),
    [
        ("pytorchjob.yaml", "PyTorchJob", container_of_pytorchjob),
        ("trainjob.yaml", "TrainJob", lambda spec: spec["trainer"]),
    ],
)
def test_kubernetes_runs_a_command_that_is_understood(file, kind, container):
    document = yaml.safe_load((RECIPES / "kubernetes" / file).read_text())
    assert document["kind"] == kind
    program, *words = container(document["spec"])["command"]
    assert program == "torchrun"
    _, options = understood(words)
    assert (options.resume, str(options.run.folder), options.run.name) == ("auto", "/runs", "aotdist")
