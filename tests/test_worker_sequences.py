"""Cutting sequences into micro-batches: every row once, real limits, little padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.ragged import Ragged
from tasks.balance import sequence_cost
from tasks.workers.layout import Layout
from tasks.workers.sequences import MicroBatching, Sequences, Share, cut, share_out


def make(prompt_lengths, group, response_lengths):
    return Sequences(
        Ragged.from_rows([np.ones(n) for n in prompt_lengths], np.int32),
        np.asarray(group, dtype=np.int64),
        Ragged.from_rows([np.ones(n) for n in response_lengths], np.int32),
    )


def rectangle(sequences, part):
    prompts = sequences.prompts.lengths[sequences.group[part]]
    return len(part) * (prompts.max() + sequences.responses.lengths[part].max())


def test_samples_of_a_prompt_share_a_micro_batch():
    sequences = make([9, 9], [0, 1, 0, 1], [3, 3, 3, 3])
    parts = cut(sequences, np.arange(4), MicroBatching(2, None))
    assert [part.tolist() for part in parts] == [[0, 2], [1, 3]]


def test_rows_go_by_length_where_that_is_less_work():
    sequences = make([1, 1], [0, 1, 0, 1], [90, 2, 2, 90])
    parts = cut(sequences, np.arange(4), MicroBatching(2, None))
    assert sorted(sorted(part.tolist()) for part in parts) == [[0, 3], [1, 2]]


def test_the_last_micro_batch_may_be_short():
    sequences = make([2], [0] * 5, [1] * 5)
    assert [len(part) for part in cut(sequences, np.arange(5), MicroBatching(2, None))] == [2, 2, 1]


def test_a_sequence_that_fits_no_micro_batch_is_named_with_the_way_out():
    sequences = make([4], [0, 0], [1, 5])
    with pytest.raises(ValueError, match=r"sequence 1 has 9 tokens but a micro-batch holds 8\. Raise .*max_token_len"):
        cut(sequences, np.arange(2), MicroBatching(None, 8))


def test_a_micro_batch_has_one_limit():
    for limits in ((None, None), (4, 100)):
        with pytest.raises(ValueError, match="either by sequences or by tokens"):
            MicroBatching(*limits)


def test_no_rows_make_no_micro_batch():
    sequences = make([4], [0], [1])
    for micro in (MicroBatching(2, None), MicroBatching(None, 64)):
        assert cut(sequences, np.arange(0), micro) == []


def test_ranks_that_share_sequences_hold_as_many_tokens_each():
    """As the plan has it: the cap of a device times the devices that share a sequence."""
    tokens, rows = MicroBatching(None, 1000), MicroBatching(4, None)
    assert tokens.shared_by(1) == tokens and rows.shared_by(2) == rows
    long = make([200], [0] * 4, [1000, 600, 300, 300])
    with pytest.raises(ValueError, match="sequence 0 has 1200 tokens but a micro-batch holds 1000"):
        share_out(long, np.arange(4), tokens, 1, balance=True, layout=Layout.PACKED)
    share = share_out(long, np.arange(4), tokens.shared_by(2), 1, balance=True, layout=Layout.PACKED)
    assert sorted(share.order) == [0, 1, 2, 3] and share.micro_batches == 2  # 3000 tokens in micro-batches of 2000
    assert all(long.lengths()[part].sum() <= 2000 for part in share.parts[0])
    equal = make([100], [0] * 12, [400] * 12)
    assert [
        share_out(equal, np.arange(12), tokens.shared_by(sp), 2, balance=True, layout=Layout.PACKED).micro_batches
        for sp in (1, 2, 3)
    ] == [3, 2, 1]  # 6 sequences of 500 tokens per rank: 2, 4 and 6 in one


def test_packed_micro_batches_of_equal_size_cost_nearly_the_same():
    random = np.random.default_rng(0)
    for count in (64, 61, 3):
        sequences = make([20], [0] * count, random.integers(1, 900, count))
        parts = cut(sequences, np.arange(count), MicroBatching(8, None), packed=True)
        cost = [int(sequence_cost(sequences.lengths()[part]).sum()) for part in parts]
        assert sorted(np.concatenate(parts).tolist()) == list(range(count)) and len(parts) == -(-count // 8)
        assert max(len(part) for part in parts) <= 8 and cost == sorted(cost, reverse=True)
        assert cost[0] - cost[-1] < 0.15 * cost[0]
    assert cut(sequences, np.arange(0), MicroBatching(8, None), packed=True) == []


def test_an_idle_turn_computes_the_shortest_sequence_that_has_a_response():
    parts = [[np.array([0]), np.array([1])], [np.array([2]), np.array([3])], [np.array([4])]]
    responses, prompts = np.array([1, 9, 0, 5, 0]), np.array([90, 3, 2, 4, 1])
    share = Share(parts, responses, responses + prompts)
    assert share.micro_batches == 2  # of the first rank; the others have one with a response, and none
    [own, idle] = share.turns(1)
    assert (own.rows.tolist(), own.idle) == ([3], False)
    assert (idle.rows.tolist(), idle.places, idle.idle) == ([3], slice(3, 4), True)
    assert [(turn.rows.tolist(), turn.idle) for turn in share.turns(2)] == [([3], True)] * 2


@given(data=st.data())
def test_every_row_is_cut_once_and_the_token_limit_holds(data):
    prompts = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    group = data.draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=12))
    sequences = make(prompts, group, data.draw(st.lists(st.integers(0, 20), min_size=len(group), max_size=len(group))))
    rows = np.asarray(data.draw(st.permutations(range(len(group))))[: data.draw(st.integers(1, len(group)))])
    limit = data.draw(st.integers(40, 200))
    share = data.draw(st.booleans())
    parts = cut(sequences, rows, MicroBatching(None, limit), share_prompts=share)
    assert sorted(np.concatenate(parts).tolist()) == sorted(rows.tolist())
    assert all(len(part) and rectangle(sequences, part) <= limit for part in parts)
