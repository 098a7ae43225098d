"""Rank tasks that go wrong, for tests of the watch over ranks."""

import ctypes
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from storage import StorageError
from tasks.engines import transformers_engine
from tasks.generate import sample_responses
from tasks.workers import progress


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


def read_for_ever(pipe):
    """Read what nobody writes, as from a file system that does not answer; other threads go on."""
    with Path(pipe).open() as waiting:
        waiting.read()


def stuck(rank, number, pipe, seconds):
    """One rank's computation gets stuck in the kernel; the others compute for a while, each by itself."""
    if rank.number == number:
        read_for_ever(pipe)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        progress.note()
        time.sleep(0.1)


def stuck_as_it_samples(rank, *args, number, pipe):
    """`sample_responses`, but one rank gets stuck at its third token."""
    decode, done = transformers_engine._Wave._decode, []

    def slow(wave, newest, position):
        done.append(position)
        if len(done) == 3:
            read_for_ever(pipe)
        return decode(wave, newest, position)

    if rank.number == number:
        transformers_engine._Wave._decode = slow
    return sample_responses(rank, *args)


def environment(rank, name):
    """A variable as this rank's process has it."""
    return os.environ.get(name)
