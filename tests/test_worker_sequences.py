"""Cutting sequences into micro-batches: every row once, real limits, little padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.ragged import Ragged
from tasks.workers.sequences import MicroBatching, Sequences, cut


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
