"""Peak memory of the log-prob pass and of the update, against the number of sequences, at a fixed micro-batch."""

import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

SEQUENCES = (64, 256, 1024)
PROMPT, RESPONSE, N = 32, 96, 8


def measure(count: int, model: str) -> None:
    """One pass of each kind over `count` sequences; prints the process's peak after loading and after the passes."""
    from storage import Ragged
    from tasks.config import RunConfig
    from tasks.workers.policy import PolicyWorker, Signals
    from tasks.workers.sequences import MicroBatching, Sequences

    cfg = RunConfig.model_validate(
        {
            "actor_rollout_ref": {
                "model": {"path": model, "enable_gradient_checkpointing": False},
                "actor": {"use_kl_loss": True, "optim": {"lr": 1e-4}},
            },
            "trainer": {"device": "cpu"},
        }
    )
    worker = PolicyWorker(cfg, total_steps=10, with_reference=False)
    generator = np.random.default_rng(0)
    groups = count // N

    def ids(rows: int, length: int) -> Ragged:
        values = generator.integers(5, 2000, rows * length, dtype=np.int32)
        return Ragged.from_lengths(values, np.full(rows, length))

    sequences = Sequences(ids(groups, PROMPT), np.repeat(np.arange(groups), N), ids(count, RESPONSE))
    micro = MicroBatching(sequences=N, max_tokens=None)
    loaded = peak_mb()
    old = worker.log_probs(sequences, micro, temperature=1.0).log_probs
    after_log_probs = peak_mb()
    noise = Ragged(generator.normal(size=len(old.values)).astype(np.float32), old.offsets)
    mask = Ragged(np.ones(len(old.values), dtype=bool), old.offsets)
    signals = Signals(noise, mask, old, old, None, sequences.group)
    worker.update(sequences, signals, [[np.arange(count)]], micro, step=1)
    print(f"{count:>9} {loaded:>12.0f} {after_log_probs:>16.0f} {peak_mb():>13.0f}", flush=True)


def peak_mb() -> float:
    """Peak resident memory of this process, MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def make_model(folder: Path) -> None:
    """A model with a vocabulary large enough that logits, not weights, would be what grows."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=16384, max_position_embeddings=512, **sizes)).save_pretrained(folder)


def main() -> None:
    """Measure each number of sequences in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        print(f"sequences of {PROMPT} + {RESPONSE} tokens, micro-batches of {N}, vocabulary 16384; peak RSS in MB")
        print("sequences  after load  after log-probs  after update", flush=True)
        for count in SEQUENCES:
            subprocess.run([sys.executable, "-m", "benchmarks.memory", str(count), folder], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]), sys.argv[2])
    else:
        main()
