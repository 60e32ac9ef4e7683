"""Recipes: merging, overrides, typed options, and the origin of every value."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import forge
from forge import registry
from forge.config import Recipe, list_recipes, read_recipe
from forge.errors import RecipeError


@pytest.fixture
def write(tmp_path):
    """Write a recipe file and return its path."""

    def write(name: str, text: str) -> Path:
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        return path

    return write


def load(*args, **kwargs) -> Recipe:
    return read_recipe(*args, **kwargs).checked()


def refused(*args, **kwargs) -> str:
    """The message with which loading is refused."""
    with pytest.raises(RecipeError) as caught:
        load(*args, **kwargs)
    return str(caught.value)


# -- finding ----------------------------------------------------------------------------------------------------------


def test_a_recipe_file_is_found_by_path(write):
    assert load(write("mine", "trainer: {max_epochs: 2}")).trainer == {"max_epochs": 2}


def test_an_unknown_recipe_is_answered_with_the_nearest_name():
    assert "Did you mean 'quickstart'?" in refused("quikstart")


def test_a_missing_file_is_named(tmp_path):
    assert "no.yaml" in refused(tmp_path / "no.yaml")


def test_listing_reads_names_and_descriptions_from_the_packages():
    listed = list_recipes()
    assert {"default", "fast", "quickstart"} <= listed.keys()
    assert listed["default"].description
    assert listed["default"].package.startswith("forge-trainer")


def test_reading_recipes_does_not_import_torch():
    code = (
        "import sys; from forge.config import list_recipes, read_recipe; list_recipes(); read_recipe('quickstart'); "
        "print(sorted({'torch', 'forge_recipes', 'forge.config'} & sys.modules.keys()))"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told.strip() == "['forge.config']"


def test_without_omegaconf_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "omegaconf", None)
    message = refused("default")
    assert "pip install omegaconf" in message
    assert "plugins=[...]" in message


# -- merging ----------------------------------------------------------------------------------------------------------


def test_bases_merge_left_to_right_and_the_file_itself_wins(write):
    write("a", "trainer: {max_epochs: 1, log_every: 10, seed: 1}")
    write("b", "trainer: {max_epochs: 2, log_every: 20}")
    recipe = load(write("c", "extends: [a.yaml, b.yaml]\ntrainer: {max_epochs: 3}"))
    assert recipe.trainer == {"max_epochs": 3, "log_every": 20, "seed": 1}


def test_a_base_that_two_recipes_share_is_applied_once(write):
    write("base", "plugins: {clip: {max_norm: 5.0}}")
    write("a", "extends: [base.yaml]\nplugins: {clip: {max_norm: 1.0}}")
    write("b", "extends: [base.yaml]\nplugins: {accumulate: {window: 2}}")
    recipe = load(write("c", "extends: [a.yaml, b.yaml]"))
    assert recipe.plugins["clip"] == {"max_norm": 1.0}


def test_a_circle_of_extends_is_named(write):
    write("a", "extends: [b.yaml]")
    assert "a -> b -> a" in refused(write("b", "extends: [a.yaml]").with_name("a.yaml"))


def test_plugins_merge_by_name_and_keep_their_order(write):
    write("a", "plugins: {clip: {max_norm: 1.0}, accumulate: {window: 2}}")
    recipe = load(write("b", "extends: [a.yaml]\nplugins: {jsonl: {}, clip: {norm_type: 1.0}}"))
    assert list(recipe.plugins) == ["clip", "accumulate", "jsonl"]
    assert recipe.plugins["clip"] == {"max_norm": 1.0, "norm_type": 1.0}


def test_a_null_plugin_is_removed(write):
    write("a", "plugins: {clip: {}, accumulate: {window: 2}}")
    recipe = load(write("b", "extends: [a.yaml]\nplugins: {clip: null}"))
    assert list(recipe.plugins) == ["accumulate"]
    assert not any(key.startswith("plugins.clip") for key in recipe.origin)


def test_a_label_makes_a_second_instance(write):
    recipe = load(write("a", "plugins: {jsonl: {}, jsonl@more: {}}"))
    assert list(recipe.plugins) == ["jsonl", "jsonl@more"]


def test_another_task_starts_with_its_own_options(write):
    write("a", "task: {name: other, depth: 3}")
    recipe = load(write("b", "extends: [a.yaml]\ntask: {name: digits_mlp, hidden: 8}"))
    assert recipe.config["task"] == {"name": "digits_mlp", "hidden": 8}


def test_interpolation_is_resolved(write):
    recipe = load(write("a", "trainer: {max_epochs: 3, log_every: '${trainer.max_epochs}'}"))
    assert recipe.trainer["log_every"] == 3


@pytest.mark.parametrize("key", ["run_dir", "resume"])
@pytest.mark.parametrize("value", ["/tmp/elsewhere", "../out", "runs/../../out", "link/out"])
def test_a_recipe_names_no_folder_outside_the_working_directory(write, key, value, empty_folder, tmp_path):
    (empty_folder / "link").symlink_to(tmp_path)
    message = refused(write("a", f"trainer:\n  {key}: {value}"))
    assert f"trainer.{key} (a.yaml:2) is {value!r}" in message
    assert "outside the working directory" in message
    assert load("quickstart", [f"trainer.{key}={value}"]).trainer[key] == value
    forge.Trainer(recipe="quickstart", **{key: value})


@pytest.mark.parametrize("value", ["out", "./a/../b", "runs/mine", "false", "null", "."])
def test_a_recipe_may_name_a_folder_inside_it(write, value, empty_folder, tmp_path):
    (empty_folder / "runs").symlink_to(tmp_path)  # as on a cluster with a scratch disk
    assert "run_dir" in load(write("a", f"trainer: {{run_dir: {value}}}")).trainer


# -- overrides --------------------------------------------------------------------------------------------------------


def test_an_override_wins_over_every_file():
    recipe = load("quickstart", ["trainer.max_epochs=3", "task.lr=0.1", "data.batch_size=16"])
    assert recipe.trainer["max_epochs"] == 3
    assert recipe.config["task"]["lr"] == 0.1
    assert recipe.config["data"]["batch_size"] == 16


@pytest.mark.parametrize("key", ["clip.max_norm", "plugins.clip.max_norm"])
def test_a_plugins_option_has_a_long_and_a_short_key(key):
    assert load("quickstart", [f"{key}=0.5"]).plugins["clip"]["max_norm"] == 0.5


def test_an_added_plugin_has_defaults_and_takes_overrides():
    recipe = load("quickstart", ["accumulate.window=4"], add=["accumulate"])
    assert recipe.plugins["accumulate"] == {"window": 4}
    assert recipe.origin["plugins.accumulate"] == "command line"


def test_a_plugin_is_removed():
    assert "clip" not in load("quickstart", remove=["clip"]).plugins
    assert "clip" not in load("quickstart", ["clip=null"]).plugins


def test_a_plugin_written_with_a_question_mark_may_be_removed_whether_it_is_installed_or_not(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("extends: [quickstart]\nplugins: {nowhere?: {}, clip?: {max_norm: 2.0}}\n")
    assert load(file).plugins["clip"] == {"max_norm": 2.0}
    for name in ("nowhere", "clip"):
        assert not {"nowhere", name} & load(file, remove=[name]).plugins.keys()
        assert not {"nowhere", name} & load(file, [f"{name}=null"]).plugins.keys()
    assert "no plugin 'nowhere' is installed" in refused(file, ["nowhere.option=1"])
    assert "Cannot remove 'elsewhere'" in refused(file, remove=["elsewhere"])


def test_adding_what_is_not_installed_names_the_nearest():
    assert "Did you mean 'accumulate'?" in refused("quickstart", add=["acumulate"])


def test_an_option_of_an_absent_plugin_says_how_to_add_it():
    assert "-p accumulate" in refused("quickstart", ["accumulate.window=4"])


def test_an_unknown_root_names_the_nearest_section_or_plugin():
    assert "Did you mean 'trainer'?" in refused("quickstart", ["trainr.max_epochs=3"])
    assert "Did you mean 'clip'?" in refused("quickstart", ["clpi.max_norm=3"])


@pytest.mark.parametrize("text", ["*", "*.bias", "@here", "{open", "a: b: c", "it's: *", '"half', "`$HOME`: !x"])
def test_what_yaml_cannot_read_is_answered_with_how_to_quote_it(text):
    message = refused("quickstart", [f"freeze.modules={text}"], add=["freeze"])
    assert message.startswith(f"freeze.modules={text} (command line): the value cannot be read as YAML (")
    (advised,) = shlex.split(message.partition("for the shell: ")[2].removesuffix("."))
    assert load("quickstart", [advised], add=["freeze"]).plugins["freeze"] == {"modules": text}


# -- what is refused --------------------------------------------------------------------------------------------------


def test_an_unknown_option_names_its_full_key_and_line(write):
    message = refused(write("a", "plugins:\n  clip:\n    max_nrom: 1.0"))
    assert "plugins.clip.max_nrom (a.yaml:3)" in message
    assert "Did you mean 'max_norm'?" in message


def test_a_wrong_type_names_the_command_line_and_what_is_taken():
    message = refused("quickstart", ["clip.max_norm=high"])
    assert "plugins.clip.max_norm (command line)" in message
    assert "float" in message


UNIT = "An interval has a unit: '2 updates', '1 epoch'."


@pytest.mark.parametrize("override", ["monitor.every=2", "checkpoint.every=2", "freeze.thaw=3", "early_stop.after=3"])
def test_an_interval_without_a_unit_is_refused(override):
    plugin = override.partition(".")[0]
    others = ["freeze.modules=net"] if plugin == "freeze" else []  # which has no default
    assert refused("quickstart", [*others, override], add=[plugin]).endswith(UNIT)


@pytest.mark.parametrize(
    ("override", "key", "near"),
    [
        ("trainer.max_epoch=3", "trainer.max_epoch", "max_epochs"),
        ("task.hiden=3", "task.hiden", "hidden"),
        ("data.batchsize=3", "data.batchsize", "batch_size"),
    ],
)
def test_options_are_checked_against_signatures(override, key, near):
    message = refused("quickstart", [override])
    assert f"{key} (command line)" in message
    assert f"Did you mean {near!r}?" in message


def test_a_rule_that_the_plugin_checks_names_the_recipes_line(write):
    assert "plugins.clip.max_norm (a.yaml:1)" in refused(write("a", "plugins: {clip: {max_norm: -1.0}}"))
    said = refused("quickstart", ["checkpoint.every=2 epoch s"])
    assert said.startswith("plugins.checkpoint.every (command line): '2 epoch s'")
    assert ".yaml" not in said


def test_an_unknown_plugin_task_or_data_set_names_its_line(write):
    assert "plugins.clpi (a.yaml:1)" in refused(write("a", "plugins: {clpi: {}}"))
    assert "task.name (b.yaml:1)" in refused(write("b", "task: {name: digits_mpl}"))
    assert "data.name (c.yaml:1)" in refused(write("c", "data: {name: digit}"))


@pytest.mark.parametrize("text", ["plugins: [clip]", "plugins: {clip: 1.0}", "task: digits_mlp", "- a", "extends: 3"])
def test_a_wrong_shape_is_refused_with_how_to_write_it(write, text):
    assert "write" in refused(write("a", text))


# -- origins and defaults ---------------------------------------------------------------------------------------------


def test_every_value_knows_where_it_came_from(write):
    write("base", "plugins:\n  clip:\n    max_norm: 2.0\n    norm_type: 1.0\n")
    recipe = load(write("a", "extends: [base.yaml]\nplugins:\n  clip:\n    max_norm: 1.0"), ["trainer.seed=7"])
    assert recipe.origin["plugins.clip"] == "base.yaml:2"
    assert recipe.origin["plugins.clip.norm_type"] == "base.yaml:4"
    assert recipe.origin["plugins.clip.max_norm"] == "a.yaml:4"
    assert recipe.origin["plugins.clip.max_value"] == "default"
    assert recipe.origin["trainer.seed"] == "command line"
    assert recipe.origin["trainer.log_every"] == "default"


# -- making things ----------------------------------------------------------------------------------------------------


def test_a_task_and_data_in_code_replace_the_recipes_own():
    class Own(forge.TaskModule):
        def __init__(self, width: int = 3):
            super().__init__()
            self.width = width

    recipe = load("quickstart", ["task.width=5"], task=Own, data=lambda size=1: forge.data.Splits(train=[size]))
    assert recipe.make_task().width == 5
    assert recipe.make_data().train == [1]
    assert "task.width (command line)" not in recipe.to_yaml()
    with pytest.raises(RecipeError, match=r"task\.hidden \(command line\)"):
        load("quickstart", ["task.hidden=5"], task=Own)


@pytest.mark.parametrize(("own", "cure"), [("width", "Leave one of them out"), ("name", "'name' cannot be set by a")])
def test_a_name_beside_a_task_that_is_given_is_refused(own, cure):
    class Given(forge.TaskModule):
        if own == "name":

            def __init__(self, name: str = "small"):
                super().__init__()

    with pytest.raises(RecipeError, match=rf"task.name is the name of an installed task, and '.*Given' was.*{cure}"):
        load("default", ["task.name=large"], task=Given)


def test_data_that_are_no_splits_are_refused():
    def batches() -> list[int]:
        return []

    with pytest.raises(RecipeError, match=r"function '.*batches' returned a list.*Splits"):
        load("default", data=batches).make_data()


def test_a_data_function_may_return_a_pair_of_loaders() -> None:
    splits = load("default", data=lambda: ([1], [2])).make_data()
    assert (splits.train, splits.val, splits.test) == ([1], [2], None)


def test_a_plugin_that_cannot_be_imported_names_its_package(tmp_path, monkeypatch, write):
    info = tmp_path / "broken_plugin-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-plugin\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[forge.plugins]\nbroken = no_such_module:Broken\n")
    monkeypatch.syspath_prepend(tmp_path)
    registry.installed.cache_clear()
    try:
        assert "broken-plugin 1.2" in refused(write("a", "plugins: {broken: {}}"))
        assert load("quickstart").plugins, "others do not notice"
    finally:
        registry.installed.cache_clear()


# -- writing ----------------------------------------------------------------------------------------------------------


words = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=12).filter(lambda word: word != "???")
scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | words


@given(
    st.dictionaries(st.from_regex(r"[a-z]{1,8}", fullmatch=True), scalars | st.lists(scalars, max_size=3), max_size=4)
)
@example({"a": "${b}", "b": "\\${b}\\", "c": "1e3", "d": "null", "e": ["${x", "a: b", ""]})
def test_any_plain_options_survive_writing_and_reading(tmp_path_factory, options):
    config = {"task": options} if options else {}
    path = tmp_path_factory.mktemp("recipes") / "any.yaml"
    path.write_text(Recipe("any", config, {}).to_yaml(), encoding="utf-8")
    assert read_recipe(path).config == config


def test_the_config_of_a_run_holds_what_was_given_in_code(tmp_path: Path) -> None:
    from forge.testing import TinyTask, tiny_batches

    options = {"recipe": "default", "max_updates": 1, "seed": 9}
    forge.Trainer(**options, run_dir=tmp_path / "a").fit(TinyTask(), tiny_batches())
    again = load(tmp_path / "a" / "config.yaml")
    assert again.trainer == {"max_updates": 1, "seed": 9}
    assert list(again.plugins) == list(load("default").plugins)

    forge.Trainer(**options, plugins=["clip"], run_dir=tmp_path / "b").fit(TinyTask(), tiny_batches())
    assert "Plugins were given in code too" in (tmp_path / "b" / "config.yaml").read_text()
