"""Rank tasks that go wrong, for tests of the watch over ranks."""

import ctypes
import os
import signal
import time

import torch
import torch.distributed as dist

from storage import StorageError


def whoami(rank):
    """(number, ranks, process, threads)."""
    return rank.number, rank.ranks, os.getpid(), torch.get_num_threads()


def raise_on(rank, number, how):
    """Raise on one rank while the others wait for it in a collective; on all where number is None."""
    if number in (None, rank.number):
        raise {"value": ValueError("seven"), "storage": StorageError("gone"), "odd": KeyError("k")}[how]
    dist.barrier()


def nap(rank, seconds):
    """Sleep, and tell nobody."""
    time.sleep(seconds)
    return rank.number


def hang(rank, number):
    """One rank stops itself; the others wait for it in a collective."""
    if rank.number == number:
        os.kill(os.getpid(), signal.SIGSTOP)
    dist.barrier()


def crash(rank, number):
    """One rank reads what is not its own; the others wait for it in a collective."""
    if rank.number == number:
        print("about to read address 0", flush=True)
        ctypes.string_at(0)
    dist.barrier()
