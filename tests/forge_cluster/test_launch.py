"""`forge launch`: the files it writes, run by a shell and read by published schemas, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forge.cli import main
from forge.errors import ForgeError
from forge_cluster.launching import LaunchJob, pytorchjob, sbatch_script, skypilot_task

JOB = LaunchJob(
    name="first",
    words=("my task.yaml", "task.note=it's $HOME"),
    run_dir="/runs/first",
    nodes=2,
    gpus="H100:8",
    procs=8,
    cpus=12,
    image="me/forge:1",
    claim="claim",
)
SHELL: dict[str, Callable[[str], list[str]]] = {
    "slurm": lambda text: ["bash", "-c", text],
    "kubernetes": lambda text: [filled_in(word) for word in containers(yaml.safe_load(text))[-1]["command"]],
    "skypilot": lambda text: ["bash", "-c", yaml.safe_load(text)["run"]],
}
"""What a node of each system runs."""
WRITERS = {"slurm": sbatch_script, "kubernetes": pytorchjob, "skypilot": skypilot_task}
VARIABLES = {
    "slurm": {"SLURM_NODEID": "1", "SLURM_JOB_ID": "77", "SLURM_CPUS_PER_TASK": "96", "SLURMD_NODENAME": "n1"},
    "kubernetes": {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "m"},
    "skypilot": {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "m\nother"},
}
PROGRAM = '#!/bin/bash\nprintf "%s\\0" "$@" >> {folder}/NAME.calls\n'
PROGRAMS = {
    "python": 'echo "$FORGE_NODE_RANK|$RANK|$WORLD_SIZE|$FORGE_JOB|$SRUN_CPUS_PER_TASK" > {folder}/seen\n',
    "srun": 'shift 2; "$@"; exit ${{FORGE_TEST_CODE:-0}}\n',
    "scontrol": '[ "$1" = show ] && echo "   NodeAddr=m NodeHostName=n1 Version=22.05"\n',
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with stand-ins that write down how they are called, with a NUL behind each word."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "bin").mkdir()
    for name, body in PROGRAMS.items():
        (folder / "bin" / name).write_text((PROGRAM + body).format(folder=folder).replace("NAME", name))
        (folder / "bin" / name).chmod(0o755)
    return folder


def run(programs: Path, command: list[str], **variables: str) -> int:
    """Run what a node runs; nothing but the calls may be left in the folder."""
    for path in [*programs.glob("*.calls"), *programs.glob("seen")]:
        path.unlink()
    path = f"{programs}/bin:{os.environ['PATH']}"
    code = subprocess.run(command, cwd=programs, env={**os.environ, **variables, "PATH": path}).returncode
    assert {path.name for path in programs.iterdir()} <= {"bin", "seen", *(f"{name}.calls" for name in PROGRAMS)}
    return code


def calls(programs: Path, name: str) -> list[str]:
    return (programs / f"{name}.calls").read_text().split("\0")[:-1] if (programs / f"{name}.calls").exists() else []


def fit_words(job: LaunchJob) -> list[str]:
    return ["-m", "forge", "fit", *job.words, "--run-dir", job.run_dir, "--resume"]


@pytest.mark.parametrize("system", WRITERS)
def test_a_node_starts_its_ranks_with_the_words_unchanged(system: str, programs: Path) -> None:
    assert run(programs, SHELL[system](WRITERS[system](JOB)), **VARIABLES[system]) == 0
    port = 20077 if system == "slurm" else 29400  # jobs of SLURM may share a host
    more = f"--nproc 8 --max-restarts 3 --nnodes 2 --rdzv-endpoint m:{port}"
    assert calls(programs, "python") == [*fit_words(JOB), *more.split()]
    seen = "1|||slurm:77|96" if system == "slurm" else "1||||"  # the pods' own ranks are not those of processes
    assert (programs / "seen").read_text() == f"{seen}\n"


# -- values -----------------------------------------------------------------------------------------------------------

SIGNS = ["\n", "\r", "\u2028", "\x85", "\0", "\x1b", "'", '"', "\\", "$", "$$", "`", "{", "}", "#", "*", "~", "!", "%"]
TRICKS = [";touch canary;", "&&touch canary", "|touch canary", ">canary", "`touch canary`", "\ntouch canary\n"]
WORDS = ["a", "é", " ", "-", "=", ",", ":", "$HOME", "$(HOME)", "$$(HOME)", "{command}", "$(touch canary)", "#SBATCH "]


@pytest.mark.parametrize("system", WRITERS)
@settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
@given(value=st.lists(st.sampled_from(SIGNS + TRICKS + WORDS), min_size=1, max_size=5).map("".join))
@example(value="$(HOME) $$ $$(HOME)")
@example(value="\ntouch canary\n")
def test_no_value_becomes_a_command(system: str, programs: Path, value: str) -> None:
    """A shell gets the values that were given, or the job is refused in one line."""
    folder = f"/home/{value}"
    changes: dict[str, Any] = {"words": ("quickstart", f"task.note={value}", value), "run_dir": f"/runs/{value}"}
    if not value.isprintable():
        with pytest.raises(ForgeError, match=r"^[ -~]*one line of printable signs\.$"):
            replace(JOB, **changes)
        return
    job = replace(JOB, **changes, folder=folder)
    text = WRITERS[system](replace(job, nodes=1))
    assert run(programs, SHELL[system](text), **VARIABLES[system]) == 0
    assert calls(programs, "python") == [
        *fit_words(job),
        "--nproc",
        "8",
        "--max-restarts",
        "3",
    ]  # one node needs no other
    if system == "slurm":
        head = [word for line in text.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line[8:])]
        assert f"--chdir={folder}" in head
        assert len(head) == 10


def filled_in(word: str) -> str:
    """What Kubernetes makes of a command's word: $$ is a $, and $(NAME) the value of a variable of the container."""
    return re.sub(r"\$\$|\$\(HOME\)", lambda found: "$" if found[0] == "$$" else "/root", word)


# -- SLURM ------------------------------------------------------------------------------------------------------------


def test_sbatch_gets_the_size_and_what_a_requeue_needs() -> None:
    text = sbatch_script(replace(JOB, time="24:00:00", options=("--account=me", "-C '[a|b]'"), folder="/my work"))
    head = [shlex.split(line[8:])[0] for line in text.splitlines() if line.startswith("#SBATCH")]
    size = {"--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=H100:8", "--cpus-per-task=96", "--time=24:00:00"}
    assert {*size, "--requeue", "--open-mode=append", "--signal=USR1@120", "--account=me", "--chdir=/my work"} <= {
        *head
    }
    assert text.startswith("#!/bin/bash\n#SBATCH")
    assert "\n#SBATCH -C '[a|b]'\n" in text


@pytest.mark.parametrize(
    ("code", "requeues", "again"),
    [(0, 0, False), (1, 0, False), (2, 0, False), (85, 9, True), (137, 2, True), (137, 3, False)],
)
def test_a_job_is_requeued_once_it_has_saved_and_some_times_after_a_kill(
    code: int, requeues: int, again: bool, programs: Path
) -> None:
    variables = {**VARIABLES["slurm"], "FORGE_TEST_CODE": str(code), "SLURM_RESTART_COUNT": str(requeues)}
    assert run(programs, SHELL["slurm"](sbatch_script(JOB)), **variables) == code
    assert calls(programs, "scontrol")[3:] == (["requeue", "77"] if again else [])


# -- Kubernetes and SkyPilot ------------------------------------------------------------------------------------------


def containers(tree: Any) -> list[dict[str, Any]]:
    """All containers of pods in a manifest."""
    if isinstance(tree, dict):
        return [*tree.get("containers", []), *(c for value in tree.values() for c in containers(value))]
    return [c for value in tree for c in containers(value)] if isinstance(tree, list) else []


def test_a_pytorchjob_has_a_pod_for_each_node() -> None:
    made = yaml.safe_load(pytorchjob(JOB))
    assert (made["apiVersion"], made["kind"], made["metadata"]) == ("kubeflow.org/v1", "PyTorchJob", {"name": "first"})
    assert made["spec"]["runPolicy"]["backoffLimit"] == 3
    replicas = made["spec"]["pytorchReplicaSpecs"]
    assert {name: (each["replicas"], each["restartPolicy"]) for name, each in replicas.items()} == {
        "Master": (1, "OnFailure"),
        "Worker": (1, "OnFailure"),
    }
    pods = [each["template"]["spec"] for each in replicas.values()]
    assert pods[0] == pods[1]
    assert pods[0]["terminationGracePeriodSeconds"] == 120
    shared, claimed = pods[0]["volumes"]
    assert shared["emptyDir"] == {"medium": "Memory"}
    assert claimed["persistentVolumeClaim"] == {"claimName": "claim"}
    (container,) = pods[0]["containers"]
    assert (container["name"], container["image"]) == ("pytorch", "me/forge:1")
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "cpu": "96"}
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts == {shared["name"]: "/dev/shm", claimed["name"]: "/runs"}
    assert [*yaml.safe_load(pytorchjob(replace(JOB, nodes=1)))["spec"]["pytorchReplicaSpecs"]] == ["Master"]


def test_a_skypilot_task_has_what_it_rents_and_when_it_goes_on() -> None:
    made = yaml.safe_load(skypilot_task(JOB))
    assert made.pop("run").startswith("exec env FORGE_NODE_RANK=")
    assert made == {
        "name": "first",
        "num_nodes": 2,
        "resources": {
            "accelerators": "H100:8",
            "cpus": "96+",
            "image_id": "docker:me/forge:1",
            "job_recovery": {"max_restarts_on_errors": 3, "recover_on_exit_codes": [85]},
        },
        "workdir": ".",
        "volumes": {"/runs": "claim"},
        "envs": {"FORGE_JOB": "skypilot:first"},
    }


def test_a_pytorchjob_is_read_whole_by_the_operators_model() -> None:
    """The model of `kubeflow-training` refuses what is missing, and drops what it does not know."""
    client = pytest.importorskip("kubeflow.training.api_client").ApiClient()

    def read(made: Any) -> Any:
        answer = SimpleNamespace(data=json.dumps(made))
        return client.sanitize_for_serialization(client.deserialize(answer, "KubeflowOrgV1PyTorchJob"))

    made = yaml.safe_load(pytorchjob(JOB))
    assert read(made) == made
    containers(made)[0]["imagee"] = "x"
    assert read(made) != made


def test_pods_fit_the_schema_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    replica = yaml.safe_load(pytorchjob(JOB))["spec"]["pytorchReplicaSpecs"]["Worker"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": replica["template"]["spec"]}
    validate.validate(pod, validate.latest_version(), strict=True)
    pod["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(validate.ValidationError):
        validate.validate(pod, validate.latest_version(), strict=True)


@pytest.mark.parametrize("job", [JOB, replace(JOB, nodes=1, gpus="", image=None, claim=None, cpus=None)])
def test_a_task_fits_the_schema_of_skypilot(job: LaunchJob) -> None:
    sky = pytest.importorskip("sky")
    from sky.utils import schemas, validator  # pyright: ignore[reportMissingImports]

    made = yaml.safe_load(skypilot_task(job))
    check = validator.get_schema_validator()
    check(schemas.get_task_schema()).validate(made)
    check(schemas.get_resources_schema()).validate(made["resources"])
    assert sky.Task.from_yaml_config(made).num_nodes == job.nodes


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["-p", "ddp", "--procs", "2"], "sbatch quickstart.sbatch"),
        (["--to", "kubernetes", "--image", "x"], "kubectl apply -f quickstart.yaml"),
        (["--to", "skypilot"], "sky jobs launch quickstart.yaml"),
        (["--run-dir", "runs/My first"], "sbatch my-first.sbatch"),
    ],
)
def test_the_command_writes_one_file_and_says_how_to_submit_it(
    words: list[str], command: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "quickstart", "trainer.max_epochs=1", *words]) == 0
    assert capsys.readouterr().err.strip().endswith(command)
    (file,) = empty_folder.iterdir()
    assert file.name == command.split()[-1]
    assert " -m forge fit quickstart trainer.max_epochs=1 " in file.read_text()
    if file.suffix == ".sbatch":
        assert f"{sys.executable} -m" in file.read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--procs", "2"], "no plugin in this stack connects them"),
        (["trainer.max_epoch=2"], "max_epoch"),
        (["--procs", "0"], "--procs is 0"),
        (["--gpus", "many"], "a name and a number as in H100:8"),
        (["--to", "kubernetes"], "--image NAME:TAG"),
        (["--to", "kubernetes", "--image", "x", "--nodes", "2", "-p", "ddp"], "by --claim"),
        (["--to", "kubernetes", "--image", "x", "--claim", "c", "--run-dir", "first"], "/runs/first"),
        (["--to", "skypilot", "--gpus", "8", "-p", "ddp"], "--gpus H100:8"),
        (["--to", "skypilot", "--time", "1:00"], "--time is for slurm"),
        (["--run-dir", "s3://b/x"], "is a URL"),
    ],
)
def test_a_mistake_is_answered_before_the_queue(
    words: list[str], said: str, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "quickstart", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(empty_folder.iterdir())
