"""Loading a configuration: layers, overrides as verl's users type them, and errors that say what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.config import ConfigError, all_keys, json_schema, load_config, nearest_key, to_yaml
from flows.verl_keys import RENAMED, RENAMED_SECTIONS, TRL_KEYS, UNSUPPORTED
from tasks.config import RunConfig

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"


def errors_of(*overrides: str, files: tuple[Path, ...] = ()) -> dict[str, str]:
    """Key -> message of everything that is wrong."""
    with pytest.raises(ConfigError) as caught:
        load_config(files, overrides)
    return {problem.key: problem.message for problem in caught.value.problems}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("key", ["tracking.uri", "orchestration.api_url"])
def test_an_address_with_a_password_is_refused_without_being_shown(key: str) -> None:
    with pytest.raises(ConfigError, match="PGPASSWORD") as caught:
        load_config([], [f"{key}=postgresql://me:hunter2@host/db"])
    assert "hunter2" not in str(caught.value)
    load_config([], [f"{key}=postgresql://me@host/db"])


# -------------------------------------------------------------------------------------------------------------- layers


def test_later_files_and_then_overrides_win(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yaml", "data:\n  train_batch_size: 8\n  seed: 1\ntrainer:\n  total_epochs: 3\n")
    top = write(tmp_path / "top.yaml", "data:\n  train_batch_size: 16\n")
    cfg = load_config([base, top], ["trainer.total_epochs=5", "trainer.total_epochs=7"])
    assert (cfg.data.train_batch_size, cfg.data.seed, cfg.trainer.total_epochs) == (16, 1, 7)


def test_no_files_and_no_overrides_are_the_defaults() -> None:
    assert load_config() == RunConfig()


def test_overrides_take_hydras_marks() -> None:
    cfg = load_config(
        [], ["+data.train_batch_size=4", "++data.seed=2", "+data.apply_chat_template_kwargs.thinking=False"]
    )
    assert (cfg.data.train_batch_size, cfg.data.seed) == (4, 2)
    assert cfg.data.apply_chat_template_kwargs == {"thinking": False}


def test_a_tilde_goes_back_to_the_default(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yaml", "data:\n  seed: 5\ntrainer:\n  nnodes: 2\n")
    cfg = load_config([base], ["~data.seed", "~trainer"])
    assert (cfg.data.seed, cfg.trainer.nnodes) == (None, 1)
    assert "Nearest: data.seed" in errors_of("~data.sead")["data.sead"]


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        (f"{ACTOR}.optim.lr=1e-6", f"{ACTOR}.optim.lr", 1e-6),
        ("data.gen_batch_size=null", "data.gen_batch_size", None),
        ("data.train_files=['a.parquet', \"b.parquet\"]", "data.train_files", ("a.parquet", "b.parquet")),
        ("data.train_files=[a.parquet,b.parquet]", "data.train_files", ("a.parquet", "b.parquet")),
        ("data.train_files=a.parquet", "data.train_files", ("a.parquet",)),
        ("data.shuffle=False", "data.shuffle", False),
        ("trainer.experiment_name=1e3", "trainer.experiment_name", "1e3"),
        ("trainer.experiment_name=012", "trainer.experiment_name", "012"),
        ("trainer.experiment_name='a: b'", "trainer.experiment_name", "a: b"),
        ("trainer.experiment_name=a: b", "trainer.experiment_name", "a: b"),
        ("trainer.experiment_name=", "trainer.experiment_name", ""),
        ("custom_reward_function.name=null", "custom_reward_function.name", "compute_score"),
        (
            f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16",
            f"{ACTOR}.fsdp_config.mixed_precision.param_dtype",
            "bfloat16",
        ),
        (
            "algorithm.rollout_correction.rollout_rs_threshold='0.6_1.6,2.5'",
            "algorithm.rollout_correction.rollout_rs_threshold",
            "0.6_1.6,2.5",
        ),
        ("data.gen_batch_size=${data.train_batch_size}", "data.gen_batch_size", 1024),
    ],
)
def test_values_are_read_as_verls_users_mean_them(override: str, key: str, value: object) -> None:
    found: object = load_config([], [override])
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


def test_yaml_numbers_are_those_of_yaml_1_2(tmp_path: Path) -> None:
    text = "actor_rollout_ref:\n  actor:\n    optim: {lr: 1e-5}\ntrainer:\n  experiment_name: on\n"
    cfg = load_config([write(tmp_path / "a.yaml", text)])
    assert (cfg.actor_rollout_ref.actor.optim.lr, cfg.trainer.experiment_name) == (1e-5, "on")


def test_a_section_with_every_key_commented_out_is_its_defaults(tmp_path: Path) -> None:
    text = "data:\n  # seed: 1\nactor_rollout_ref:\n  actor:\n    optim:\n"
    assert load_config([write(tmp_path / "a.yaml", text)]) == RunConfig()


def test_a_reference_follows_the_value_that_wins(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yaml", "data:\n  gen_batch_size: ${data.train_batch_size}\n  train_batch_size: 8\n")
    assert load_config([base], ["data.train_batch_size=32"]).data.gen_batch_size == 32
    assert "no key data.nothing" in errors_of("data.seed=${data.nothing}")["data.seed"]


# -------------------------------------------------------------------------------------------------------------- errors


def test_a_misspelt_key_is_an_error_with_the_nearest_key() -> None:
    """Field case B08."""
    key = f"{ROLLOUT}.temprature"
    assert errors_of(f"{key}=0.2") == {key: f"unknown key. Nearest: {ROLLOUT}.temperature."}
    assert errors_of(f"+{key}=0.2") == {key: f"unknown key. Nearest: {ROLLOUT}.temperature."}
    assert errors_of(f"++{key}=0.2") == {key: f"unknown key. Nearest: {ROLLOUT}.temperature."}


def test_a_key_that_verl_has_and_this_has_not_says_so() -> None:
    """Field case B08."""
    found = errors_of(
        "critic.optim.lr=1e-5", "trainer.logger=['console']", f"{ACTOR}.megatron.tensor_model_parallel_size=2"
    )
    assert "critic" in found["critic.optim.lr"] and "not supported" in found["critic.optim.lr"]
    assert "MLflow" in found["trainer.logger"]
    assert "fsdp2" in found[f"{ACTOR}.megatron.tensor_model_parallel_size"]


def test_a_key_with_another_name_says_its_name_here() -> None:
    """Field case B08."""
    found = errors_of(f"{ACTOR}.loss_mode=gspo", "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096")
    assert found[f"{ACTOR}.loss_mode"] == f"is called {ACTOR}.policy_loss.loss_mode here."
    assert (
        found["reward_model.reward_kwargs.overlong_buffer_cfg.len"]
        == "is called reward_model.overlong_buffer.len here."
    )


def test_the_right_word_in_the_wrong_section_is_found() -> None:
    assert nearest_key("rollout.temperature") == f"{ROLLOUT}.temperature"
    assert nearest_key("trainer.train_batch_size") == "data.train_batch_size"
    assert nearest_key("zzz.qqq") is None


def test_trls_keys_are_answered_in_verls_words(tmp_path: Path) -> None:
    assert errors_of("num_generations=8") == {"num_generations": f"TRL's key. In verl's words: {ROLLOUT}.n."}
    path = write(tmp_path / "trl.yaml", "beta: 0.04\n")
    assert errors_of(files=(path,))["beta"].startswith(f"TRL's key. In verl's words: {ACTOR}.kl_loss_coef, with")
    assert "TRL" not in errors_of("trainer.beta=1")["trainer.beta"]


def test_every_key_in_the_table_of_trls_keys_is_one() -> None:
    named = {
        word for text in TRL_KEYS.values() for word in re.findall(r"(?:actor_rollout_ref|algorithm|data)\.[.\w]+", text)
    }
    assert len(named) >= len(TRL_KEYS) and named <= set(all_keys())


@pytest.mark.parametrize(
    ("override", "answer"),
    [
        (
            "algorithm.adv_estimator=dapo",
            "Nearest: grpo with algorithm.filter_groups.enable, actor_rollout_ref.actor.clip_ratio_high and "
            "reward_model.overlong_buffer.",
        ),
        ("algorithm.adv_estimator=gspo", f"gspo is a policy loss: {ACTOR}.policy_loss.loss_mode=gspo."),
        ("algorithm.adv_estimator=clip-cov", f"clip_cov is a policy loss: {ACTOR}.policy_loss.loss_mode=clip_cov."),
        (
            f"{ACTOR}.policy_loss.loss_mode=rloo",
            "rloo is an advantage estimator: algorithm.adv_estimator=rloo.",
        ),
        (f"{ACTOR}.policy_loss.loss_mode=grpo", "Nearest: vanilla."),
        (f"{ACTOR}.policy_loss.loss_mode=dapo", f"Nearest: vanilla with {ACTOR}.clip_ratio_high."),
        (f"{ACTOR}.loss_agg_mode=dr_grpo", "Nearest: seq-mean-token-sum-norm."),
        ("algorithm.rollout_correction.rollout_is=true", "Nearest: token."),
    ],
)
def test_a_name_of_another_library_or_of_another_key_is_answered(override: str, answer: str) -> None:
    (message,) = errors_of(override).values()
    assert message.endswith(answer)


def test_unknown_keys_of_files_name_their_file(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "data:\n  train_batchsize: 8\n")
    with pytest.raises(ConfigError, match=r"data\.train_batchsize \(.*run\.yaml\): unknown key"):
        load_config([path])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.nnodes=", "expected an integer of at least 1, got an empty value."),
        ("trainer.nnodes=two", "expected an integer of at least 1, got 'two'."),
        ("trainer.nnodes=1.5", "expected an integer of at least 1, got 1.5."),
        ("trainer.nnodes=true", "expected an integer of at least 1, got true."),
        ("trainer.nnodes=null", "expected an integer of at least 1, got null."),
        ("data.val_batch_size=0", "expected an integer of at least 1 or null, got 0."),
        ("data.shuffle=maybe", "expected true or false, got 'maybe'."),
        (f"{ROLLOUT}.gpu_memory_utilization=2", "expected a number above 0 and at most 1, got 2."),
        (f"{ACTOR}.optim.lr=nan", "expected a number of at least 0, got nan."),
        (f"{ACTOR}.loss_agg_mode=mean", "expected one of token-mean, "),
        (f"{ROLLOUT}.name=sglang", "sglang: this engine is not offered"),
        (f"{ROLLOUT}.mode=sync", "sync: verl has removed it too."),
        ("algorithm=grpo", "expected a section with keys of its own, got 'grpo'."),
        ("reward.functions=[{name: a, wieght: 2}]", "unknown key 0.wieght."),
        ("trainer.experiment_name=run}", "a `}` has no partner"),
        ("trainer.default_local_dir=<your path>", "is a placeholder"),
        ("data.train_files=[a", "a `[` has no partner"),
    ],
)
def test_a_wrong_value_says_what_is_expected(override: str, expected: str) -> None:
    found = errors_of(override)
    assert list(found) == [override.partition("=")[0]]
    assert found[override.partition("=")[0]].startswith(expected)


def test_all_errors_come_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "run.yaml", "data:\n  max_prompt_length: -1\n")
    found = errors_of("trainer.nnodes=x", "data.sede=1", "nonsense", files=(path, tmp_path / "missing.yaml"))
    assert set(found) == {
        "data.max_prompt_length",
        "trainer.nnodes",
        "data.sede",
        "nonsense",
        str(tmp_path / "missing.yaml"),
    }


@pytest.mark.parametrize("text", ["data: [", "- a\n- b\n", "data:\n  seed: 1\n  seed: 2\n", "3: 4\n"])
def test_a_file_that_is_no_configuration_is_an_error(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / "run.yaml", text)
    assert str(path) in errors_of(files=(path,))


# -------------------------------------------------------------------------------------------------------------- output


def test_the_resolved_configuration_reads_back_equal(tmp_path: Path) -> None:
    cfg = load_config([], ["trainer.experiment_name=1e3", "trainer.project_name='null'", f"{ACTOR}.optim.lr=3e-7"])
    assert load_config([write(tmp_path / "a.yaml", to_yaml(cfg))]) == cfg


@settings(max_examples=50)
@given(name=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12), lr=st.floats(0, 1))
def test_any_text_and_number_survive_being_saved(
    tmp_path_factory: pytest.TempPathFactory, name: str, lr: float
) -> None:
    cfg = RunConfig.model_validate(
        {"trainer": {"experiment_name": name}, "actor_rollout_ref": {"actor": {"optim": {"lr": lr}}}}
    )
    path = write(tmp_path_factory.mktemp("saved") / "a.yaml", to_yaml(cfg))
    assert load_config([path]) == cfg


def test_every_key_is_described_in_the_schema() -> None:
    section = json_schema()["$defs"]["RolloutConfig"]["properties"]
    assert "group" in section["n"]["description"]
    assert section["tensor_model_parallel_size"]["default"] == 2


def test_the_tables_of_verls_keys_fit_what_exists() -> None:
    assert set(RENAMED.values()) <= set(all_keys())
    assert set(RENAMED_SECTIONS.values()) <= set(all_keys())
    leaves = {key for key in all_keys() if not any(other.startswith(f"{key}.") for other in all_keys())}
    assert leaves.isdisjoint(RENAMED)
    assert leaves.isdisjoint(UNSUPPORTED)
