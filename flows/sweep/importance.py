"""How much of the spread of the objective each searched key explains."""

from __future__ import annotations

from flows.sweep.book import Sweep
from flows.sweep.space import as_optuna, silent
from flows.sweep.table import rows

FEWEST_TRIALS = 4


def importances(sweep: Sweep) -> tuple[list[tuple[str, float]], str | None]:
    """Share of the variance of the objective by key, largest first (fANOVA, ICML 2014, by Optuna).

    Only trials that have reached the same, last step are compared, and of conditional keys only those that all of them
    have.

    Returns:
        The shares, which add up to 1; and why there are none, or None.
    """
    import optuna

    done = [row for row in rows(sweep) if row.state == "done" and row.value is not None]
    if len(done) < FEWEST_TRIALS:
        return [], f"{len(done)} trials are at their end; {FEWEST_TRIALS} are needed"
    if len({row.value for row in done}) == 1:
        return [], "all values are equal"
    shared = [key for key in sweep.spec.space if all(key in row.values for row in done)]
    varied = [key for key in shared if len({repr(row.values[key]) for row in done}) > 1]
    if not varied:
        return [], "no key has two values among the trials that are at their end"
    if len(varied) == 1:
        return [(varied[0], 1.0)], None
    with silent():
        study = optuna.create_study()
        for row in done:
            study.add_trial(as_optuna(sweep.spec, dict(row.values), row.value))
        evaluator = optuna.importance.FanovaImportanceEvaluator(seed=0)
        found = optuna.importance.get_param_importances(study, evaluator=evaluator, params=varied)
    return sorted(found.items(), key=lambda one: -one[1]), None
