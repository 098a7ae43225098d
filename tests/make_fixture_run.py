"""Make the run that later versions must be able to read: `python tests/make_fixture_run.py`.

It goes into tests/data/fixture_runs/<version of the package>/ with all that is needed to go on with it. Make one when
the format of a run has changed, and never change an older one.
"""

import json
import os
import shutil
import socket
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent
HOME = ROOT / "data" / "fixture_runs" / version("grpoflow")


def make(lab: Path) -> None:
    """Train three steps in a folder, go back once, and end at a checkpoint."""
    import torch
    from rich.console import Console
    from transformers import AutoConfig, AutoModelForCausalLM

    from flows.config import load_config
    from flows.run_folder import GoBack
    from flows.train import run_training
    from tasks.warm_start.word_problems import build_tokenizer, save_tokenizer

    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "llama", vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=8, max_position_embeddings=64,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=0, **sizes,
        )
    )  # fmt: skip
    model.save_pretrained(lab / "model")
    save_tokenizer(tokenizer, lab / "model")
    rows = [{"prompt": f"Tom has {i} apples .", "answer": str(i), "data_source": "toy"} for i in range(8)]
    (lab / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (lab / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(ord((solution_str or 'a')[0]) % 2)\n"
    )
    words = [
        f"data.train_files=[{lab}/train.jsonl]",
        "data.train_batch_size=4",
        "data.max_prompt_length=16",
        "data.max_response_length=4",
        f"actor_rollout_ref.model.path={lab}/model",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
        f"custom_reward_function.path={lab}/reward.py",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        "trainer.total_training_steps=3",
        "trainer.max_actor_ckpt_to_keep=1",
        f"trainer.default_local_dir={lab}/run",
        "trainer.val_before_train=false",
        f"storage.root={lab}/runs",
        "tracking.enabled=false",
        "orchestration.enabled=false",
    ]
    run_training(load_config([], words), Console(), until=2)
    run_training(load_config([], words), Console(), back=GoBack(2, "advantages"))


if __name__ == "__main__":
    if HOME.exists():
        sys.exit(f"{HOME} is there already; a fixture run is never changed. Raise the version first.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Neither the name of this machine nor that of its folders belongs in the repository.
    socket.gethostname = lambda: "fixture"
    place = Path(tempfile.gettempdir()) / "grpoflow-fixture"
    place.mkdir()
    try:
        make(place)
        shutil.copytree(place, HOME, ignore=shutil.ignore_patterns("lock", "logs", "__pycache__", "runs"))
    finally:
        shutil.rmtree(place)
    print(f"{HOME}: {sum(path.stat().st_size for path in HOME.rglob('*') if path.is_file()):,} bytes")
