"""What a sweep decides: grids, conditions, rungs, medians, budgets, and that neither speed nor kills change it."""

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.config import ConfigError
from flows.sweep.board import Advance, Board, NewTrial, Result, Trial, Wait, next_decision, rungs
from flows.sweep.space import grid, suggest
from flows.sweep.spec import Parameter, SweepSpec, load_sweep

LR = "actor_rollout_ref.actor.optim.lr"
N = "actor_rollout_ref.rollout.n"
KL = "algorithm.use_kl_in_reward"
COEF = "algorithm.kl_ctrl.kl_coef"


def spec(**more) -> SweepSpec:
    base = {"name": "s", "space": {LR: {"log_uniform": [1e-5, 1e-1]}}, "objective": {"metric": "score"}}
    return SweepSpec.model_validate({**base, "budget": {"trials": 12}, **more})


def simulate(given_spec, total, value, order=None, killed=0.0, seed=0):
    """Run a sweep whose runs end at once, in order or in a random one, with kills; return its board."""
    chance = random.Random(seed)
    board, under_way = Board(given_spec, total), []
    limit = given_spec.budget.trials or 10**9
    while True:
        if given_spec.sampler.kind == "grid":
            limit = min(limit, len(grid(given_spec)))
        decision = next_decision(board, len(board.trials) < limit)
        if isinstance(decision, NewTrial):
            seen = [(dict(board.trials[trial].values), place) for trial, place in decision.seen.items()]
            values = suggest(given_spec, len(board.trials), seen)
            board.trials.append(Trial(len(board.trials), values))
            decision = Advance(len(board.advances), len(board.trials) - 1, decision.until)
        if isinstance(decision, Advance):
            board.advances.append(decision)
            under_way += [(decision, one) for one in given_spec.seeds]
            continue
        if not under_way:
            assert decision is None
            return board
        if chance.random() < killed:
            # The command is given again: what it knows is what was written down.
            board = Board(given_spec, total, list(board.trials), list(board.advances), dict(board.results))
            continue
        advance, one = under_way.pop(chance.randrange(len(under_way)) if order == "random" else 0)
        found = value(board.trials[advance.trial].values, advance.until, one)
        board.results[advance.index, one] = Result(found, None if found is not None else "broken")


def test_a_grid_is_every_combination_and_inactive_keys_are_left_out():
    space = {
        KL: {"choice": [False, True]},
        COEF: {"choice": [0.1, 0.2], "when": {KL: True}},
        N: {"int": [4, 8], "step": 2},
    }
    points = grid(spec(space=space, sampler={"kind": "grid"}))
    off = [{KL: False, N: n} for n in (4, 6, 8)]
    on = [{KL: True, COEF: coef, N: n} for coef in (0.1, 0.2) for n in (4, 6, 8)]
    assert points == off + on


def test_grid_points_are_multiples_of_the_step_without_drift():
    points = grid(spec(space={COEF: {"uniform": [0.0, 0.3], "step": 0.1}}, sampler={"kind": "grid"}))
    assert [point[COEF] for point in points] == pytest.approx([0.0, 0.1, 0.2, 0.3], abs=1e-15)


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_a_suggestion_depends_on_the_file_the_number_and_what_it_saw_alone(kind):
    the_spec = spec(
        sampler={"kind": kind, "startup_trials": 2}, space={LR: {"log_uniform": [1e-5, 1e-1]}, N: {"int": [2, 16]}}
    )
    seen = [({LR: 10.0**-k, N: 2 * k}, -abs(k - 3.0)) for k in range(1, 5)]
    assert suggest(the_spec, 7, seen) == suggest(the_spec, 7, seen)
    assert suggest(the_spec, 7, seen) != suggest(the_spec, 8, seen)
    found = suggest(the_spec, 7, seen)
    assert 1e-5 <= found[LR] <= 1e-1 and found[N] in range(2, 17)


@pytest.mark.parametrize("kind", ["random", "tpe"])
def test_what_was_tried_is_not_suggested_again_while_there_is_something_else(kind):
    the_spec = spec(
        space={N: {"choice": [2, 4, 8]}, KL: {"choice": [False, True]}},
        sampler={"kind": kind, "startup_trials": 1},
    )
    tried = []
    for number in range(6):
        seen = [(values, place) for place, values in enumerate(tried)]
        tried.append(suggest(the_spec, number, seen, tried))
    assert len({repr(values) for values in tried}) == 6
    assert suggest(the_spec, 6, [], tried) in tried


def test_tpe_takes_numbers_in_a_choice_that_go_up_or_down_for_neighbours():
    kinds = {"up": [1e-4, 1e-3, 1], "down": [8, 4, 2], "mixed": [1, 3, 2], "truths": [False, True], "words": ["a", "b"]}
    found = {name: Parameter(choice=tuple(values)).is_ordered for name, values in kinds.items()}
    assert found == {"up": True, "down": True, "mixed": False, "truths": False, "words": False}


def test_a_trial_that_got_further_is_a_better_one_and_at_the_same_step_its_value_decides():
    the_spec = spec(pruning={"kind": "asha", "min_steps": 1, "reduction": 3}, objective={"metric": "m", "mode": "min"})
    board = Board(the_spec, 3, [Trial(number, {LR: 0.1 * number}) for number in range(4)])
    board.advances = [Advance(number, number, 1) for number in range(4)] + [Advance(4, 1, 3)]
    worth = [3.0, 1.0, 2.0, None, 9.0]
    board.results = {(index, 0): Result(value) for index, value in enumerate(worth)}
    assert next_decision(board, True).seen == {0: 0, 2: 1, 1: 2}


def test_any_value_can_be_chosen_lists_and_null_included():
    choices = [None, ["a", "b"], {"x": 1}, True, 1]
    the_spec = spec(space={"data.train_files": {"choice": choices}}, sampler={"kind": "random"})
    found = [suggest(the_spec, number, [])["data.train_files"] for number in range(60)]
    assert {repr(one) for one in found} == {repr(one) for one in choices}


def test_without_pruning_every_trial_goes_to_its_end_and_learns_of_those_that_are_over():
    board = simulate(spec(sampler={"kind": "random"}, slots=2), 10, lambda values, until, seed: values[LR])
    assert [(advance.trial, advance.until) for advance in board.advances] == [(k, 10) for k in range(12)]


def test_rungs_grow_by_the_reduction_and_end_with_the_run():
    assert rungs(spec(pruning={"kind": "asha", "min_steps": 2}), 30) == [2, 6, 18, 30]
    assert rungs(spec(pruning={"kind": "median", "min_steps": 2, "every": 5}), 10) == [2, 7, 10]
    assert rungs(spec(), 30) == [30]


def test_asha_lets_the_best_third_of_a_rung_go_on():
    """By hand: of 3, 6, 9 trials at step 1 the best 1, 2, 3 go on to step 3, and of these 3 the best to step 9."""
    the_spec = spec(
        space={COEF: {"choice": [float(k) for k in range(9)]}},
        sampler={"kind": "grid"},
        pruning={"kind": "asha", "min_steps": 1, "reduction": 3},
        budget={},
    )
    board = simulate(the_spec, 9, lambda values, until, seed: -values[COEF])
    order = [(0, 1), (1, 1), (2, 1), (0, 3), (3, 1), (4, 1), (5, 1), (1, 3), (6, 1), (7, 1), (8, 1), (2, 3), (0, 9)]
    assert [(one.trial, one.until) for one in board.advances] == order
    assert board.planned_steps() == 9 + 2 * 3 + 6 * 1


def test_asha_trains_the_best_of_few_trials_to_the_end_when_no_more_come():
    """Two trials where three would be needed for one to go on: nobody would ever reach step 9."""
    the_spec = spec(
        space={COEF: {"choice": [0.0, 1.0]}},
        sampler={"kind": "grid"},
        pruning={"kind": "asha", "min_steps": 1, "reduction": 3},
        budget={},
    )
    board = simulate(the_spec, 9, lambda values, until, seed: values[COEF])
    assert [(one.trial, one.until) for one in board.advances] == [(0, 1), (1, 1), (1, 3), (1, 9)]


def test_a_trial_that_failed_further_on_is_not_the_one_that_is_trained_to_the_end():
    the_spec = spec(
        space={COEF: {"choice": [0.0, 1.0]}},
        sampler={"kind": "grid"},
        pruning={"kind": "asha", "min_steps": 1, "reduction": 3},
        budget={},
    )
    board = simulate(
        the_spec, 9, lambda values, until, seed: None if values[COEF] == 1.0 and until > 1 else values[COEF]
    )
    assert [(one.trial, one.until) for one in board.advances] == [(0, 1), (1, 1), (1, 3), (0, 3), (0, 9)]


def test_a_failed_trial_counts_as_the_worst_of_its_rung():
    the_spec = spec(
        space={COEF: {"choice": [0.0, 1.0, 2.0]}},
        sampler={"kind": "grid"},
        pruning={"kind": "asha", "min_steps": 1, "reduction": 3},
        budget={},
    )
    board = simulate(the_spec, 3, lambda values, until, seed: None if values[COEF] == 2.0 else values[COEF])
    assert [(one.trial, one.until) for one in board.advances] == [(0, 1), (1, 1), (2, 1), (1, 3)]
    assert board.failure(2) == "broken" and board.failure(1) is None


def test_a_trial_below_the_median_of_the_others_stops_where_it_is():
    values = {0: 5.0, 1: 6.0, 2: 7.0, 3: 1.0, 4: 9.0}
    the_spec = spec(
        space={N: {"choice": [0, 1, 2, 3, 4]}},
        sampler={"kind": "grid"},
        pruning={"kind": "median", "min_steps": 2, "every": 2, "startup_trials": 3},
        budget={},
    )
    board = simulate(the_spec, 6, lambda point, until, seed: values[point[N]])
    reached = {trial: max(one.until for one in board.of_trial(trial)) for trial in range(5)}
    assert reached == {0: 6, 1: 6, 2: 6, 3: 2, 4: 6}


def test_seeds_are_averaged_and_their_spread_is_kept():
    the_spec = spec(seeds=[0, 1, 2], budget={"trials": 1}, sampler={"kind": "random"})
    board = simulate(the_spec, 5, lambda values, until, seed: 1.0 + seed)
    assert board.value(board.advances[0]) == 2.0 and board.spread(board.advances[0]) == 1.0


def test_one_failed_seed_leaves_a_trial_without_a_value():
    the_spec = spec(seeds=[0, 1], budget={"trials": 1}, sampler={"kind": "random"})
    board = simulate(the_spec, 5, lambda values, until, seed: None if seed else 1.0)
    assert board.value(board.advances[0]) is None and board.failure(0) == "broken"


def test_no_decision_costs_more_steps_than_the_budget_has():
    the_spec = spec(sampler={"kind": "random"}, budget={"trials": 12, "steps": 45}, seeds=[0, 1])
    board = simulate(the_spec, 10, lambda values, until, seed: 1.0)
    assert board.planned_steps() == 40


def test_a_decision_waits_for_all_but_the_last_that_may_be_under_way():
    the_spec = spec(slots=2, sampler={"kind": "random"})
    board = Board(the_spec, 10)
    for number in range(2):
        assert isinstance(next_decision(board, True), NewTrial)
        board.trials.append(Trial(number, {LR: 0.1}))
        board.advances.append(Advance(number, number, 10))
    board.results[1, 0] = Result(1.0)
    assert isinstance(next_decision(board, True), Wait)
    board.results[0, 0] = Result(2.0)
    assert next_decision(board, True) == NewTrial(10, {0: 0})


@pytest.mark.parametrize(
    ("pruning", "sampler"),
    list(itertools.product(["none", "median", "asha"], ["grid", "random", "tpe"])),
)
@settings(max_examples=8)
@given(st.integers(0, 10_000))
def test_neither_the_order_in_which_runs_end_nor_kills_change_the_table(pruning, sampler, seed):
    the_spec = spec(
        space={COEF: {"choice": [0.1 * k for k in range(10)]}, N: {"choice": [4, 8]}},
        sampler={"kind": sampler, "startup_trials": 3},
        pruning={"kind": pruning, "startup_trials": 2},
        budget={"trials": 8},
        slots=3,
        seeds=[0, 1],
    )

    def value(values, until, one):
        found = (values[COEF] * 7 + values[N] * 3 + until + one) % 5
        return None if found < 0.3 else found

    plain = simulate(the_spec, 9, value)
    other = simulate(the_spec, 9, value, order="random", killed=0.3, seed=seed)
    assert (plain.trials, plain.advances, plain.results) == (other.trials, other.advances, other.results)


WRONG = {
    "space: {}": "nothing to search",
    "space: {trainer.sed: {choice: [1]}}": "Nearest: trainer.seed",
    "space: {trainer.seed: {choice: [1]}}": "see seeds",
    "space: {trainer.experiment_name: {choice: [a]}}": "the sweep itself sets this key",
    "space: {algorithm.gamma: {uniform: [0, 1]}}": "budget.trials",
    "space: {algorithm.gamma: {uniform: [0, 1]}}\nsampler: {kind: grid}": "a grid needs values",
    "space: {algorithm.gamma: {uniform: [1, 0]}}": "must go up",
    "space: {algorithm.gamma: {log_uniform: [0, 1]}}": "above 0",
    "space: {algorithm.gamma: {choice: [1], uniform: [0, 1]}}": "exactly one of",
    "space: {algorithm.gamma: {choice: [1, 1]}}": "twice",
    "space: {algorithm.gamma: {choice: [1], when: {algorithm.lam: 1}}}\nsampler: {kind: grid}": "not searched above",
    "space: {algorithm.gamma: {choice: [1]}}\nsampler: {kind: grid}\nseeds: [1, 1]": "different whole numbers",
    "space: {algorithm.gamma: {choice: [1]}}\nsampler: {kind: grid}\nbudget: {deadline: 2030-01-01T00:00:00}": "zone",
    "space: {algorithm.gamma: {choice: [1]}}\nsampler: {kind: grid}\nbuget: {steps: 1}": "buget",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_is_told_with_the_key(text, tmp_path):
    path = Path(tmp_path / "sweep.yaml")
    path.write_text(f"name: s\nobjective: {{metric: x}}\n{text}\n")
    with pytest.raises(ConfigError, match=r"sweep\.yaml") as error:
        load_sweep(path)
    assert WRONG[text] in str(error.value)


def test_a_file_reads_as_a_section_of_its_own_too(tmp_path):
    path = tmp_path / "sweep.yaml"
    text = "  name: s\n  objective: {metric: x}\n  space: {algorithm.gamma: {choice: [1]}}\n  sampler: {kind: grid}\n"
    path.write_text(f"sweep:\n{text}")
    assert load_sweep(path).name == "s"
