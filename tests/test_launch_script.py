"""Reading verl's launch scripts without running them: the shell's features, its traps, and verl's own launches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flows.launch_script import (
    LaunchScript,
    LaunchScriptError,
    config_of,
    launch_of_overrides,
    parse_launch_script,
    read_launch_script,
)
from tasks.geometry import Cut, Mesh, Plan, plan

LAUNCHES = [json.loads(line) for line in (Path(__file__).parent / "data/verl_launches.jsonl").read_text().splitlines()]
VALID = [launch for launch in LAUNCHES if launch["expected"]["valid"]]
INVALID = [launch for launch in LAUNCHES if not launch["expected"]["valid"]]
TRAIN = "data.train_batch_size"
SAMPLES = "actor_rollout_ref.rollout.n"
NODES = "trainer.nnodes"

SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail   # as in most launch scripts

project_name='GRPO math'
NNODES=${NNODES:-2}
export gpus=4
n_resp=$((2 * 4))
max_prompt=$((1024 * 2)); max_response=$(( max_prompt / 2 ))
cap=$(((max_prompt + max_response) * 2))
sp=${SP_SIZE-1}
adv=${ADV:="grpo"}
train_files="['data/gsm8k/train.parquet', 'data/math/train.parquet']"
stamp=$(date +%Y%m%d)
EXTRA="trainer.save_freq=10 trainer.test_freq=5"

MODEL_ARGS=(
    # the policy
    actor_rollout_ref.model.path=Qwen/Qwen3-8B-Base
    "actor_rollout_ref.model.use_remove_padding=True"   # packed
    actor_rollout_ref.actor.optim.lr=1e-6
)
MODEL_ARGS+=(
    actor_rollout_ref.rollout.n=${n_resp}
)

PYTHONUNBUFFERED=1 python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=${adv} \
    data.train_files="$train_files" \
    data.train_batch_size=32 \
    data.max_prompt_length=${max_prompt} data.max_response_length=$max_response \
    "${MODEL_ARGS[@]}" $EXTRA \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${cap} \
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=${sp} \
    +data.apply_chat_template_kwargs.enable_thinking=False \
    ++trainer.seed=7 \
    trainer.project_name="${project_name}" \
    trainer.experiment_name="run-${stamp}" \
    trainer.logger='["console","wandb"]' \
    trainer.nnodes="${NNODES}" trainer.n_gpus_per_node=${gpus} \
    trainer.total_epochs=${1:-3} $@ 2>&1 | tee run.log
"""


def launch(body: str, before: str = "") -> LaunchScript:
    """A script that launches verl with these arguments."""
    return parse_launch_script(f"{before}\npython3 -m verl.trainer.main_ppo {body}\n")


# ----------------------------------------------------------------------------------------------------- what it can read


def test_a_script_with_every_feature_is_read() -> None:
    script = parse_launch_script(SCRIPT)
    assert script.module == "verl.trainer.main_ppo"
    assert script.warnings == () and script.problems == ()
    cfg, script = config_of(script)
    assert cfg.data.train_files == ("data/gsm8k/train.parquet", "data/math/train.parquet")
    assert (cfg.prompt_length, cfg.response_length) == (2048, 1024)
    assert cfg.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 6144
    assert cfg.actor_rollout_ref.model.path == "Qwen/Qwen3-8B-Base"
    assert cfg.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert (cfg.trainer.project_name, cfg.trainer.seed, cfg.trainer.save_freq) == ("GRPO math", 7, 10)
    assert (cfg.trainer.nnodes, cfg.trainer.n_gpus_per_node, cfg.trainer.total_epochs) == (2, 4, 3)
    assert [one.key for one in script.unsupported] == ["trainer.logger"]
    assert [(one.key, one.text) for one in script.unresolved] == [("trainer.experiment_name", "run-$(date +%Y%m%d)")]


def test_a_script_with_every_feature_gives_its_numbers() -> None:
    answer = plan(config_of(parse_launch_script(SCRIPT))[0])
    assert answer.problems == ()
    assert (answer.world_size, answer.sequences_per_step, answer.sequences_per_rank) == (8, 256, 32)
    assert answer.mini_batches == (16, 16)
    assert answer.micro_batches_per_mini_batch == (8, 8)  # two sequences of 3072 tokens in 6144


def test_the_environment_is_used_only_where_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text("python -m verl.trainer.main_ppo data.train_batch_size=8 actor_rollout_ref.model.path=$HOME/m\n")
    assert read_launch_script(path).unresolved[0].text == "$HOME/m"
    assert read_launch_script(path, {"HOME": "/home/me"}).overrides["actor_rollout_ref.model.path"] == "/home/me/m"


@pytest.mark.parametrize(
    ("before", "argument", "text"),
    [
        ("A=8", f"{TRAIN}=$A", "8"),
        ("A=8", f'{TRAIN}="${{A}}"', "8"),
        ("A=8", f"'{TRAIN}=$A'", "$A"),
        ("", f"{TRAIN}=${{A:-16}}", "16"),
        ("A=", f"{TRAIN}=${{A:-16}}", "16"),
        ("A=", f"{TRAIN}=${{A-16}}", ""),
        ("A=4", f"{TRAIN}=${{A:+32}}", "32"),
        ("B=2", f"{TRAIN}=${{A:-$((B * 3))}}", "6"),
        ("A=2; B=$A", f"{TRAIN}=$((A ** 3 + B % 2))", "8"),
        ("A=7", f"{TRAIN}=$((A > 5 ? 64 : 32))", "64"),
        ("A=-7", f"{TRAIN}=$((A / 2))", "-3"),
        ("A=3; A+=2", f"{TRAIN}=$A", "32"),
        ("declare -r A=5", f"{TRAIN}=$A", "5"),
        ("A=(1 2 3)", f"{TRAIN}=${{A[1]}}", "2"),
        ("A=1 && B=2", f"{TRAIN}=$A$B", "12"),
        ("cat > f <<'EOF'\nA=9 \"\nEOF\nA=5", f"{TRAIN}=$A", "5"),
        ("", f"{TRAIN}=1\\\n2", "12"),
    ],
)
def test_shell_values(before: str, argument: str, text: str) -> None:
    assert launch(argument, before).overrides[TRAIN] == text


@pytest.mark.parametrize(
    ("before", "value", "reason"),
    [
        ("", "$A", "$A is not set"),
        ("", "$(nproc)", "$(nproc) would have to be run"),
        ("", "`nproc`", "`nproc` would have to be run"),
        ("A=$(nproc)", "$A", "$(nproc) would have to be run"),
        ("A=$(nproc)", "$((A * 2))", "cannot be calculated"),
        ("", "$1", "argument $1 of the script is not known"),
        ('if [ -n "$X" ]; then\n  A=1\nelse\n  A=2\nfi', "$A", "$A is set under a condition"),
        ("A=1\n[[ $X == y ]] && A=2", "$A", "$A is set under a condition"),
        ("case $X in\n  a|b) A=1 ;;\nesac", "$A", "$A is set under a condition"),
        ("function f() {\n  A=1\n}", "$A", "$A is set under a condition"),
        ("f() {\n  A=1\n}", "$A", "$A is set under a condition"),
        ("read A", "$A", "$A is set by `read`"),
        ("A=1\n((A = A + 1))", "$A", "$A is calculated by a command"),
        ("A=x.y", "${A%.*}", "is not evaluated"),
        ("A=1\nunset A", "$A", "$A is not set"),
    ],
)
def test_what_only_running_would_tell_is_listed_and_never_guessed(before: str, value: str, reason: str) -> None:
    script = launch(f"{SAMPLES}=2 {TRAIN}={value}", before)
    assert TRAIN not in script.overrides
    assert [one.key for one in script.problems] == [TRAIN]
    assert reason in script.unresolved[0].reason


def test_a_variable_used_before_it_is_set_is_not_resolved() -> None:
    script = parse_launch_script(f"B=$((8 / sp))\nsp=4\npython -m verl.trainer.main_ppo {TRAIN}=$B {SAMPLES}=$sp\n")
    assert script.overrides == {SAMPLES: "4"}
    assert script.unresolved[0].key == TRAIN


def test_an_override_settles_what_is_not_resolved() -> None:
    script = launch(f"{TRAIN}=$A {NODES}=1")
    cfg, script = config_of(script, overrides=[f"{TRAIN}=24", f"~{NODES}"])
    assert (cfg.data.train_batch_size, cfg.trainer.nnodes, script.problems) == (24, 1, ())


# ---------------------------------------------------------------------------------------------------------------- traps


def test_settings_after_a_comment_within_the_command_are_lost_and_listed() -> None:
    script = launch(f"\\\n    {TRAIN}=8 \\\n    # {SAMPLES}=4 \\\n    {SAMPLES}=2 \\\n    {NODES}=3\n")
    assert script.overrides == {TRAIN: "8"}
    (warning,) = script.warnings
    assert "2 settings are lost: a comment within the continued command" in warning
    assert f"{SAMPLES}=2 (line 5)" in warning and f"{NODES}=3 (line 6)" in warning


def test_settings_after_a_backslash_and_a_blank_are_lost_and_listed() -> None:
    script = launch(f"\\\n    {TRAIN}=8 \\ \n    {SAMPLES}=2\n")
    assert script.overrides == {TRAIN: "8"}
    assert "1 setting is lost: a blank after a backslash" in script.warnings[0]


def test_a_comment_after_the_last_setting_loses_nothing() -> None:
    assert launch(f"\\\n    {TRAIN}=8 \\\n    # the end\necho done").warnings == ()


def test_a_key_given_twice_takes_the_last_value_with_a_warning() -> None:
    script = launch("data.truncation=left \\\n data.truncation=error")
    assert script.overrides == {"data.truncation": "error"}
    assert "data.truncation is given twice, the last wins: left (line 2), error (line 3)" in script.warnings[0]


def test_an_unset_repeat_does_not_fall_back_to_the_first_value() -> None:
    key = "actor_rollout_ref.actor.use_kl_loss"
    script = launch(f"{key}=True {key}=${{use_kl_loss}}")
    assert script.overrides == {}
    assert [one.key for one in script.problems] == [key]
    assert config_of(script)[0].actor_rollout_ref.actor.use_kl_loss is False


def test_stray_brackets_placeholders_and_empty_numbers_are_refused() -> None:
    name, path = "trainer.experiment_name", "trainer.default_local_dir"
    cfg, script = config_of(launch(f"{name}=run}} {NODES}= '{path}=<your folder>' {TRAIN}=8"))
    assert {one.key for one in script.problems} == {name, path, NODES}
    assert cfg.data.train_batch_size == 8


def test_unknown_unsupported_and_renamed_keys_are_told_apart() -> None:
    body = "actor_rollout_ref.rollout.temprature=1 trainer.critic_warmup=0 actor_rollout_ref.actor.loss_mode=gspo"
    cfg, script = config_of(launch(f"{TRAIN}=8 {body}"))
    assert [one.key for one in script.unknown] == ["actor_rollout_ref.rollout.temprature"]
    assert [one.key for one in script.unsupported] == ["trainer.critic_warmup"]
    assert [one.key for one in script.renamed] == ["actor_rollout_ref.actor.loss_mode"]
    assert cfg.actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"


def test_another_engine_or_backend_is_listed_and_the_rest_explained() -> None:
    body = (
        f"{TRAIN}=8 actor_rollout_ref.rollout.name=sglang actor_rollout_ref.actor.strategy=megatron "
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2"
    )
    cfg, script = config_of(launch(body))
    assert len(script.unsupported) == 3 and script.problems == ()
    assert (cfg.data.train_batch_size, cfg.actor_rollout_ref.rollout.name) == (8, "vllm")


def test_another_base_configuration_is_named() -> None:
    assert launch(f"{TRAIN}=8 --config-name=dapo_trainer").warnings == ()
    assert "gsm8k_multiturn_grpo are not known" in launch(f"--config-name='gsm8k_multiturn_grpo' {TRAIN}=8").warnings[0]


def test_the_launch_with_most_settings_is_read_and_others_are_named() -> None:
    text = f"python prepare.py data.seed=1\npython -m verl.trainer.main_ppo {TRAIN}=8 {SAMPLES}=2\n"
    script = parse_launch_script(text)
    assert script.overrides == {TRAIN: "8", SAMPLES: "2"}
    assert "line 2 is read; the commands at line 1" in script.warnings[0]


@pytest.mark.parametrize("text", ["", "echo hello\n", "FOO=1\n"])
def test_a_script_that_launches_nothing_is_an_error(text: str) -> None:
    with pytest.raises(LaunchScriptError, match="no command with key"):
        parse_launch_script(text)


@pytest.mark.parametrize("text", ["A='open", 'A="open', "A=$(open", "A=(open", "A=${open", "\\", "x=$((1+", "if", "))"])
def test_a_broken_script_is_no_crash(text: str) -> None:
    with pytest.raises(LaunchScriptError):
        parse_launch_script(text)


# -------------------------------------------------------------------------------------------------- verl's own launches


def planned(launch: dict[str, Any]) -> tuple[Plan, LaunchScript]:
    cfg, script = config_of(launch_of_overrides(launch["base"] | launch["overrides"]))
    return plan(cfg), script


def mesh(expected: dict[str, Any] | None) -> Mesh | None:
    return Mesh(tuple(expected["shape"]), tuple(expected["names"])) if expected else None


def cut_numbers(cut: Cut | None, sequences: int | None) -> dict[str, Any] | None:
    if cut is None:
        return None
    count = cut.micro_batches_by_token_count(sequences) if cut.by_tokens else cut.micro_batches(sequences)
    return {
        "dynamic": cut.by_tokens,
        "micro_batch_per_gpu": cut.sequences_per_micro_batch,
        "max_token_len_per_gpu": cut.max_tokens_per_device,
        "token_budget": cut.token_budget,
        "micro_batches": count,
    }


def numbers(answer: Plan) -> dict[str, Any]:
    """A plan in the words of the launches' expected numbers; where tokens cut, the count that verl makes."""
    by_tokens = answer.update_cut.by_tokens
    counts = answer.micro_batches_per_mini_batch_by_token_count if by_tokens else answer.micro_batches_per_mini_batch
    return {
        "world_size": answer.world_size,
        "dp_size": answer.dp_size,
        "sp_size": answer.sp_size,
        "rollout_tp": answer.tp_size,
        "prompts_per_step": answer.prompts_per_step,
        "gen_batch_prompts": answer.gen_batch_prompts,
        "rollout_n": answer.samples_per_prompt,
        "sequences_per_step": answer.sequences_per_step,
        "prompts_per_rollout_replica": answer.prompts_per_rollout_replica,
        "sequences_per_dp_rank": answer.sequences_per_rank,
        "mini_batch_prompts_global": answer.prompts_per_mini_batch,
        "mini_batch_sequences_global": answer.sequences_per_mini_batch,
        "mini_batch_sequences_per_rank": answer.sequences_per_mini_batch_per_rank,
        "mini_batch_sizes_per_rank": list(answer.mini_batches),
        "dynamic_bsz": by_tokens,
        "micro_batch_per_gpu": answer.sequences_per_micro_batch,
        "micro_batches_per_mini": list(counts),
        "grad_accum_steps": answer.grad_accumulation_steps,
        "ppo_epochs": answer.ppo_epochs,
        "optimizer_steps_per_step": answer.optimizer_steps_per_step,
        "token_budget": answer.update_cut.token_budget,
        "prompt_length": answer.prompt_length,
        "response_length": answer.response_length,
        "padded_seq_len": answer.padded_sequence_tokens,
        "needs_ref": answer.needs_ref,
        "ref_in_actor": answer.ref_in_actor,
        "on_policy": answer.on_policy,
    }


def test_the_launches_are_all_there() -> None:
    assert (len(VALID), len(INVALID)) == (64, 18)


@pytest.mark.parametrize("launch", VALID, ids=lambda launch: launch["path"])
def test_a_valid_launch_gives_its_numbers(launch: dict[str, Any]) -> None:
    answer, _ = planned(launch)
    expected = launch["expected"]
    found = numbers(answer)
    assert found == {name: expected[name] for name in found}
    assert answer.fsdp_mesh == mesh(expected["mesh"])
    assert answer.ulysses_mesh == mesh(expected["ulysses_mesh"])
    assert answer.rollout_mesh == mesh(expected["rollout_mesh"])
    assert cut_numbers(answer.old_log_prob_cut, answer.sequences_per_rank) == expected["log_prob"]["rollout"]
    assert cut_numbers(answer.ref_log_prob_cut, answer.sequences_per_rank) == expected["log_prob"]["ref"]


@pytest.mark.parametrize("launch", VALID, ids=lambda launch: launch["path"])
def test_a_valid_launch_is_refused_only_for_what_it_silently_does(launch: dict[str, Any]) -> None:
    answer, script = planned(launch)
    assert {problem.code for problem in answer.problems} <= {"GROUP_OF_ONE", "GEN_BATCH_SIZE"}
    empty = {one.key for one in script.problems}
    assert empty <= {"actor_rollout_ref.actor.use_kl_loss"}  # one script sets it to an empty text
    assert script.unknown == ()


@pytest.mark.parametrize("launch", INVALID, ids=lambda launch: launch["path"])
def test_an_invalid_launch_has_an_error_at_the_keys_named(launch: dict[str, Any]) -> None:
    answer, script = planned(launch)
    at_fault = [set(problem.keys) for problem in answer.problems] + [{one.key} for one in script.problems]
    for error in launch["expected"]["errors"]:
        if error["code"] != "AGENT_CHUNK":  # there are no agent-loop workers
            assert any(set(error["keys"]) <= keys for keys in at_fault), error


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("examples/cispo_trainer/run_cispo_qwen2_5_0_5b_gsm8k.sh", "actor_rollout_ref.model.torch_dtype"),
        ("examples/grpo_trainer/run_gptoss_20b.sh", "actor_rollout_ref.actor.fsdp_config.model_dtype"),
        ("examples/grpo_trainer/run_qwen3_4b_grpo_vllm_1k_npu.sh", "trainer.experiment_name"),
        ("recipe/entropy/32b_kl_cov.sh", "actor_rollout_ref.actor.loss_mode"),
    ],
)
def test_a_key_that_verl_cannot_compose_is_listed(path: str, key: str) -> None:
    (launch,) = (one for one in INVALID if one["path"] == path)
    _, script = planned(launch)
    assert key in {one.key for one in (*script.renamed, *script.unsupported, *script.problems)}
