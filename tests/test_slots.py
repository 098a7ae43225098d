"""Slots: kernel locks that die with their holder and with nothing else."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from servers import wait_until

from flows.slots import acquire, holders, waiting

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]

HOLDS_THE_INTERPRETER = """
import ctypes, sys
print("began", flush=True)
libc = ctypes.PyDLL(None)  # a call that keeps the interpreter's lock: no other thread of this process runs
libc.sleep(int(sys.argv[1]))
print("done", flush=True)
"""


@pytest.fixture
def started():
    """Processes to be ended after the test."""
    processes = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def test_a_slot_has_one_holder_and_the_next_number_is_given(tmp_path):
    with acquire(tmp_path, 2, {"run": "a"}) as first, acquire(tmp_path, 2, {"run": "b"}) as second:
        assert (first.number, second.number) == (0, 1)
        assert acquire(tmp_path, 2, wait_s=0) is None
        assert [(one.number, one.pid, one.about) for one in holders(tmp_path, 2)] == [
            (0, os.getpid(), {"run": "a"}),
            (1, os.getpid(), {"run": "b"}),
        ]
    assert holders(tmp_path, 2) == []


def test_no_slot_is_a_mistake_and_not_a_wait_for_ever(tmp_path):
    with pytest.raises(ValueError, match=r"0 slots in .*there must be one at least"):
        acquire(tmp_path, 0)


def test_a_child_holds_the_slot_that_was_handed_to_it_until_it_ends(tmp_path, started):
    with acquire(tmp_path, 1, {"run": "a"}) as slot:
        child = slot.start(SLEEP)
        started.append(child)
    assert [(one.pid, one.about) for one in holders(tmp_path, 1)] == [(child.pid, {"run": "a"})]
    assert acquire(tmp_path, 1, wait_s=0) is None
    child.kill()
    child.wait()
    assert holders(tmp_path, 1) == []
    with acquire(tmp_path, 1, wait_s=0) as slot:
        assert slot.number == 0


def test_a_child_keeps_the_slot_when_its_parent_is_killed(tmp_path, started):
    program = (
        "import sys; from pathlib import Path; from flows.slots import acquire\n"
        f"print(acquire(Path({str(tmp_path)!r}), 1).start({SLEEP!r}).pid, flush=True)\n"
        "import time; time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    started.append(parent)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    assert [one.pid for one in holders(tmp_path, 1)] == [child]
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not holders(tmp_path, 1), 10)


def test_a_killed_holders_slot_goes_to_the_next_in_the_queue_at_once(tmp_path, started):
    with acquire(tmp_path, 1) as slot:
        holder = slot.start(SLEEP)
        started.append(holder)
    moment = {}

    def wait_for_it():
        with acquire(tmp_path, 1):
            moment["taken"] = time.monotonic()

    waiter = threading.Thread(target=wait_for_it)
    waiter.start()
    wait_until(lambda: waiting(tmp_path) == 1, 10)
    holder.kill()
    killed = time.monotonic()
    waiter.join(20)
    assert moment["taken"] - killed < 2.0


def test_a_holder_that_blocks_its_interpreter_keeps_its_slot(tmp_path, started):
    seconds = 3
    with acquire(tmp_path, 1) as slot:
        busy = slot.start(
            [sys.executable, "-c", HOLDS_THE_INTERPRETER, str(seconds)], stdout=subprocess.PIPE, text=True
        )
        started.append(busy)
    assert busy.stdout.readline() == "began\n"
    while busy.poll() is None:
        if acquire(tmp_path, 1, wait_s=0.2) is not None:
            break
    # The slot is free when, and only when, the holder has come to its end by itself.
    assert busy.wait(10) == 0
    assert busy.stdout.readline() == "done\n"


def test_a_stopped_holder_keeps_its_slot(tmp_path, started):
    with acquire(tmp_path, 1) as slot:
        holder = slot.start(SLEEP)
        started.append(holder)
    holder.send_signal(signal.SIGSTOP)
    assert acquire(tmp_path, 1, wait_s=1.0) is None
    assert holder.poll() is None


def test_those_who_wait_are_served_in_the_order_in_which_they_came(tmp_path):
    served = []

    def wait_in_line(name):
        with acquire(tmp_path, 1):
            served.append(name)

    with acquire(tmp_path, 1):
        threads = []
        for name in range(5):
            threads.append(threading.Thread(target=wait_in_line, args=(name,)))
            threads[-1].start()
            wait_until(lambda: waiting(tmp_path) == len(threads), 10)
        assert acquire(tmp_path, 1, wait_s=0) is None, "who does not wait does not jump the queue"
        assert acquire(tmp_path, 1, most_waiting=5) is None, "the queue is as long as was allowed"
    for thread in threads:
        thread.join(20)
    assert served == [0, 1, 2, 3, 4]
    assert list(tmp_path.glob("ticket-*")) == []


def test_who_dies_while_waiting_does_not_hold_up_the_queue(tmp_path, started):
    program = (
        f"from pathlib import Path; from flows.slots import acquire; acquire(Path({str(tmp_path)!r}), 1); print('took')"
    )
    with acquire(tmp_path, 1):
        dead = subprocess.Popen([sys.executable, "-c", program])
        started.append(dead)
        wait_until(lambda: waiting(tmp_path) == 1, 20)
        dead.kill()
        dead.wait()
        assert waiting(tmp_path) == 0
    with acquire(tmp_path, 1, wait_s=0) as slot:
        assert slot is not None


def test_a_wait_ends_when_it_is_told_to(tmp_path):
    class Told(Exception):
        pass

    def told():
        raise Told

    with acquire(tmp_path, 1):
        with pytest.raises(Told):
            acquire(tmp_path, 1, check=told)
        assert waiting(tmp_path) == 0


def test_a_slot_that_is_given_back_is_free_although_a_forked_child_has_its_descriptor(tmp_path, started):
    program = (
        "import os, time; from pathlib import Path; from flows.slots import acquire\n"
        f"slot = acquire(Path({str(tmp_path)!r}), 1)\n"
        "child = os.fork()\n"
        "if child: slot.release(); print(child, flush=True)\n"
        "time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    started.append(holder)
    forked = int(holder.stdout.readline())
    try:
        assert holders(tmp_path, 1) == []
    finally:
        os.kill(forked, signal.SIGKILL)


def test_sixty_short_holders_never_share_a_slot(tmp_path):
    held, most, lock = [0, 0], [], threading.Lock()

    def hold():
        with acquire(tmp_path, 2) as slot:
            with lock:
                held[slot.number] += 1
                most.append(max(held))
            time.sleep(0.005)
            with lock:
                held[slot.number] -= 1

    threads = [threading.Thread(target=hold) for _ in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1] * 60
