"""Real ranks for tests: gloo processes that each run one module-level function, with a hard timeout."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

COLLECTIVE_TIMEOUT_S = 100
"""How long a rank waits for another one, on a busy machine too; then the test has found a hang."""


def run_ranks(function: Any, world_size: int, folder: Path, *, timeout_s: float = 400, **arguments: Any) -> list[Any]:
    """Call `function(rank, world_size, **arguments)` in `world_size` processes of one gloo group.

    Args:
        function: at the top of a test module; what it returns must fit into JSON.
        world_size: processes.
        folder: where results and outputs go.
        timeout_s: then all of them are killed.
        arguments: JSON values too.

    Returns:
        What each rank returned, by rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {
        "file": function.__globals__["__file__"],
        "name": function.__name__,
        "world_size": world_size,
        "port": port,
        "arguments": arguments,
    }
    (folder / "job.json").write_text(json.dumps(job))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "OMP_WAIT_POLICY": "passive"}
    processes = []
    try:
        for rank in range(world_size):
            with (folder / f"{rank}.log").open("wb") as log:
                command = [sys.executable, __file__, str(folder), str(rank)]
                processes.append(
                    subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
                )
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=timeout_s)
        for process in processes:
            process.wait(max((deadline - datetime.datetime.now()).total_seconds(), 0.1))
    except subprocess.TimeoutExpired:
        raise AssertionError(f"ranks did not end within {timeout_s} s:\n{_logs(folder, world_size)}") from None
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    missing = [rank for rank in range(world_size) if not (folder / f"{rank}.json").exists()]
    assert not missing, f"ranks {missing} failed:\n{_logs(folder, world_size)}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def _logs(folder: Path, world_size: int) -> str:
    return "\n".join(f"--- rank {rank}\n{(folder / f'{rank}.log').read_text()[-3000:]}" for rank in range(world_size))


def _load(path: str) -> Any:
    sys.path.insert(0, str(Path(path).parent))
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _main(folder: Path, rank: int) -> None:
    import torch.distributed as dist

    job = json.loads((folder / "job.json").read_text())
    function = getattr(_load(job["file"]), job["name"])
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{job['port']}",
        rank=rank,
        world_size=job["world_size"],
        timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT_S),
    )
    result = function(rank, job["world_size"], **job["arguments"])
    (folder / f"{rank}.json.new").write_text(json.dumps(result))
    (folder / f"{rank}.json.new").rename(folder / f"{rank}.json")
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    # Some of 100 gloo processes abort while they exit, after correct results.
    os._exit(0)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
