"""Whether six algorithms learn the quickstart: held-out greedy accuracy before and after, by algorithm and seed.

python -m benchmarks.algorithms [--steps N] [--seeds 0 1 2] [--runs FOLDER] [--picture OUT.svg] [--table OUT.md]

One training at a time, in this process, without Prefect and MLflow. A seed has its own data, warm start, prompt order
and samples. Runs lie in FOLDER/algorithms; a finished one is read, not made again, so delete them to measure a changed
program.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from rich.console import Console

from flows.config import load_config
from flows.recipes import prepare, recipe_file
from flows.run_folder import run_folder
from flows.train import run_training
from storage import open_run
from tasks.algorithms.variants import ESTIMATORS, Variant
from tasks.config import RunConfig

SCORE, HELD_OUT = "#0072b2", "#d55e00"
ACTOR = "actor_rollout_ref.actor"
VARIANTS: dict[str, tuple[str, ...]] = {
    # The recipe as it is.
    "grpo": (),
    # No division by a group's std, none by a response's length (arXiv 2503.20783).
    "dr_grpo": ("algorithm.norm_adv_by_std_in_grpo=false", f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm"),
    # A leave-one-out baseline instead of the group's mean and std (arXiv 2402.14740).
    "rloo": ("algorithm.adv_estimator=rloo",),
    # The ratio is a mean over a sequence's tokens, so it stays much nearer to 1 than a token's: the clip range is the
    # paper's (arXiv 2507.18071, section 5.1).
    "gspo": (
        f"{ACTOR}.policy_loss.loss_mode=gspo",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
        f"{ACTOR}.clip_ratio_low=3e-4",
        f"{ACTOR}.clip_ratio_high=4e-4",
    ),
    # The paper has no lower bound (arXiv 2506.13585): 1 - clip_ratio_low = 0 is none.
    "cispo": (f"{ACTOR}.policy_loss.loss_mode=cispo", f"{ACTOR}.clip_ratio_low=1", f"{ACTOR}.clip_ratio_high=0.2"),
    # The group's mean as baseline, then whitened over the step (arXiv 2501.03262).
    "reinforce_plus_plus_baseline": ("algorithm.adv_estimator=reinforce_plus_plus_baseline",),
}
"""What each algorithm changes of the `quickstart` recipe. Learning rate, KL and everything else are the recipe's."""

CONTROL = "shuffled_scores"
"""Not an algorithm but grpo with the scores of each step in random order. Adam's steps do not shrink for it, so
accuracy moves by chance: what an algorithm gains says something as far as it is beyond that."""

Curve = dict[int, float]
Curves = dict[str, dict[int, tuple[Curve, Curve]]]
"""By variant and seed: (mean score of the training responses, held-out greedy accuracy), both by step."""


def variant_config(variant: str, seed: int, steps: int, root: Path, more: tuple[str, ...] = ()) -> RunConfig:
    """The recipe with a variant's overrides, validated before, halfway and at the end, with model and data made.

    Args:
        variant: a key of `VARIANTS`, or `CONTROL`.
        seed: of data, warm start, prompt order and samples.
        steps: length of the run and of its learning-rate schedule.
        root: where runs and warm starts lie.
        more: overrides that come last, such as a model and data to use instead of the seed's own.
    """
    recipe = [recipe_file("quickstart")]
    setting = (
        f"storage.root={root}",
        "trainer.project_name=algorithms",
        f"trainer.experiment_name={variant}-{steps}-steps-seed-{seed}",
        f"trainer.seed={seed}",
        f"trainer.total_training_steps={steps}",
        f"trainer.test_freq={(steps + 1) // 2}",
        "trainer.save_freq=-1",
        "orchestration.enabled=false",
        "tracking.enabled=false",
    )
    return prepare(recipe, load_config(recipe, [*setting, *VARIANTS.get(variant, ()), *more]), print)


@contextmanager
def shuffled_scores(seed: int) -> Iterator[None]:
    """Give `algorithm.adv_estimator=grpo` the scores of each step in random order within the block."""
    rng, grpo = np.random.default_rng(seed), ESTIMATORS["grpo"]
    compute = grpo.load()

    class Shuffled(Variant):
        def load(self) -> Callable[..., Any]:
            return lambda batch, cfg: compute(replace(batch, score=rng.permutation(batch.score)), cfg)

    ESTIMATORS["grpo"] = Shuffled(**vars(grpo))
    try:
        yield
    finally:
        ESTIMATORS["grpo"] = grpo


def train(variant: str, seed: int, steps: int, root: Path, console: Console) -> tuple[Curve, Curve]:
    """Train one variant with one seed, unless its folder holds the finished run.

    Returns:
        (mean score of the training responses by step, held-out greedy accuracy by step).
    """
    cfg = variant_config(variant, seed, steps, root)
    folder = run_folder(cfg)
    if not (folder / "run.json").exists() or open_run(folder).state != "finished":
        with shuffled_scores(seed) if variant == CONTROL else nullcontext():
            run_training(cfg, console)
    run = open_run(folder)
    found = {index: run.step(index).record for index in run.steps()}
    records = {index: record["metrics"] for index, record in found.items() if record is not None}
    scores = {index: metrics["critic/score/mean"] for index, metrics in records.items() if index}
    held_out = {
        index: value
        for index, metrics in records.items()
        for name, value in metrics.items()
        if name.startswith("val-core/")
    }
    return scores, held_out


def changes(variant: str) -> str:
    """A variant's overrides in Markdown, each key without its section."""
    if variant == CONTROL:
        return "the scores of each step in random order: nothing to learn"
    pairs = [override.split("=") for override in VARIANTS[variant]]
    return ", ".join(f"`{key.rpartition('.')[2]}={value}`" for key, value in pairs) or "nothing"


def table(curves: Curves) -> str:
    """Markdown: held-out accuracy before -> after in percent, by variant and seed, with the mean gain and its range."""
    seeds = list(next(iter(curves.values())))
    lines = [
        "| algorithm | changes of the recipe | " + " | ".join(f"seed {seed}" for seed in seeds) + " | gain, points |",
        "|---|---|" + "---|" * (len(seeds) + 1),
    ]
    for variant, by_seed in curves.items():
        ends = [(held_out[min(held_out)], held_out[max(held_out)]) for _, held_out in by_seed.values()]
        gains = [100 * (after - before) for before, after in ends]
        cells = [f"{before:.1%} → {after:.1%}".replace("%", "") for before, after in ends]
        gain = f"{mean(gains):.1f} ({min(gains):.1f} to {max(gains):.1f})"
        lines.append(f"| `{variant}` | {changes(variant)} | {' | '.join(cells)} | {gain} |")
    return "\n".join(lines) + "\n"


def over_seeds(curves: list[Curve]) -> tuple[list[int], list[float], list[float], list[float]]:
    """(steps, mean, least, largest) of curves that have the same steps."""
    steps = list(curves[0])
    columns = [[curve[step] for curve in curves] for step in steps]
    return steps, [mean(column) for column in columns], [min(c) for c in columns], [max(c) for c in columns]


def draw(axes: Axes, by_seed: dict[int, tuple[Curve, Curve]], grpo: Curve | None) -> None:
    """One variant: mean over the seeds, with a band or bars from the least to the largest; grpo in grey behind it.

    Held-out points are not joined: between them accuracy was not measured.
    """
    if grpo is not None:
        axes.plot(list(grpo), list(grpo.values()), color="0.6", linewidth=1)
    steps, middle, least, largest = over_seeds([scores for scores, _ in by_seed.values()])
    axes.fill_between(steps, least, largest, color=SCORE, alpha=0.2, linewidth=0)
    axes.plot(steps, middle, color=SCORE, linewidth=1.2)
    steps, middle, least, largest = over_seeds([held_out for _, held_out in by_seed.values()])
    bars = [[m - low for m, low in zip(middle, least, strict=True)]]
    bars.append([high - m for m, high in zip(middle, largest, strict=True)])
    axes.errorbar(steps, middle, bars, color=HELD_OUT, marker="o", markersize=4, linestyle="none", capsize=2)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def legend(figure: Figure) -> None:
    """Say above the panels what lines and points are."""
    lines = [
        Line2D([], [], color=SCORE, label="mean score of sampled training responses"),
        Line2D([], [], color=HELD_OUT, marker="o", markersize=4, label="greedy accuracy on held-out problems"),
        Line2D([], [], color="0.6", label="training score of grpo"),
    ]
    lines[1].set_linestyle("none")
    figure.legend(handles=lines, loc="outside upper center", ncols=3, frameon=False, fontsize=8)


def picture(curves: Curves, out: Path) -> None:
    """Draw one panel per variant into an SVG file."""
    plt.rcParams.update({"svg.hashsalt": "grpoflow", "svg.fonttype": "none", "font.size": 9})
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure, grid = plt.subplots(
        rows, columns, figsize=(7.6, 0.5 + 2.2 * rows), sharex=True, sharey=True, squeeze=False, layout="constrained"
    )
    for axes in grid.flat[len(curves) :]:
        axes.set_visible(False)
    for axes, (variant, by_seed) in zip(grid.flat, curves.items(), strict=False):
        others = curves.get("grpo") if variant != "grpo" else None
        steps, middle, _, _ = over_seeds([scores for scores, _ in (others or by_seed).values()])
        draw(axes, by_seed, dict(zip(steps, middle, strict=True)) if others else None)
        axes.set_title(variant, fontsize=9, loc="left")
    grid[0, 0].set(ylim=(0, 1))
    figure.supxlabel("step", fontsize=9)
    figure.supylabel("share right", fontsize=9)
    legend(figure)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    """Train what is missing, print the table, write table and picture."""
    every = [*VARIANTS, CONTROL]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.algorithms", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--variants", nargs="+", choices=every, default=every)
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="where runs and warm starts lie")
    parser.add_argument("--picture", type=Path, help="default: algorithms.svg in the folder of runs")
    parser.add_argument("--table", type=Path, help="default: algorithms.md in the folder of runs")
    asked = parser.parse_args()
    console = Console(stderr=True)
    curves: Curves = {variant: {} for variant in asked.variants}
    for seed in asked.seeds:
        for variant in asked.variants:
            _, held_out = curves[variant][seed] = train(variant, seed, asked.steps, asked.runs, console)
            print(f"seed {seed} {variant}: {', '.join(f'{v:.3f}' for v in held_out.values())}", flush=True)
    text = table(curves)
    print(f"\n{text}")
    (asked.table or asked.runs / "algorithms.md").write_text(text, encoding="utf-8")
    curves.pop(CONTROL, None)
    picture(curves, asked.picture or asked.runs / "algorithms.svg")


if __name__ == "__main__":
    main()
