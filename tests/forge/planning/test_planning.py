"""`forge plan --devices N --memory G`: what a step takes, counted without computing it, and which strategy to take."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.cli import main, plan, plan_memory, target
from forge.errors import TaskError
from forge.planning import (
    WORKSPACE,
    Advice,
    DryStep,
    Footprint,
    MemoryPlan,
    Moment,
    StrategyRow,
    advise,
    rows,
    run_dry,
)
from forge.planning.cuda_ops import chosen_as_on_cuda
from tests.support.profiles import some

GIB = 2**30
WIDTH, SAMPLES = 64, 32
Forge = Callable[..., tuple[int, str, str]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


class Net(forge.TaskModule):
    optimizer: Any = staticmethod(momentum)

    def __init__(self, blocks: int = 2):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.norm, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 10)

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.norm(self.blocks(x))), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters())


def batch(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, WIDTH), torch.randint(10, (samples,))


@cache
def plain(samples: int = SAMPLES) -> Footprint:
    """What is needed without any plugin."""
    return run_dry(Net, batch(samples))


def rounded(tensors: Iterable[Tensor]) -> int:
    """Each storage once, in multiples of 512 bytes."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({s.data_ptr(): -(-s.nbytes() // 512) * 512 for s in storages}.values())


@pytest.fixture
def forge_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Forge:
    """Runs a command: (exit code, stdout, stderr)."""
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        out, err = capsys.readouterr()
        return code, out, err

    return run


# ---------------------------------------------------------------------------------------------------------------------
# What is counted


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(torch.optim.AdamW, id="adamw"), pytest.param(momentum, id="sgd", marks=pytest.mark.slow)],
)
def test_state_sizes_are_those_of_a_real_step(optimizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Net, "optimizer", staticmethod(optimizer))
    task = Net()
    real = task.configure_optimizers()
    task.training_step(batch()).backward()
    gradients = [p.grad for p in task.parameters() if p.grad is not None]
    real.step()
    states = [value for state in real.state.values() for value in state.values() if isinstance(value, Tensor)]

    footprint = run_dry(Net, batch())

    assert footprint.parameters == rounded([*task.parameters(), *task.buffers()])
    assert footprint.buffers == rounded(task.buffers())
    assert footprint.gradients == rounded(gradients)
    assert footprint.optimizer == rounded(states)


def test_activations_are_what_autograd_keeps() -> None:
    task, (x, y) = Net(), batch()
    kept: list[Tensor] = []
    own = {t.untyped_storage().data_ptr() for t in (*task.parameters(), *task.buffers(), x, y)}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept.append(tensor.detach())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = task.training_step((x, y))
    assert run_dry(Net, (x, y)).activations == rounded([*kept, loss])


@pytest.mark.slow
def test_a_fused_optimizer_takes_a_copy_of_the_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes it on CUDA where nobody says otherwise; then the optimizer's step can be the peak."""
    monkeypatch.setattr(Net, "optimizer", staticmethod(torch.optim.AdamW))
    together = run_dry(Net, batch(2))
    monkeypatch.setattr(Net, "optimizer", staticmethod(lambda p: torch.optim.AdamW(p, foreach=False)))
    one_by_one = run_dry(Net, batch(2))
    parameters = together.parameters - together.buffers
    assert one_by_one.rest("optimizer") < parameters / 2 < parameters <= together.rest("optimizer")
    assert together.worst == "optimizer"


@pytest.mark.slow
def test_what_plugins_hold_is_counted() -> None:
    averaged = run_dry(Net, batch(), {"ema": {}})
    parameters = plain().parameters - plain().buffers
    assert averaged.rest("backward") - plain().rest("backward") >= parameters
    ahead = run_dry(Net, batch(), {"prefetch": {"depth": 2}})
    assert ahead.peak - plain().peak == 2 * (SAMPLES * WIDTH * 4 + 512)


def test_two_optimizers_are_planned() -> None:
    class Pair(forge.TaskModule):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def training_step(self, batch: Any, name: str = "") -> Tensor:
            return getattr(self, name)(batch[0]).square().mean()

        def configure_optimizers(self) -> dict[str, torch.optim.Optimizer]:
            return {name: torch.optim.Adam(getattr(self, name).parameters()) for name in ("a", "b")}

    footprint = run_dry(Pair, batch())
    assert footprint.gradients == footprint.parameters // 2
    assert footprint.optimizer > 2 * footprint.parameters


@pytest.mark.slow
def test_a_dry_run_leaves_no_trace() -> None:
    state = torch.get_rng_state()
    run_dry(Net, (torch.ones(SAMPLES, WIDTH), torch.zeros(SAMPLES, dtype=torch.long)))
    assert torch.equal(torch.get_rng_state(), state)
    with torch.autocast("cpu", torch.bfloat16):
        assert F.softmax(torch.ones(2, 2, dtype=torch.bfloat16), -1).dtype == torch.bfloat16


# ---------------------------------------------------------------------------------------------------------------------
# As CUDA would


def test_autocast_computes_in_float32_what_it_does_on_cuda() -> None:
    x = torch.ones(4, 8, dtype=torch.bfloat16)
    with chosen_as_on_cuda(), torch.autocast("cpu", torch.bfloat16):
        for made in (F.softmax(x, -1), F.log_softmax(x, -1), F.layer_norm(x, (8,)), x.exp(), x.sum(), x.pow(2)):
            assert made.dtype == torch.float32
        for made in (F.linear(x.float(), x.float()), F.gelu(x), x + x):
            assert made.dtype == torch.bfloat16
        assert F.softmax(x, -1, dtype=torch.float64).dtype == torch.float64


@pytest.mark.slow
def test_attention_keeps_no_matrix_with_dropout_or_a_mask() -> None:
    class Attends(forge.TaskModule):
        options: Any = {}

        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

        def training_step(self, batch: Any) -> Tensor:
            q, k, v = self.qkv(batch).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            return F.scaled_dot_product_attention(q, k, v, **self.options).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    length = 256
    matrix = 2 * 4 * length * length * 4
    mask = torch.ones(length, length, dtype=torch.bool)
    halved = {"amp": {"dtype": "bf16"}}
    for options, stack in (({"is_causal": True}, {}), ({"dropout_p": 0.1}, halved), ({"attn_mask": mask}, {})):
        Attends.options = options
        assert run_dry(Attends, torch.randn(2, length, WIDTH), stack).activations < matrix


# ---------------------------------------------------------------------------------------------------------------------
# Strategies and advice, by hand

P, G, OPT, ACT, BUFFERS, BLOCK = 1000, 1000, 2000, 5000, 100, 100
STEP = Footprint(
    samples=8,
    parameters=P + BUFFERS,
    buffers=BUFFERS,
    gradients=G,
    optimizer=OPT,
    activations=ACT,
    moments={
        "forward": Moment(P + BUFFERS + OPT + ACT, 0),
        "backward": Moment(P + BUFFERS + OPT + ACT + 700, 200),
        "optimizer": Moment(P + BUFFERS + OPT + G + P, G),
    },
    block=BLOCK,
    outside=300,
)


def table(devices: int, bucket_views: bool = True) -> dict[str, StrategyRow]:
    step = DryStep({(): STEP}, {(): STEP}, devices, options={"ddp": {"bucket_view": bucket_views}})
    return {row.strategy: row for row in rows(step)}


def test_one_device_takes_what_was_measured() -> None:
    row = table(1)["single"]
    assert row.peak == STEP.peak == P + BUFFERS + OPT + ACT + 700 + WORKSPACE
    assert not row.is_estimate
    assert "ddp" not in table(1)


def test_ddp_has_its_buckets_from_beginning_to_end() -> None:
    assert table(4)["ddp"].peak == STEP.peak - 200 + G
    assert table(4, bucket_views=False)["ddp"].peak == STEP.peak + G


def test_fsdp_divides_all_but_buffers_and_gathers_blocks() -> None:
    row = table(4)["fsdp"]
    assert (row.parameters, row.gradients, row.optimizer) == (P // 4 + BUFFERS, G // 4, OPT // 4)
    gathered = 300 + 2 * BLOCK + 300
    rest = ACT + 700 - 200
    assert row.peak == (P + OPT + 200) // 4 + BUFFERS + gathered + rest + WORKSPACE


def test_offload_leaves_only_what_computes() -> None:
    row = table(4)["fsdp + offload"]
    assert (row.parameters, row.gradients, row.optimizer) == (BUFFERS, 0, 0)
    assert row.is_estimate
    assert row.peak < table(4)["fsdp"].peak


def test_tensor_parallel_gathers_less_and_shares_the_batch() -> None:
    found = table(8)
    assert [found[f"fsdp + tensor_parallel {size}"].samples for size in (2, 4, 8)] == [2, 4, 8]
    assert "fsdp + tensor_parallel 8" not in table(4)
    assert found["fsdp + tensor_parallel 2"].activations == round(2 / 8 * ACT * (10 + 12) / 34)


def row(strategy: str, gib: float, amp: bool = False, remat: bool = False) -> StrategyRow:
    levers = tuple(name for name, on in (("amp", amp), ("remat", remat)) if on)
    first, _, second = strategy.partition(" + ")
    name, _, size = second.partition(" ")
    plugins = {} if first == "single" else {first: {"offload": True} if second == "offload" else {}}
    plugins |= {name: {"size": int(size)}} if size else {}
    return StrategyRow(strategy, levers, 0, 0, 0, 0, 0, round(gib * GIB), 8, plugins, is_last=bool(second))


LADDER = [
    row("single", 90),
    row("ddp", 50),
    row("fsdp", 40),
    row("fsdp", 20, remat=True),
    row("fsdp", 16, amp=True, remat=True),
    row("fsdp + offload", 12, remat=True),
    row("fsdp + tensor_parallel 2", 8, remat=True),
]


@pytest.mark.parametrize(
    ("memory", "strategy", "levers", "because"),
    [
        (80, "ddp", "", "fits with room to spare"),
        (55, "fsdp", "", "ddp fits only barely"),
        (45, "fsdp", "remat", "fsdp fits only barely"),
        (30, "fsdp", "remat", "fsdp does not fit"),
        (21, "fsdp", "amp + remat", "fsdp + remat fits only barely"),
        (15, "fsdp + offload", "remat", "does not fit"),
        (12, "fsdp + tensor_parallel 2", "remat", "fsdp + offload + remat fits only barely"),
        (9, "fsdp + tensor_parallel 2", "remat", "needs least"),
    ],
)
def test_the_first_rung_that_fits_is_advised(memory: int, strategy: str, levers: str, because: str) -> None:
    advice = advise(LADDER, (), memory * GIB, frugal=["remat"])
    assert advice.row is not None
    assert (advice.row.strategy, " + ".join(advice.row.levers)) == (strategy, levers)
    assert because in advice.reason


def test_nothing_is_advised_where_nothing_fits() -> None:
    advice = advise(LADDER, (), 7 * GIB, frugal=["remat"])
    assert advice.row is None
    assert "nothing fits: the least is fsdp + tensor_parallel 2 + remat" in advice.reason


def test_levers_that_the_recipe_has_are_kept() -> None:
    advice = advise([*LADDER, row("ddp", 9, amp=True)], ("amp",), 80 * GIB, frugal=["remat"])
    assert advice.row is not None
    assert advice.row.levers == ("amp",)


# ---------------------------------------------------------------------------------------------------------------------
# The command line

TASK = """
import torch
import forge


class MyTask(forge.TaskModule):
    def __init__(self, width: int = 256):
        super().__init__()
        layers = [torch.nn.Sequential(*[torch.nn.Linear(width, width), torch.nn.ReLU()] * 2) for _ in range(2)]
        self.net = torch.nn.Sequential(*layers)

    def training_step(self, batch):
        loss = self.net(batch).square().mean()
        {line}
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
DATA = """
import torch
import forge


def data():
    return forge.data.Splits(train=[torch.ones(64, 256)] * 4)
"""


@pytest.fixture
def my_files(empty_folder: Path) -> Callable[[str], None]:
    def write(line: str) -> None:
        Path("my_task.py").write_text(TASK.replace("{line}", line))
        Path("my_data.py").write_text(DATA)

    return write


def test_a_recipe_is_planned_in_a_table_and_a_sentence(forge_line: Forge, empty_folder: Path) -> None:
    code, out, err = forge_line("plan", "quickstart", "--devices", "2", "--memory", "80")
    assert (code, err) == (0, "")
    assert out.startswith("Memory on each of 2 devices of 80 GiB, micro-batches of 64 samples")
    strategies = [line.lstrip("≈ ").split()[0] for line in out.splitlines()[2:8]]
    assert strategies == ["single", "single", "ddp", "ddp", "fsdp", "fsdp"]
    assert "≈ fsdp + offload" in out
    assert "64 MiB of workspaces for cuBLAS" in out
    assert "Recommended: ddp, because it fits with room to spare" in out
    assert out.splitlines()[-1] == "  forge fit quickstart --nproc 2 -p ddp"
    assert not list(empty_folder.iterdir())


@pytest.mark.slow
def test_a_task_and_data_of_ones_own_are_planned_as_json(forge_line: Forge, my_files: Callable[[str], None]) -> None:
    my_files("pass")
    words = ["my_task.py:MyTask", "task.width=256", "--data", "my_data.py", "--devices", "4", "-p", "no:tensorboard"]
    memory = 0.08
    code, out, _ = forge_line("plan", *words, "--memory", str(memory), "--json")
    found_plan = json.loads(out)
    assert code == 0
    assert found_plan["batch"] == 64
    assert found_plan["memory"] == round(memory * GIB)
    found = {(row["strategy"], row["amp"], row["remat"]): row for row in found_plan["rows"]}
    assert {strategy for strategy, _, _ in found} >= {"single", "ddp", "fsdp", "fsdp + offload"}
    plain, again = found["single", False, False], found["single", False, True]
    assert again["activations"] < plain["activations"]
    assert found["ddp", False, False]["samples"] == 16
    command = found_plan["recommended"]["command"]
    assert command.startswith("forge fit my_task.py:MyTask task.width=256 --data my_data.py --nproc 4")


@pytest.mark.parametrize(
    "line",
    some(
        ["print(loss.item())", "loss = loss if loss > 0 else -loss", "batch[batch > 0].sum()", "loss.detach().numpy()"],
        quick=1,
    ),
)
def test_a_task_that_reads_values_is_told_which_line_does(
    forge_line: Forge, my_files: Callable[[str], None], line: str
) -> None:
    my_files(line)
    code, out, err = forge_line("plan", "my_task.py:MyTask", "--data", "my_data.py", "--memory", "80")
    assert (code, out) == (2, "")
    assert err.startswith(f"error: my_task.py:14 ({line})")
    assert "cannot be planned without running it" in err
    assert "Traceback" not in err


def test_a_mistake_of_the_task_is_told_with_its_line() -> None:
    class Wrong(Net):
        def training_step(self, batch: Any) -> Tensor:
            return self.head(batch[0][:, :3]).mean()

    with pytest.raises(TaskError, match=r"test_planning.py:\d+ \(return self.head.*failed in a dry run"):
        run_dry(Wrong, batch())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--devices", "0"], "--devices is 0; it must be at least 1."),
        (["--memory", "-1"], "--memory is -1; give the GiB"),
        (["--devices", "2"], "This machine has no GPU to take the memory from"),
        (["--memory", "80", "--measure"], "--measure trains here"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    forge_line: Forge, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, _, err = forge_line("plan", "quickstart", *words)
    assert code == 2
    assert err.startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("words", "chosen", "command"),
    [
        (["quickstart"], row("single", 1, remat=True), "forge fit quickstart -p remat"),
        (["quickstart"], row("ddp", 1), "forge fit quickstart --nproc 8 -p ddp"),
        (["quickstart", "-p", "amp"], row("ddp", 1, amp=True), "forge fit quickstart --nproc 8 -p amp -p ddp"),
        (["quickstart", "-p", "ddp"], row("fsdp", 1), "forge fit quickstart --nproc 8 -p fsdp"),
        (["quickstart", "-p", "ddp"], row("ddp", 1), "forge fit quickstart --nproc 8 -p ddp"),
        (
            ["quickstart", "task.hidden=16", "-p", "no:clip"],
            row("fsdp + offload", 1, remat=True),
            "forge fit quickstart task.hidden=16 --nproc 8 -p no:clip -p fsdp -p remat fsdp.offload=true",
        ),
        (
            ["quickstart"],
            row("fsdp + tensor_parallel 2", 1, amp=True),
            "forge fit quickstart --nproc 8 -p fsdp -p tensor_parallel -p amp tensor_parallel.size=2",
        ),
    ],
)
def test_the_command_runs_what_is_advised(words: list[str], chosen: StrategyRow, command: str) -> None:
    args = plan.parser().parse_intermixed_args(words)
    found = MemoryPlan(8, 80 * GIB, 64, (), (), [chosen], Advice(chosen, ""))
    assert plan_memory.command(chosen, found, args, target.load(args)) == command
