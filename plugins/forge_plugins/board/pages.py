"""TensorBoard pages that `forge board` extends."""

from __future__ import annotations

import os
from typing import Any

from tensorboard.context import RequestContext
from tensorboard.plugins.hparams import backend_context, hparams_plugin
from tensorboard.plugins.projector import metadata, projector_plugin

STAGES = ("val", "test", "train")
OPTIONS = ("task", "data", "trainer")


class OrderedColumns(backend_context.Context):
    """The columns of HPARAMS, the most important first: the page shows only a few at once."""

    def experiment_from_metadata(self, *args: Any, **kwargs: Any) -> Any:
        experiment = super().experiment_from_metadata(*args, **kwargs)
        for columns, key in ((experiment.metric_infos, _of_metric), (experiment.hparam_infos, _of_option)):
            ordered = sorted(columns, key=key)
            del columns[:]
            columns.extend(ordered)
        return experiment


def _of_metric(info: Any) -> tuple[int, bool, str]:
    """Sort validation, test and training metrics first, each with its loss before others; then those of plugins."""
    name = info.name.tag
    return _place(name.partition("/")[0], STAGES), not name.endswith("/loss"), name


def _of_option(info: Any) -> tuple[bool, int, str]:
    """Sort options that differ between runs first; then those of the task, the data, the Trainer and plugins."""
    return not getattr(info, "differs", False), _place(info.name.partition(".")[0], OPTIONS), info.name


def _place(name: str, names: tuple[str, ...]) -> int:
    return names.index(name) if name in names else len(names)


class HParams(hparams_plugin.HParamsPlugin):
    """The HPARAMS page with ordered columns."""

    def __init__(self, context: Any):
        super().__init__(context)
        self._context = OrderedColumns(context)


class Projector(projector_plugin.ProjectorPlugin):
    """The PROJECTOR page, reloading points written since TensorBoard was started."""

    _written: dict[str, int] | None = None

    def _update_configs(self) -> None:
        written = {}
        for run in self.data_provider.list_runs(RequestContext(), experiment_id=""):
            path = os.path.join(self.logdir, run.run_name, metadata.PROJECTOR_FILENAME)
            if os.path.exists(path):
                written[run.run_name] = os.stat(path).st_mtime_ns
        if written != self._written:
            self._written, self._run_paths = written, None
            self.tensor_cache = type(self.tensor_cache)(1)
        super()._update_configs()


PAGES: dict[Any, Any] = {hparams_plugin.HParamsPlugin: HParams, projector_plugin.ProjectorPlugin: Projector}
"""Replacements of TensorBoard's own pages."""
