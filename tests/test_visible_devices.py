"""Which accelerators the ranks are given, as far as one sees it without any: the ranks' places and environments.

Ray is told that there are accelerators; nothing is computed on them, and CUDA itself is never asked.
"""

import time
from pathlib import Path

import psutil
import pytest

from tasks.engines.vllm_settings import environment
from tasks.workers import ray_cluster
from tasks.workers.rank import training_role
from tasks.workers.ray_cluster import ray_of
from tasks.workers.ray_group import Pool, RayGroup


@pytest.mark.parametrize(
    ("own", "visible", "number"),
    [(("7",), "7", 0), (("7",), "5,7", 1), (("3",), None, 3), (("GPU-a",), "GPU-b,GPU-a", 1), ((), "5,7", 0)],
)
def test_a_rank_computes_on_the_accelerator_that_ray_has_given_it(own, visible, number):
    ray_cluster.before_import(300)
    from tasks.workers.ray_rank import cuda_number

    assert cuda_number(own, visible) == number


@pytest.fixture
def eight_of_which_two_are_in_sight(monkeypatch):
    """Ray counts the accelerators of a machine before it starts; here it counts eight."""
    ray_cluster.before_import(300)
    from ray._private.accelerators import NvidiaGPUAcceleratorManager

    monkeypatch.setattr(NvidiaGPUAcceleratorManager, "get_current_node_num_accelerators", staticmethod(lambda: 8))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


@pytest.mark.slow
@pytest.mark.parametrize("noset", ["0", "1"])
@pytest.mark.usefixtures("eight_of_which_two_are_in_sight")
def test_ranks_and_engines_see_what_cuda_visible_devices_names_and_no_more(tiny_run, tmp_path, monkeypatch, noset):
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", noset)
    import ray_tasks

    from tasks.workers.ray_rank import cuda_number

    cfg = tiny_run("trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    with ray_of(None, 2, gpus=None) as cuda:
        assert cuda
        group = RayGroup(cfg, Pool(1, 2, training_role(cfg)), tmp_path / "logs", cuda=cuda, total_steps=1)
        try:
            group._start_processes(time.monotonic() + 120)
            given = [one.gpus for one in group.about]
            assert sorted(given) == [("5",), ("7",)]
            seen = group.run(ray_tasks.environment, "CUDA_VISIBLE_DEVICES")
            assert seen == (["5,7"] * 2 if noset == "1" else [own[0] for own in given])
            chosen = [one.split(",")[cuda_number(own, one)] for own, one in zip(given, seen, strict=True)]
            assert chosen == [own[0] for own in given]
            for rank in (0, 1):
                engine = environment(cfg, "cuda", group._gpus_of_replica(rank), own_python=False)
                assert engine["CUDA_VISIBLE_DEVICES"] == ",".join(own[0] for own in given)
        finally:
            pids = [one.pid for one in group.about]
            group.end()
            assert not any(map(psutil.pid_exists, pids))


@pytest.mark.slow
@pytest.mark.usefixtures("eight_of_which_two_are_in_sight")
def test_more_devices_than_are_in_sight_are_refused_with_the_way_out():
    refused = pytest.raises(ValueError, match=r"3 devices are asked for .* Ray sees 2 GPUs.*CUDA_VISIBLE_DEVICES")
    with refused, ray_of(None, 3, gpus=True):
        pass
