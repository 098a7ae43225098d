"""`grpoflow resume`, `fork` and `export`: a run taken up by its folder alone."""

import json

import pytest
import torch
from runs import digest, run

from flows.resume import export_command, fork_command, parse_source, resume_command
from storage import StorageError, open_run
from storage.checkpoints import checkpoints

STEPS = ("trainer.total_training_steps=3", "trainer.total_epochs=9", "trainer.save_freq=2")
NAMED = ("trainer.default_local_dir=null", "trainer.project_name=p", "trainer.experiment_name=first")


def test_resume_goes_on_with_the_run_in_a_folder_also_after_it_was_moved(tiny_run, tmp_path, capsys):
    cfg = tiny_run(*STEPS, "trainer.total_training_steps=2")
    the_run, _ = run(cfg)
    moved = the_run.root.rename(tmp_path / "elsewhere")
    assert resume_command(moved, ["trainer.total_training_steps=3"], None, None) == 0
    assert open_run(moved).finished_steps() == [1, 2, 3]
    assert "found 2 finished steps: checkpoint 2" in capsys.readouterr().out
    assert not the_run.root.exists()


def test_resume_from_a_step_opens_a_lineage(tiny_run, capsys):
    the_run, _ = run(tiny_run(*STEPS))
    last = digest(the_run, 3)
    assert resume_command(the_run.root, ["actor_rollout_ref.actor.optim.lr=0.01"], 2, "advantages") == 0
    again = open_run(the_run.root)
    assert (again.lineage, again.lineages[2].step, again.lineages[2].stage) == (2, 2, "advantages")
    assert digest(again, 3) != last
    assert "step 2 goes on: used again: prompts, rollouts" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--from-stage needs --from-step"):
        resume_command(the_run.root, [], None, "rewards")


def test_a_bound_that_yaml_1_1_takes_for_a_number_survives_a_resume(tiny_run):
    correction = "algorithm.rollout_correction"
    bounds = [f"{correction}.rollout_is=token", f"{correction}.rollout_is_threshold=0.5_2"]
    the_run, _ = run(tiny_run(*STEPS, *bounds, "trainer.total_training_steps=1"))
    assert resume_command(the_run.root, ["trainer.total_training_steps=2"], None, None) == 0


def test_an_exported_policy_is_the_one_of_that_step(tiny_run, tmp_path):
    """Step 1 has no checkpoint: its policy is rebuilt from the stored batch."""
    the_run, _ = run(tiny_run(*STEPS))
    assert [one.step for one in checkpoints(the_run.root)] == [2, 3]
    assert export_command(f"{the_run.root}@1", tmp_path / "out", adapter=False) == 0
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    recorded = the_run.step(1).manifest("updates").notes["tensors"]
    from tasks.workers.weights import tensor_digest

    got = {name: tensor_digest(name, weight).hex()[:16] for name, weight in model.named_parameters()}
    assert got == recorded
    with pytest.raises(StorageError, match="is not empty"):
        export_command(f"{the_run.root}@1", tmp_path / "out", adapter=False)


def test_a_fork_begins_with_the_other_runs_policy_and_says_so(tiny_run):
    first, _ = run(tiny_run(*STEPS, *NAMED))
    assert fork_command(f"{first.root}@2", "second", ["trainer.seed=5", "trainer.total_training_steps=1"]) == 0
    second = open_run(first.root.with_name("second"))
    origin = second.identity["origin"]
    assert (origin["run_id"], origin["step"], origin["lineage"]) == (first.run_id, 2, 1)
    inputs = json.loads((second.root / "inputs.json").read_text())
    assert inputs["digests"]["actor_rollout_ref.model.path"] == origin["weights_digest"] == digest(first, 2)
    assert second.step(1).manifest("rollouts").notes["policy_digest"] == digest(first, 2)
    with pytest.raises(StorageError, match="is a run already"):
        fork_command(f"{first.root}@2", "second", [])
    assert fork_command(str(first.root), "third", ["trainer.total_training_steps=1"]) == 0
    assert open_run(first.root.with_name("third")).identity["origin"]["step"] == 3


def test_policies_that_are_not_there_are_refused(tiny_run):
    the_run, _ = run(tiny_run(*STEPS))
    assert parse_source(f"{the_run.root}@2")[1] == 2
    with pytest.raises(StorageError, match="has no policy 9; its policies are 0 to 3"):
        parse_source(f"{the_run.root}@9")
    with pytest.raises(StorageError, match="is no run"):
        parse_source("nowhere@1")
