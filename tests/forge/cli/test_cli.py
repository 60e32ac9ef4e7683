"""The command line: every verb, what it prints, and how it answers a mistake."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from argparse import SUPPRESS
from contextlib import nullcontext
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from forge import __version__, registry
from forge.cli import additions, main, parser_of, verbs
from forge.cli.evaluate import check_bounds
from forge.errors import NegativeVerdict
from tests.support import forked
from tests.support.patience import PATIENCE

QUICK = ["task.hidden=16", "trainer.max_epochs=1", "schedule.warmup=2", "-p", "no:tensorboard"]


MADE = """
import forge, torch
from torch import nn

class Made(forge.TaskModule):
    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def narrow(width: int = 8):
    return Made(nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 1)))

def data():
    x = torch.arange(64.0).reshape(16, 4) / 64
    loader = forge.data.TensorLoader(x, x.sum(1, keepdim=True), batch_size=8)
    return loader, loader
"""


class Forge:
    """Runs commands in this process and keeps what they print."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self.capsys = capsys

    def __call__(self, *words: str) -> str:
        """The standard output of a command that must succeed."""
        code = main(words)
        self.out, self.err = self.capsys.readouterr()
        assert code == 0, self.err
        return self.out

    def refused(self, *words: str) -> str:
        """The message of a command that must fail as a mistake of the user's: one line, no traceback."""
        code = main(words)
        self.out, self.err = self.capsys.readouterr()
        assert code == 2
        assert self.err.startswith("error: ")
        assert "Traceback" not in self.err
        return self.err


@pytest.fixture
def forge(capsys, monkeypatch) -> Forge:
    monkeypatch.setenv("COLUMNS", "160")
    return Forge(capsys)


@pytest.fixture
def ring(forge) -> Path:
    """A task file as `forge new task ring` writes it."""
    forge("new", "task", "ring")
    return Path("ring.py")


# -- the command itself -----------------------------------------------------------------------------------------------


WITHOUT_TORCH = """
import contextlib, io, sys
from forge.cli import additions, main, verbs
shown = [[*command.split(), "--help"] for verb in verbs() for command in (verb, *additions(verb))]
for words in ["--help"], ["plugins"], ["recipes"], *shown:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(words)
    if code or not said.getvalue().strip() or "torch" in sys.modules:
        sys.exit(f"{words}: exit code {code}, torch imported: {'torch' in sys.modules}")
"""


def test_help_and_lists_do_not_import_torch():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_help_names_every_verb_and_at_its_line_what_packages_add(forge, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    text = forge("--help")
    listed = [line.split()[0] for line in text.partition("\nexamples")[0].splitlines() if line[:2] == "  " != line[2:4]]
    assert listed == list(verbs())
    assert len(listed) <= 22
    assert all(name in " ".join(text.split()) for verb in verbs() for name in additions(verb))
    assert max(map(len, text.splitlines())) <= 80
    assert forge() == text


@pytest.mark.parametrize("command", [name for verb in verbs() for name in (verb, *additions(verb))])
def test_every_argument_has_a_meaning_and_paragraphs_fit(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    parser = parser_of(command)
    actions = [action for action in parser._actions if action.help != SUPPRESS]
    assert [action.dest for action in actions if not action.help] == []
    told = parser.format_help().partition("\n\n")[2].splitlines()
    assert [line for line in told if len(line) > 80 and not line.startswith("  forge ")] == []


def test_version(forge):
    assert forge("--version") == f"forge {__version__}\n"


def test_python_dash_m_forge_is_the_same_command():
    done = subprocess.run([sys.executable, "-m", "forge", "--version"], check=True, capture_output=True, text=True)
    assert done.stdout == f"forge {__version__}\n"


@pytest.mark.parametrize(
    ("word", "command"),
    [("validte", "validate"), ("train", "fit")],
)
def test_a_verb_that_is_not_there_is_answered_with_the_nearest(forge, word, command):
    assert f"`forge {command}`" in forge.refused(word)


@pytest.mark.parametrize("command", [name for verb in verbs() for name in (verb, *additions(verb))])
def test_every_verb_refuses_an_option_that_it_has_not(capsys, command):
    assert main([*command.split(), "--no-such-option"]) == 2
    said = capsys.readouterr().err
    assert f"forge {command.partition(' --')[0]}" in said
    assert "Traceback" not in said


def test_a_crash_prints_its_traceback_and_notes_and_exits_with_1(capsys):
    Path("crash.py").write_text(
        "import forge, torch\n"
        "class Crash(forge.TaskModule):\n"
        "    def __init__(self):\n"
        "        super().__init__(); self.layer = torch.nn.Linear(1, 1)\n"
        "    def training_step(self, batch): raise RuntimeError('no way')\n"
        "    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.1)\n"
        "def data(): return forge.data.Splits(train=[torch.zeros(2, 1)])\n"
    )
    assert main(["fit", "crash.py:Crash"]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert "no way" in error
    assert "forge: raised in Crash.training_step" in error


def test_an_interrupt_is_one_line_and_exits_with_130(capsys, monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("forge.cli.plugins.run", interrupt)
    assert main(["plugins"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


# -- fit --------------------------------------------------------------------------------------------------------------


def test_fit_prints_metrics_run_folder_and_what_comes_next(forge):
    out = forge("fit", "quickstart", "task.hidden=16", "trainer.max_epochs=1", "schedule.warmup=2")
    (run,) = Path("runs/quickstart").iterdir()
    assert "val/accuracy" in out
    assert str(run) in out
    assert f"tensorboard --logdir {run}" in out
    assert f"forge report {run}" in out
    assert f"forge test quickstart task.hidden=16 --weights {run}\n" in out
    assert {"weights.safetensors", "config.yaml", "metrics.jsonl"} <= {path.name for path in run.iterdir()}


@pytest.mark.slow
def test_quickstart_reads_digits_with_at_least_97_percent(forge):
    forge("fit", "quickstart", "--run-dir", "run", "-p", "no:tensorboard")
    rows = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    accuracies = [row["val/accuracy"] for row in rows if "val/accuracy" in row]
    assert accuracies[-1] >= 0.97


@pytest.mark.slow
def test_the_runs_config_is_a_recipe_that_gives_the_same_weights(forge):
    forge("fit", "quickstart", *QUICK, "--run-dir", "a")
    forge("fit", "a/config.yaml", "--run-dir", "b")
    one, two = (load_file(f"{name}/weights.safetensors") for name in ("a", "b"))
    assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.slow
def test_trace_prints_every_hook_call(forge):
    forge("fit", "quickstart", *QUICK, "trainer.max_updates=1", "--trace")
    assert "forge_optimizer_step" in forge.err


def test_a_wrong_option_is_one_message_before_any_work(forge):
    assert "plugins.clip.max_nrom (command line)" in forge.refused("fit", "quickstart", "clip.max_nrom=1")
    assert not Path("runs").exists()


def test_a_stack_recipe_alone_says_what_is_missing(forge):
    assert "names no task" in forge.refused("fit", "default")


# -- a task from the user's own file ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_task_from_a_file_trains_with_any_stack_recipe(forge, ring):
    changed = ["task.lr=0.02", "data.batch_size=128", "-p", "no:compile"]
    forge("fit", "ring.py:Ring", "--recipe", "fast", *changed, "--run-dir", "run")
    config = Path("run/config.yaml").read_text()
    assert "lr: 0.02" in config
    assert "log_every: 200" in config


def test_a_missing_task_file_or_class_is_named(forge, ring):
    assert "No file 'rong.py'. Did you mean 'ring.py'?" in forge.refused("fit", "rong.py:Ring")
    assert "Did you mean 'Ring'?" in forge.refused("fit", "ring.py:Rong")
    assert "no subclass of forge.TaskModule" in forge.refused("fit", "ring.py:torch")
    assert "data made a Splits; it must return a forge.TaskModule" in forge.refused("fit", "ring.py:data")


def test_a_function_makes_a_task_that_no_options_describe(forge):
    Path("mine.py").write_text(MADE)
    assert "name a function that makes the task: FILE.py:function" in forge.refused("fit", "mine.py:Made")
    assert "Did you mean 'narrow'?" in forge.refused("fit", "mine.py:narow")
    assert "Did you mean 'width'?" in forge.refused("fit", "mine.py:narrow", "task.widht=3")
    forge("fit", "mine.py:narrow", "task.width=3", "--run-dir", "run", "trainer.max_epochs=1", "-p", "no:tensorboard")
    assert "val/loss" in forge("validate", "mine.py:narrow", "task.width=3", "--weights", "run")


@pytest.mark.parametrize(
    ("source", "cause", "lines"),
    [
        ("x = 1\nimport numpyy\n", "ModuleNotFoundError: No module named 'numpyy'", ["broken.py:2: import numpyy"]),
        ("def f(:\n    pass\n", "SyntaxError: invalid syntax", ["broken.py:1: def f(:"]),
        (
            "import torn_helper\n",
            "ZeroDivisionError: ",
            ["broken.py:1: import torn_helper", "torn_helper.py:2: y = 1 / 0"],
        ),
    ],
)
def test_an_import_error_is_told_by_the_users_own_lines(forge, source, cause, lines):
    Path("broken.py").write_text(source)
    Path("torn_helper.py").write_text("x = 1\ny = 1 / 0\n")
    first, *told = forge.refused("fit", "broken.py:Task").splitlines()
    assert first.startswith(f"error: broken.py cannot be imported: {cause}")
    assert told == [f"  {line}" for line in lines]


def test_data_by_name_replace_the_function_beside_a_task(forge, ring):
    assert "No data is called 'rings'" in forge.refused("fit", "ring.py:Ring", "data.name=rings")
    told = forge.refused("fit", "ring.py:Ring", "--data", "ring.py:data", "data.name=digits")
    assert (
        "data.name is the name of an installed data set, and 'data' was given instead. Leave one of them out." in told
    )


def test_a_task_without_data_says_where_to_give_them(forge, ring):
    source = ring.read_text()
    Path("bare.py").write_text(source[: source.index("def data")])
    assert "--data FILE.py:function" in forge.refused("fit", "bare.py:Ring")


# -- validate, test, predict ------------------------------------------------------------------------------------------


def test_trained_weights_are_validated_tested_and_predicted_with(forge):
    forge("fit", "quickstart", *QUICK, "--run-dir", "run")
    same = ["quickstart", "task.hidden=16", "--weights", "run/weights.safetensors"]
    assert "val/accuracy" in forge("validate", *same)
    assert "test/accuracy" in forge("test", *same)
    assert "warning" not in forge.err
    forge("predict", *same, "--out", "out/p.safetensors")
    assert load_file("out/p.safetensors")["predictions"].shape == (180,)


@pytest.mark.parametrize(("verb", "stage"), [("validate", "val"), ("test", "test")])
def test_a_metric_below_its_bound_is_a_negative_verdict(forge, ring, verb, stage):
    words = [verb, "ring.py:Ring", "data.points=200"]
    assert f"{stage}/accuracy" in forge(*words, "--at-least", f"{stage}/accuracy=0", "--at-least", f"{stage}/loss=0")
    assert main([*words, "--at-least", f"{stage}/accuracy=0", f"--at-least={stage}/accuracy=1.5"]) == 1
    out, err = forge.capsys.readouterr()
    assert f"{stage}/accuracy" in out  # the metrics are printed all the same
    assert f"{stage}/accuracy is 0." in err
    assert "less than 1.5 (--at-least)" in err
    assert "Traceback" not in err
    assert main([*words, "--at-least", f"{stage}/acuracy=0.5"]) == 2
    assert f"Did you mean '{stage}/accuracy'?" in forge.capsys.readouterr().err
    assert main([*words, "--at-least", "accuracy"]) == 2


@pytest.mark.parametrize(
    ("value", "fails"), [(0.9, False), (0.8999999761581421, False), (0.899, True), (math.nan, True)]
)
def test_a_bound_is_a_number_and_nan_is_below_it(value, fails):
    with pytest.raises(NegativeVerdict) if fails else nullcontext():
        check_bounds({"test/accuracy": value}, [("test/accuracy", 0.9)])


@pytest.mark.slow
def test_a_smoke_run_tries_every_stage_and_keeps_nothing(forge, ring):
    said = forge("fit", "ring.py:Ring", "--smoke", "data.points=200")
    for name in ("train/loss", "val/loss", "test/loss", "two batches of each stage"):
        assert name in said
    assert not Path("runs").exists()
    assert "--smoke keeps nothing" in forge.refused("fit", "ring.py:Ring", "--smoke", "--resume")


@pytest.mark.slow
def test_weights_of_other_options_say_which_and_what_to_type(forge, ring):
    forge("fit", "ring.py:Ring", "task.hidden=16", "trainer.max_updates=1", "-p", "no:tensorboard", "--run-dir", "run")
    given = ["ring.py:Ring", "data.points=200", "trainer.max_updates=1", "--weights", "run"]
    for verb in ("validate", "test", "predict", "fit"):
        said = forge.refused(verb, *given, "task.hidden=8")
        assert said.startswith("error: run was trained with task.hidden=16. Use the same options: ")
        words = shlex.split(said.partition("Use the same options: ")[2])[1:]
        assert words == [verb, *given[:3], "task.hidden=16", *given[3:]]
    assert "test/accuracy" in forge("test", *words[1:])


def test_a_missing_split_is_named(forge, ring):
    Path("untested.py").write_text(ring.read_text().replace("test=", "predict="))
    assert "no test split" in forge.refused("test", "untested.py:Ring")


def test_predictions_of_all_batches_are_joined_by_name():
    from forge.cli.predict import gather

    joined = gather([{"a": torch.zeros(2, 3), "b": torch.tensor(1)}, {"a": torch.ones(1, 3), "b": torch.tensor(2)}])
    assert joined["a"].shape == (3, 3)
    assert joined["b"].tolist() == [1, 2]


# -- plan -------------------------------------------------------------------------------------------------------------


def test_plan_shows_owners_wrappers_and_origins_of_values(forge):
    out = forge("plan", "quickstart", "-p", "accumulate", "accumulate.window=4")
    assert "accumulate owns" in out
    assert "schedule wraps > core does it" in out
    assert "quickstart.yaml:" in out
    assert "command line" in out
    assert not Path("runs").exists()


def test_plan_as_json_holds_every_hook_and_value(forge):
    plan = json.loads(forge("plan", "quickstart", "clip.max_norm=0.5", "--json"))
    assert plan["stack"][-2:] == ["clip", "schedule"]
    assert plan["hooks"]["forge_edit_grads"] == [{"plugin": "clip", "role": "event"}]
    assert plan["hooks"]["forge_backward"] == [{"plugin": "core", "role": "default"}]
    assert plan["values"]["plugins.clip.max_norm"] == {"value": 0.5, "from": "command line"}
    assert plan["values"]["trainer.device"]["from"] == "default"


def test_plan_shows_the_hooks_of_the_task(forge, ring):
    hook = "    @forge.hookimpl\n    def forge_step_end(self, step): pass\n\n    validation_step ="
    ring.write_text(ring.read_text().replace("    validation_step =", hook))
    plan = json.loads(forge("plan", "ring.py:Ring", "--json"))
    assert {"plugin": "task", "role": "event"} in plan["hooks"]["forge_step_end"]


# -- recipes and plugins ----------------------------------------------------------------------------------------------


def test_recipes_lists_names_and_descriptions(forge):
    out = forge("recipes")
    assert "quickstart" in out
    assert "handwritten digits" in out


def test_a_shown_recipe_is_merged_annotated_and_loads_again(forge):
    from forge.config import read_recipe

    out = forge("recipes", "quickstart")
    assert "# default.yaml:" in out
    Path("shown.yaml").write_text(out)
    assert read_recipe("shown.yaml").config == read_recipe("quickstart").config


def test_plugins_lists_every_plugin_with_its_package(forge):
    out = forge("plugins")
    assert "clip" in out
    assert f"forge-trainer {__version__}" in out


def test_a_shown_plugin_has_its_docstring_options_and_hooks(forge):
    out = forge("plugins", "clip")
    for part in ("Clip gradients", "max_norm", "float or None", "1.0", "provides clip", "forge_edit_grads"):
        assert part in out


def test_an_unknown_plugin_is_answered_with_the_nearest(forge):
    assert "Did you mean 'clip'?" in forge.refused("plugins", "clpi")


# -- new --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_new_task_trains_at_once_and_can_be_tested(forge, ring):
    out = forge("fit", "ring.py:Ring", "--run-dir", "run")
    assert "10 epochs, 250 updates, as planned (max_epochs)" in out
    assert "val/accuracy" in out
    assert "test/accuracy" in forge("test", "ring.py:Ring", "--weights", "run")


def test_a_new_plugin_is_a_package(forge):
    out = forge("new", "plugin", "weight-norm")
    assert "pip install -e weight-norm && pytest weight-norm" in out
    folder = Path("weight-norm")
    assert 'weight_norm = "forge_weight_norm:WeightNorm"' in (folder / "pyproject.toml").read_text()
    assert list(folder.glob("tests/test_*.py"))
    workflow = yaml.safe_load((folder / ".github" / "workflows" / "tests.yml").read_text())
    runs = [step["run"] for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert runs[-1] == "forge plugins check forge-weight-norm --out build"
    assert workflow["jobs"]["test"]["steps"][1]["with"]["python-version"] == "${{ matrix.python }}"


def test_the_page_of_a_new_plugin_is_what_forge_prints_of_it(forge, monkeypatch):
    forge("new", "plugin", "paged-norm")
    monkeypatch.syspath_prepend(Path("paged-norm", "src").absolute())
    entry = metadata.EntryPoint("paged_norm", "forge_paged_norm:PagedNorm", "forge.plugins")
    others = registry.installed("plugin")
    monkeypatch.setattr(registry, "installed", lambda kind: {**others, "paged_norm": entry})
    assert forge("plugins", "paged_norm", "--markdown") == Path("paged-norm/docs/paged_norm.md").read_text()


@pytest.mark.slow
def test_the_own_tests_of_a_new_plugin_pass(forge):
    forge("new", "plugin", "weight-norm")
    done = forked.call(partial(pytest.main, ["-q", "-p", "no:cacheprovider", "weight-norm"]))
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


def test_new_overwrites_nothing_and_refuses_what_is_no_name(forge, ring):
    assert "exists" in forge.refused("new", "task", "Ring")
    assert "letter first" in forge.refused("new", "plugin", "3d")


LATE = """
import os, signal, sys
from forge.cli import main

done = main(["fit", "quickstart", "trainer.max_updates=1", "-q", "--run-dir", "run", "--resume"])
os.kill(os.getpid(), signal.SIGUSR1)
sys.exit(done)
"""
EARLY = """
import os, signal, sys
from forge.cli import main, ranks, target

def build(*_, **__):
    os.kill(os.getpid(), signal.SIGUSR1)
    raise AssertionError("it went on")

target.build = ranks.checked_trainer = build
sys.exit(main(["fit", "quickstart", "--run-dir", "run", "--resume", *sys.argv[1:]]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("program", "words", "code"), [(LATE, [], 0), (EARLY, [], 85), (EARLY, ["--nproc", "1"], 85)])
def test_slurms_signal_outside_of_the_fit_fails_no_job(
    tmp_path: Path, program: str, words: list[str], code: int
) -> None:
    environment = {**os.environ, "SLURM_JOB_ID": "7"}
    done = forked.run([sys.executable, "-c", program, *words], cwd=tmp_path, env=environment, timeout=PATIENCE)
    assert done.returncode == code, done.stderr
