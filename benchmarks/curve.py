"""The picture of a run: mean score of the training responses and held-out accuracy by step.

python -m benchmarks.curve OUT.svg RUN [RUN ...]        needs matplotlib, which MLflow brings along
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

from storage import open_run

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")


def main(out: Path, runs: list[Path]) -> None:
    """Draw one line of training scores and one of validation accuracies for every run."""
    plt.rcParams.update({"svg.hashsalt": "grpoflow", "svg.fonttype": "none", "font.size": 10})
    figure, axes = plt.subplots(figsize=(7.2, 3.4), layout="constrained")
    for colour, path in zip(COLOURS, runs, strict=False):
        records = {index: open_run(path).step(index).record["metrics"] for index in open_run(path).steps()}
        scores = {index: metrics["critic/score/mean"] for index, metrics in records.items() if index}
        held_out = {
            index: value for index, metrics in records.items() for name, value in metrics.items() if "val-core" in name
        }
        axes.plot(list(scores), list(scores.values()), color=colour, linewidth=1.2)
        axes.plot(list(held_out), list(held_out.values()), color=colour, marker="o", linestyle="--", linewidth=1)
    axes.plot([], [], color="grey", label="mean score of sampled training responses")
    axes.plot([], [], color="grey", marker="o", linestyle="--", label="greedy accuracy on held-out problems")
    axes.set(xlabel="step", ylabel="share right", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(argument) for argument in sys.argv[2:]])
