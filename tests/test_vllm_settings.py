"""What vLLM is told on which platform, what is refused, and what counts as proof of new weights. Runs no vLLM."""

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from test_engine import Letters

from flows.local_paths import with_absolute_paths
from flows.plan_view import plan_of
from flows.support import refuse_unbuilt
from tasks.config import RunConfig
from tasks.engines.engine_process import EngineDied, EngineFailed, EngineProcess
from tasks.engines.hand_over import hand_over
from tasks.engines.policy_folder import POLICY, end_tokens, fault_of, read_policy
from tasks.engines.vllm_engine import VllmEngine
from tasks.engines.vllm_settings import arguments, check_supported, environment, log_probs_mode, without_effect
from tasks.workers.policy import PolicyWorker


def config(*, model=None, actor=None, **rollout):
    sections = {"model": model or {}, "actor": actor or {}, "rollout": {"tensor_model_parallel_size": 1, **rollout}}
    data = {"max_prompt_length": 100, "max_response_length": 50}
    return RunConfig.model_validate({"actor_rollout_ref": sections, "data": data})


def model_folder(tmp_path, **values):
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "hidden_size": 128}
    (tmp_path / "config.json").write_text(json.dumps({**sizes, "max_position_embeddings": 2048, **values}))
    return tmp_path


# ---------------------------------------------------------------------------------------------------------- arguments


def test_on_cpu_the_cache_holds_every_response_and_prompts_are_computed_whole(tmp_path):
    chosen = arguments(config(max_num_seqs=10, max_num_batched_tokens=64), "cpu", model_folder(tmp_path), None)
    # 100 + 50 tokens take 2 blocks of 128; a block holds keys and values of 3 layers, 2 heads, 32 float32 values each.
    assert chosen["kv_cache_memory_bytes"] == (10 * 2 + 16) * 128 * 2 * 3 * 2 * 32 * 4
    assert chosen["enable_chunked_prefill"] is False and chosen["enforce_eager"] is True
    assert chosen["max_num_batched_tokens"] == chosen["max_model_len"] == 151
    assert (chosen["dtype"], chosen["skip_tokenizer_init"]) == ("float32", True)
    assert "gpu_memory_utilization" not in chosen and "enable_sleep_mode" not in chosen


def test_the_cpu_cache_is_bounded_but_holds_one_sequence_of_full_length(tmp_path):
    large = {"num_hidden_layers": 80, "num_key_value_heads": 64, "num_attention_heads": 64, "hidden_size": 8192}
    folder = model_folder(tmp_path, **large, max_position_embeddings=100_000)
    assert arguments(config(max_num_seqs=512), "cpu", folder, None)["kv_cache_memory_bytes"] == 4 * 2**30
    chosen = arguments(config(max_model_len=50_000), "cpu", folder, None)
    assert chosen["kv_cache_memory_bytes"] > 50_000 * 2 * 80 * 64 * 128 * 4


def test_on_cuda_memory_sleep_and_graphs_follow_the_configuration(tmp_path):
    cfg = config(gpu_memory_utilization=0.4, free_cache_engine=False, enforce_eager=True, tensor_model_parallel_size=2)
    chosen = arguments(cfg, "cuda", model_folder(tmp_path), tmp_path / "tokenizer")
    assert (chosen["gpu_memory_utilization"], chosen["enable_sleep_mode"], chosen["enforce_eager"]) == (
        0.4,
        False,
        True,
    )
    assert (chosen["dtype"], chosen["tensor_parallel_size"]) == ("bfloat16", 2)
    assert chosen["tokenizer"] == str(tmp_path / "tokenizer") and "kv_cache_memory_bytes" not in chosen


def test_the_engine_computes_in_the_policys_type(tmp_path):
    folder = model_folder(tmp_path)
    mixed = {"fsdp_config": {"mixed_precision": {"param_dtype": "bf16"}}}
    assert arguments(config(actor=mixed), "cpu", folder, None)["dtype"] == "bfloat16"
    assert arguments(config(model={"dtype": "bf16"}), "cpu", folder, None)["dtype"] == "bfloat16"


def test_the_context_is_no_longer_than_the_model_allows_nor_than_responses_need(tmp_path):
    folder = model_folder(tmp_path, max_position_embeddings=120)
    assert arguments(config(), "cpu", folder, None)["max_model_len"] == 121
    assert arguments(config(max_model_len=60), "cpu", folder, None)["max_model_len"] == 61


def test_further_arguments_go_to_vllm_but_not_over_what_the_engine_relies_on(tmp_path):
    cfg = config(engine_kwargs={"vllm": {"kv_cache_memory_bytes": 2**28, "swap_space": None}, "sglang": {"a": 1}})
    check_supported(cfg)
    chosen = arguments(cfg, "cpu", model_folder(tmp_path), None)
    assert chosen["kv_cache_memory_bytes"] == 2**28 and "swap_space" not in chosen and "a" not in chosen
    with pytest.raises(ValueError, match=r"engine_kwargs\.vllm\.max_model_len cannot be set"):
        check_supported(config(engine_kwargs={"vllm": {"max_model_len": 5}}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2: an engine holds one copy"),
        ({"temperature": 2.5}, "temperature=2.5: vLLM samples at 0"),
        ({"temperature": 0.001}, "temperature=0.001"),
        ({"val_kwargs": {"do_sample": True, "temperature": 3.0}}, r"val_kwargs.temperature=3.0"),
        ({"engine_python": "/nowhere/python"}, "engine_python=/nowhere/python is no program"),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_its_key(values, words):
    with pytest.raises(ValueError, match=words):
        VllmEngine(config(**values), tokenizer=None)


def test_the_engines_python_is_kept_in_full_and_its_links_are_not_followed(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    wanted = str(tmp_path / "bin" / "python")
    assert VllmEngine(config(engine_python="bin/python"), tokenizer=None)._python == wanted
    rollouts = [
        with_absolute_paths(config(engine_python=name)).actor_rollout_ref.rollout for name in ("bin/python", "py")
    ]
    assert [rollout.engine_python for rollout in rollouts] == [wanted, "py"]


def test_what_vllm_cannot_do_is_refused_before_anything_is_opened():
    cfg = config(name="vllm", temperature=2.5)
    with pytest.raises(ValueError, match=r"cannot train it:\n- .*temperature=2.5: vLLM samples at 0"):
        refuse_unbuilt(cfg, plan_of(cfg))


def test_settings_without_effect_are_named_once_they_are_made():
    assert without_effect(config(), "cpu") == []
    said = without_effect(config(free_cache_engine=True, enable_chunked_prefill=True, load_format="dummy"), "cpu")
    assert [sentence.split()[0].rsplit(".", 1)[1] for sentence in said] == [
        "enable_chunked_prefill",
        "free_cache_engine",
        "load_format=dummy:",
    ]
    assert without_effect(config(free_cache_engine=True, enforce_eager=True), "cuda") == []


def test_log_probs_are_those_before_the_filters_where_vllm_can_say_them():
    assert log_probs_mode(config(top_p=0.9)) == log_probs_mode(config(top_k=5)) == "raw_logprobs"
    assert log_probs_mode(config()) == log_probs_mode(config(top_p=0.9, temperature=0.7)) == "processed_logprobs"
    assert "after the filters" in without_effect(config(top_p=0.9, temperature=0.7), "cuda")[0]


# --------------------------------------------------------------------------------------------------------- environment


def test_the_environment_has_nothing_of_other_process_groups_or_other_pythons(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "PYTHONPATH"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    own, same = (environment(config(), "cpu", None, own_python=own) for own in (True, False))
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & (set(own) | set(same))
    assert "PYTHONPATH" not in own and same["PYTHONPATH"] == "1"
    assert (own["OMP_NUM_THREADS"], own["VLLM_CPU_OMP_THREADS_BIND"], own["GOMP_SPINCOUNT"]) == ("3", "nobind", "0")
    assert own["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0" and own["VLLM_HOST_IP"] == "127.0.0.1"


def test_a_replica_sees_its_own_devices_alone(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert environment(config(), "cuda", ("2", "3"), own_python=False)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert environment(config(), "cuda", None, own_python=False)["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert "OMP_WAIT_POLICY" not in environment(config(), "cuda", None, own_python=False)


# --------------------------------------------------------------------------------------------------------------- proof


def test_log_probs_near_the_policys_are_proof():
    wanted = np.linspace(-5, -1, 200)
    assert fault_of(wanted, wanted + 1e-4, wanted[-1], None, 1e-3) is None
    assert fault_of(wanted, wanted + 1e-4, wanted[-1], wanted - 0.5, 1e-3) is None


def test_log_probs_of_other_weights_are_no_proof():
    wanted = np.linspace(-5, -1, 200)
    assert "differ from the policy's by 0.002" in fault_of(wanted, wanted + 2e-3, wanted[-1], None, 1e-3)
    assert "differ" in fault_of(wanted, np.full(200, np.nan), 0.0, None, 1e-3)
    assert "199 log-probs" in fault_of(wanted, wanted[1:], 0.0, None, 1e-3)
    assert "cache is stale" in fault_of(wanted, wanted, wanted[-1] - 0.1, None, 1e-3)


def test_a_small_update_that_was_not_taken_is_seen_although_the_gap_is_small():
    random = np.random.default_rng(0)
    noise, moved = random.normal(0, 1e-5, 200), random.normal(0, 1e-4, 200)
    old = np.linspace(-5, -1, 200)
    new = old + moved
    assert "of the policy before" in fault_of(new, old + noise, float(old[-1]), old, 1e-3)
    assert fault_of(new, new + noise, float(new[-1]), old, 1e-3) is None


def test_an_update_smaller_than_rounding_raises_no_alarm():
    random = np.random.default_rng(0)
    for scale in (1e-9, 1e-6, 1e-3, 1e-2):
        old = np.linspace(-5, -1, 200)
        new = old + random.normal(0, scale, 200)
        got = new + random.normal(0, 0.05, 200)
        assert fault_of(new, got, float(got[-1]), old, 0.15) is None


def test_a_folder_without_its_last_file_or_of_another_policy_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no complete hand-over"):
        read_policy(tmp_path, 1, "abc")
    (tmp_path / POLICY).write_text(json.dumps({"policy_version": 1, "policy_digest": "abc"}))
    with pytest.raises(ValueError, match="holds policy 1 with digest abc, not policy 2 with abc"):
        read_policy(tmp_path, 2, "abc")


def test_end_tokens_are_those_of_generation_settings_and_tokenizer(tmp_path):
    folder = model_folder(tmp_path, eos_token_id=[1, 3])
    assert end_tokens(folder, 5) == [1, 3, 5] and end_tokens(folder, None) == [1, 3]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert end_tokens(folder, 5) == [2, 5]


# --------------------------------------------------------------------------------------------------------- the process


def a_process(tmp_path, body, startup_s=20.0):
    """A real process that speaks the protocol and then does as told."""
    script = tmp_path / "script.py"
    script.write_text(
        "import json, os, select, sys, time\n"
        "if sys.argv[1] == '--watch':\n"
        "    sys.stdin.read()\n"
        "    sys.exit()\n"
        "spec = json.load(open(sys.argv[1]))\n"
        "def say(**m): os.write(spec['replies'], json.dumps(m).encode() + b'\\n')\n" + body
    )
    return EngineProcess(sys.executable, script, {}, {}, tmp_path / "log", tmp_path / "scratch", startup_s)


def test_a_process_that_cannot_start_says_why(tmp_path):
    with pytest.raises(EngineFailed, match="no such model"):
        a_process(tmp_path, "say(failed='ValueError: no such model')\n")
    with pytest.raises(EngineDied, match=r"in start: it ended with exit code 3.*\n.*out of luck"):
        a_process(tmp_path, "print('out of luck', flush=True); sys.exit(3)\n")
    with pytest.raises(EngineDied, match=r"no sign of life for 0.5 s, actor_rollout_ref.rollout.engine_startup_s"):
        a_process(tmp_path, "time.sleep(60)\n", startup_s=0.5)


def test_a_call_that_is_slow_but_alive_is_waited_for_and_one_that_hangs_is_not(tmp_path):
    body = "say(done={})\nos.read(spec['requests'], 999)\n[(time.sleep(0.3), say(alive=i)) for i in range(5)]\n"
    process = a_process(tmp_path, body + "say(done={'a': 1})\nos.read(spec['requests'], 999)\ntime.sleep(60)\n")
    assert process.call("one", 1.0, "key") == {"a": 1}
    with pytest.raises(EngineDied, match="in two: no sign of life for 1 s, key"):
        process.call("two", 1.0, "key")
    assert not process.alive


def test_a_process_that_is_killed_in_a_call_is_named_with_its_signal(tmp_path):
    body = "say(done={})\nos.read(spec['requests'], 999)\nprint('last words', flush=True)\nos.kill(os.getpid(), 9)\n"
    process = a_process(tmp_path, body)
    with pytest.raises(EngineDied, match=r"killed by SIGKILL, perhaps for want of memory.*\n.*last words"):
        process.call("one", 5.0, "key")
    assert isinstance(EngineDied(), OSError)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is in this environment")
def test_an_environment_without_vllm_is_named_with_the_way_out(tmp_path, tiny_model):
    sections = {"model": {"path": str(tiny_model("llama")), "enable_gradient_checkpointing": False}}
    sections["rollout"] = {"tensor_model_parallel_size": 1}
    cfg = RunConfig.model_validate({"actor_rollout_ref": sections, "trainer": {"device": "cpu"}})
    engine = VllmEngine(cfg, Letters())
    with pytest.raises(EngineFailed, match=r"No module named 'vllm'.*docs/engines.md.*engine_python"):
        hand_over(PolicyWorker(cfg, total_steps=1, with_reference=False), engine)
    assert engine.policy_version == -1 and engine.process is None
    engine.close()
