"""Checks that need the policy: log-probs and updates made again from stored inputs, as `grpoflow replay` does."""

from __future__ import annotations

from flows.audit.compare import Where
from flows.audit.replay import Replayer
from flows.audit.verify.base import Account, Cannot
from flows.audit.verify.step import Look
from storage import Ragged, StorageError

REPLAYED = ("old_log_probs", "ref_log_probs", "updates")


def replayed(look: Look, account: Account) -> None:
    """Log-probs, and every optimizer step of an update, made again with the rebuilt policy are the stored ones."""
    if not look.bench.deep:
        raise Cannot("it needs the policy: give --deep")
    wanted = [stage for stage in look.having(*REPLAYED) if not look.is_dropped(stage)]
    if not wanted:
        return
    try:
        results = replayer(look).step(look.step, wanted)
    except (StorageError, ValueError) as error:
        raise Cannot(f"it cannot be made again: {error}") from error
    for result in results:
        if result.verdict == "cannot":
            account.skip(f"{result.stage} cannot be made again: {result.why}", look.step)
            continue
        account.look(max(result.rows, 1), result.measured)
        if result.verdict == "differs":
            first = result.first
            why = f" ({result.why})" if result.why else ""
            says = (
                f"{result.rows} rows differ beyond {result.tolerance}, first {first}{why}{_encoded_again(look, first)}"
            )
            sample = None if first is None or result.stage == "updates" else first.row
            account.fail(says, look.step, result.stage, sample, None if first is None else first.token)


def replayer(look: Look) -> Replayer:
    """The one that all steps of this command share: it holds a policy."""
    return look.bench.shared("replayer", lambda: Replayer(look.run))


def _encoded_again(look: Look, first: Where | None) -> str:
    """Says so where the ids of a sample with other log-probs are its text encoded again."""
    try:
        table = look.table("rollouts")
        row = table["sample_id"].to_pylist().index(first.row if first else None)
        again = look.bench.tokenizer(table["response_text"][row].as_py(), add_special_tokens=False)["input_ids"]
    except (Cannot, ValueError):
        return ""
    same = again == Ragged.from_arrow(table["response_ids"])[row].tolist()
    return "; its ids are its text encoded again" if same else ""
