import sqlite3
from pathlib import Path

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class Sqlite(Logger):
    def __init__(self, folder):
        super().__init__()
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def name(self):
        return self.folder.name

    @property
    def version(self):
        return ""

    @rank_zero_only
    def log_hyperparams(self, params):
        with sqlite3.connect(self.folder / "metrics.db") as db:
            db.execute("create table if not exists options (name primary key, value)")
            db.executemany("insert or replace into options values (?, ?)", params.items())

    @rank_zero_only
    def log_metrics(self, metrics, step):
        with sqlite3.connect(self.folder / "metrics.db") as db:
            db.execute("create table if not exists points (step, name, value, primary key (step, name))")
            rows = [(step, name, value) for name, value in metrics.items()]
            db.executemany("insert or replace into points values (?, ?, ?)", rows)
