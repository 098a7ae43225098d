"""Fixtures shared by the tests: tiny random models in Hugging Face format, and small runs on them."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from hypothesis import settings

if TYPE_CHECKING:
    from tasks.config import RunConfig

# A test that is slow because the machine is busy has not failed.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")


ALONE = (
    "test_article_geometry",
    "test_ends_with_ranks",
    "test_mesh_checkpoints",
    "test_mesh_worker",
    "test_ray_runs",
    "test_visible_devices",
    "test_worker_group",
)
"""Files whose tests start many processes, and look for what those leave on the machine: one at a time."""

FIRST = (
    "test_schedules_served",
    "test_sweep_runs",
    "test_recovery_with_servers",
    "test_stack",
    "test_chaos",
    "test_object_store",
    "test_sweep_postgres",
)
"""Files that take minutes. They begin first: else the processes of a run would wait for the last one."""


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the tests of these files."""
    if item.path.stem in ALONE:
        item.add_marker(pytest.mark.alone)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put these files first, in their order."""
    items.sort(key=lambda item: FIRST.index(item.path.stem) if item.path.stem in FIRST else len(FIRST))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Make a random model's folder: `tiny_model("qwen3", vocab_size=50)`. The same arguments give the same folder."""
    made: dict[str, Path] = {}
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }

    def make(model_type: str = "qwen3", **config: object) -> Path:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        name = f"{model_type}-" + "-".join(f"{key}={value}" for key, value in sorted(config.items()))
        if name not in made:
            folder = tmp_path_factory.mktemp("model")
            with torch.random.fork_rng():
                torch.manual_seed(0)
                model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **{**sizes, **config}))
                # Larger than the usual start, so that predictions differ from one another.
                for weight in model.parameters():
                    if weight.dim() > 1:
                        weight.data.normal_(std=0.25)
            model.save_pretrained(folder)
            made[name] = folder
        return made[name]

    return make


@pytest.fixture
def tiny_run(tmp_path: Path, tiny_run_in: Callable[..., Callable[..., "RunConfig"]]) -> Callable[..., "RunConfig"]:
    """Make the configuration of a small real run: `tiny_run("trainer.total_training_steps=2", rows=16)`.

    16 prompts of different lengths, a random model, and a reward that looks at the parity of the response's first
    letter, so that groups are mixed. No server is started: `orchestration.enabled` is off unless a test turns it on.
    """
    return tiny_run_in(tmp_path)


@pytest.fixture(scope="session")
def tiny_run_in(tiny_model: Callable[..., Path]) -> Callable[..., Callable[..., "RunConfig"]]:
    """`tiny_run` in a folder of one's own, for runs that several tests look at: `tiny_run_in(folder)("key=value")`."""

    def within(tmp_path: Path) -> Callable[..., "RunConfig"]:
        return partial(_tiny_config, tmp_path, tiny_model)

    return within


def _tiny_config(tmp_path: Path, tiny_model: Callable[..., Path], *overrides: str, rows: int = 16) -> "RunConfig":
    from flows.config import load_config
    from tasks.warm_start.word_problems import build_tokenizer, save_tokenizer

    tokenizer = build_tokenizer()
    model = tmp_path / "model"
    if not model.exists():
        shutil.copytree(tiny_model("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id), model)
        save_tokenizer(tokenizer, model)
    questions = [f"{'Tom has 1 2 apples ' * (1 + i % 3)}." for i in range(rows)]
    lines = [{"prompt": text, "answer": str(i), "data_source": "toy"} for i, text in enumerate(questions)]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    (tmp_path / "val.jsonl").write_text("\n".join(json.dumps(line) for line in lines[:4]))
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(ord((solution_str or 'a')[0]) % 2)\n"
    )
    base = {
        "data": {
            "train_files": str(tmp_path / "train.jsonl"),
            "val_files": str(tmp_path / "val.jsonl"),
            "train_batch_size": 8,
            "max_prompt_length": 40,
            "max_response_length": 6,
        },
        "actor_rollout_ref": {
            "model": {"path": str(model), "enable_gradient_checkpointing": False},
            "actor": {
                "ppo_mini_batch_size": 4,
                "ppo_micro_batch_size_per_gpu": 8,
                "optim": {"lr": 1e-3},
                "use_kl_loss": True,
            },
            "rollout": {"n": 4, "tensor_model_parallel_size": 1, "log_prob_micro_batch_size_per_gpu": 8},
            "ref": {"log_prob_micro_batch_size_per_gpu": 8},
        },
        "custom_reward_function": {"path": str(tmp_path / "reward.py")},
        "trainer": {
            "n_gpus_per_node": 1,
            "device": "cpu",
            "total_training_steps": 2,
            "default_local_dir": str(tmp_path / "run"),
            "val_before_train": False,
        },
        "storage": {"root": str(tmp_path / "runs")},
        "tracking": {"enabled": False},
        "orchestration": {"enabled": False},
    }
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(base))
    return load_config([tmp_path / "base.yaml"], list(overrides))
