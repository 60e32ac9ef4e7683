"""The page of `forge report`: what the run folder holds, means of groups, and nothing that a stranger could run."""

from __future__ import annotations

import io
import json
import math
import sys
from base64 import b64encode
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import forge
from forge.cli import main
from forge.report.images import pictures
from forge.report.page import page
from forge.runs.find import locate
from forge.runs.folder import RunFolder
from forge.runs.group import RunGroup
from forge_plugins import JSONL, Checkpoint, Clip, Spans, Tensorboard
from tests.support.profiles import some
from tests.support.run_folders import write_group, write_run
from tests.support.tasks import Classifier, fit, make_batches

HOSTILE = """</pre></td></svg></style><script>alert('x"')</script><img src=x onerror=alert(1)>"""
VOID = {"meta", "img", "br", "hr", "link", "input"}


class Page(HTMLParser):
    """A page taken apart: its tags, its text, its curves."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.curves: list[dict[str, str | None]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == [], "tags are left open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "path" and "data-name" in dict(attrs):
            self.curves.append(dict(attrs))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def points(self, *names: str) -> list[list[tuple[float, float]]]:
        """The points of every curve of these names."""
        found = [str(curve["data-points"]).split() for curve in self.curves if curve["data-name"] in names]
        return [[(float(x), float(y)) for x, y in (pair.split(",") for pair in pairs)] for pairs in found]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with everything in it."""

    class Writes(Classifier):
        def evaluation_end(self, stage: str) -> dict[str, Any]:
            return {"sample": forge.Text("To be, or <not> to be")}

    folder = tmp_path_factory.mktemp("runs") / "group" / "20260101-120000-abcd"
    plugins = [JSONL(), Checkpoint(), Clip(1.0), Spans(hooks=True)]
    options: dict[str, Any] = {"val": make_batches(1), "max_epochs": 3, "log_every": 2, "seed": 7, "run_dir": folder}
    fit(Writes(), train=make_batches(6), plugins=plugins, **options)
    (folder / "config.yaml").write_text("description: a recipe\ntask: {name: it}\n")
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """Write a run folder by hand: `make_run(lines, end={...}, card={...})`."""

    def make(lines: list[dict[str, Any]], name: str = "run", **files: Any) -> Path:
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        for stem, content in files.items():
            (folder / f"{stem}.json").write_text(json.dumps(content))
        return folder

    return make


def written(folder: Path, *names: str) -> list[list[tuple[float, float]]]:
    """The points of metrics as metrics.jsonl has them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[(line["update"], line[name]) for line in lines if line.get(name) is not None] for name in names]


class TestOneRun:
    def test_the_page_is_written_beside_the_run_or_where_one_says(self, trained: Path, capsys: Any) -> None:
        assert main(["report", str(trained)]) == 0
        assert (trained / "report.html").read_text().startswith("<!doctype html>")
        assert main(["report", str(trained), "-o", "deep/page.html"]) == 0
        assert Path("deep/page.html").exists()
        assert capsys.readouterr().out.splitlines()[-1] == "Wrote deep/page.html."

    def test_curves_have_the_points_of_metrics_jsonl(self, trained: Path) -> None:
        shown = Page(page([RunFolder(trained)]))
        means = ("train/loss", "train/accuracy", "train/accuracy_epoch", "train/loss_epoch")
        assert sorted(shown.points("train")) == sorted(written(trained, *means))
        assert shown.points("val") == written(trained, "val/loss", "val/accuracy")
        assert shown.points("learning rate") == written(trained, "lr")
        assert shown.points("before") == written(trained, "grad_norm/before")
        assert shown.points("clip") == written(trained, "costs/clip")
        assert len(shown.points("train")[0]) == 9

    def test_it_shows_the_last_and_the_best_of_a_metric(self, trained: Path) -> None:
        text = Page(page([RunFolder(trained)])).text
        end = json.loads((trained / "end.json").read_text())
        assert f"val/accuracy {end['metrics']['val/accuracy']:.5g}" in text
        assert f"{min(y for _, y in written(trained, 'val/loss')[0]):.5g} 18" in text

    def test_it_has_card_stack_costs_checkpoints_samples_and_recipe(self, trained: Path) -> None:
        text = Page(page([RunFolder(trained)])).text
        assert "task Writes(" in text
        assert f"forge {forge.__version__}" in text
        assert "clip max_norm=1" in text
        assert "What plugins cost" in text
        assert "clip edit_grads 1 " in text
        assert "update-00000018 latest" in text
        assert "val/sample at update 18, unchanged since 6 To be, or <not> to be" in text
        assert "task: {name: it}" in text

    def test_it_loads_nothing_and_runs_nothing(self, trained: Path) -> None:
        text = page([RunFolder(trained)])
        shown = Page(text)
        assert not {"script", "img", "link", "iframe", "object", "a"} & set(shown.tags)
        assert not [name for name, _ in shown.attributes if name.startswith("on") or name in ("src", "href")]
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
        assert "default-src 'none'" in text


class TestRunsAsTheyAre:
    def test_a_killed_run_is_shown_up_to_its_torn_last_line(self, make_run: Any) -> None:
        folder = make_run(
            [{"update": i, "epoch": 0, "sample": 8 * i, "time": i / 2, "train/loss": 1 / i} for i in (1, 2, 3)]
        )
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"update": 4, "train/lo')
        shown = Page(page([RunFolder(folder)]))
        assert shown.points("train") == [[(1, 1.0), (2, 0.5), (3, 1 / 3)]]
        assert "Ended without a record after 0 epochs, 3 updates in 1.5 s" in shown.text

    def test_what_is_not_finite_is_named_but_not_drawn(self, make_run: Any) -> None:
        shown = Page(
            page([RunFolder(make_run([{"update": i, "val/loss": None if i == 3 else 1.0 * i} for i in (1, 2, 3)]))])
        )
        assert shown.points("val") == [[(1, 1.0), (2, 2.0)]]
        assert "val/loss not finite 1 1" in shown.text

    def test_a_run_that_goes_on_is_reported_as_such(self, tmp_path: Path) -> None:
        texts: list[str] = []

        @forge.on("boundary")
        def look(trainer: forge.Trainer) -> None:
            texts.append(Page(page([RunFolder(tmp_path)])).text)

        fit(train=make_batches(2), plugins=[JSONL(), look], run_dir=tmp_path, log_every=1)
        assert "running Still running when this page was made, after 0 epochs, 1 of 2 updates in" in texts[0]

    def test_a_failed_run_says_why(self, make_run: Any) -> None:
        end = {"status": "failed", "reason": "RuntimeError: out of memory", "updates": 7, "epochs": 0, "seconds": 3.0}
        text = Page(page([RunFolder(make_run([{"update": 5, "train/loss": 1.0}], end=end))])).text
        assert "Failed after 0 epochs, 7 updates in 3.0 s: RuntimeError: out of memory" in text

    @pytest.mark.parametrize("content", ["[]", "nul", '{"task": 3, "stack": {"a": 1}, "trainer": []}', "[" * 100_000])
    def test_files_that_are_something_else_are_left_out(self, make_run: Any, content: str) -> None:
        folder = make_run(
            [{"update": 1, "train/loss": 2.0, "odd": [1], "big": 10**400}, {"update": "x"}, {"update": -1}]
        )
        for name in ("card.json", "end.json", "lives.json", "spans.json", "config.yaml", "texts.jsonl"):
            (folder / name).write_text(content)
        assert Page(page([RunFolder(folder)])).points("train") == [[(1, 2.0)]]


class TestTexts:
    def shown(self, make_run: Any, *texts: str) -> str:
        folder = make_run([{"update": 1, "train/loss": 1.0}])
        lines = [{"update": i, "name": "note", "text": text} for i, text in enumerate(texts, 1)]
        (folder / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        text = page([RunFolder(folder)])
        Page(text)  # whatever was logged, tags are closed in their order
        return text

    def test_markdown_is_drawn_and_everything_is_escaped(self, make_run: Any) -> None:
        text = self.shown(make_run, "**3** of `a*b` <b>\n\n```text\nTo **be**\n```\n\nafter **a `b** c`")
        assert "<p><strong>3</strong> of <code>a*b</code> &lt;b&gt;</p>" in text
        assert '<pre><code class="language-text">To **be**\n</code></pre>' in text
        assert "<p>after **a <code>b** c</code></p>" in text

    @pytest.mark.parametrize(
        "hostile",
        some(
            [
                HOSTILE,
                f"- item\n\n    {HOSTILE}\n\n> {HOSTILE}",
                f"```{{#x .y onclick=alert(1)}}\n{HOSTILE}\n```",
                f"| a | b |\n|---|---|\n| {HOSTILE} | `{HOSTILE}` |",
                "[a](javascript:alert(1)) ![b](http://elsewhere/x.png) [c][d] ![e][d] <http://elsewhere> <a@b.example>"
                "\n\n[d]: javascript:alert(1)",
                "&#60;script&#62; &lt;img src=x&gt;",
                "\x02wzxhzdk:0\x03 \ufdd0script\ufdd2",
                "1. " * 6000,
                "[" * 60_000,
            ],
            quick=7,
        ),
    )
    def test_markdown_passes_no_markup_or_address_through(self, make_run: Any, hostile: str) -> None:
        shown = Page(self.shown(make_run, hostile))
        assert not {"script", "img", "a", "link", "iframe", "object"} & set(shown.tags)
        assert not [name for name, _ in shown.attributes if name.startswith("on") or name in ("src", "href")]
        assert "<img src=x>" not in shown.text  # an entity is shown as it was written


class TestPictures:
    @pytest.fixture
    def drawn(self, tmp_path: Path) -> Path:
        """A run whose task draws a picture at every validation, and one that is never drawn again."""

        class Draws(Classifier):
            def evaluation_end(self, stage: str) -> dict[str, Any]:
                assert self.trainer is not None
                update = self.trainer.progress.update
                grey = forge.Image(torch.full((4, 4), update / 100))
                return {"now": grey, **({"<once>": grey} if update == 2 else {})}

        plugins = [JSONL(), Tensorboard()]
        fit(
            Draws(), train=make_batches(2), val=make_batches(1), max_epochs=3, plugins=plugins, run_dir=tmp_path / "run"
        )
        return tmp_path / "run"

    def test_the_last_picture_of_each_name_is_in_the_page(self, drawn: Path) -> None:
        from PIL import Image

        found = pictures(drawn / "tensorboard")
        assert [(picture.name, picture.update) for picture in found] == [("val/<once>", 2), ("val/now", 6)]
        with Image.open(io.BytesIO(found[1].png)) as image:
            assert image.convert("L").getpixel((0, 0)) == 15  # 0.06 of 255
        text = page([RunFolder(drawn)])
        sources = [value for name, value in Page(text).attributes if name == "src"]
        assert sources == [f"data:image/png;base64,{b64encode(picture.png).decode()}" for picture in found]
        assert "val/&lt;once&gt; <span class='soft'>at update 2</span>" in text
        assert "img-src data:" in text

    def test_a_file_that_is_torn_or_is_none_gives_what_it_has(self, drawn: Path) -> None:
        file = next((drawn / "tensorboard").glob("*tfevents*"))
        whole = file.read_bytes()
        for length in range(0, len(whole), 97):
            file.write_bytes(whole[:length])
            assert len(pictures(file.parent)) <= 2
        file.write_bytes(whole[: whole.rindex(b"IHDR")])
        assert [picture.update for picture in pictures(file.parent)] == [2, 4]
        for broken in (b"\xff" * 100, b"\x05" + b"\0" * 11 + b"\xff" * 9, b"\xff" * 8 + whole):
            file.write_bytes(broken)
            assert pictures(file.parent) == []
        Page(page([RunFolder(drawn)]))

    def test_without_tensorboard_the_page_says_what_to_install(self, drawn: Path, monkeypatch: Any) -> None:
        monkeypatch.setitem(sys.modules, "tensorboard.compat.proto", None)
        assert "pip install tensorboard" in page([RunFolder(drawn)])


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


ITSELF = "data: &it\n  name: here\n  again: *it\n"
LAUGHS = "data:\n  a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"  {name}: &{name} [{', '.join([f'*{below}'] * 10)}]\n" for below, name in zip("abcdefgh", "bcdefghi", strict=True)
)
LINE = {"update": 1, "train/loss": 1.0}


@pytest.mark.parametrize(
    ("lines", "files", "recipe"),
    some(
        [
            ([LINE], {"card": {"stack": 3}}, ""),
            ([LINE], {"card": {"stack": True, "planned_updates": 10**400, "task": {"parameters": 10**400}}}, ""),
            ([LINE], {"card": {"task": {"class": "Net", "options": {"a": nested(300)}}}}, ""),
            ([LINE], {"lives": {"lives": 3}}, ""),
            ([LINE], {"lives": {"lives": [3, {}, {"update": 10**400, "setup": [1]}]}}, ""),
            ([LINE], {"lives": {"lives": [{"started": {}, "command": nested(20), "setup": {"a": {}}}] * 50}}, ""),
            ([LINE], {"spans": {"hooks": {"rows": 3}}}, ""),
            ([LINE], {"spans": {"hooks": {"rows": {"a": 1}}}}, ""),
            ([LINE], {"end": {"status": "finished", "seconds": 10**400, "samples": 10**400, "updates": 10**400}}, ""),
            ([LINE], {"end": {"status": "finished", "seconds": 1e-320, "samples": 2**53 - 1}}, ""),
            ([LINE], {"end": {"status": "finished", "seconds": 1e308}}, ""),
            (
                [{**LINE, "time": 10**400}, {**LINE, "time": 1e308, "sample": 10**400}],
                {"card": {"resumed_from": 1}},
                "",
            ),
            ([{"update": i, "train/loss": y, "other": -y} for i, y in enumerate((0.0, 5e-324))], {}, ""),
            ([{"update": i, "train/loss": y} for i, y in enumerate((1e-310, 3e-310, 2e-305))], {}, ""),
            ([LINE], {}, ITSELF),
            ([LINE], {}, LAUGHS),
        ],
        quick=4,
    ),
)
def test_a_broken_or_hostile_file_costs_itself_and_no_more(make_run: Any, lines: Any, files: Any, recipe: str) -> None:
    folder, other = make_run(lines, **files), make_run([{"update": 1, "train/loss": 2.0}], name="other")
    (folder / "config.yaml").write_text(recipe)
    for runs in ([RunFolder(folder)], [RunFolder(folder), RunFolder(other)]):
        assert "train/loss" in Page(page(runs)).text
    assert main(["runs", str(folder.parent)]) == 0
    assert main(["runs", "compare", str(folder), str(other)]) == 0


def test_whatever_a_run_says_is_text(make_run: Any, tmp_path: Path) -> None:
    card = {
        **dict.fromkeys(("recipe", "command", "machine", "device", "started", "seed", "planned_updates"), HOSTILE),
        "task": {"class": HOSTILE, "options": {HOSTILE: HOSTILE}},
        "optimizers": {HOSTILE: HOSTILE},
        "versions": {HOSTILE: HOSTILE},
        "git": {"commit": HOSTILE},
        "stack": [{"name": HOSTILE, "options": {HOSTILE: HOSTILE}}],
    }
    spans = {"hooks": {"rows": [{"plugin": HOSTILE, "hook": HOSTILE, "us_per_update": 1.0, "share": 0.1}]}}
    end = {"status": "failed", "reason": HOSTILE}
    lives = [{"started": HOSTILE, "command": HOSTILE, "setup": {HOSTILE: f"{HOSTILE}{i}"}} for i in range(20)]
    lines = [{"update": i, f"train/{HOSTILE}": 1.0 * i, HOSTILE: 2.0, "val/loss": math.pi} for i in (1, 2)]
    folder = make_run(lines, name=HOSTILE.replace("/", "∕"), card=card, spans=spans, end=end, lives={"lives": lives})
    (folder / "config.yaml").write_text(f"data: {{name: {json.dumps(HOSTILE)}}}\n")
    (folder / "texts.jsonl").write_text(json.dumps({"update": HOSTILE, "name": HOSTILE, "text": HOSTILE}) + "\n")
    (folder / "checkpoints" / "update-00000001").mkdir(parents=True)
    (folder / "checkpoints" / "<script>").symlink_to("update-00000001")
    for runs in (
        [RunFolder(folder)],
        [RunFolder(folder), RunFolder(make_run([{"update": 1, "val/loss": 1.0}], name="other"))],
    ):
        shown = Page(page(runs))
        assert not {"script", "img"} & set(shown.tags)
        assert not [name for name, _ in shown.attributes if name.startswith("on")]
        assert "alert(" in shown.text


class TestSeveralRuns:
    def test_their_curves_lie_over_one_another(self, make_run: Any) -> None:
        folders = [
            make_run([{"update": i, "val/loss": i * k, "lr": k} for i in (1, 2)], name=f"run{k}") for k in (1.0, 3.0)
        ]
        shown = Page(page([RunFolder(folder) for folder in folders]))
        assert shown.points("A val") == written(folders[0], "val/loss")
        assert shown.points("B val") == written(folders[1], "val/loss")
        assert shown.points("A", "B") == [*written(folders[0], "lr"), *written(folders[1], "lr")]

    def test_a_run_has_one_colour_and_validation_is_dashed(self, make_run: Any) -> None:
        lines = [[{"update": i, "train/loss": i * k, "val/loss": i * k, "lr": k} for i in (1, 2)] for k in (1.0, 3.0)]
        runs = [RunFolder(make_run(points, name=f"run{k}")) for k, points in enumerate(lines)]
        looks = {
            str(curve["data-name"]): (curve["stroke"], curve.get("stroke-dasharray"))
            for curve in Page(page(runs)).curves
        }
        assert {looks[name][0] for name in ("A train", "A val", "A")} == {"var(--c0)"}
        assert {looks[name][0] for name in ("B train", "B val", "B")} == {"var(--c1)"}
        assert (looks["A train"][1], looks["A val"][1]) == (None, "6 4")

    def test_tables_say_what_differs(self, make_run: Any, capsys: Any) -> None:
        for name, rate in (("one", 0.1), ("two", 0.2)):
            card = {"task": {"class": "Net", "options": {"lr": rate, "width": 8}}, "device": f"device {name}"}
            make_run([{"update": 5, "val/loss": rate}], name=name, card=card)
        folder = make_run([], name="x").parent
        assert main(["report", str(folder / "one"), str(folder / "two")]) == 0
        text = Page(Path("report.html").read_text()).text
        assert "task.lr 0.1 0.2" in text
        assert "task.width" not in text.split("What differs around it")[0]
        assert "best val/loss 0.1 0.2 +0.1" in text
        assert "device device one device two" in text


class TestMistakes:
    def test_an_unknown_run_is_answered_with_the_nearest(self, capsys: Any) -> None:
        folder = Path("runs/quickstart/20260101-120000-abcd")
        folder.mkdir(parents=True)
        (folder / "card.json").write_text("{}")
        assert main(["report", "runs/quickstrat/20260101-120000-abcd"]) == 2
        assert "Did you mean 'quickstart/20260101-120000-abcd'?" in capsys.readouterr().err

    def test_a_folder_that_is_no_run_is_named(self, tmp_path: Path, capsys: Any) -> None:
        assert main(["report", str(tmp_path)]) == 2
        assert "holds no run" in capsys.readouterr().err

    def test_a_file_that_cannot_be_written_is_named(self, trained: Path, capsys: Any) -> None:
        Path("file").write_text("")
        assert main(["report", str(trained), "-o", "file/page.html"]) == 2
        assert "cannot be written to file/page.html" in capsys.readouterr().err
        assert main(["report", str(trained), "-o", "."]) == 2
        assert "name a file in it" in capsys.readouterr().err


class TestAGroup:
    def test_its_curve_is_the_mean_with_a_band(self) -> None:
        group = RunGroup(write_group("mine/g", {"seed-0": 1.0, "seed-1": 2.0}))
        text = page([group])
        assert Page(text).points("val") == [[(5, 3.0), (10, 1.5)]]
        assert text.count('class="band"') == 1
        assert "val 1.5 ± 0.7071" in Page(text).text
        for word in ("val/loss 1.50 ± 0.71", "seed-1", "Single runs", "2 runs of 0 epochs, 10 updates each"):
            assert word in Page(text).text

    def test_two_and_a_run_lie_side_by_side(self) -> None:
        write_group("mine/a", {"seed-0": 1.0, "seed-1": 2.0})
        write_group("mine/b", {"seed-0": 2.0, "seed-1": 2.0})
        write_run("mine/c", {"update": 5, "val/loss": 1.0}, {"update": 10, "val/loss": 0.5})
        text = page([locate(f"runs/mine/{name}") for name in "abc"])
        assert Page(text).points("A val", "C val") == [[(5, 3.0), (10, 1.5)], [(5, 1.0), (10, 0.5)]]
        assert text.count('class="band"') == 2
        assert "3 rows" in Page(text).text

    def test_a_stranger_writes_no_markup(self) -> None:
        home = write_group("mine/g", {"seed-0": 1.0, "seed-1": 2.0})
        content = {"command": HOSTILE, "job": HOSTILE, "runs": {HOSTILE: {}, "seed-0": HOSTILE}}
        (home / "group.json").write_text(json.dumps(content))
        shown = Page(page([RunGroup(home)]))
        assert not {"script", "img"} & set(shown.tags)
        assert "alert(" in shown.text

    def test_one_without_runs_has_a_page(self, tmp_path: Path) -> None:
        (tmp_path / "group.json").write_text("{}")
        assert "none begun" in Page(page([RunGroup(tmp_path)])).text


def epoch_logs(logs: int) -> list[dict[str, Any]]:
    """Two epochs of some logs each, and the mean of each epoch."""
    found: list[dict[str, Any]] = []
    for update in range(1, 2 * logs + 1):
        line: dict[str, Any] = {"update": update, "train/loss": 1.0 / update}
        if update % logs == 0:
            line["train/loss_epoch"] = sum(1.0 / at for at in range(update - logs + 1, update + 1)) / logs
        found.append(line)
    return found


class TestCharts:
    @pytest.mark.parametrize(("logs", "titles"), [(1, ["loss"]), (3, ["loss", "loss_epoch"])])
    def test_the_mean_of_an_epoch_that_is_one_log_is_no_second_chart(self, logs: int, titles: list[str]) -> None:
        text = page([RunFolder(write_run("a", *epoch_logs(logs)))])
        assert [title for title in ("loss", "loss_epoch") if f"<figcaption>{title}</figcaption>" in text] == titles

    def test_a_log_between_two_epochs_is_no_reason_for_a_second_chart(self) -> None:
        at = (20, 40, 50, 60, 80, 100)
        logs = [{"update": i, "train/loss": i, **({} if i == 50 else {"train/loss_epoch": -i})} for i in at]
        text = page([RunFolder(write_run("a", *logs))])
        assert "loss_epoch" not in text.partition("Curves")[2]
        assert Page(text).points("train") == [[(i, -i) for i in at if i != 50]]

    def test_a_key_hides_its_curve_and_what_is_told_of_it(self) -> None:
        text = page([RunFolder(write_run("a", *({"update": i, "train/loss": 1, "val/loss": 2} for i in (1, 2, 3))))])
        assert text.count("<input type='checkbox' checked>") == 2
        assert ".chart:has(.keys>:nth-child(2)>input:not(:checked)) .s1{display:none}" in text
        assert text.count('<g class="s1">') == 1 + 3
        assert Page(text).text.count("val 2") >= 3

    def test_a_curve_alone_needs_no_key(self) -> None:
        assert "<input" not in page([RunFolder(write_run("a", {"update": 1, "lr": 1.0}, {"update": 2, "lr": 2.0}))])

    def test_long_curves_tell_their_values_at_some_places(self) -> None:
        text = page([RunFolder(write_run("a", *({"update": i, "val/loss": i} for i in range(1, 500))))])
        assert text.count('class="at"') == 40

    def test_eight_runs_are_in_one_chart(self) -> None:
        runs = [
            RunFolder(write_run(f"mine/{k}", *({"update": i, "train/loss": k, "val/loss": i} for i in (1, 2))))
            for k in range(8)
        ]
        text = page(runs)
        assert text.count("<figcaption>loss</figcaption>") == 1
        assert {curve["stroke"] for curve in Page(text).curves} == {f"var(--c{i})" for i in range(8)}
