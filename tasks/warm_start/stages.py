"""The warm start's stages as pure functions between files: make the data, train on the demonstrations and measure.

demonstrations.parquet   text: what the model is trained on, mistakes included
train.parquet            prompts for GRPO
val.parquet              prompts over held-out operand pairs
model/                   the trained model with its tokenizer, in Hugging Face format
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.rewards.gsm8k import compute_score
from tasks.seeds import hashed
from tasks.warm_start.parameters import WarmStartParameters
from tasks.warm_start.problem_files import write_problems
from tasks.warm_start.word_problems import (
    DATA_SOURCE,
    END,
    build_tokenizer,
    demonstrate,
    draw_pairs,
    ids_of,
    save_tokenizer,
    split_pairs,
    tell,
)

MODEL = "model"
TRAIN_FILE = "train.parquet"
VAL_FILE = "val.parquet"
DEMONSTRATIONS = "demonstrations.parquet"


def make_data(folder: Path, parameters: WarmStartParameters, seed: int) -> None:
    """Write the three data files."""
    pairs = split_pairs(seed, parameters.held_out_pairs, parameters.carry_share)

    def problems(what: str, count: int) -> tuple[np.random.Generator, list]:
        random = np.random.default_rng(hashed("word_problems", what, seed))
        return random, tell(random, draw_pairs(random, pairs.train, count, parameters.carry_share))

    schedule = parameters.schedule
    random, shown = problems("demonstrations", schedule.steps * schedule.batch)
    responses = demonstrate(random, shown, parameters.mistake_share)
    table = pa.table({"prompt": [problem.prompt for problem in shown], "response": responses})
    pq.write_table(table, folder / DEMONSTRATIONS)
    _, asked = problems("train", parameters.train_prompts)
    write_problems(folder / TRAIN_FILE, asked, DATA_SOURCE, "train")
    held_out = tell(np.random.default_rng(hashed("word_problems", "val", seed)), pairs.held_out)
    write_problems(folder / VAL_FILE, held_out, DATA_SOURCE, "val")


def train_and_measure(folder: Path, parameters: WarmStartParameters, seed: int) -> dict[str, float]:
    """Train on the demonstrations, write the model beside them, and let it answer the held-out prompts.

    Returns:
        `loss`, `steps`, `tokens`, `seconds` of the training; `greedy`, `pass@1`, `pass@8` (by `parameters.samples`):
        shares of held-out prompts that are answered right.
    """
    from tasks.warm_start.supervised import save_model, train_model

    tokenizer = build_tokenizer()
    demonstrations = pq.read_table(folder / DEMONSTRATIONS).to_pydict()
    prompts = _matrix(tokenizer, demonstrations["prompt"])
    responses = _matrix(tokenizer, [text + END for text in demonstrations["response"]])
    model, metrics = train_model(parameters.shape, parameters.schedule, tokenizer, prompts, responses, seed)
    save_model(model, folder / MODEL)
    save_tokenizer(tokenizer, folder / MODEL)
    return metrics | _measure(model, tokenizer, folder / VAL_FILE, responses.shape[1], parameters.samples, seed)


def _measure(model: Any, tokenizer: Any, file: Path, response_length: int, samples: int, seed: int) -> dict[str, float]:
    from tasks.warm_start.supervised import pass_at_k, write_responses

    rows = pq.read_table(file, columns=["prompt", "reward_model"]).to_pydict()
    prompts = _matrix(tokenizer, rows["prompt"])
    truths = [reward["ground_truth"] for reward in rows["reward_model"]]

    def right(count: int, greedy: bool) -> np.ndarray:
        ids = write_responses(model, prompts, 2 * response_length, samples=count, greedy=greedy, seed=seed)
        scores = [
            [compute_score(text, truth)["score"] for text in tokenizer.batch_decode(row, skip_special_tokens=True)]
            for row, truth in zip(ids, truths, strict=True)
        ]
        return np.array(scores) == 1.0

    sampled = right(samples, greedy=False)
    return {
        "greedy": float(right(1, greedy=True).mean()),
        "pass@1": pass_at_k(sampled, 1),
        f"pass@{samples}": pass_at_k(sampled, samples),
    }


def _matrix(tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    """[N, T] ids of texts that all have T tokens."""
    rows = ids_of(tokenizer, texts)
    assert len({len(row) for row in rows}) == 1, "word problems and their answers all have one length"
    return np.array(rows, dtype=np.int64)
