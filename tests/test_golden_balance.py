"""Balancing against the partitions, workloads and metrics that verl gave for the same lengths (tests/data/golden)."""

import numpy as np
import pytest
from golden import cases, check, check_metrics, values

from storage.ragged import Ragged
from tasks.balance import (
    balance_metrics,
    greedy_partition,
    karmarkar_karp,
    micro_batches,
    partition_groups,
    sequence_cost,
)
from tasks.workers.sequences import MicroBatching, Sequences, cut


def of(function, raises=False):
    return cases("balance", lambda case: case["function"] == function and case["raises"] == raises)


def lists(parts):
    return [part.tolist() for part in parts]


def lengths_of(case):
    return np.asarray(values(case, "inputs")["seqlen_list"])


@of("get_seqlen_balanced_partitions")
def test_balanced_partitions_are_verls(case):
    want, params, lengths = values(case, "expected"), case["params"], lengths_of(case)
    parts = karmarkar_karp(lengths, params["k_partitions"], equal_sizes=params["equal_size"])
    assert lists(parts) == want["partitions"]
    check(case, [lengths[part].sum() for part in parts], want["loads"])


@of("get_seqlen_balanced_partitions", raises=True)
def test_what_verl_refuses_as_partition_is_refused(case):
    with pytest.raises(ValueError, match="sequences cannot be split into"):
        karmarkar_karp(lengths_of(case), case["params"]["k_partitions"], equal_sizes=case["params"]["equal_size"])


@of("greedy_partition")
def test_greedy_partitions_are_verls(case):
    params = case["params"]
    parts = greedy_partition(lengths_of(case), params["k_partitions"], equal_sizes=params["equal_size"])
    assert lists(parts) == values(case, "expected")["partitions"]


@of("calculate_workload")
def test_costs_of_sequences_are_verls_workloads(case):
    check(case, sequence_cost(lengths_of(case)), values(case, "expected")["workload"])


@of("log_seqlen_unbalance")
def test_balance_metrics_are_verls(case):
    given = values(case, "inputs")
    parts = [np.asarray(part) for part in given["partitions"]]
    got = balance_metrics(lengths_of(case), parts, case["params"]["prefix"])
    check_metrics(case, got, values(case, "expected")["metrics"])


@of("get_group_balanced_partitions")
def test_partitions_of_whole_groups_are_verls(case):
    group, cost = values(case, "inputs")["uid_list"], sequence_cost(lengths_of(case))
    parts = partition_groups(cost, np.asarray(group), case["params"]["k_partitions"])
    assert lists(parts) == values(case, "expected")["partitions"]


# Ours come heaviest first, verl's with the heaviest in the middle: the set of micro-batches is the same.
@of("rearrange_micro_batches")
def test_micro_batches_are_verls_in_another_order(case):
    want, lengths, limit = values(case, "expected"), lengths_of(case), case["params"]["ppo_max_token_len_per_gpu"]
    parts = micro_batches(lengths, limit)
    assert sorted(lists(parts)) == sorted(want["micro_batches"])
    assert max(lengths[part].sum() for part in parts) == want["max_tokens"] <= limit
    order = np.concatenate(parts)
    assert order[np.argsort(order)].tolist() == list(range(len(lengths)))


@of("rearrange_micro_batches", raises=True)
def test_a_sequence_longer_than_a_micro_batch_is_refused_as_by_verl(case):
    with pytest.raises(ValueError, match=r"sequence 3 has 26 tokens .*ref\.actor\.ppo_max_token_len_per_gpu"):
        micro_batches(lengths_of(case), case["params"]["ppo_max_token_len_per_gpu"])


# ------------------------------------------------------------------------------------------- the padded cut of a worker


def sequences_of(lengths):
    """Sequences of the given lengths, each with a prompt of its own of one token."""
    prompts = Ragged.from_lengths(np.ones(len(lengths), dtype=np.int32), np.ones(len(lengths), dtype=np.int64))
    responses = Ragged.from_lengths(np.ones(int(lengths.sum()) - len(lengths), dtype=np.int32), lengths - 1)
    return Sequences(prompts, np.arange(len(lengths)), responses)


@of("rearrange_micro_batches")
def test_the_workers_cut_gives_verls_guarantees_with_padding_counted(case):
    lengths, limit = lengths_of(case), case["params"]["ppo_max_token_len_per_gpu"]
    parts = cut(sequences_of(lengths), np.arange(len(lengths)), MicroBatching(None, limit))
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(lengths)))
    assert max(len(part) * lengths[part].max() for part in parts) <= limit


@of("rearrange_micro_batches", raises=True)
def test_the_workers_cut_refuses_a_sequence_that_fits_no_micro_batch(case):
    lengths, limit = lengths_of(case), case["params"]["ppo_max_token_len_per_gpu"]
    with pytest.raises(ValueError, match=r"actor_rollout_ref\.actor\.ppo_max_token_len_per_gpu"):
        cut(sequences_of(lengths), np.arange(len(lengths)), MicroBatching(None, limit))
