"""`grpoflow diagnose`: each failure sign is found where it is planted, with its evidence; a healthy run shows none."""

import json
import math

import pytest
from made_up import GROUPS, N, made_up_run
from tiny_runs import run as train
from typer.testing import CliRunner

from flows.audit.diagnose import SIGNS, diagnose
from flows.cli import app
from flows.run_folder import GoBack
from storage import StorageError, open_run

STEPS = 12
FROM = 7
"""Step from which a bend bends."""


def late(change):
    """A bend of the steps from `FROM` on."""

    def bend(shape):
        if shape.step >= FROM:
            change(shape)

    return bend


def found_in(folder, bend, steps=STEPS, **config):
    run = made_up_run(folder, steps, bend, **config)
    return diagnose(run, run.steps()).found


def test_a_healthy_run_shows_no_sign(tmp_path):
    run = made_up_run(tmp_path, STEPS)
    result = diagnose(run, run.steps())
    assert result.found == {}
    assert result.cannot.keys() <= {"reward through form"}
    assert len(result.absent) + len(result.cannot) == len(SIGNS)
    assert result.unread == {}


def silent(shape):
    for group in range(6):
        shape.scores[group * N : group * N + N] = [0.0] * N


def grown(shape):
    shape.lengths = [length * (shape.step - FROM + 3) for length in shape.lengths]


def cut(shape):
    shape.truncated = set(range(0, GROUPS * N, 3))


def all_alike(shape):
    for group in range(6):
        for sample in range(1, N):
            shape.lengths[group * N + sample] = shape.lengths[group * N]
            shape.texts[group * N + sample] = group * N


def by_length(shape):
    """Longer responses score more, and all get longer."""
    shape.lengths = [6 + shape.step + 4 * (i % N) for i in range(GROUPS * N)]
    shape.scores = [min(length / 40, 1.0) for length in shape.lengths]


def by_form(shape):
    form = min(0.1 * shape.step, 1.0)
    shape.parts = [{"gsm8k": score * 0.5, "response_format": form} for score in [1.0, 0.0, 1.0, 0.0] * GROUPS]
    shape.scores = [sum(row.values()) for row in shape.parts]


def failing(shape):
    for i in range(4):
        shape.scores[i] = None
    shape.status = ["error"] * 3 + ["timeout"] + ["ok"] * (GROUPS * N - 4)
    shape.message = [f"score: ValueError: bad {i}" for i in range(3)] + ["no verdict from score within 10 s"]
    shape.message += [None] * (GROUPS * N - 4)


def fallen(shape):
    shape.scores = [score if i % N == 0 else 0.0 for i, score in enumerate(shape.scores)]
    shape.scores = [score / 2 if i >= N * 2 else score for i, score in enumerate(shape.scores)]


def visited_again(shape):
    """Of 16 prompts, ten are never solved; every prompt comes back every second step."""
    first = (shape.step % 2) * GROUPS
    shape.prompts = [first + i for i in range(GROUPS)]
    for group in range(5):
        shape.scores[group * N : group * N + N] = [float(group == 4)] * N


def set_to(**values):
    def change(shape):
        for name, value in values.items():
            setattr(shape, name, value(shape) if callable(value) else value)

    return change


PLANTED = {
    "no-signal groups": (late(silent), "75% of the groups carry no signal", FROM),
    "reward collapse": (late(fallen), "the median of the last 5 is 0.156", None),
    "reward through length": (by_length, "within groups the score follows the length", None),
    "reward through form": (by_form, "it is form", None),
    "entropy": (
        late(set_to(entropy=0.01)),
        "entropy collapsed: 0.5 nats a token at the start, 0.01 since step 7",
        FROM,
    ),
    "length explosion": (late(grown), "responses have grown from", FROM),
    "truncation": (late(cut), "of the responses are cut by data.max_response_length", FROM),
    "duplicates within groups": (late(all_alike), "75% of the groups hold the same wrong response", FROM),
    "dead prompts": (
        visited_again,
        "10 of 16 prompts that were seen more than once never carried a signal: 2 always",
        1,
    ),
    "KL": (late(set_to(kl=0.5)), "the KL to the reference leaps at step 7", FROM),
    "ratios": (late(set_to(ratio_max=50.0)), "the ratio of new to old probability reaches 50", FROM),
    "sampler gap": (late(set_to(gap=0.01)), "the gap between sampler and policy grew", None),
    "learning rate": (late(set_to(lr=0.0)), "the learning rate is 0 in 6 of 12 steps (7..12)", FROM),
    "gradients": (late(set_to(grad_norm=lambda s: (0.4, 40.0 if s.step == 9 else 0.5))), "spikes at step 9, to", 9),
    "reward errors": (late(failing), "24 of 384 samples have no verdict (18 errors, 6 over reward.timeout_s)", FROM),
}


def test_every_sign_has_a_plant():
    assert set(PLANTED) == {sign.name for sign in SIGNS}
    assert all(sign.about.endswith(".") for sign in SIGNS)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_sign_is_found_with_its_evidence_and_its_query(tmp_path, name):
    bend, words, step = PLANTED[name]
    found = found_in(tmp_path, bend)
    assert name in found
    assert words in found[name].says
    assert step is None or found[name].steps[0] == step
    assert all(math.isfinite(number) for number in found[name].numbers.values())
    assert found[name].query.startswith("select ")


@pytest.mark.parametrize("name", PLANTED)
def test_the_query_of_a_sign_is_answered(tmp_path, name):
    from flows.audit.query import ask, opened
    from flows.audit.sources import open_source

    run = made_up_run(tmp_path, STEPS, PLANTED[name][0])
    found = diagnose(run, run.steps()).found[name]
    with opened([open_source(str(run.root))]) as (connection, seen):
        assert ask(connection, seen, found.query).read_all().num_rows > 0


def test_errors_are_counted_by_kind_and_not_by_text(tmp_path):
    says = found_in(tmp_path, late(failing))["reward errors"].says
    assert "18 x score: ValueError" in says
    assert "6 x no verdict from score within … s" in says


@pytest.mark.parametrize(
    ("bend", "name", "words"),
    [
        (late(set_to(entropy=2.0)), "entropy", "entropy exploded"),
        (set_to(kl=lambda s: 0.3 * s.step), "KL", "the KL to the reference is above 1 nat a token"),
        (late(set_to(first_log_ratio=0.5)), "ratios", "though the policy has not moved"),
        (set_to(clipfrac=0.5), "ratios", "50% of the tokens are clipped"),
        (late(set_to(gap=0.2)), "sampler gap", "above trainer.alarms.rollout_probs_diff_mean"),
        (set_to(grad_norm=(3.0, 4.0)), "gradients", "100% of the gradients are above actor.grad_clip=1"),
        (set_to(skipped="no token is in the loss"), "gradients", "moved nothing (no token is in the loss)"),
        (set_to(status=["unparsed"] * GROUPS * N), "reward errors", "in 100% of the responses no answer was found"),
    ],
)
def test_other_faces_of_a_sign(tmp_path, bend, name, words):
    assert words in found_in(tmp_path, bend)[name].says


def test_a_warm_up_and_a_schedule_that_ends_at_0_are_no_sign(tmp_path):
    bend = set_to(lr=lambda shape: 0.0 if shape.step in (1,) else 1e-5)
    assert "learning rate" not in found_in(tmp_path, bend)


def test_few_steps_show_no_trend(tmp_path):
    run = made_up_run(tmp_path, 2)
    result = diagnose(run, run.steps())
    assert result.found == {}
    assert "a trend needs 4" in result.cannot["entropy"]


def test_rows_that_cannot_be_read_are_told_and_the_records_numbers_used(tmp_path):
    run = made_up_run(tmp_path, STEPS, late(set_to(entropy=0.01)))
    for path in (run.root / "steps/000009").glob("*/0001/part-00000.arrow"):
        path.write_bytes(b"ARROW1")
    result = diagnose(run, run.steps())
    assert list(result.unread) == [9]
    assert result.found["entropy"].steps == [7, 8, 9, 10, 11, 12]


def test_only_the_steps_that_are_asked_for_are_looked_at(tmp_path):
    run = made_up_run(tmp_path, STEPS, late(silent))
    assert diagnose(run, range(1, FROM)).found == {}
    with pytest.raises(StorageError, match="no training step"):
        diagnose(run, [0])


def test_a_real_run_is_read(tiny_run):
    run, _ = train(tiny_run("trainer.total_training_steps=4"))
    result = diagnose(run, run.steps())
    assert result.unread == {}
    assert set(result.cannot) <= {"reward through form", "reward through length"}
    assert {"learning rate", "gradients", "ratios", "sampler gap", "KL", "reward errors"} <= set(result.absent)


def test_queries_ask_the_history_that_was_looked_at(tiny_run):
    still = ("trainer.total_training_steps=4", "actor_rollout_ref.actor.optim.lr=0")
    train(tiny_run(*still))
    run, _ = train(tiny_run(*still), back=GoBack(2, "advantages"))
    for words, name in (([f"{run.root}#1"], f"'{run.root}#1'"), ([str(run.root)], str(run.root))):
        shown = CliRunner().invoke(app, ["diagnose", *words])
        assert shown.exit_code == 0
        assert f"  grpoflow sql {name} " in shown.stdout
    both = CliRunner().invoke(app, ["diagnose", f"{run.root}#1", "--lineage", "2"])
    assert "is lineage 1, --lineage says 2" in str(both.exception)


def test_the_command_tells_signs_with_queries_and_prints_plain_json(tmp_path):
    run = made_up_run(tmp_path, STEPS, late(silent))
    shown = CliRunner().invoke(app, ["diagnose", str(run.root)])
    assert shown.exit_code == 0
    assert "since step 7, 75% of the groups carry no signal" in shown.stdout
    assert f'grpoflow sql {run.root} "select step' in shown.stdout
    assert "no sign of: " in shown.stdout
    values = json.loads(CliRunner().invoke(app, ["diagnose", str(run.root), "--json", "--steps", "5.."]).stdout)
    # Groups whose scores have all become 0 lose what was gained, too.
    assert [sign["name"] for sign in values["found"]] == ["no-signal groups", "reward collapse"]
    assert values["steps"] == list(range(5, 13))
    assert open_run(run.root).owner() is None
