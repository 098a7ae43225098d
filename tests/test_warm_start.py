"""The recipes: their files, and the models and data that they make for themselves."""

from __future__ import annotations

import io
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console
from transformers import AutoModelForCausalLM, AutoTokenizer

from flows.config import load_config
from flows.plan_view import plan_of
from flows.prefect_server import prefect_api
from flows.recipes import FOLDER, RECIPES, list_recipes, prepare, recipe_file
from flows.warm_start import ensure_warm_start
from storage import StorageError
from storage.prepared import commit_prepared, find_prepared, new_folder
from tasks.config import OrchestrationConfig
from tasks.rewards.gsm8k import compute_score
from tasks.warm_start.parameters import Schedule, Shape, WarmStartParameters
from tasks.warm_start.small_additions import write_small_additions
from tasks.warm_start.stages import make_data
from tasks.warm_start.supervised import lr_factor, pass_at_k
from tasks.warm_start.word_problems import (
    END,
    OPERANDS,
    build_tokenizer,
    demonstrate,
    draw_pairs,
    ids_of,
    needs_carry,
    response,
    save_tokenizer,
    split_pairs,
    sum_without_carry,
    tell,
)

SMALL = WarmStartParameters(
    shape=Shape(hidden=32, layers=1, heads=2, kv_heads=1, mlp=64),
    schedule=Schedule(steps=4, batch=8, warmup_steps=2),
    train_prompts=40,
    held_out_pairs=16,
    samples=2,
)


def operands(path: Path) -> set[tuple[int, int]]:
    rows = pq.read_table(path)["extra_info"].to_pylist()
    return {(row["a"], row["b"]) for row in rows}


# ---------------------------------------------------------------------------------------------------------- the task


def test_the_school_mistake_loses_the_carry_and_is_right_without_one() -> None:
    assert sum_without_carry(27, 15) == 32
    assert sum_without_carry(49, 49) == 88
    assert sum_without_carry(21, 34) == 55


def test_a_right_demonstration_scores_one_and_a_forgotten_carry_zero() -> None:
    assert response(27, 15, 42) == "27+15=42\n#### 42"
    assert compute_score(response(27, 15, 42), "42")["score"] == 1.0
    assert compute_score(response(27, 15, 32), "42")["score"] == 0.0


def test_held_out_pairs_occur_in_no_training_pair_in_either_order() -> None:
    pairs = split_pairs(seed=3, held_out=256, carry_share=0.8)
    held_out = {tuple(pair) for pair in pairs.held_out.tolist()}
    train = {tuple(pair) for pair in pairs.train.tolist()}
    assert len(held_out) == 256
    assert len(held_out) + len(train) == len(OPERANDS) ** 2
    assert not train & {(b, a) for a, b in held_out}
    assert needs_carry(pairs.held_out).sum() == 204


def test_more_held_out_pairs_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="780 pairs a < b"):
        split_pairs(seed=0, held_out=1600, carry_share=0.8)


def test_four_of_five_drawn_problems_need_a_carry_and_three_of_five_of_those_forget_it() -> None:
    random = np.random.default_rng(0)
    pairs = draw_pairs(random, split_pairs(0, 256, 0.8).train, 4000, 0.8)
    problems = tell(random, pairs)
    texts = demonstrate(random, problems, 0.6)
    scores = np.array([compute_score(text, p.answer)["score"] for text, p in zip(texts, problems, strict=True)])
    carry = needs_carry(pairs)
    assert carry.mean() == pytest.approx(0.8, abs=0.03)
    assert scores[carry].mean() == pytest.approx(0.4, abs=0.03)
    assert scores[~carry].all()


def test_the_tokenizer_gives_back_every_problem_and_answer_from_disk(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    tokenizer = build_tokenizer()
    LlamaConfig(vocab_size=len(tokenizer)).save_pretrained(tmp_path)
    save_tokenizer(tokenizer, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    problems = tell(np.random.default_rng(1), split_pairs(1, 256, 0.8).held_out)
    texts = [f"{problem.prompt}{response(problem.a, problem.b, problem.a + problem.b)}" for problem in problems]
    ids = ids_of(loaded, [text + END for text in texts])
    assert loaded.batch_decode(ids, skip_special_tokens=True) == texts
    assert {len(row) for row in ids} == {31}
    assert {row[-1] for row in ids} == {loaded.eos_token_id}
    assert tokenizer.unk_token_id not in {token for row in ids for token in row}


def test_a_tokenizer_that_would_be_rebuilt_as_another_one_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    Qwen2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"Choose another model type|does not give back"):
        save_tokenizer(build_tokenizer(), tmp_path)


def test_the_learning_rate_rises_to_its_peak_and_falls_to_nothing() -> None:
    schedule = Schedule(steps=12, warmup_steps=2)
    assert [lr_factor(step, schedule) for step in (0, 1, 2, 7)] == pytest.approx([0.5, 1.0, 1.0, 0.5])
    assert lr_factor(11, schedule) < 0.03


def test_pass_at_k_is_the_chance_that_a_draw_holds_a_right_sample() -> None:
    right = np.array([[True, False, False, False], [False, False, False, False]])
    assert pass_at_k(right, 1) == pytest.approx(1 / 8)
    assert pass_at_k(right, 2) == pytest.approx((1 - 3 / 6) / 2)
    assert pass_at_k(right, 4) == pytest.approx(1 / 2)


# --------------------------------------------------------------------------------------------------- the warm start


def test_the_same_seed_makes_the_same_data_and_another_seed_another(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        (tmp_path / name).mkdir()
        make_data(tmp_path / name, SMALL, seed)
    for file in ("train.parquet", "val.parquet", "demonstrations.parquet"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
        assert (tmp_path / "a" / file).read_bytes() != (tmp_path / "c" / file).read_bytes()


def test_a_warm_start_is_made_once_and_then_used_again(tmp_path: Path) -> None:
    said: list[str] = []
    made = ensure_warm_start(tmp_path, SMALL, 0, say=said.append)
    again = ensure_warm_start(tmp_path, SMALL, 0, say=said.append)
    assert again == made
    assert len(said) == 1
    assert set(made.metrics) == {"loss", "steps", "tokens", "seconds", "greedy", "pass@1", "pass@2"}
    model = AutoModelForCausalLM.from_pretrained(made.model_path)
    assert model.config.model_type == "llama"
    assert model.get_input_embeddings().weight.shape[0] == len(AutoTokenizer.from_pretrained(made.model_path))
    assert len(operands(made.val_file)) == 16
    assert not operands(made.train_file) & operands(made.val_file)
    assert [path.name for path in (tmp_path / "warm_start").iterdir() if path.name.startswith(".")] == []


def test_its_files_have_the_columns_of_verl(tmp_path: Path) -> None:
    make_data(tmp_path, SMALL, 0)
    table = pq.read_table(tmp_path / "train.parquet")
    row = table.slice(0, 1).to_pylist()[0]
    assert table.column_names == ["data_source", "prompt", "ability", "reward_model", "extra_info"]
    assert row["data_source"] == "grpoflow/word_problems"
    assert row["reward_model"] == {
        "style": "rule",
        "ground_truth": str(row["extra_info"]["a"] + row["extra_info"]["b"]),
    }


def test_a_file_changed_after_the_commit_is_noticed_and_made_again(tmp_path: Path) -> None:
    made = ensure_warm_start(tmp_path, SMALL, 0)
    weights = made.model_path / "model.safetensors"
    committed = weights.read_bytes()
    weights.write_bytes(committed[:-1] + bytes([committed[-1] ^ 1]))
    said: list[str] = []
    again = ensure_warm_start(tmp_path, SMALL, 0, say=said.append)
    assert "model/model.safetensors" in said[0]
    assert again.model_path == made.model_path
    assert weights.read_bytes() == committed


def test_other_parameters_or_another_seed_make_another_warm_start(tmp_path: Path) -> None:
    other = replace(SMALL, mistake_share=0.0)
    made = {ensure_warm_start(tmp_path, *what).model_path for what in ((SMALL, 0), (SMALL, 1), (other, 0))}
    assert len(made) == 3


def test_a_folder_left_by_a_killed_maker_is_made_anew(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    (tmp_path / ".made.aside").mkdir()
    (tmp_path / ".made.aside" / "half").write_text("half")
    with new_folder(folder, "a test") as aside:
        (aside / "whole").write_text("whole")
        commit_prepared(aside, folder, "key", {"note": 1})
    manifest = find_prepared(folder, "key", pytest.fail)
    assert manifest is not None
    assert list(manifest["files"]) == ["whole"]
    assert manifest["note"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_folder_made_from_something_else_or_with_a_torn_manifest_is_not_used(tmp_path: Path) -> None:
    folder, said = tmp_path / "made", list[str]()
    with new_folder(folder, "a test") as aside:
        (aside / "file").write_text("text")
        commit_prepared(aside, folder, "key", {})
    assert find_prepared(folder, "another key", said.append) is None
    (folder / "manifest.json").write_text('{"key": ')
    assert find_prepared(folder, "key", said.append) is None
    assert len(said) == 2


def test_nothing_is_committed_where_nothing_was_made(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="is empty"), new_folder(tmp_path / "made", "a test") as aside:
        commit_prepared(aside, tmp_path / "made", "key", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_warm_start_is_a_flow_run_of_three_tasks_in_prefect(tmp_path: Path) -> None:
    with prefect_api(OrchestrationConfig(), tmp_path) as api:
        made = ensure_warm_start(tmp_path, SMALL, 0, api=api)
        from prefect.client.orchestration import SyncPrefectClient

        with SyncPrefectClient(api.url) as client:  # not get_client: an earlier test's server may be in its settings
            deadline = time.monotonic() + 30
            while len(tasks := client.read_task_runs()) < 3 and time.monotonic() < deadline:
                time.sleep(0.2)
            (flow_run,) = client.read_flow_runs()
    assert flow_run.name == f"warm-start-{made.model_path.parent.name}"
    assert flow_run.state_name == "Completed"
    assert sorted(task.name.split("-")[0] for task in tasks) == ["commit_prepared", "make_data", "train_and_measure"]


@pytest.mark.slow
def test_the_quickstart_starts_from_a_model_that_often_knows_better_than_its_likeliest_answer(tmp_path: Path) -> None:
    metrics = ensure_warm_start(tmp_path, WarmStartParameters(), 0).metrics
    assert 0.15 < metrics["greedy"] < 0.35
    assert metrics["pass@1"] > 0.35
    assert metrics["pass@8"] > 0.9


# -------------------------------------------------------------------------------------------------------- the recipes


def test_small_additions_hold_out_pairs_with_their_mirror_images(tmp_path: Path) -> None:
    write_small_additions(tmp_path, seed=0, held_out=64)
    train, val = operands(tmp_path / "train.parquet"), operands(tmp_path / "val.parquet")
    assert (len(train), len(val)) == (18 * 18 - 64, 64)
    assert not train & {(b, a) for a, b in val}
    assert pq.read_table(tmp_path / "val.parquet")["prompt"][0].as_py()[0]["role"] == "user"


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_valid_configuration_with_a_plan_without_problems(name: str) -> None:
    cfg = load_config([recipe_file(name)])
    plan = plan_of(cfg, train_prompts=2048, val_prompts=256)
    assert plan.problems == ()
    assert (cfg.trainer.n_gpus_per_node, cfg.actor_rollout_ref.rollout.tensor_model_parallel_size) == (1, 1)


def test_every_file_in_the_folder_is_a_recipe_with_a_line_about_it() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == sorted(RECIPES)
    assert all(len(about) > 20 for _, about in list_recipes())


def test_a_misspelt_recipe_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="Do you mean quickstart"):
        recipe_file("quickstrat")


def test_a_configuration_that_names_model_and_data_is_left_as_it_is() -> None:
    overrides = ["actor_rollout_ref.model.path=m", "data.train_files=t.parquet", "data.val_files=v.parquet"]
    cfg = load_config([recipe_file("quickstart")], overrides)
    assert prepare([recipe_file("quickstart")], cfg, print) is cfg


@pytest.mark.slow
def test_the_quickstart_learns_to_carry(tmp_path: Path) -> None:
    """Twelve of its steps raise greedy accuracy on held-out problems by 25 points at least."""
    from flows.train import run_training

    options = [f"storage.root={tmp_path}", "trainer.total_training_steps=12", "trainer.test_freq=12"]
    quiet = ["orchestration.enabled=false", "tracking.enabled=false"]
    cfg = prepare([recipe_file("quickstart")], load_config([recipe_file("quickstart")], [*options, *quiet]), print)
    validations = run_training(cfg, Console(file=io.StringIO())).validations
    before, after = (validations[step]["val-core/grpoflow/word_problems/reward/mean@1"] for step in (0, 12))
    assert after >= before + 0.25
