"""`forge plan`: show what a recipe runs, hook by hook and value by value.

No data are loaded and nothing is trained, except with `--measure`, which times each plugin. With `--devices` or
`--memory` it shows instead which strategies fit on such devices, and loads one batch for its shapes. With `--cluster`
it compares all strategies on many GPUs, by memory and time.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from typing import Any

from rich.text import Text

from forge.cli import plan_costs, plan_memory, target
from forge.config import Recipe
from forge.config.build import make_plugins
from forge.config.merge import leaves
from forge.contract.stack import ACTIONS, CORE, Call, Stack
from forge.errors import ForgeError
from forge.util import show

EXAMPLES = """\
examples:
  forge plan quickstart
  forge plan quickstart -p PLUGIN PLUGIN.OPTION=VALUE
  forge plan my_task.py:MyTask --recipe fast --json
  forge plan quickstart --measure --updates 100
  forge plan quickstart --devices 8 --memory 80
"""
STYLES = {"own": "bold yellow", "wrap": "cyan", "event": "green", "default": "dim"}
VERBS = {"own": "owns", "wrap": "wraps", "default": "does it"}


def parser() -> ArgumentParser:
    parser = show.new_parser(
        "plan",
        "Show what a recipe runs, or which strategies fit on given devices. Only --measure trains.",
        EXAMPLES,
    )
    target.add_arguments(parser)
    parser.add_argument(
        "--measure", action="store_true", help="train a few updates and show the cost of each plugin; no run is written"
    )
    parser.add_argument(
        "--updates", type=int, metavar="N", help=f"with --measure: number of updates (default: {plan_costs.UPDATES})"
    )
    parser.add_argument(
        "--devices", type=int, metavar="N", help="show what fits on N devices, and the best strategy; needs no GPU"
    )
    parser.add_argument(
        "--memory", type=float, metavar="GIB", help="memory of each device (default: that of this machine's GPU)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    return parser


def run(args: Namespace) -> int:
    from forge.engine.default_actions import Core

    if args.updates is not None and not args.measure:
        raise ForgeError("--updates is an option of --measure: add --measure.")
    recipe = target.load(args, to_train=True)
    if args.devices is not None or args.memory is not None:
        return _plan_memory(args, recipe)
    stack = Stack(make_plugins(recipe.plugins))
    stack.resolve()
    stack.register(Core(), _task_without_weights(recipe))
    calls = stack.calls()
    values = {key: {"value": value, "from": recipe.origin[key]} for key, value in leaves(recipe.resolved)}
    if args.json:
        hooks = {hook: [{"plugin": c.plugin, "role": c.role} for c in who] for hook, who in calls.items()}
        plan: dict[str, Any] = {"recipe": recipe.name, "stack": stack.names, "hooks": hooks, "values": values}
        if args.measure:
            plan["measured"] = plan_costs.measure(recipe, args.updates)
        print(json.dumps(plan, indent=2))
        return 0
    _print_stack(recipe, stack)
    _print_hooks(calls)
    _print_values(recipe, values)
    if args.measure:
        implemented = [hook for hook, who in calls.items() if any(call.plugin != CORE for call in who)]
        plan_costs.show_costs(plan_costs.measure(recipe, args.updates), implemented)
    return 0


def _plan_memory(args: Namespace, recipe: Recipe) -> int:
    if args.measure:
        raise ForgeError("--measure trains here, --devices and --memory plan for other devices: use one at a time.")
    found = plan_memory.plan(args, recipe)
    if args.json:
        print(json.dumps({"recipe": recipe.name, **plan_memory.as_json(found, args, recipe)}, indent=2))
    else:
        plan_memory.show_plan(found, args, recipe)
    return 0


def _task_without_weights(recipe: Recipe) -> Any | None:
    """Build the task, whose hooks are shown, on the meta device, where even a large model costs nothing."""
    import torch

    if "task" not in recipe.local and "name" not in recipe.config.get("task", {}):
        return None
    try:
        with torch.device("meta"):
            return recipe.make_task()
    except Exception:  # its __init__ needs real numbers; an error of its own is raised again
        return recipe.make_task()


def _print_stack(recipe: Recipe, stack: Stack) -> None:
    console = show.console()
    console.print(Text.assemble((recipe.name, "bold"), f"  {recipe.description}"), soft_wrap=True)
    console.print()
    console.print(show.heading("Stack, outermost first"))
    grid = show.table("plugin", "options", "from", wrap=["options"])
    for plugin in stack:
        given = recipe.resolved["plugins"][plugin.name]
        options = ", ".join(f"{key}={_as_yaml(value)}" for key, value in given.items())
        grid.add_row(plugin.name, options, Text(recipe.origin[f"plugins.{plugin.name}"], "dim"))
    console.print(grid if len(stack) else Text("no plugins", "dim"))


def _print_hooks(calls: dict[str, list[Call]]) -> None:
    console = show.console()
    console.print()
    console.print(show.heading("Hooks, in the order of a run"))
    grid = show.table("hook", "kind", "plugins, in call order", wrap=["plugins, in call order"])
    for hook, who in calls.items():
        if any(call.plugin != CORE for call in who):
            grid.add_row(hook, Text("action" if hook in ACTIONS else "event", "dim"), _chain(hook, who))
    console.print(grid)
    alone = [hook for hook, who in calls.items() if who and all(call.plugin == CORE for call in who)]
    unused = [hook for hook, who in calls.items() if not who]
    for label, hooks in (("core alone", alone), ("unused", unused)):
        if hooks:
            line = ", ".join(hook.removeprefix("forge_") for hook in hooks)
            console.print(Text(f"{label}: {line}", "dim"))


def _chain(hook: str, who: list[Call]) -> Text:
    """List an event's plugins in order; an action from its outermost wrapper to its owner."""
    if hook not in ACTIONS:
        return Text(", ").join(Text(call.plugin, STYLES[call.role]) for call in who)
    owned = any(call.role == "own" for call in who)
    shown = [call for call in who if not (owned and call.role == "default")]
    return Text(" > ").join(Text(f"{call.plugin} {VERBS[call.role]}", STYLES[call.role]) for call in shown)


def _print_values(recipe: Recipe, values: dict[str, Any]) -> None:
    console = show.console()
    console.print()
    console.print(show.heading("Values"))
    grid = show.table("key", "value", "from", wrap=["value"])
    for key, entry in values.items():
        if key != "description":
            style = "dim" if entry["from"] == "default" else ""
            grid.add_row(Text(key, style), Text(_as_yaml(entry["value"]), style), Text(entry["from"], "dim"))
    console.print(grid)
    for section, maker in recipe.local.items():
        console.print(Text(f"{section}: {maker.__qualname__} from the command line", "dim"))


def _as_yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
