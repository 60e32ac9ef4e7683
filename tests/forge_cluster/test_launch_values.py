"""No value of a job becomes a command: what is written is run by a shell, read by a YAML parser or compiled by Python,
and gives back the values that were given, or the job is refused."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forge.cli import main
from forge.errors import ForgeError
from forge_cluster.launching import KINDS, LaunchJob, Pods, manifest, ray_driver, sbatch_script, ssh_script
from forge_cluster.launching.job import parse_sweep
from tests.support.profiles import some

SIGNS = [
    "\n",
    "\r",
    "\u2028",
    "\x85",
    "\0",
    "\x1b",
    "'",
    '"',
    '"""',
    "\\",
    "$",
    "$$",
    "`",
    "{",
    "}",
    "#",
    "*",
    "~",
    "!",
    "%",
]
TRICKS = [
    "$(touch canary)",
    "`touch canary`",
    ";touch canary;",
    "&&touch canary",
    "|touch canary",
    ">canary",
    "\ntouch canary\n",
]
WORDS = [
    "a",
    "é",
    " ",
    "-",
    "--",
    "=",
    ",",
    ":",
    "$HOME",
    "$(HOME)",
    "$$(HOME)",
    "@ENDPOINT@",
    "{job}",
    "\\n",
    "#SBATCH ",
    "'''",
]
values = st.lists(st.sampled_from(SIGNS + TRICKS + WORDS), min_size=1, max_size=5).map("".join)
few = settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None
)
"""Every example runs a shell."""


@pytest.fixture(scope="module")
def sandbox(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with programs that write down how they are called, with a NUL behind each word."""
    folder = tmp_path_factory.mktemp("sandbox")
    (folder / "bin").mkdir()
    recorded = f'#!/bin/bash\nprintf "%s\\0" "$@" >> {folder}/calls\n'
    bodies = {
        "srun": recorded,
        "python": recorded,
        "scontrol": recorded,
        "ssh": '#!/bin/bash\nshift 3\nexec /bin/sh -c "$*"\n',
    }
    for name, body in bodies.items():
        (folder / "bin" / name).write_text(body)
        (folder / "bin" / name).chmod(0o755)
    return folder


def ran(sandbox: Path, command: list[str]) -> list[str]:
    """The words that the stubs were called with; nothing else may have happened in the folder."""
    (sandbox / "calls").unlink(missing_ok=True)
    names = {"MASTER_ADDR": "m", "PET_MASTER_ADDR": "m", "FORGE_ENDPOINT": "m", "RANK": "0", "SLURM_ARRAY_TASK_ID": "0"}
    environment = {**os.environ, **names, "PATH": f"{sandbox}/bin:{os.environ['PATH']}"}
    before = {*sandbox.iterdir()}
    done = subprocess.run(command, cwd=sandbox, env=environment, capture_output=True, check=False)
    made = {path.name for path in {*sandbox.iterdir()} - before} - {"calls", "work"}
    assert made == set(), (made, command)
    assert done.returncode == 0, done.stderr
    return (sandbox / "calls").read_text().split("\0")[:-1]


def written(render: Callable[[], str]) -> str | None:
    """What is written; None if it is refused, in one line."""
    try:
        return render()
    except ForgeError as error:
        said = str(error)
    assert said.isprintable()
    return None


def job(value: str, **more: Any) -> LaunchJob:
    given = {
        "words": ("quickstart", f"task.note={value}", value),
        "run_dir": f"/runs/{value}",
        "folder": f"/home/{value}",
    }
    return LaunchJob(name="first", **{**given, **more})


def fit_words(job: LaunchJob) -> list[str]:
    return ["-m", "forge", "fit", *job.words, "--run-dir", job.run_dir, "--resume"]


@few
@given(values, values)
@example("\ntouch canary\n", "1:00:00\ntouch canary")
def test_slurm(sandbox: Path, value: str, other: str) -> None:
    sweep = parse_sweep([f"task.x={value.replace(',', '')}y"])
    made = job(value, memory=other, sweep=sweep, env=(f"FORGE_TEST={value}",))
    text = written(lambda: sbatch_script(made, other, other, ["--comment=" + shlex.quote(value)]))
    if text is None:
        return
    head = [word for line in text.splitlines() if line.startswith("#SBATCH ") for word in shlex.split(line[8:])]
    head_given = {"chdir": made.folder, "time": other, "partition": other, "mem": other, "comment": value}
    assert {f"--{name}={text}" for name, text in head_given.items()} <= {*head}
    assert len(head) == 13
    (sandbox / "script").write_text(text)
    subprocess.run(["bash", "-n", "script"], cwd=sandbox, check=True)
    words = ran(sandbox, ["bash", "script"])
    assert words[1:] == ["python", *fit_words(made)[:-3], *sweep[0], "--run-dir", f"{made.run_dir}/0", "--resume"]


@few
@given(values)
@example("$(touch canary)")
def test_ssh(sandbox: Path, value: str) -> None:
    work = sandbox / "work" / value.replace("/", "").replace("\0", "")[:40].strip(".")
    made = job(value, run_dir=str(work / "runs"), folder=str(work), procs=2, env=(f"FORGE_TEST={value}",))
    text = written(lambda: ssh_script(made, ["me@a"]))
    if text is None:
        return
    work.mkdir(parents=True, exist_ok=True)
    (sandbox / "script").write_text(text)
    assert ran(sandbox, ["bash", "script"]) == [*fit_words(made), "--nproc", "2", "--max-restarts", "3"]


@pytest.mark.parametrize("kind", some(KINDS, quick=1))
@few
@given(value=values)
@example(value="$(HOME) $$ $$(HOME)")
def test_kubernetes(sandbox: Path, kind: str, value: str) -> None:
    made = job(value, procs=2, memory=value, env=(f"FORGE_TEST={value}",))
    pods = Pods(claim=f"claim {value}", shm=f"shm {value}", tolerations=(f"key={value}",))
    text = written(lambda: manifest(made, kind, f"me/{value}", pods))
    if text is None:
        return
    tree = yaml.safe_load(text)
    assert {value, f"me/{value}", f"claim {value}", f"shm {value}"} <= {*texts(tree)}
    assert value in [filled_in(str(text)) for text in texts(tree)]
    command = next(part["command"] for part in mappings(tree) if "command" in part)
    expected = [*fit_words(made), "--nproc", "2", "--max-restarts", "3"]
    assert ran(sandbox, command) == expected
    assert ran(sandbox, [filled_in(word) for word in command]) == expected


def texts(tree: Any) -> Any:
    if isinstance(tree, (dict, list)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from texts(part)
    else:
        yield tree


def mappings(tree: Any) -> Any:
    if isinstance(tree, dict):
        yield tree
    if isinstance(tree, (dict, list)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from mappings(part)


def filled_in(word: str) -> str:
    """What Kubernetes makes of a command's word: $$ is a $, and $(NAME) the value of a variable of the container."""
    return re.sub(r"\$\$|\$\(HOME\)", lambda found: "$" if found[0] == "$$" else "/root", word)


@few
@given(values, values)
@example("a", '"""\nimport os; os.system("touch canary")\n"""')
def test_ray(sandbox: Path, value: str, submit: str) -> None:
    made = job(value, folder=str(sandbox), procs=2)
    text = written(lambda: ray_driver(made, submit=submit))
    if text is None:
        return
    mine, plain = (ast.parse(source) for source in (text, ray_driver(LaunchJob(name="x", words=(), run_dir="/x"))))
    at = next(number for number, node in enumerate(plain.body) if isinstance(node, ast.Assign))
    command = ast.literal_eval(mine.body[at].value)["command"]  # pyright: ignore[reportAttributeAccessIssue]
    del mine.body[at], plain.body[at]
    assert ast.dump(mine) == ast.dump(plain)
    assert ran(sandbox, ["/bin/sh", "-c", command]) == [*fit_words(made), "--nproc", "2", "--max-restarts", "3"]


@pytest.mark.parametrize(
    "host", ["a b", "-oProxyCommand=x", "a\n", "$(x)", "a;b", "a#b", "~", "!!", "a\u2028b", "*", "a=b", "@a", "é"]
)
def test_a_host_is_a_name(host: str) -> None:
    with pytest.raises(ForgeError):
        ssh_script(LaunchJob(name="x", words=("q",), run_dir="/x"), [host])


@pytest.mark.parametrize(
    "option",
    ["", "account", "--x\ntouch canary", "--x='", "--x\u2028--y", "a --b"],
    ids=["none", "word", "lf", "quote", "ls", "two"],
)
def test_an_option_of_sbatch_is_one(option: str) -> None:
    with pytest.raises(ForgeError):
        sbatch_script(LaunchJob(name="x", words=("q",), run_dir="/x"), more=[option])


def test_options_of_sbatch_may_be_words() -> None:
    text = sbatch_script(
        LaunchJob(name="x", words=("q",), run_dir="/x"), more=["-A me", '--comment="a b"', "-C '[a|b]'"]
    )
    lines = [shlex.split(line[8:]) for line in text.splitlines() if line.startswith("#SBATCH")]
    assert lines[-3:] == [["-A", "me"], ["--comment=a b"], ["-C", "[a|b]"]]


def test_an_array_that_multiplies_is_refused() -> None:
    with pytest.raises(ForgeError, match="10,000 is the most"):
        parse_sweep([f"task.x{i}=" + ",".join("1" * 100) for i in range(50)])


@pytest.mark.parametrize("system", ["slurm", "ssh", "ray", "kubernetes"])
def test_a_folder_with_a_line_break_is_refused(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a\ntouch canary\n"
    folder.mkdir()
    monkeypatch.chdir(folder)
    more = {"ssh": ["--hosts", "a"], "kubernetes": ["--image", "x"]}.get(system, [])
    assert main(["launch", system, "quickstart", *more]) == 2
    assert "it must be one line of printable signs" in " ".join(capsys.readouterr().err.split())
    assert not list(folder.iterdir())
