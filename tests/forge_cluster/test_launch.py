"""`forge launch`: the jobs it writes, checked by a shell and by published schemas, and what it refuses."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.cli import main
from forge.errors import ForgeError
from forge_cluster.launching import KINDS, Container, LaunchJob, Pods, manifest, ray_driver, sbatch_script, ssh_script
from forge_cluster.launching.job import parse_sweep
from tests.support import forked
from tests.support.patience import PATIENCE

JOB = LaunchJob(
    name="first",
    words=("my task.yaml", "task.note=it's $HOME"),
    run_dir="/runs/first",
    nodes=2,
    gpus=8,
    procs=8,
    cpus=12,
    memory="64Gi",
)


TASKS = """
import forge
from forge.data import Splits

class First(forge.TaskModule): ...

class Second(First): ...

def data(): return Splits(train=[])
"""
NUMBERS = {"PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "0"}


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs that write down how they are called: `python`, `srun`, `scontrol` and `ssh`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    recorded = f'for word in "$@"; do printf "%s\\n" "$word" >> {tmp_path}/NAME.calls; done\n'
    bodies = {
        "python": recorded + f"echo $FORGE_NODE_RANK $RANK >> {tmp_path}/ranks; exit ${{FORGE_TEST_CODE:-0}}",
        "srun": recorded + "exit ${FORGE_TEST_CODE:-0}",
        "scontrol": recorded,
        "ssh": 'shift 2; shift; exec /bin/sh -c "$*"',
    }
    for name, body in bodies.items():
        (folder / name).write_text("#!/bin/sh\n" + body.replace("NAME", name) + "\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    return tmp_path


def run_text(text: str, folder: Path, **environment: str) -> int:
    (folder / "script").write_text(text)
    return subprocess.run(["bash", "script"], cwd=folder, env={**os.environ, **environment}).returncode


# -- SLURM ------------------------------------------------------------------------------------------------------------


def test_sbatch_gets_the_size_and_what_a_requeue_needs() -> None:
    lines = sbatch_script(JOB, "24:00:00", "gpu", ["--account=me"]).splitlines()
    head = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert lines[0] == "#!/bin/bash"
    assert {"nodes=2", "ntasks-per-node=8", "gpus-per-node=8", "cpus-per-task=12", "time=24:00:00"} <= {*head}
    assert {"requeue", "open-mode=append", "signal=USR1@120", "account=me", "partition=gpu"} <= {*head}


def test_sbatch_reads_a_folder_with_a_space_whole() -> None:
    text = sbatch_script(replace(JOB, folder="/home/it's me/my work"))
    lines = [shlex.split(line.removeprefix("#SBATCH ")) for line in text.splitlines() if line.startswith("#SBATCH")]
    assert ["--chdir=/home/it's me/my work"] in lines


@pytest.mark.parametrize("code", [0, 1, 85])
def test_a_job_is_requeued_after_85_and_only_then(code: int, programs: Path) -> None:
    found = run_text(sbatch_script(JOB), programs, FORGE_TEST_CODE=str(code), SLURM_JOB_ID="77")
    assert found == code
    words = (programs / "srun.calls").read_text().splitlines()
    assert words[1:] == ["python", "-m", "forge", "fit", *JOB.words, "--run-dir", "/runs/first", "--resume"]
    asked = programs / "scontrol.calls"
    assert (asked.read_text().split() if asked.exists() else None) == (["requeue", "77"] if code == 85 else None)


def test_an_array_has_a_combination_for_each_task(programs: Path) -> None:
    sweep = parse_sweep(["task.lr=1e-3,1e-2", "trainer.seed=1,2"])
    assert sweep[1] == ("task.lr=1e-3", "trainer.seed=2")
    job = LaunchJob(name="grid", words=("quickstart",), run_dir="/runs/grid", sweep=sweep)
    text = sbatch_script(job)
    assert "#SBATCH --array=0-3" in text
    assert run_text(text, programs, SLURM_ARRAY_TASK_ID="2") == 0
    words = (programs / "srun.calls").read_text().splitlines()
    assert words[5:] == ["quickstart", "task.lr=1e-2", "trainer.seed=1", "--run-dir", "/runs/grid/2", "--resume"]


KILLED = "srun: error: n1: task 0: Exited with exit code 1\nsrun: error: n2: task 1: Killed\n"
SLURM = {"SLURM_JOB_ID": "77", "SLURM_JOB_PARTITION": "main", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(("nodes", "left_out"), [(3, True), (2, False)])
def test_a_killed_task_is_tried_again_without_its_node_where_there_is_another(
    nodes: int, left_out: bool, programs: Path
) -> None:
    (programs / "bin/srun").write_text(f"#!/bin/sh\nprintf '{KILLED}' >&2\nexit 137\n")
    (programs / "bin/sinfo").write_text(f"#!/bin/sh\necho {nodes}\n")
    (programs / "bin/squeue").write_text("#!/bin/sh\necho n9\n")  # left out by the user
    for name in ("sinfo", "squeue"):
        (programs / "bin" / name).chmod(0o755)
    text = sbatch_script(replace(JOB, run_dir=f"{programs}/run", restarts=2))
    asked = []
    for _ in range(4):
        assert run_text(text, programs, **SLURM) == 137
        calls = programs / "scontrol.calls"
        asked.append(calls.read_text().split() if calls.exists() else [])
        calls.unlink(missing_ok=True)
    again = ["requeue", "77", *(["update", "JobId=77", "ExcNodeList=n9,n2"] if left_out else [])]
    assert asked == [again, again, [], []]  # bounded


def test_a_host_that_the_check_found_unfit_is_left_out(programs: Path) -> None:
    (programs / "bin/srun").write_text("#!/bin/sh\nprintf 'error: rank 9\\nunfit host: n4\\n' >&2\nexit 1\n")
    for name, said in {"sinfo": "9", "squeue": ""}.items():
        (programs / "bin" / name).write_text(f"#!/bin/sh\necho {said}\n")
        (programs / "bin" / name).chmod(0o755)
    assert run_text(sbatch_script(replace(JOB, run_dir=f"{programs}/run")), programs, **SLURM) == 1
    assert (programs / "scontrol.calls").read_text().split()[2:] == ["update", "JobId=77", "ExcNodeList=n4"]


def test_tasks_get_their_cores_their_variables_and_a_sites_way_to_ask_for_gpus(programs: Path) -> None:
    job = replace(JOB, env=("NCCL_DEBUG=it's $HOME", "NCCL_IB_HCA=mlx5"))
    seen = 'echo "$SRUN_CPUS_PER_TASK|$NCCL_DEBUG|$NCCL_IB_HCA" > seen\n'
    (programs / "bin/srun").write_text(f"#!/bin/sh\n{seen}")
    text = sbatch_script(job, gpu_option="--gres=gpu:a100:{}")
    assert run_text(text, programs, SLURM_CPUS_PER_TASK="12") == 0
    assert (programs / "seen").read_text() == "12|it's $HOME|mlx5\n"
    assert "#SBATCH --gres=gpu:a100:8\n" in text
    assert "gpus-per-node" not in text


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            "pyxis",
            ["--container-image=me/x", "--container-mounts=WORK:WORK,RUN:RUN,/data:/d", "--container-workdir=WORK"],
        ),
        ("apptainer", ["apptainer", "exec", "--nv", "--bind=WORK,RUN,/data:/d", "--pwd=WORK", "me/x"]),
    ],
)
def test_ranks_run_in_a_container(kind: str, words: list[str], programs: Path) -> None:
    job = replace(JOB, folder=f"{programs}/my work", run_dir=f"{programs}/run")
    assert run_text(sbatch_script(job, container=Container(kind, "me/x", ("/data:/d",))), programs) == 0
    places = {"WORK": job.folder, "RUN": job.run_dir}
    expected = [re.sub("WORK|RUN", lambda found: places[found[0]], word) for word in words]
    assert (programs / "srun.calls").read_text().splitlines()[1 : len(words) + 2] == [*expected, "python"]
    assert (programs / "run").is_dir()  # a folder that is not there cannot be bound
    with pytest.raises(ForgeError, match="comma or a colon"):
        sbatch_script(replace(job, folder="/a,b"), container=Container(kind, "me/x"))


# -- Kubernetes -------------------------------------------------------------------------------------------------------


def containers(tree: Any) -> list[dict[str, Any]]:
    """All containers of pods in a manifest."""
    if isinstance(tree, dict):
        return [*tree.get("containers", []), *(c for value in tree.values() for c in containers(value))]
    return [c for value in tree for c in containers(value)] if isinstance(tree, list) else []


def mappings(tree: Any) -> list[dict[str, Any]]:
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [*([tree] if isinstance(tree, dict) else []), *(found for part in parts for found in mappings(part))]


def lost(given: Any, read: Any, path: str = "") -> list[str]:
    """What a model has not read of a manifest: fields that it does not know. It may add defaults."""
    if isinstance(given, dict) and isinstance(read, dict):
        return [name for key in given for name in lost(given[key], read.get(key), f"{path}.{key}".strip("."))]
    if isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        pairs = enumerate(zip(given, read, strict=True))
        return [name for index, (one, other) in pairs for name in lost(one, other, f"{path}.{index}")]
    return [] if given == read else [path]


@pytest.mark.parametrize("kind", KINDS)
def test_a_pod_runs_the_worker_with_its_words_unchanged(kind: str, programs: Path) -> None:
    made = yaml.safe_load(manifest(JOB, kind, "me/forge:1", Pods(claim="claim")))
    command = made["spec"]["trainer"]["command"] if kind == "trainjob" else containers(made)[0]["command"]
    subprocess.run(
        command, env={**os.environ, "MASTER_ADDR": "m", "PET_MASTER_ADDR": "m", "RANK": "0", **NUMBERS}, check=True
    )
    words = (programs / "python.calls").read_text().splitlines()
    assert (programs / "ranks").read_text() == ("0\n" if kind == "pytorchjob" else "0 0\n")  # that of the pod is unset
    assert words[:5] == ["-m", "forge", "fit", *JOB.words]
    first = "first-node-0-0.first" if kind == "jobset" else "m"
    assert shlex.join(words[5:]) == (
        f"--run-dir /runs/first --resume --nproc 8 --max-restarts 3 --nnodes 2 --rdzv-endpoint {first}:29400"
    )


def test_pods_fit_the_schema_of_kubernetes() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    job = replace(JOB, env=("A=b",))
    jobset = yaml.safe_load(manifest(job, "jobset", "me/forge:1", EVERYTHING))
    inner = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": inner}
    validate.validate(job, validate.latest_version(), strict=True)
    replicas = yaml.safe_load(manifest(JOB, "pytorchjob", "me/forge:1", EVERYTHING))["spec"]["pytorchReplicaSpecs"]
    assert {name: replica["replicas"] for name, replica in replicas.items()} == {"Master": 1, "Worker": 1}
    for replica in replicas.values():
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": replica["template"]["spec"]}
        validate.validate(pod, validate.latest_version(), strict=True)
        del pod["spec"]["containers"][0]["image"]
        pod["spec"]["containers"][0]["imagee"] = "x"
        with pytest.raises(validate.ValidationError):
            validate.validate(pod, validate.latest_version(), strict=True)


@pytest.mark.parametrize(
    ("kind", "model"), [("trainjob", "TrainerV1alpha1TrainJob"), ("jobset", "JobsetV1alpha2JobSet")]
)
def test_manifests_fit_the_models_of_kubeflow(kind: str, model: str) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    pods = replace(EVERYTHING, capabilities=(), secrets=(), priority=None) if kind == "trainjob" else EVERYTHING
    made = yaml.safe_load(manifest(replace(JOB, env=("A=b",)), kind, "me/forge:1", pods))
    assert lost(made, getattr(models, model).from_dict(made).to_dict()) == []
    made["spec"]["suspendd"] = True
    assert lost(made, getattr(models, model).from_dict(made).to_dict()) == ["spec.suspendd"]


EVERYTHING = Pods(
    claim="claim",
    shm="16Gi",
    queue="team",
    priority="high",
    tolerations=("nvidia.com/gpu", "team=vision:NoSchedule"),
    resources=("rdma/hca=1",),
    capabilities=("IPC_LOCK",),
    secrets=("s3",),
)


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_memory_to_share_a_queue_and_what_a_site_needs(kind: str) -> None:
    pods = replace(EVERYTHING, capabilities=(), secrets=(), priority=None) if kind == "trainjob" else EVERYTHING
    made = yaml.safe_load(manifest(replace(JOB, env=("A=$(B) $$",)), kind, "me/forge:1", pods))
    assert made["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    spec = next(part for part in mappings(made) if "volumes" in part)
    assert spec["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "16Gi"}}
    assert {"name": "shm", "mountPath": "/dev/shm"} in spec["containers"][0]["volumeMounts"]
    assert spec.get("priorityClassName") == pods.priority
    assert spec["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "team", "operator": "Equal", "value": "vision", "effect": "NoSchedule"},
    ]
    worker = made["spec"]["trainer"] if kind == "trainjob" else spec["containers"][0]
    assert worker["env"] == [{"name": "A", "value": "$$(B) $$$$"}]  # which Kubernetes reads as $(B) $$
    limits = worker["resourcesPerNode" if kind == "trainjob" else "resources"]["limits"]
    assert limits == {"nvidia.com/gpu": "8", "cpu": "96", "memory": "64Gi", "rdma/hca": "1"}
    if kind != "trainjob":
        assert worker["envFrom"] == [{"secretRef": {"name": "s3"}}]
        assert worker["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}


def test_what_a_trainjob_cannot_have_is_refused() -> None:
    for one in (Pods(secrets=("s3",)), Pods(capabilities=("IPC_LOCK",)), Pods(priority="high")):
        with pytest.raises(ForgeError, match="its runtime has"):
            manifest(replace(JOB, nodes=1), "trainjob", "me/forge:1", one)


def test_a_mistake_ends_a_jobset_and_a_crash_does_not() -> None:
    spec = yaml.safe_load(manifest(JOB, "jobset", "me/forge:1", EVERYTHING))["spec"]
    rules = spec["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    failing = [rule for rule in rules if rule["action"] == "FailJob"]
    assert [rule["onExitCodes"]["values"] for rule in failing] == [[2]]  # what the reason PodFailurePolicy stands for
    policy = spec["failurePolicy"]
    assert [(r["action"], r["onJobFailureReasons"]) for r in policy["rules"]] == [("FailJobSet", ["PodFailurePolicy"])]
    assert policy["maxRestarts"] == 3


def test_pods_without_a_shared_volume_are_refused() -> None:
    with pytest.raises(ForgeError, match="--claim PVC"):
        manifest(JOB, "jobset", "me/forge:1")
    with pytest.raises(ForgeError, match="is not in the volume, which is mounted at /data"):
        manifest(JOB, "jobset", "me/forge:1", Pods(claim="claim", mount="/data"))


# -- Ray and ssh ------------------------------------------------------------------------------------------------------


def test_the_ray_driver_is_python_with_the_command_in_it() -> None:
    text = ray_driver(JOB)
    compile(text, "driver.py", "exec")
    assert "--rdzv-endpoint $FORGE_ENDPOINT:29400" in text
    assert '"STRICT_SPREAD"' in text


@pytest.mark.parametrize("code", [0, 85])
def test_ssh_starts_every_host_and_returns_the_code(code: int, programs: Path) -> None:
    job = LaunchJob(
        name="x",
        words=JOB.words,
        run_dir=f"{programs}/run dir",
        nodes=2,
        procs=2,
        folder=str(programs),
        python="python",
    )
    assert run_text(ssh_script(job, ["me@a", "b"]), programs, FORGE_TEST_CODE=str(code)) == code
    words = (programs / "python.calls").read_text().splitlines()
    assert words.count("task.note=it's $HOME") == 2
    assert words.count("a:29400") == 2
    assert sorted((programs / "ranks").read_text().split()) == ["0", "1"]
    assert sorted(path.name for path in (programs / "run dir/.ssh-launch").iterdir()) == ["b.pid", "me@a.pid"]


def test_no_shell_text_is_taken_for_a_host() -> None:
    with pytest.raises(ForgeError, match="no name of a host"):
        ssh_script(JOB, ["a", "b;reboot"])


# -- the command ------------------------------------------------------------------------------------------------------


def test_the_command_writes_a_file_and_names_how_to_submit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "slurm", "quickstart", "trainer.max_epochs=1", "-p", "ddp", "--procs", "2"]) == 0
    assert "sbatch quickstart.sbatch" in capsys.readouterr().err
    text = (tmp_path / "quickstart.sbatch").read_text()
    assert f"{sys.executable} -m forge fit quickstart trainer.max_epochs=1 -p ddp --run-dir {tmp_path}" in text


def test_a_job_of_a_file_is_named_after_its_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "my tasks.py").write_text(TASKS)
    for task in ("First", "Second"):
        assert main(["launch", "ray", f"my tasks.py:{task}", "trainer.max_epochs=1"]) == 0
        words = shlex.split(capsys.readouterr().err.partition("To submit it: ")[2])
        assert words == ["ray", "job", "submit", "--", "python", str(folder / f"{task.lower()}.py")]
        assert f"{folder}/runs/{task.lower()}" in (folder / f"{task.lower()}.py").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["slurm", "quickstart", "--procs", "2"], "no plugin in this stack connects them"),
        (["slurm", "quickstart", "trainer.max_epoch=2"], "max_epoch"),
        (["ssh", "quickstart"], "--hosts A,B"),
        (["kubernetes", "quickstart"], "--image NAME:TAG"),
        (["kubernetes", "quickstart", "--image", "x", "--kind", "pod"], "one of pytorchjob, trainjob, jobset"),
        (["slurm", "quickstart", "--array", "task.lr"], "write a key and its values"),
        (["slurm", "quickstart", "--name", "A B"], "lower-case letters"),
        (["slurm", "quickstart", "--run-dir", "s3://b/x"], "keep checkpoints there: checkpoint.remote=s3://b/x"),
        (["kubernetes", "quickstart", "--image", "x", "--run-dir", "s3://b/x"], "is a URL"),
        (["slurm", "quickstart", "--env", "A"], "--env NCCL_DEBUG=INFO"),
        (["slurm", "quickstart", "--container", "pyxis"], "--image IMAGE"),
        (["slurm", "quickstart", "--container", "docker", "--image", "x"], "one of pyxis, apptainer"),
        (["slurm", "quickstart", "--gpus", "1", "--gpu-option", "gres"], "--gpu-option 'gres'"),
        (["ray", "quickstart", "--queue", "team"], "--queue is for kubernetes, not for ray"),
        (["kubernetes", "quickstart", "--image", "x", "--resource", "rdma"], "rdma/hca=1"),
        (["ray", "quickstart", "--out", "-", "--submit"], "leave one of them out"),
    ],
)
def test_a_mistake_is_answered_before_the_queue(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["launch", *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


LATE = """
import os, signal, sys
from forge.cli import main

done = main(["fit", "quickstart", "trainer.max_updates=1", "-q", "--run-dir", "run", "--resume"])
os.kill(os.getpid(), signal.SIGUSR1)
sys.exit(done)
"""
EARLY = """
import os, signal, sys
from forge.cli import main, target

def build(*_):
    os.kill(os.getpid(), signal.SIGUSR1)
    raise AssertionError("it went on")

target.build = build
sys.exit(main(["fit", "quickstart", "--run-dir", "run", "--resume"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "code"), [(LATE, 0), (EARLY, 85)])
def test_slurms_signal_outside_of_the_fit_fails_no_job(tmp_path: Path, program: str, code: int) -> None:
    environment = {**os.environ, "SLURM_JOB_ID": "7"}
    done = forked.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, timeout=PATIENCE)
    assert done.returncode == code, done.stderr
