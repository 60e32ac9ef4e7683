"""freeze: what a pattern names does not move until it is thawed; the rest trains as in a hand-written loop."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import forge
from forge.errors import CheckpointError, RecipeError, StackError, TaskError
from forge.testing import TinyGAN, TinyTask, assert_same, fit_tiny, tiny_batches
from forge_plugins import Checkpoint, Freeze
from tests.forge.snapshot.test_resume import PowerCut, cut_at
from tests.support.freeze_kit import Look, evaluating, frozen, statistics
from tests.support.tasks import Classifier
from tests.support.tasks import fit as task_fit


class Decayed(TinyTask):
    """AdamW decays every weight that it steps, gradient or not."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


class Tree(forge.TaskModule):
    """Names to choose from: layers, norms of every kind, a tied weight, a parameter of the task's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.backbone = nn.ModuleDict(
            {
                "layers": nn.ModuleList([nn.Linear(6, 6) for _ in range(12)]),
                "bn": nn.BatchNorm1d(6),
                "plain": nn.BatchNorm1d(6, affine=False),
                "still": nn.BatchNorm1d(6, track_running_stats=False),
            }
        )
        self.embed, self.head = nn.Linear(6, 3), nn.Linear(6, 3)
        self.head.weight = self.embed.weight

    def training_step(self, batch: Any) -> Tensor:
        x = batch[0]
        for module in [*self.backbone["layers"], *(self.backbone[name] for name in ("bn", "plain", "still"))]:  # pyright: ignore
            x = module(x)
        return F.cross_entropy(self.head(x) * self.scale, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def chosen(*patterns: str, keep: list[str] | None = None, norm: bool = True) -> tuple[set[str], set[str]]:
    """What these patterns freeze in a Tree, and put into evaluation mode."""
    look = Look()
    plugins = [Freeze(list(patterns), keep=keep or [], norm=norm), look]
    forge.Trainer(max_updates=1, plugins=plugins, run_dir=False, device="cpu").fit(Tree(), tiny_batches())
    return look.frozen[0], look.evaluating[0]


# -- training ---------------------------------------------------------------------------------------------------------


def test_what_is_frozen_keeps_its_bits_and_has_no_state() -> None:
    task, before = Decayed(), Decayed()
    sizes: list[int] = []

    @forge.on("boundary")
    def count(trainer: forge.Trainer) -> None:
        sizes.append(len(trainer.optimizers[None].state))

    fit_tiny([Freeze("net.[01]"), count], task=task)
    for name, tensor in task.state_dict().items():
        assert torch.equal(tensor, before.state_dict()[name]) == (not name.startswith("net.4")), name
    assert sizes == [2] * 10


def test_gradual_unfreezing_thaws_each_part_at_its_moment() -> None:
    look = Look()
    thaw = {"net.4": "2 updates", "net.*.bias": "4 updates", "net.[14]": "6 updates"}
    fit_tiny([Freeze("net.[014]", keep="net.0.weight", thaw=thaw), look])
    everything = {"net.0.bias", "net.1.weight", "net.1.bias", "net.4.weight", "net.4.bias"}
    assert look.frozen[0] == everything
    assert look.frozen[2] == everything - {"net.4.weight", "net.4.bias"}
    assert look.frozen[4] == {"net.1.weight"}
    assert look.frozen[6] == set()


@pytest.mark.parametrize(
    ("thaw", "update"), [("1 updates", 1), ("1 epochs", 5), ("8 samples", 1), ("9 samples", 2), ("40 samples", 6)]
)
def test_a_moment_is_counted_in_updates_epochs_or_samples(thaw: str, update: int) -> None:
    """Of 8, 8, 8, 8 and 5 samples."""
    look = Look()
    fit_tiny([Freeze("net.0", thaw=thaw), look])
    assert [bool(names) for names in look.frozen].index(False) == update


def test_what_no_moment_matches_stays_frozen() -> None:
    look = Look()
    fit_tiny([Freeze("net.[01]", thaw={"net.0": "1 updates"}), look])
    assert look.frozen[-1] == {"net.1.weight", "net.1.bias"}


def test_two_optimizers_take_turns_over_what_is_not_frozen() -> None:
    ours, theirs = TinyGAN(), TinyGAN()
    fit_tiny([Freeze("*.0", thaw={"generator.0": "3 updates"})], task=ours)
    nets: dict[str, Any] = {"generator": theirs.generator, "discriminator": theirs.discriminator}
    optimizers = theirs.configure_optimizers()
    torch.manual_seed(0)
    for update, batch in enumerate(tiny_batches() * 2):
        for name, net in nets.items():
            for other in nets.values():
                other.requires_grad_(other is net)
            if name == "discriminator" or update < 3:
                net[0].requires_grad_(False)
            theirs.training_step(batch, name)["loss"].backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
    assert_same(ours, theirs)


# -- patterns ---------------------------------------------------------------------------------------------------------


ALL = {"scale", "embed.weight", "embed.bias", "head.bias", "backbone.bn.weight", "backbone.bn.bias"} | {
    *("backbone.still.weight", "backbone.still.bias"),
    *(f"backbone.layers.{i}.{kind}" for i in range(12) for kind in ("weight", "bias")),
}
NORMS = {"backbone.bn", "backbone.plain"}


def below(*prefixes: str) -> set[str]:
    return {name for name in ALL if name.startswith(prefixes)}


@pytest.mark.parametrize(
    ("patterns", "expected", "norms"),
    [
        (["backbone"], below("backbone."), NORMS),
        (["backbone.*"], below("backbone."), NORMS),
        (["backbone.layers.[0-3]"], below(*(f"backbone.layers.{i}." for i in range(4))), set()),
        (["backbone.layers.[0-3].*"], below(*(f"backbone.layers.{i}." for i in range(4))), set()),
        (["backbone.layers.1"], below("backbone.layers.1."), set()),
        (["*.bias"], {name for name in ALL if name.endswith(".bias")}, set()),
        (["scale"], {"scale"}, set()),
        (["backbone.bn"], below("backbone.bn."), {"backbone.bn"}),
        (["backbone.bn.weight"], {"backbone.bn.weight"}, set()),
        (["backbone.bn.*"], below("backbone.bn."), {"backbone.bn"}),
        (["*.weight", "*.bias"], ALL - {"scale"}, {"backbone.bn"}),
        (["backbone.plain", "scale"], {"scale"}, {"backbone.plain"}),
        (["head"], {"embed.weight", "head.bias"}, set()),
        (["head.weight"], {"embed.weight"}, set()),
    ],
)
def test_a_pattern_freezes_its_match_and_all_inside(patterns: list[str], expected: set[str], norms: set[str]) -> None:
    assert chosen(*patterns) == (expected, norms)


@pytest.mark.parametrize(
    ("keep", "expected", "norms"),
    [
        (["backbone.layers"], below("backbone.bn", "backbone.still"), NORMS),
        (["*.bias"], {name for name in below("backbone.") if name.endswith("weight")}, {"backbone.plain"}),
        (["backbone.plain", "backbone.bn.bias"], below("backbone.") - {"backbone.bn.bias"}, set()),
        (["head"], below("backbone."), NORMS),
    ],
)
def test_what_is_to_be_kept_stays_trained(keep: list[str], expected: set[str], norms: set[str]) -> None:
    assert chosen("backbone", keep=keep) == (expected, norms)


# -- norms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [True, False])
def test_a_frozen_batch_norm_stays_in_evaluation_mode(norm: bool) -> None:
    look, task = Look(), TinyTask()
    fit_tiny([Freeze("net.1", norm=norm), look], task=task)
    still = all(torch.equal(a, b) for a, b in zip(statistics(task), statistics(TinyTask()), strict=True))
    assert still == norm
    assert look.evaluating == [{"net.1"} if norm else set()] * 11  # also after each of the two validations


def test_a_foreign_train_is_put_right_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @forge.on("boundary", mutates=True)
    def careless(trainer: forge.Trainer) -> None:
        if trainer.progress.update in (2, 5):
            trainer.task.eval()
            trainer.task.train()

    look, task = Look(), TinyTask()
    fit_tiny([Freeze("net.1"), careless, look], task=task)
    assert [i for i, names in enumerate(look.evaluating) if not names] == [2, 5]
    assert int(task.net[1].num_batches_tracked) == 2  # pyright: ignore
    assert caplog.text.count("freeze: something called train() on net.1 in or after update 2") == 1
    assert caplog.text.count("something called train()") == 1


class Filtered(TinyTask):
    """Its optimizer has only what is trained at the start."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


# -- before, after and beside -----------------------------------------------------------------------------------------


def test_the_task_is_handed_back_with_the_flags_that_it_had() -> None:
    task = TinyTask()
    task.net[4].bias.requires_grad_(False)  # pyright: ignore
    look = Look()
    fit_tiny([Freeze("net.[014]", keep="net.0", thaw={"net.4": "2 updates"}), look], task=task)
    assert look.frozen[0] == {"net.1.weight", "net.1.bias", "net.4.weight", "net.4.bias"}
    assert look.frozen[-1] == {"net.1.weight", "net.1.bias", "net.4.bias"}  # what the user froze is not ours to thaw
    assert (frozen(task), evaluating(task)) == ({"net.4.bias"}, set())


@pytest.mark.parametrize("update", [1, 4])
def test_also_after_an_error(update: int) -> None:
    task = TinyTask()
    with pytest.raises(PowerCut):
        fit_tiny([Freeze("net.[01]", thaw="3 updates"), cut_at(update)], task=task)
    assert (frozen(task), evaluating(task)) == (set(), set())


def test_the_log_says_what_is_frozen_and_what_thaws(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="forge")
    fit_tiny([Freeze("net.[01]", thaw="1 epoch")])
    assert (
        "freeze: froze 4 of 6 parameters, 72 of 99 values, and the statistics of 1 module: "
        "net.0.weight, net.0.bias, net.1.weight and 1 more." in caplog.text
    )
    assert caplog.text.count("freeze: thawed") == 1
    assert "freeze: thawed 4 parameters after update 5, 72 values: net.0.weight" in caplog.text


def test_a_moment_that_the_run_never_comes_to_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    fit_tiny([Freeze("net.0", thaw={"*.weight": "2 epochs", "*.bias": "10 updates"})], max_epochs=2)
    assert "freeze.thaw: this run ends after 2 epochs, so parameters that thaw at 2 epochs never train" in caplog.text
    assert (
        "freeze.thaw: this run ends after 10 updates, so parameters that thaw at 10 updates never train" in caplog.text
    )
    caplog.clear()
    fit_tiny([Freeze("net.0", thaw={"*.weight": "1 epochs", "*.bias": "9 updates"})], max_epochs=2)
    assert "never trains" not in caplog.text


# -- what it refuses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": "nett.0.*"}, "freeze.modules: 'nett.0.*' matches no parameter of TinyTask. Did you mean 'net.0'?"),
        ({"modules": ["net.0", "net.9"]}, "freeze.modules: 'net.9' matches no parameter of TinyTask. Did you mean"),
        ({"modules": "net.2"}, "freeze.modules: 'net.2' matches no parameter"),  # a ReLU
        ({"modules": "encoder"}, "matches no parameter of TinyTask. Its parameters are in net.0-1, net.4."),
        ({"modules": "net.0", "keep": "*.gamma"}, "freeze.keep: '*.gamma' matches no parameter"),
        ({"modules": "net.0", "thaw": {"nat.0": "1 epoch"}}, "freeze.thaw: 'nat.0' matches no parameter of TinyTask."),
        (
            {"modules": "net.0", "thaw": {"net.4": "1 epoch"}},
            "freeze.thaw: 'net.4' matches nothing that freeze.modules freezes.",
        ),
    ],
)
def test_a_pattern_without_a_match_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        fit_tiny([Freeze(**options)])
    assert message in str(caught.value)


def test_freezing_everything_is_refused() -> None:
    task = TinyTask()
    with pytest.raises(RecipeError) as caught:
        fit_tiny([Freeze("*", thaw="1 epoch")], task=task)
    assert str(caught.value) == (
        "freeze.modules='*' freezes every parameter of TinyTask. Name fewer, or keep some trained, for example with "
        "freeze.keep='net.4'."
    )
    assert frozen(task) == set()


@pytest.mark.parametrize("undo", ["net[0] = Linear", "train"])
def test_layers_replaced_by_another_plugin_are_refused(undo: str) -> None:
    class Surgeon(forge.Plugin):
        @forge.hookimpl
        def forge_build_model(self, trainer: forge.Trainer, phase: str) -> None:
            task: Any = trainer.task
            if phase == "surgery" and undo == "train":
                task.train()
            elif phase == "surgery":
                task.net[0] = nn.Linear(6, 8)

    freeze = Freeze("net.[01]")
    with pytest.raises(StackError, match="Move that plugin before freeze"):
        fit_tiny([freeze, Surgeon()])
    fit_tiny([Surgeon(), freeze])


def test_a_thaw_of_what_no_optimizer_has_is_refused_by_name() -> None:
    with pytest.raises(TaskError) as caught:
        fit_tiny([Freeze("net.0", thaw={"*.weight": "1 epoch"})], task=Filtered())
    assert str(caught.value) == (
        "freeze.thaw is to train net.0.weight later, but Filtered.configure_optimizers leaves it out. Give the "
        "optimizer all parameters, not only those with requires_grad; it skips parameters without a gradient."
    )
    fit_tiny([Freeze("net.0")], task=Filtered())


def test_a_resume_that_freezes_other_parts_is_refused_by_name(tmp_path: Path) -> None:
    def live(modules: str, **options: Any) -> Any:
        look = Look()
        stack = [Freeze(modules, thaw=options.pop("thaw", None)), Checkpoint(background=False), look]
        return fit_tiny(stack, run_dir=tmp_path, resume="auto", **options)[0], look

    live("net.0", max_epochs=1)
    with pytest.raises(CheckpointError, match=r"froze other parts .* differ in net\.0\.bias, net\.0\.weight, net\.1"):
        live("net.1", max_epochs=2)
    task, look = live("net.1", max_epochs=2, allow_inexact=True)
    assert (look.frozen[-1], look.evaluating[-1]) == ({"net.1.weight", "net.1.bias"}, {"net.1"})
    assert frozen(task) == set()
    _, look = live("net.1", max_epochs=3, thaw="4 updates")  # long past: it thaws with the first update
    assert look.frozen[1:] == [set()] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs a value for 'modules'"),
        ({"modules": []}, r"freeze\.modules is empty"),
        ({"modules": 3}, "modules"),
        ({"modules": "a", "thaw": "10 min"}, r"freeze\.thaw is '10 min': write it in updates, epochs or samples"),
        ({"modules": "a", "thaw": {"a": "soon"}}, r"freeze\.thaw: 'soon' is not an interval"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Freeze(**options)


def test_a_frozen_optimizer_rests_until_the_thaw() -> None:
    class Two(Classifier):
        def training_step(self, batch: Any, name: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return super().training_step(batch)

        def configure_optimizers(self) -> Any:
            first, last = self.net[0].parameters(), self.net[2].parameters()
            return {"head": torch.optim.SGD(last, lr=0.1), "backbone": torch.optim.SGD(first, lr=0.1)}

    trained: list[tuple[str, ...]] = []

    @forge.on("step_end")
    def watch(step: forge.Step) -> None:
        trained.append(step.updated_names)

    with pytest.warns(UserWarning, match="SGD 'backbone' has no parameter that requires a gradient: it does nothing"):
        task_fit(Two(), plugins=[Freeze("net.0", thaw="2 updates"), watch])
    assert trained == [("head",), ("head",), ("head", "backbone"), ("head", "backbone")]
