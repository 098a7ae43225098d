"""What the loss needs of each response token beside the policy itself."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from storage.ragged import Ragged
from tasks.stage import NonFiniteError


@dataclass(frozen=True, eq=False)
class Signals:
    """What the loss needs of each response token; N rows each, aligned with the responses.

    Attributes:
        advantages: advantage.
        loss_mask: bool, true: the token takes part in the loss.
        old_log_probs: denominator of the ratio.
        ref_log_probs: for the KL in the loss; None: there is none.
        rollout_is_weights: importance weights of rollout correction; None: all 1.
        group: [N] which prompt each row answers.
        rollout_log_probs: of the sampler, for `off_policy_mask_threshold`; None: there are none.
        in_loss: [N] bool, false: no token of the row is in the loss, for another reason than that rollout correction
            rejected it. None: nothing was rejected.
    """

    advantages: Ragged
    loss_mask: Ragged
    old_log_probs: Ragged
    ref_log_probs: Ragged | None
    rollout_is_weights: Ragged | None
    group: np.ndarray
    rollout_log_probs: Ragged | None = None
    in_loss: np.ndarray | None = None


def wrong_signal(signals: Signals, responses: Ragged, step: int) -> Exception | None:
    """What speaks against training on signals: they are not aligned with the responses, or not finite. A NaN outside
    the loss mask, too, would reach the gradient, as 0 times NaN."""
    columns = {
        "advantage": signals.advantages,
        "old log-prob": signals.old_log_probs,
        "reference log-prob": signals.ref_log_probs,
        "importance weight": signals.rollout_is_weights,
    }
    for name, rows in {**columns, "loss mask": signals.loss_mask}.items():
        if rows is not None and not np.array_equal(rows.offsets, responses.offsets):
            return ValueError(f"step {step}: the {name}s are not aligned with the responses")
    for name, rows in columns.items():
        if rows is None or (finite := np.isfinite(rows.values)).all():
            continue
        bad = np.flatnonzero(~finite)
        row = int(np.searchsorted(responses.offsets, bad[0], side="right")) - 1
        return NonFiniteError(
            f"step {step}: the {name} of sample {row}, token {bad[0] - responses.offsets[row]}, is "
            f"{rows.values[bad[0]]} ({len(bad)} such values). Nothing was trained on it."
        )
    return None
