r"""One-sentence addition problems: the task, its tokenizer, and demonstrations by a pupil who often forgets the carry.

Ann has 27 apples and buys 15. How many apples?\n   ->   27+15=42\n#### 42
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tasks.seeds import hashed
from tasks.tokenizer import check_round_trip
from tasks.warm_start.problem_files import Problem

DATA_SOURCE = "grpoflow/word_problems"

NAMES = (
    *("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gita", "Hugo", "Ida", "Jon", "Kim", "Leo"),
    *("Mia", "Nils", "Olga", "Paul", "Rosa", "Sam", "Tara", "Uri", "Vera", "Will", "Yara", "Zoe"),
)
THINGS = (
    *("apples", "balls", "books", "boxes", "cards", "coins", "cups", "eggs", "hats", "keys", "kites", "lemons"),
    *("maps", "nuts", "pears", "pens", "pies", "plums", "rings", "ropes", "seeds", "shells", "stamps", "stones"),
)
VERBS = ("buys", "finds", "gets")
OPERANDS = range(10, 50)
"""Both operands; the sum has two digits like them, so that every response has the same length."""

END = "<end>"
PAD = "<pad>"
UNKNOWN = "<unknown>"
_WORDS = ("has", "and", "How", "many")
_SIGNS = (" ", "\n", "####", "+", "=", ".", "?")


@dataclass(frozen=True)
class Pairs:
    """Operand pairs in two sets that share none, in either order.

    Attributes:
        train: [pairs, 2] int64.
        held_out: [pairs, 2] int64.
    """

    train: np.ndarray
    held_out: np.ndarray


def needs_carry(pairs: np.ndarray) -> np.ndarray:
    """[N] bool: whether the ones of a pair sum to ten or more."""
    return pairs[:, 0] % 10 + pairs[:, 1] % 10 >= 10


def split_pairs(seed: int, held_out: int, carry_share: float) -> Pairs:
    """Hold out operand pairs together with their mirror images.

    Args:
        seed: chooses them.
        held_out: how many, an even number.
        carry_share: share of them that needs a carry.

    Raises:
        ValueError: there are not that many pairs of each kind.
    """
    every = np.array([(a, b) for a in OPERANDS for b in OPERANDS], dtype=np.int64)
    below = every[every[:, 0] < every[:, 1]]
    carry = needs_carry(below)
    random = np.random.default_rng(hashed("word_problems", "pairs", seed))
    with_carry = round(held_out / 2 * carry_share)
    if held_out % 2 or with_carry > carry.sum() or held_out // 2 - with_carry > (~carry).sum():
        raise ValueError(
            f"{held_out} held-out pairs, {carry_share:.0%} of them with a carry, cannot be taken in mirror images from "
            f"{len(below)} pairs a < b, {carry.sum()} of them with a carry"
        )
    chosen = np.concatenate(
        [
            random.choice(below[carry], with_carry, replace=False),
            random.choice(below[~carry], held_out // 2 - with_carry, replace=False),
        ]
    )
    out = random.permutation(np.concatenate([chosen, chosen[:, ::-1]]))
    taken = {(int(a), int(b)) for a, b in out}
    left = [pair for pair in every if (int(pair[0]), int(pair[1])) not in taken]
    return Pairs(np.array(left), out)


def draw_pairs(random: np.random.Generator, pairs: np.ndarray, count: int, carry_share: float) -> np.ndarray:
    """[count, 2] pairs drawn with replacement; each needs a carry with probability `carry_share`."""
    carry = needs_carry(pairs)
    wanted = random.random(count) < carry_share
    with_carry = random.integers(carry.sum(), size=count)
    without = random.integers((~carry).sum(), size=count)
    return np.where(wanted[:, None], pairs[carry][with_carry], pairs[~carry][without])


def tell(random: np.random.Generator, pairs: np.ndarray) -> list[Problem]:
    """One sentence for every pair."""
    draws = [random.integers(len(words), size=len(pairs)) for words in (NAMES, THINGS, VERBS)]
    problems = []
    for (a, b), name, thing, verb in zip(pairs.tolist(), *draws, strict=True):
        things = THINGS[thing]
        text = f"{NAMES[name]} has {a} {things} and {VERBS[verb]} {b}. How many {things}?\n"
        problems.append(Problem(text, a, b))
    return problems


def demonstrate(random: np.random.Generator, problems: Sequence[Problem], mistake_share: float) -> list[str]:
    """A response to every problem; with probability `mistake_share` the carry, where there is one, is forgotten."""
    forgets = random.random(len(problems)) < mistake_share
    return [
        response(p.a, p.b, sum_without_carry(p.a, p.b) if forget else p.a + p.b)
        for p, forget in zip(problems, forgets, strict=True)
    ]


def response(a: int, b: int, total: int) -> str:
    """The response's text: the addition, and the answer where the gsm8k reward looks for it."""
    return f"{a}+{b}={total}\n#### {total}"


def sum_without_carry(a: int, b: int) -> int:
    """The school mistake: tens and ones are added each by itself, and the carry is lost."""
    return (a // 10 + b // 10) * 10 + (a % 10 + b % 10) % 10


def build_tokenizer() -> Any:
    """A word-level tokenizer whose tokens, put one after the other, are the text: decoding loses nothing.

    Words carry the blank before them, digits are single tokens. It has no chat template: prompts are plain text.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*NAMES, *(f" {word}" for word in (*_WORDS, *VERBS, *THINGS))]
    vocabulary = [PAD, END, UNKNOWN, *"0123456789", *_SIGNS, *words]
    raw = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token=UNKNOWN))
    raw.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?[A-Za-z]+|####|[0-9]|[^A-Za-z0-9]"), "isolated")
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write the tokenizer beside a model and make sure that loading it gives the same ids and texts.

    Raises:
        ValueError: what AutoTokenizer makes of the folder is another tokenizer.
    """
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(folder)
    text = f"Ann has 27 apples and buys 15. How many apples?\n{response(27, 15, 42)}"
    loaded = AutoTokenizer.from_pretrained(folder)
    check_round_trip(loaded, text)
    wanted, got = ids_of(tokenizer, [text])[0], ids_of(loaded, [text])[0]
    if got != wanted or loaded.eos_token_id != tokenizer.eos_token_id:
        raise ValueError(
            f"{folder} holds the word-level tokenizer, but AutoTokenizer makes {type(loaded).__name__} of it, which "
            f"gives {got} for {text!r} instead of {wanted}. Choose another model type in the folder's config.json."
        )


def ids_of(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of texts, nothing added."""
    return tokenizer(list(texts), add_special_tokens=False)["input_ids"]
