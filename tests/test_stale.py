"""Why a stored artifact is used again or not: said in words, and true of what then happens."""

import io
import json
import shutil

import pytest
from rich.console import Console
from tiny_runs import digest, run, tokens

from flows.show import status
from flows.stale import differences, stale_reasons
from storage import RunWriter, open_run
from storage.durable import sha256_json
from tasks.config import RunConfig
from tasks.rewards.functions import configured_functions, functions_digest
from tasks.rewards.sources import source_files
from tasks.stage import Step

TRAINING_STAGES = ("prompts", "rollouts", "old_log_probs", "ref_log_probs", "rewards", "advantages", "updates")

HELPED = (
    "from helper import parity\n"
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    "    return parity(solution_str or 'a')\n"
)
FACTORY = (
    "def make(rest):\n"
    "    def compute_score(data_source, solution_str, ground_truth, extra_info, wanted=0):\n"
    "        return float(ord((solution_str or 'a')[0]) % 2 == rest)\n"
    "    return compute_score\n"
    "odd, even = make(1), make(0)\n"
)


def stop_before(monkeypatch, stage, cfg):
    """Run until a stage, which raises, and return the run."""

    def refuse(*_):
        raise RuntimeError(f"no {stage} today")

    with monkeypatch.context() as patch:
        patch.setattr(f"flows.step.{stage}", refuse)
        with pytest.raises(RuntimeError, match="today"):
            run(cfg)
    return open_run(cfg.trainer.default_local_dir)


def attempts(the_run, step=1):
    return {stage: len(the_run.step(step).attempts(stage)) for stage in the_run.step(step).stages()}


def made(**changes):
    about = {
        "stage": "advantages",
        "step": 3,
        "policy_version": 2,
        "config": {
            "actor_rollout_ref.rollout.temperature": 1.0,
            "algorithm.kl_ctrl": {"type": "fixed", "kl_coef": 0.1},
        },
        "parents": {"rollouts": "a" * 64},
        "code": "c" * 64,
        "also": {"functions": "f" * 64},
        "modules": {"tasks.advantage": "1" * 64, "tasks.algorithms": "2" * 64},
    }
    return {**about, **changes}


# ------------------------------------------------------------------------------------------------------- in words


def test_equal_things_have_no_differences():
    assert differences(made(), made()) == []


def test_a_changed_key_is_named_with_both_values_even_inside_a_section():
    now = {"actor_rollout_ref.rollout.temperature": 0.7, "algorithm.kl_ctrl": {"type": "fixed", "kl_coef": 0.2}}
    assert differences(made(), made(config=now)) == [
        "actor_rollout_ref.rollout.temperature was 1.0, is 0.7",
        "algorithm.kl_ctrl.kl_coef was 0.1, is 0.2",
    ]


def test_changed_code_is_named_by_module():
    one = made(code="d" * 64, modules={"tasks.advantage": "1" * 64, "tasks.algorithms": "3" * 64})
    assert differences(made(), one) == ["the code of tasks.algorithms is another one"]
    both = made(code="d" * 64, modules={"tasks.advantage": "4" * 64, "tasks.algorithms": "3" * 64})
    assert differences(made(), both) == ["the code of tasks.advantage, tasks.algorithms is another one"]


def test_inputs_that_were_made_again_came_or_went_are_named():
    assert differences(made(), made(parents={"rollouts": "b" * 64})) == [
        "rollouts was made again (digest aaaaaaaaaaaa then, bbbbbbbbbbbb now)"
    ]
    assert differences(made(), made(parents={})) == ["it was made from rollouts too"]
    more = {"rollouts": "a" * 64, "ref_log_probs": "b" * 64}
    assert differences(made(), made(parents=more)) == ["it was made without ref_log_probs"]


def test_another_source_of_the_reward_functions_is_told_from_other_reward_functions():
    assert differences(made(), made(also={"functions": "e" * 64})) == ["the reward functions' source is another one"]
    then = made(config={"custom_reward_function": {"name": "odd"}})
    now = made(config={"custom_reward_function": {"name": "even"}}, also={"functions": "e" * 64})
    assert differences(then, now) == [
        "custom_reward_function.name was 'odd', is 'even'",
        "the reward functions are other ones",
    ]


def test_an_artifact_that_does_not_say_what_it_was_made_from_is_not_guessed_about():
    assert differences(None, made()) == ["what it was made from was not written down"]


def test_a_key_is_the_digest_of_what_the_manifest_says_the_artifact_was_made_from(tiny_run):
    the_run, _ = run(tiny_run("trainer.total_training_steps=1"))
    for stage in TRAINING_STAGES:
        manifest = the_run.step(1).manifest(stage)
        about = {name: value for name, value in manifest.made_from.items() if name != "modules"}
        assert sha256_json(about) == manifest.key
        assert about["parents"] == manifest.parents
    modules = the_run.step(1).manifest("advantages").made_from["modules"]
    assert modules.keys() == {"tasks.advantage", "tasks.algorithms"}


# --------------------------------------------------------------------- B51: what makes a stage stale, and what does not


def test_an_edited_helper_of_the_reward_file_makes_rewards_again_and_nothing_before_them(
    tiny_run, tmp_path, monkeypatch
):
    cfg = tiny_run("trainer.total_training_steps=1")
    (tmp_path / "reward.py").write_text(HELPED)
    helper = tmp_path / "helper.py"
    helper.write_text("def parity(text):\n    return float(ord(text[0]) % 2)\n")
    the_run = stop_before(monkeypatch, "update", cfg)
    before = the_run.step(1).table("rewards")["score"].to_pylist()
    assert not any(stale_reasons(the_run, cfg, 1).values())

    helper.write_text("def parity(text):\n    return 1.0 - float(ord(text[0]) % 2)\n")
    reasons = stale_reasons(the_run, cfg, 1)
    assert reasons["rewards"] == ["the reward functions' source is another one"]
    assert reasons["advantages"] == ["because rewards is"]
    assert [stage for stage, why in reasons.items() if not why] == [
        "prompts",
        "rollouts",
        "old_log_probs",
        "ref_log_probs",
    ]
    the_run, _ = run(cfg)
    again = {"rewards": 2, "advantages": 2}
    assert attempts(the_run) == {stage: again.get(stage, 1) for stage in TRAINING_STAGES}
    assert the_run.step(1).table("rewards")["score"].to_pylist() == [1.0 - score for score in before]


def test_a_helper_of_a_helper_and_modules_of_a_package_count_and_what_is_not_imported_does_not(tmp_path):
    (tmp_path / "lib" / "deep").mkdir(parents=True)
    texts = {
        "reward.py": "import os\ndef f(solution_str):\n    from lib.deep.rules import rule\n    return rule\n",
        "lib/__init__.py": "",
        "lib/deep/__init__.py": "from . import words\n",
        "lib/deep/rules.py": "from ..numbers import one\nrule = one\n",
        "lib/deep/words.py": "",
        "lib/numbers.py": "import json\none = 1\n",
        "lib/unused.py": "x = 1\n",
        "os.py.txt": "",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    target = f"{tmp_path / 'reward.py'}:f"
    found = source_files(target)
    wanted = {"reward.py", "lib/__init__.py", "lib/deep/__init__.py", "lib/deep/rules.py", "words.py", "numbers.py"}
    assert found.keys() == wanted
    (tmp_path / "lib" / "numbers.py").write_text("import json\none = 2\n")
    changed = source_files(target)
    assert [name for name in found if found[name] != changed[name]] == ["numbers.py"]


def test_helpers_on_the_import_path_count_and_installed_packages_do_not(tmp_path, monkeypatch):
    (tmp_path / "rewards").mkdir()
    (tmp_path / "shared").mkdir()
    (tmp_path / "rewards" / "mine.py").write_text("import numpy, pytest, common\ndef f(solution_str): return 1.0\n")
    (tmp_path / "shared" / "common.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(str(tmp_path / "shared"))
    assert source_files(f"{tmp_path / 'rewards' / 'mine.py'}:f").keys() == {"mine.py", "common.py"}


def test_a_helper_with_a_syntax_error_still_counts(tmp_path):
    (tmp_path / "mine.py").write_text("import broken\ndef f(solution_str): return 1.0\n")
    (tmp_path / "broken.py").write_text("def (:\n")
    assert source_files(f"{tmp_path / 'mine.py'}:f").keys() == {"mine.py", "broken.py"}


def test_two_variants_of_one_factory_and_two_values_of_an_argument_are_different_functions(tmp_path):
    (tmp_path / "reward.py").write_text(FACTORY)

    def made_of(name, **kwargs):
        values = {"path": str(tmp_path / "reward.py"), "name": name, "reward_kwargs": kwargs}
        return functions_digest(configured_functions(RunConfig(custom_reward_function=values)))

    assert len({made_of("odd"), made_of("even"), made_of("odd", wanted=1), made_of("odd", wanted=2)}) == 4
    assert made_of("odd", wanted=1) == made_of("odd", wanted=1)


def test_another_variant_of_a_factory_makes_rewards_again(tiny_run, tmp_path, monkeypatch):
    cfg = tiny_run("custom_reward_function.name=odd", "trainer.total_training_steps=1")
    (tmp_path / "reward.py").write_text(FACTORY)
    the_run = stop_before(monkeypatch, "update", cfg)
    other = tiny_run("custom_reward_function.name=even", "trainer.total_training_steps=1")
    (tmp_path / "reward.py").write_text(FACTORY)
    assert not any(stale_reasons(the_run, cfg, 1).values())
    assert stale_reasons(the_run, other, 1)["rewards"] == [
        "custom_reward_function.name was 'odd', is 'even'",
        "the reward functions are other ones",
    ]


def test_a_key_that_a_stage_reads_makes_it_again_and_one_that_it_does_not_read_does_not(tiny_run, monkeypatch):
    one_step = "trainer.total_training_steps=1"
    the_run = stop_before(monkeypatch, "update", tiny_run(one_step))
    unread = tiny_run(one_step, "actor_rollout_ref.rollout.val_kwargs.n=2", "reward.num_workers=2")
    assert not any(stale_reasons(the_run, unread, 1).values())
    read = tiny_run(one_step, "reward.timeout_s=5")
    reasons = stale_reasons(the_run, read, 1)
    assert reasons["rewards"] == ["reward.timeout_s was 10.0, is 5.0"]
    assert reasons["advantages"] == ["because rewards is"]
    assert reasons["old_log_probs"] == []

    the_run, _ = run(read)
    again = {"rewards": 2, "advantages": 2}
    assert attempts(the_run) == {stage: again.get(stage, 1) for stage in TRAINING_STAGES}


def test_another_temperature_would_make_all_from_the_rollouts_on_again(tiny_run, monkeypatch):
    the_run = stop_before(monkeypatch, "update", tiny_run())
    reasons = stale_reasons(the_run, tiny_run("actor_rollout_ref.rollout.temperature=0.7"), 1)
    changed = "actor_rollout_ref.rollout.temperature was 1.0, is 0.7"
    assert reasons["prompts"] == []
    assert reasons["rollouts"] == [changed]
    assert reasons["ref_log_probs"] == [changed, "because rollouts is"]
    assert reasons["rewards"] == ["because rollouts is"]
    assert reasons["advantages"][0] == "because rollouts is"


def test_changed_source_of_a_stage_is_said(tiny_run, monkeypatch):
    cfg = tiny_run()
    the_run = stop_before(monkeypatch, "update", cfg)
    from tasks import stage

    known = stage.code_digest
    monkeypatch.setattr(stage, "code_digest", lambda names: "0" * 64 if "tasks.algorithms" in names else known(names))
    assert stale_reasons(the_run, cfg, 1)["advantages"] == ["the code of tasks.algorithms is another one"]


# ---------------------------------------------------------------------------- B53: files that are gone, cut or swapped


@pytest.mark.parametrize("damage", ["deleted", "cut", "of another step"])
def test_a_damaged_artifact_is_made_again_and_said_and_never_read(tiny_run, monkeypatch, damage):
    cfg = tiny_run("trainer.total_training_steps=2")
    fine, _ = run(tiny_run(f"trainer.default_local_dir={cfg.trainer.default_local_dir}-fine"))
    finished_one = tiny_run("trainer.total_training_steps=2")
    the_run = None

    def refuse(step, *_):
        if step.index == 2:
            raise RuntimeError("no update today")
        return update(step, *_)

    from flows.step import update

    with monkeypatch.context() as patch:
        patch.setattr("flows.step.update", refuse)
        with pytest.raises(RuntimeError, match="today"):
            run(finished_one)
    the_run = open_run(cfg.trainer.default_local_dir)
    part = the_run.step(2).attempts("rollouts")[0] / "part-00000.arrow"
    if damage == "deleted":
        part.unlink()
    elif damage == "cut":
        part.write_bytes(part.read_bytes()[:-100])
    else:
        shutil.copyfile(the_run.step(1).attempts("rollouts")[0] / part.name, part)

    reasons = stale_reasons(the_run, cfg, 2)
    assert len(reasons["rollouts"]) == 1 and str(part) in reasons["rollouts"][0]
    assert reasons["prompts"] == [] and reasons["rewards"] == ["because rollouts is"]
    output = io.StringIO()
    status(the_run.root, False, Console(file=output, width=400))
    assert f"rollouts is made again: {part}" in output.getvalue()
    assert "used again: prompts" in output.getvalue()

    the_run, _ = run(cfg)
    assert len(the_run.step(2).attempts("rollouts")) == 2
    assert tokens(the_run, 2) == tokens(fine, 2)
    assert digest(the_run, 2) == digest(fine, 2)
    # The same tokens came out, so that what was made from them stands.
    assert [len(the_run.step(2).attempts(stage)) for stage in ("old_log_probs", "rewards", "advantages")] == [1, 1, 1]
    events = [event for event in the_run.events() if event["event"] == "damaged"]
    assert {(event["step"], event["stage"]) for event in events} == {(2, "rollouts")}


# --------------------------------------------------------------------------------- B54: what a retried step does not do


def test_a_step_that_failed_in_its_update_does_not_generate_or_score_again(tiny_run, monkeypatch):
    cfg = tiny_run("trainer.total_training_steps=3", "trainer.total_epochs=9")
    calls = []
    for stage, worker in (
        ("rollouts", "tasks.generate.sample_responses"),
        ("rewards", "tasks.rewards.pool.RewardPool.score"),
        ("log_probs", "tasks.workers.policy.PolicyWorker.log_probs"),
    ):
        module, _, name = worker.rpartition(".")
        owner = __import__(module, fromlist=["x"]) if name == "sample_responses" else _class(module)
        known = getattr(owner, name)
        monkeypatch.setattr(owner, name, _counted(known, stage, calls))
    from tasks.workers.policy import PolicyWorker

    known = PolicyWorker.update

    def fail_at_3(self, *args, **kwargs):
        if kwargs["step"] == 3:
            raise RuntimeError("the update of step 3 fails")
        return known(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PolicyWorker, "update", fail_at_3)
        with pytest.raises(RuntimeError, match="step 3 fails"):
            run(cfg)
    the_run = open_run(cfg.trainer.default_local_dir)
    kept = {stage: the_run.step(3).artifact(stage).digest for stage in the_run.step(3).stages()}
    assert not any(stale_reasons(the_run, cfg, 3).values())
    the_run, _ = run(cfg)
    assert (calls.count("rollouts"), calls.count("rewards"), calls.count("log_probs")) == (3, 3, 6)
    assert attempts(the_run, 3) == dict.fromkeys(TRAINING_STAGES, 1)
    assert {stage: the_run.step(3).artifact(stage).digest for stage in kept} == kept


def _class(path):
    module, _, name = path.rpartition(".")
    return getattr(__import__(module, fromlist=["x"]), name)


def _counted(function, stage, calls):
    def counted(*args, **kwargs):
        calls.append(stage)
        return function(*args, **kwargs)

    return counted


# ------------------------------------------------------------------------------------------------ other shapes of steps


def test_a_step_with_several_generate_calls_is_judged_call_by_call(tiny_run, monkeypatch):
    options = ["algorithm.filter_groups.enable=True", "data.gen_batch_size=8", "data.train_batch_size=4"]
    cfg = tiny_run(*options, "algorithm.filter_groups.metric=score", "algorithm.filter_groups.max_num_gen_batches=4")
    the_run = stop_before(monkeypatch, "update", cfg)
    reasons = stale_reasons(the_run, cfg, 1)
    assert {"prompts-01", "rollouts-01", "rewards-01", "rollouts", "advantages"} <= reasons.keys()
    assert not any(reasons.values())
    (the_run.step(1).attempts("rollouts-01")[0] / "part-00000.arrow").unlink()
    reasons = stale_reasons(the_run, cfg, 1)
    assert "is missing" in reasons["rollouts-01"][0]
    assert reasons["advantages"] == reasons["rollouts"] == ["because rollouts-01 is"]


def test_an_interrupted_validation_is_judged_too(tiny_run, monkeypatch):
    cfg = tiny_run("trainer.test_freq=1", "trainer.total_training_steps=1")
    the_run = stop_before(monkeypatch, "reward_validation", cfg)
    reasons = stale_reasons(the_run, cfg, 1)
    assert {"val_prompts", "val_rollouts", "updates"} <= reasons.keys()
    assert not any(reasons.values())
    greedy = tiny_run("trainer.test_freq=1", "actor_rollout_ref.rollout.val_kwargs.n=3")
    assert stale_reasons(the_run, greedy, 1)["val_rollouts"] == ["actor_rollout_ref.rollout.val_kwargs.n was 1, is 3"]


def test_reasons_are_found_without_writing_and_beside_a_live_writer(tiny_run, monkeypatch):
    cfg = tiny_run()
    the_run = stop_before(monkeypatch, "advantage", cfg)
    with RunWriter(the_run.root):
        before = sorted(path.stat().st_mtime_ns for path in the_run.root.rglob("*"))
        assert stale_reasons(the_run, cfg, 1).keys() == {
            "prompts",
            "rollouts",
            "old_log_probs",
            "ref_log_probs",
            "rewards",
        }
        assert sorted(path.stat().st_mtime_ns for path in the_run.root.rglob("*")) == before


def test_reward_functions_that_cannot_be_found_are_said(tiny_run, tmp_path, monkeypatch):
    cfg = tiny_run()
    the_run = stop_before(monkeypatch, "update", cfg)
    (tmp_path / "reward.py").rename(tmp_path / "elsewhere.py")
    assert "there is no file" in stale_reasons(the_run, cfg, 1)["rewards"][0]


def test_status_as_json_says_what_is_stale(tiny_run, tmp_path, monkeypatch):
    cfg = tiny_run()
    the_run = stop_before(monkeypatch, "update", cfg)
    (tmp_path / "reward.py").write_text((tmp_path / "reward.py").read_text() + "# edited\n")
    output = io.StringIO()
    status(the_run.root, True, Console(file=output, width=400))
    found = json.loads(output.getvalue())["open_step"]
    assert found["step"] == 1 and "rewards" in found["committed"]
    assert found["stale"] == {
        "rewards": ["the reward functions' source is another one"],
        "advantages": ["because rewards is"],
    }


def test_opening_a_step_by_hand_gives_the_key_that_the_run_used(tiny_run):
    cfg = tiny_run("trainer.total_training_steps=1")
    the_run, _ = run(cfg)
    with RunWriter(the_run.root) as writer:
        rollouts = the_run.step(1).manifest("rollouts")
        from tasks.generate import CODE, READS

        prompts = the_run.step(1).artifact("prompts")
        assert Step(1, writer, cfg).open("rollouts", reads=READS, code=CODE, parents=[prompts]).key == rollouts.key


def test_a_policy_that_was_made_again_is_validated_again(tiny_run, tmp_path, monkeypatch):
    cfg = tiny_run("trainer.test_freq=1", "trainer.total_training_steps=1")
    the_run = stop_before(monkeypatch, "reward_validation", cfg)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0 - float(ord((solution_str or 'a')[0]) % 2)\n"
    )
    the_run, _ = run(cfg)
    assert the_run.step(1).manifest("val_rollouts").notes["policy_digest"] == digest(the_run, 1)
