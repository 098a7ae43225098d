"""`grpoflow diff`: nothing where nothing differs, else the first stage and token that do, and what came of it."""

import json
import shutil
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from planted import copy_of, flip_byte
from tiny_runs import run as train

from flows.audit.diff import compare, diff_command
from flows.audit.diff.samples import first_difference
from flows.audit.sources import open_source
from flows.run_folder import GoBack
from storage import RunWriter, StorageError, build_table, open_run
from storage.retention import Retention, drop, what_to_drop

STEPS = ("trainer.total_training_steps=3", "trainer.test_freq=3")
HELPED = "from helper import score\n\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n"
HELPED += "    return score(solution_str)\n"
HELPER = "def score(text):\n    return float(ord((text or 'a')[0]) % 2)\n"


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def make(tiny_run_in, home):
    """Train a run beside the others: `make("seed", "trainer.seed=1")`."""

    def made(name, *overrides, helper=HELPER):
        cfg = tiny_run_in(home)(*STEPS, *overrides, f"trainer.default_local_dir={home / name}")
        (home / "reward.py").write_text(HELPED)
        (home / "helper.py").write_text(helper)
        return train(cfg)[0]

    return made


@pytest.fixture(scope="module")
def base(make):
    return make("base")


@pytest.fixture
def copied(base, tmp_path):
    """A copy to change."""
    return copy_of(base, tmp_path)


def found_in(a, b, **options):
    return compare(open_source(str(getattr(a, "root", a))), open_source(str(getattr(b, "root", b))), **options)


def told(capsys, a, b, **options):
    """What the command prints."""
    capsys.readouterr()
    words = str(getattr(a, "root", a)), str(getattr(b, "root", b))
    code = diff_command(words, options.get("steps"), False, options.get("exit_code", False), options.get("limit", 10))
    return code, capsys.readouterr().out


def roots_of(found):
    return found.first_step, [stage.stage for stage in found.first]


def test_a_run_does_not_differ_from_itself(base, capsys):
    code, text = told(capsys, base, base, exit_code=True)
    assert code == 0
    assert text == "A base, B base: steps 1..3 compared; no difference\n"
    assert not found_in(base, base).differ


def test_a_run_made_again_differs_in_nothing_but_its_place(base, make):
    found = found_in(base, make("again"))
    assert list(found.config) == ["trainer.default_local_dir"]
    assert not found.differ and roots_of(found) == (None, [])


def test_another_seed_is_named_at_the_prompts(base, make, capsys):
    other = make("seed", "trainer.seed=1")
    found = found_in(base, other)
    assert found.config["trainer.seed"] == [0, 1]
    assert roots_of(found) == (1, ["prompts"])
    assert found.first[0].inputs_equal and found.first[0].because == ("trainer.seed: A 0, B 1",)
    code, text = told(capsys, base, other, exit_code=True)
    assert code == 6
    assert (
        "first difference: step 1, prompts: the output differs, its inputs are equal\n  trainer.seed: A 0, B 1\n"
        in text
    )
    assert told(capsys, base, other)[0] == 0


def test_another_learning_rate_is_named_at_the_first_update(base, make):
    found = found_in(base, make("rate", "actor_rollout_ref.actor.optim.lr=2e-3"))
    assert roots_of(found) == (1, ["updates"])
    assert found.first[0].because == ("actor_rollout_ref.actor.optim.lr: A 0.001, B 0.002",)
    assert (found.first[0].first.column, found.first[0].first.row) == ("lr", "0")
    assert not found.code and not found.inputs
    # From step 2 on the policies differ, and so do responses to the same prompts.
    assert found.by_step and all(each["step"] > 1 for each in found.by_step)
    assert all(each["prompts"].get("only in A", 0) == 0 for each in found.by_step)
    assert found.metrics["actor/lr"].a == 1e-3 and found.metrics["actor/lr"].b == 2e-3
    assert found.metrics["actor/lr"].steps == 3 and found.metrics["actor/lr"].first == 1


def test_an_edited_helper_of_the_reward_function_is_named_at_the_rewards(base, make):
    found = found_in(base, make("helper", helper=HELPER.replace("return float", "return 1.0 - float")))
    assert roots_of(found) == (1, ["rewards"])
    assert found.first[0].because == ("the source of the reward functions differs",)
    assert found.first[0].first.column == "score"
    step = found.by_step[0]
    rewards = base.step(1).table("rewards")["score"].to_pylist()
    assert step["samples"] == {"down": int(sum(rewards)), "up": 32 - int(sum(rewards))}
    assert step["responses"] == {"equal": 32}


def test_an_edited_helper_that_scores_the_same_is_said_and_no_output_differs(base, make, capsys):
    other = make("comment", helper=HELPER + "# the same\n")
    found = found_in(base, other)
    assert found.first_step is None and found.differ
    because = ["the source of the reward functions differs"]
    assert {each["stage"] for each in found.made_otherwise} == {"rewards", "val_rewards"}
    assert found.made_otherwise[0] == {"step": 1, "stage": "rewards", "because": because}
    code, text = told(capsys, base, other, exit_code=True)
    assert code == 6 and "every output that was compared is equal" in text
    assert "rewards of step 1: the source of the reward functions differs" in text


def test_with_and_without_a_reference_the_stage_that_only_one_has_is_named(base, make):
    other = make("noref", "actor_rollout_ref.actor.use_kl_loss=false")
    found = found_in(base, other)
    assert roots_of(found) == (1, ["ref_log_probs"])
    assert found.first[0].output == "only in A"
    assert found_in(other, base).first[0].output == "only in B"
    assert found.metrics["actor/kl_loss"].b is None


def test_other_data_behind_the_same_path_are_named_by_their_digest(base, tiny_run_in, home):
    cfg = tiny_run_in(home)(*STEPS, f"trainer.default_local_dir={home / 'data'}")
    (home / "reward.py").write_text(HELPED)
    (home / "helper.py").write_text(HELPER)
    text = (home / "train.jsonl").read_text()
    (home / "train.jsonl").write_text(text.replace("apples", "2 apples"))
    other, _ = train(cfg)
    (home / "train.jsonl").write_text(text)
    found = found_in(base, other)
    assert list(found.inputs) == ["data.train_files"]
    assert roots_of(found) == (1, ["prompts"])
    assert found.first[0].because == ("the prompts' data differ",)


# ------------------------------------------------------------------------------------------------ lineages, steps, gaps


def test_two_lineages_part_where_the_later_one_went_back(tiny_run, capsys):
    train(tiny_run(*STEPS))
    run, _ = train(tiny_run(*STEPS, "actor_rollout_ref.actor.optim.lr=5e-3"), back=GoBack(2))
    words = f"{run.root}#1", f"{run.root}#2"
    found = found_in(*words)
    assert found.config == {"actor_rollout_ref.actor.optim.lr": [1e-3, 5e-3]}
    assert roots_of(found) == (2, ["updates"])
    code, text = told(capsys, *words, exit_code=True)
    assert code == 6 and text.startswith("A run#1, B run#2: steps 1..3 compared\n")
    assert "first difference: step 2, updates" in text


def test_two_steps_of_a_run_are_compared_without_what_names_them(base, capsys):
    found = found_in(f"{base.root}@1", f"{base.root}@2")
    assert roots_of(found) == (1, ["prompts"])
    assert "A is step 1, B step 2" in found.first[0].because
    assert "step 1 with step 2" in told(capsys, f"{base.root}@1", f"{base.root}@2")[1]
    assert not found_in(f"{base.root}@2", f"{base.root}@2").differ
    with pytest.raises(StorageError, match="has no step 9"):
        found_in(f"{base.root}@1", f"{base.root}@9")


def test_only_the_steps_that_are_asked_for_are_compared_and_others_are_named(base, copied):
    shutil.rmtree(copied.root / "steps/000003")
    found = found_in(base, copied)
    assert found.steps == {"both": [1, 2], "only in A": [3], "only in B": []}
    assert found.differ and found.first_step is None
    assert not found_in(base, copied, steps="..2").differ
    with pytest.raises(StorageError, match="no step in --steps 3"):
        found_in(base, copied, steps="3")


def put(run, step, stage, **changes):
    """Another attempt of an artifact, which the step then says it was finished with."""
    table = run.step(step).table(stage)
    columns = {name: changes.get(name, table[name]) for name in table.column_names}
    manifest = run.step(step).manifest(stage)
    with RunWriter(run.root) as writer:
        made = writer.commit(
            step,
            stage,
            build_table(stage, columns),
            key="put",
            policy_version=step - 1,
            started_at=datetime.now(UTC),
            made_from=manifest.made_from,
            notes=manifest.notes,
        )
        writer.step(step).folder.joinpath("step.json").write_text(
            json.dumps(
                {**run.step(step).record, "artifacts": {**run.step(step).record["artifacts"], stage: made.digest}}
            )
        )
    return open_run(run.root)


def test_the_first_token_of_a_response_that_differs_is_found_with_its_text(base, copied, capsys):
    ids = [list(row) for row in base.step(2).table("rollouts")["response_ids"].to_pylist()]
    row = next(i for i, each in enumerate(ids) if len(each) > 2)
    was = ids[row][2]
    ids[row][2] = was + 1 if was < 20 else was - 1
    other = put(copied, 2, "rollouts", response_ids=ids)
    found = found_in(base, other)
    assert roots_of(found) == (2, ["rollouts"])
    first, sample = found.first[0].first, base.step(2).table("rollouts")["sample_id"][row].as_py()
    assert (first.row, first.column, first.token) == (sample, "response_ids", 2)
    assert (first.stored, first.made) == (was, ids[row][2])
    [parting] = found.partings
    assert (parting.step, parting.sample_index, parting.token) == (2, row % 4, 2)
    assert (parting.a, parting.b) == (was, ids[row][2])
    assert found.by_step[0]["responses"] == {"equal": 31, "part": 1}
    assert f"token 2: A {was} '" in told(capsys, base, other)[1]


def test_rewards_are_matched_by_prompt_and_sample_whatever_the_order_of_rows(base, copied):
    table = base.step(1).table("rewards")
    scores = table["score"].to_pylist()
    flipped = [1.0 - score if i in (0, 5) else None if i == 9 else score for i, score in enumerate(scores)]
    order = np.random.default_rng(1).permutation(32)
    shuffled = table.take(pa.array(order))
    other = put(
        copied,
        1,
        "rewards",
        **{name: shuffled[name] for name in table.column_names if name != "score"},
        score=[flipped[i] for i in order],
    )
    found = found_in(base, other)
    assert roots_of(found) == (1, ["rewards"])
    ups = sum(flipped[i] > scores[i] for i in (0, 5))
    expected = {"up": ups, "down": 2 - ups, "missing": 1, "same": 29}
    assert found.by_step[0]["samples"] == {name: count for name, count in expected.items() if count}
    assert {flip.group_a for flip in found.flips} >= {"000001-0000", "000001-0001"}


def test_a_damaged_artifact_is_refused(base, copied):
    other = put(copied, 1, "rewards", seconds=[9.0] * 32)
    assert not found_in(base, other).differ
    flip_byte(other.step(1).used("rewards") / "part-00000.arrow")
    with pytest.raises(StorageError, match="has changed since it was committed"):
        found_in(base, open_run(other.root))


def test_rows_that_were_dropped_are_said_to_be_unknown(base, copied):
    other = put(copied, 1, "rewards", seconds=[9.0] * 32)
    with RunWriter(other.root) as writer:
        drop(writer, what_to_drop(writer, Retention("last", 1), needed=3))
    found = found_in(base, open_run(other.root))
    assert found.unknown == [{"step": 1, "stage": "rewards"}]
    assert found.differ and found.first_step is None


def test_json_has_all_that_is_printed_and_is_json(base, copied, capsys):
    table = base.step(1).table("rewards")
    other = put(copied, 1, "rewards", score=[1.0 - score for score in table["score"].to_pylist()])
    assert diff_command((str(base.root), str(other.root)), None, True, True, 3) == 6
    values = json.loads(capsys.readouterr().out)
    assert values["differ"] is True and values["first_step"] == 1
    assert values["first"][0]["stage"] == "rewards" and values["first"][0]["first"]["column"] == "score"
    assert len(values["flips"]) <= 3 and values["by_step"][0]["step"] == 1


@pytest.mark.parametrize(
    ("mine", "yours", "place"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2], [1, 2, 3], 2), ([1, 2], [2, 2], 0), ([], [], None), ([], [4], 0)],
)
def test_the_first_difference_of_two_responses(mine, yours, place):
    assert first_difference(np.array(mine), np.array(yours)) == place
