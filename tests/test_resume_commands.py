"""`grpoflow resume`, `fork` and `export`: a run taken up by its folder alone."""

import io
import json

import pytest
import torch
from rich.console import Console
from tiny_runs import digest, run

from flows.gc import gc_command
from flows.resume import export_command, fork_command, parse_source, resume_command
from flows.run_folder import config_of
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


def test_a_run_that_was_begun_beside_another_is_gone_on_with_itself(tiny_run):
    the_run, _ = run(tiny_run(*STEPS, "trainer.resume_mode=disable", "trainer.total_training_steps=1"))
    there = sorted(the_run.root.parent.iterdir())
    assert resume_command(the_run.root, ["trainer.total_training_steps=2"], None, None) == 0
    assert open_run(the_run.root).finished_steps() == [1, 2]
    assert sorted(the_run.root.parent.iterdir()) == there
    for override in ("trainer.resume_mode=disable", "trainer.default_local_dir=other"):
        with pytest.raises(ValueError, match=r"takes neither trainer\.resume_mode nor trainer\.default_local_dir"):
            resume_command(the_run.root, [override], None, None)


def test_an_edited_configuration_is_refused_and_the_command_line_named(tiny_run):
    the_run, _ = run(tiny_run(*STEPS, "trainer.total_training_steps=1"))
    path = the_run.root / "config.yaml"
    path.write_text(path.read_text().replace("lr: 0.001", "lr: 0.1"))
    with pytest.raises(StorageError, match=r"edited: .* belongs on the command line: grpoflow resume .* key=value"):
        resume_command(the_run.root, ["trainer.total_training_steps=2"], None, None)
    with pytest.raises(StorageError, match="edited"):
        gc_command(the_run.root, [], dry_run=True, lineages=False, as_json=False, console=Console(quiet=True))


def test_an_allowed_change_stays_in_force_and_nothing_is_rewritten(tiny_run, capsys):
    the_run, _ = run(tiny_run(*STEPS, "trainer.total_training_steps=1"))
    begun = (the_run.root / "config.yaml").read_bytes()
    assert resume_command(the_run.root, ["trainer.total_training_steps=2", "trainer.save_freq=1"], None, None) == 0
    assert (the_run.root / "config.yaml").read_bytes() == begun
    in_force = config_of(open_run(the_run.root), 1).trainer
    assert (in_force.total_training_steps, in_force.save_freq) == (2, 1)
    capsys.readouterr()
    assert resume_command(the_run.root, [], None, None) == 0
    assert "all 2 steps are finished" in capsys.readouterr().out
    changes = [event["changes"] for event in the_run.events() if event["event"] == "config_changed"]
    assert changes == [{"trainer.total_training_steps": [1, 2], "trainer.save_freq": [2, 1]}]


def test_a_change_belongs_to_the_lineage_in_which_it_was_made(tiny_run):
    the_run, _ = run(tiny_run(*STEPS))
    assert resume_command(the_run.root, ["storage.retention.keep=last"], 3, None) == 0
    assert resume_command(the_run.root, ["trainer.test_freq=2"], None, None) == 0
    again = open_run(the_run.root)
    assert [config_of(again, number).trainer.test_freq for number in (1, 2)] == [-1, 2]
    assert [config_of(again, number).storage.retention.keep for number in (1, 2)] == ["all", "last"]
    output = io.StringIO()
    gc_command(the_run.root, [], dry_run=True, lineages=False, as_json=False, console=Console(file=output))
    assert "keeps the last 10 steps" in output.getvalue()


def test_another_model_is_never_taken_for_the_one_a_run_began_with(tiny_run, tmp_path):
    from safetensors.torch import load_file, save_file

    the_run, _ = run(tiny_run(*STEPS, *NAMED, "trainer.total_training_steps=1"))
    assert export_command(f"{the_run.root}@0", tmp_path / "first", adapter=False) == 0
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: weight + 1 for name, weight in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(StorageError, match=r"model\.path=.* holds other weights .* Put them back"):
        export_command(f"{the_run.root}@0", tmp_path / "other", adapter=False)
    with pytest.raises(StorageError, match="holds other weights"):
        fork_command(f"{the_run.root}@0", "second", [])
    assert export_command(f"{the_run.root}@1", tmp_path / "trained", adapter=False) == 0


def test_a_run_of_relative_paths_is_gone_on_with_from_any_directory(tiny_run, tmp_path, monkeypatch):
    relative = (
        *NAMED,
        "data.train_files=train.jsonl",
        "actor_rollout_ref.model.path=model",
        "custom_reward_function.path=null",
        "reward.functions=[{name: 'reward.py:compute_score'}]",
        "storage.root=runs",
    )
    monkeypatch.chdir(tmp_path)
    cfg = tiny_run(*STEPS, *relative, "trainer.total_training_steps=1")
    the_run, _ = run(cfg)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert resume_command(the_run.root, ["trainer.total_training_steps=2"], None, None) == 0
    assert export_command(f"{the_run.root}@1", tmp_path / "out", adapter=False) == 0
    assert fork_command(f"{the_run.root}@1", "second", ["trainer.total_training_steps=1"]) == 0
    assert open_run(the_run.root.with_name("second")).finished_steps() == [1]
    monkeypatch.chdir(tmp_path)
    again, _ = run(tiny_run(*STEPS, *relative))
    assert again.root == the_run.root and again.finished_steps() == [1, 2, 3]
    (tmp_path / "model").rename(tmp_path / "gone")
    for command in (
        lambda: resume_command(the_run.root, [], None, None),
        lambda: export_command(f"{the_run.root}@1", tmp_path / "out2", adapter=False),
    ):
        with pytest.raises(ValueError, match=f"{tmp_path / 'model'} is no folder"):
            command()
    with pytest.raises(StorageError, match=rf"model\.path: the run has '{tmp_path / 'model'}', asked for is 'model'"):
        run(cfg)


@pytest.mark.parametrize("name", ["a@3", "{z}", "${x}"])
def test_a_folder_of_any_name_is_taken_up(tiny_run, tmp_path, monkeypatch, name):
    the_run, _ = run(tiny_run(*STEPS, "trainer.total_training_steps=1"))
    the_run.root.rename(tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert resume_command(tmp_path / name, ["trainer.total_training_steps=2"], None, None) == 0
    assert resume_command(tmp_path / name, [], None, None) == 0
    assert parse_source(name)[1] == parse_source(f"{name}@2")[1] == 2


def test_what_cannot_be_trained_or_written_is_refused_before_a_policy_is_rebuilt(tiny_run, tmp_path):
    the_run, _ = run(tiny_run(*STEPS, *NAMED, "trainer.total_training_steps=1"))
    with pytest.raises(ValueError, match="ppo_mini_batch_size"):
        fork_command(str(the_run.root), "bad", ["actor_rollout_ref.actor.ppo_mini_batch_size=16"])
    with pytest.raises(ValueError, match="a fork begins with the other run's policy"):
        fork_command(str(the_run.root), "bad", [f"actor_rollout_ref.model.path={tmp_path / 'model'}"])
    assert not (tmp_path / "runs" / "origins").exists()
    with pytest.raises(StorageError, match=r"is a file\. Name a folder"):
        export_command(str(the_run.root), tmp_path / "reward.py", adapter=False)
