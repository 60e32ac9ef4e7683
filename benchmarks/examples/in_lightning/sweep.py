import lightning as L
import optuna
from digits_module import Digits, loaders
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend


def objective(trial):
    lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
    hidden = trial.suggest_categorical("hidden", [64, 256])
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=2, default_root_dir=f"runs/sweep/trial-{trial.number:04}")
    trainer.fit(Digits(hidden=hidden, lr=lr), *loaders())
    return trainer.callback_metrics["val/accuracy"].item()


study = optuna.create_study(
    study_name="digits",
    direction="maximize",
    sampler=optuna.samplers.TPESampler(seed=0),
    storage=JournalStorage(JournalFileBackend("sweep.log")),
    load_if_exists=True,
)
study.optimize(objective, n_trials=4, catch=Exception)
print(study.best_params, study.best_value, get_param_importances(study, evaluator=PedAnovaImportanceEvaluator()))
