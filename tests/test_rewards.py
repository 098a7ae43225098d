"""Rewards: the built-in rules, and any function in killable processes."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from storage import RunWriter, build_table, read_table
from tasks.config import RunConfig
from tasks.json_values import json_text, jsonable
from tasks.rewards import countdown, exact_match, gsm8k, math_answer, math_dapo
from tasks.rewards.functions import check_sources, configured_functions, function_of_source, functions_digest
from tasks.rewards.pool import RewardError, RewardPool, RewardRow, Verdict, check_error_share, score

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden" / "reward.json").read_text())

OURS_DIFFERS = {
    # A point at the end of a sentence and commas between thousands are no part of a number.
    "reward.gsm8k.strict.2": 1.0,
    "reward.gsm8k.flexible.1": 1.0,
    "reward.gsm8k.flexible.2": 1.0,
    "reward.gsm8k.flexible.11": 1.0,
    # math-verify and equal texts: 1,000 is 1000, and "yes" in \text{} is "yes".
    "reward.math.6": 1.0,
    "reward.math.9": 1.0,
}


def row(solution: str, truth: object = "1", i: int = 0, **columns: object) -> RewardRow:
    values = {"data_source": "openai/gsm8k", "prompt": "p", "ground_truth": truth, **columns}
    return RewardRow(sample_id=f"s{i}", solution_str=solution, **values)


def rows(*solutions: str, **columns: object) -> list[RewardRow]:
    return [row(solution, i=i, **columns) for i, solution in enumerate(solutions)]


def config(folder: Path | None = None, code: str = "", name: str = "compute_score", **reward: object) -> RunConfig:
    """A configuration whose reward function is `name` of this code; no retries unless a test is about them."""
    custom = {}
    if folder is not None:
        path = folder / "my_reward.py"
        path.write_text(textwrap.dedent(code))
        custom = {"path": str(path), "name": name}
    return RunConfig(custom_reward_function=custom, reward={"retries": 0, **reward})


def scores(verdicts: list[Verdict]) -> list[float | None]:
    return [verdict.score for verdict in verdicts]


# ------------------------------------------------------------------------------------------------- built-in functions


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_built_in_rewards_agree_with_the_references(case):
    params, inputs, expected = case["params"], case["inputs"], dict(case["expected"])
    answer = expected.pop("extracted", None) or expected.pop("pred", None)
    if case["function"] == "reward_score":
        if case.get("raises"):
            with pytest.raises(RewardError, match="no built-in reward function for data source 'nobody/nothing'"):
                function_of_source(params["data_source"])
            return
        (verdict,) = score([row(inputs["solution_str"], inputs["ground_truth"], **params)], config())
        assert verdict.score == expected["score"]
        return
    if case["function"] == "search_r1_like_qa_em":
        for within, key in ((False, "em"), (True, "subem")):
            assert exact_match.compute_score(**inputs, within=within)["score"] == expected[key]
        return
    module = {"gsm8k": gsm8k, "math_reward": math_answer, "math_dapo": math_dapo}[case["function"]]
    got = module.compute_score(**inputs, **params)
    assert got["score"] == OURS_DIFFERS.get(case["name"], expected["score"])
    if case["name"] not in OURS_DIFFERS and case["function"] != "math_reward":
        assert got["pred"] == (None if answer == "[INVALID]" else answer)


def test_a_full_stop_after_the_answer_is_no_part_of_it():
    assert gsm8k.compute_score("#### 42.", "42") == {"score": 1.0, "pred": "42"}
    assert gsm8k.compute_score("#### 1,234.", "1234") == {"score": 1.0, "pred": "1234"}
    assert gsm8k.compute_score("it is 42.", "42", method="flexible") == {"score": 1.0, "pred": "42"}


def test_a_worked_solution_is_a_reference_by_its_own_answer():
    assert gsm8k.compute_score("#### 5", "She has 2 and buys 3.\n#### 5")["score"] == 1.0


def test_boxed_answers_are_compared_as_mathematics():
    for answer, reference, right in [
        (r"x^2+2x+1", "(x+1)^2", 1.0),
        (r"\{3,2,1\}", r"\{1,2,3\}", 1.0),
        ("0.5", r"\frac{1}{2}", 1.0),
        ("1,2,3", "1,2,4", 0.0),
        (r"\frac{", "5", 0.0),
    ]:
        assert math_answer.compute_score(f"so \\boxed{{{answer}}}", reference)["score"] == right


@pytest.mark.parametrize(
    ("response", "score_", "answer"),
    [
        ("<answer>(1 + 2) * 3</answer>", 1.0, "(1 + 2) * 3"),
        ("<answer>9</answer> no: <answer> 3 × (2 + 1) = 9 </answer>", 1.0, "3 × (2 + 1)"),
        ("<answer>1 + 2 + 3</answer>", 0.1, "1 + 2 + 3"),
        ("<answer>3 * 3</answer>", 0.1, "3 * 3"),
        ("<answer>(1 + 2) * 3 * 1</answer>", 0.1, "(1 + 2) * 3 * 1"),
        ("<answer>(1 + 2) ** 3</answer>", 0.0, "(1 + 2) ** 3"),
        ("<answer>1 / (2 - 2)</answer>", 0.0, "1 / (2 - 2)"),
        ("<answer>__import__('os')</answer>", 0.0, "__import__('os')"),
        ("(1 + 2) * 3", 0.0, None),
    ],
)
def test_countdown_wants_the_target_from_each_number_once(response, score_, answer):
    truth = {"target": 9, "numbers": [1, 2, 3]}

    assert countdown.compute_score(response, truth, format_score=0.1) == {"score": score_, "pred": answer}


def test_countdown_is_exact():
    assert countdown.compute_score("<answer>1 / 3 * 3</answer>", {"target": 1, "numbers": [1, 3, 3]})["score"] == 1.0


def test_each_row_gets_the_function_of_its_data_source():
    batch = [
        row("#### 3", "3", 0),
        row(r"\boxed{\frac12}", "0.5", 1, data_source="lighteval/MATH"),
        row("Answer: 7", "8", 2, data_source="aime2025"),
        row("<answer>1 + 2</answer>", {"target": 3, "numbers": [1, 2]}, 3, data_source="countdown"),
    ]

    verdicts = score(batch, config())

    assert scores(verdicts) == [1.0, 1.0, -1.0, 1.0]
    assert [list(verdict.parts) for verdict in verdicts] == [["gsm8k"], ["math"], ["math_dapo"], ["countdown"]]
    assert verdicts[0].extracted == "3" and verdicts[2].extra == {"acc": False}


def test_a_response_without_an_answer_scores_and_is_marked_unparsed():
    (verdict,) = score([row("no idea")], config())

    assert (verdict.score, verdict.status, verdict.extracted) == (0.0, "unparsed", None)


def test_a_data_source_without_a_function_is_refused_before_anything_runs():
    with pytest.raises(RewardError, match=r"'mine'.*custom_reward_function\.path"):
        check_sources(config(), ["openai/gsm8k", "mine"])


def test_a_row_without_a_reference_is_refused_and_not_scored_0():
    with pytest.raises(RewardError, match=r"sample s0 .* data\.ground_truth_key"):
        score([row("#### 1", None)], config())


# ------------------------------------------------------------------------------------------------------ any function


def test_verls_signature_gets_its_four_arguments_and_the_configured_ones(tmp_path):
    cfg = config(
        tmp_path,
        """
        def compute_score(data_source, solution_str, ground_truth, extra_info, bonus=0.0, **kwargs):
            assert (data_source, ground_truth, extra_info) == ("openai/gsm8k", {"a": 1}, {"index": 7})
            return {"score": float(solution_str) + bonus, "pred": solution_str, "length": len(solution_str)}
        """,
    )
    custom = cfg.custom_reward_function.model_copy(update={"reward_kwargs": {"bonus": 0.5}})
    cfg = cfg.model_copy(update={"custom_reward_function": custom})

    (verdict,) = score([row("2", {"a": 1}, extra_info={"index": 7})], cfg)

    assert verdict.score == 2.5 and verdict.parts == {"compute_score": 2.5}
    assert verdict.extracted == "2" and verdict.extra == {"length": 1} and verdict.status == "ok"


def test_trls_signature_gets_lists_of_the_columns_once_per_group(tmp_path):
    cfg = config(
        tmp_path,
        """
        def right(prompts, completions, answer, **columns):
            assert columns["ground_truth"] == answer
            return [float(c == a) + len(completions) for c, a in zip(completions, answer)]
        """,
        "right",
    )
    batch = [
        row("x", "x", 0, extra_info={"answer": "x"}, group_id="a"),
        row("y", "x", 1, extra_info={"answer": "x"}, group_id="a"),
        row("z", "z", 2, extra_info={"answer": "z"}, group_id="b"),
    ]

    assert scores(score(batch, cfg)) == [3.0, 2.0, 2.0]


def test_trls_functions_get_messages_where_the_prompt_is_messages(tmp_path):
    code = """
        def length(completions):
            return [len(messages[0]["content"]) for messages in completions]
        """
    talk = [{"role": "user", "content": "hi"}]

    assert scores(score(rows("abc", "d", prompt=talk), config(tmp_path, code, "length"))) == [3.0, 1.0]


def test_an_async_function_is_awaited(tmp_path):
    code = """
        async def compute_score(solution_str, ground_truth):
            return solution_str == ground_truth
        """

    assert scores(score(rows("1", "2"), config(tmp_path, code))) == [1.0, 0.0]


def test_functions_are_found_by_import_path_file_and_built_in_name(tmp_path, monkeypatch):
    (tmp_path / "my_rules.py").write_text("def half(solution_str):\n    return 0.5\n")
    monkeypatch.syspath_prepend(tmp_path)
    names = ["my_rules:half", f"{tmp_path}/my_rules.py:half", "gsm8k"]
    cfg = config(functions=[{"name": name, "weight": weight} for name, weight in zip(names, (1, 2, 4), strict=True)])

    (verdict,) = score([row("#### 1")], cfg)

    assert verdict.score == 0.5 + 1.0 + 4.0
    assert verdict.parts == {"half": 0.5, "half_2": 0.5, "gsm8k": 1.0}


@pytest.mark.parametrize(
    ("reward", "words"),
    [
        ({"functions": [{"name": "gsm9k"}]}, r"reward\.functions\[0\]\.name='gsm9k' names no reward function"),
        ({"functions": [{"name": "/no/file.py:f"}]}, r"there is no file /no/file\.py"),
        ({"functions": [{"name": "no.such.module:f"}]}, "cannot be imported: ModuleNotFoundError"),
        ({"functions": [{"name": "json:no_such"}]}, "json has no function no_such"),
        ({"functions": [{"name": "json:dumps"}]}, r"It must take verl's .* or TRL's"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_when_the_pool_is_checked(reward, words):
    with pytest.raises(RewardError, match=words), RewardPool(RunConfig(reward=reward)) as pool:
        pool.check()


def test_a_function_that_needs_what_nobody_gives_is_refused(tmp_path):
    cfg = config(tmp_path, "def compute_score(solution_str, judge_url):\n    return 0.0\n")

    with pytest.raises(RewardError, match=r"needs judge_url.*reward_kwargs"), RewardPool(cfg) as pool:
        pool.check()


def test_the_digest_of_the_functions_follows_their_source(tmp_path):
    first = functions_digest(configured_functions(config(tmp_path, "def compute_score(solution_str): return 0\n")))
    second = functions_digest(configured_functions(config(tmp_path, "def compute_score(solution_str): return 1\n")))

    assert first != second


def test_what_a_function_prints_or_reads_does_not_disturb_the_pool(tmp_path, capfd):
    cfg = config(
        tmp_path,
        """
        import os, subprocess, sys

        def compute_score(solution_str):
            print('{"outcomes": []}', flush=True)
            os.write(1, b"junk\\n")
            subprocess.run(["echo", "more junk"])
            return len(sys.stdin.read())
        """,
    )

    assert scores(score(rows("a", "b"), cfg)) == [0.0, 0.0]
    assert "junk" in capfd.readouterr().err


# B77: one value per completion.


@pytest.mark.parametrize(
    ("returned", "described"),
    [
        ("[0.5]", "a list of 1 for 8 completions"),
        ("0.5", r"0\.5 \(float\) for 8 completions"),
        ("[]", "a list of 0 for 8 completions"),
        ("[[0.5]] * 8", "a list of 1 as item 0 of 8"),
        ("[0.5] * 9", "a list of 9 for 8 completions"),
        ("['a'] * 8", r"'a' \(str\) as item 0 of 8"),
        ("{'score': 1}", r"\(dict\) for 8 completions"),
        ("None", r"None \(NoneType\) for 8 completions"),
    ],
)
def test_a_batch_function_must_return_one_number_per_completion(tmp_path, returned, described):
    cfg = config(tmp_path, f"def mine(prompts, completions, **columns):\n    return {returned}\n", "mine", retries=2)

    with pytest.raises(RewardError, match=f"'mine' returned .*{described}"), RewardPool(cfg) as pool:
        pool.score(rows(*"abcdefgh"))


@pytest.mark.parametrize("returned", ["[0.5]", "'1.0'", "{'acc': 1}", "{'score': [1]}"])
def test_a_sample_function_must_return_a_number(tmp_path, returned):
    cfg = config(tmp_path, f"def mine(solution_str):\n    return {returned}\n", "mine")

    with pytest.raises(RewardError, match="'mine' returned"), RewardPool(cfg) as pool:
        pool.score(rows("a"))


def test_numbers_of_numpy_and_exact_numbers_are_numbers(tmp_path):
    code = """
        import numpy as np
        from fractions import Fraction

        def mine(completions):
            return np.array([0.5, 1.5], dtype=np.float32)

        def single(solution_str):
            return {"a": np.float32(0.25), "b": Fraction(1, 2), "c": np.array(2), "d": True}[solution_str]
        """

    assert scores(score(rows("a", "b"), config(tmp_path, code, "mine"))) == [0.5, 1.5]
    assert scores(score(rows(*"abcd"), config(tmp_path, code, "single"))) == [0.25, 0.5, 2.0, 1.0]


def test_a_refused_result_leaves_a_pool_that_works(tmp_path):
    cfg = config(tmp_path, "def compute_score(solution_str):\n    return 1.0 if solution_str == 'good' else 'x'\n")

    with RewardPool(cfg) as pool:
        with pytest.raises(RewardError):
            pool.score(rows("good", "bad", "good"))
        assert scores(pool.score(rows("good", "good"))) == [1.0, 1.0]


# B79: rewards that do not apply.


def test_a_part_that_does_not_apply_stays_null_and_is_skipped_in_the_sum(tmp_path):
    (tmp_path / "rules.py").write_text(
        "def first(solution_str):\n    return 1.0 if solution_str in ('a', 'both') else None\n\n"
        "def second(completions):\n    return [0.5 if c in ('b', 'both') else None for c in completions]\n"
    )
    names = [{"name": f"{tmp_path}/rules.py:first", "weight": 2}, {"name": f"{tmp_path}/rules.py:second", "weight": 4}]

    verdicts = score(rows("a", "b", "both", "none"), config(functions=names))

    assert scores(verdicts) == [2.0, 2.0, 4.0, None]
    assert [verdict.status for verdict in verdicts] == ["ok", "ok", "ok", "not_applicable"]
    assert [verdict.parts for verdict in verdicts] == [
        {"first": 1.0, "second": None},
        {"first": None, "second": 0.5},
        {"first": 1.0, "second": 0.5},
        {"first": None, "second": None},
    ]


def test_a_function_that_fails_leaves_no_score_though_another_one_has_one(tmp_path):
    (tmp_path / "rules.py").write_text(
        "def good(solution_str):\n    return 1.0\n\ndef bad(solution_str):\n    raise OSError('no judge')\n"
    )
    names = [{"name": f"{tmp_path}/rules.py:{name}"} for name in ("good", "bad")]

    (verdict,) = score(rows("a"), config(functions=names))

    assert (verdict.score, verdict.status) == (None, "error")
    assert verdict.parts == {"good": 1.0, "bad": None}
    assert verdict.message is not None and verdict.message.startswith("bad: OSError: no judge (rules.py:")


# Errors, time limits, ends.


@pytest.mark.parametrize("value", ["float('nan')", "float('inf')", "-10 ** 400"])
def test_a_score_that_is_not_finite_is_an_error(tmp_path, value):
    (verdict,) = score(rows("a"), config(tmp_path, f"def compute_score(solution_str):\n    return {value}\n"))

    assert (verdict.score, verdict.status) == (None, "error")
    assert verdict.message is not None and "as score" in verdict.message


def test_only_the_sample_that_overstays_its_time_is_killed(tmp_path):
    # The second one never gives the interpreter back: only a kill from outside ends it.
    cfg = config(
        tmp_path,
        """
        import re, time

        def compute_score(solution_str):
            if solution_str == "sleeps":
                time.sleep(60)
            if solution_str == "backtracks":
                re.match(r"(a+)+$", "a" * 60 + "b")
            return 1.0
        """,
        timeout_s=0.5,
    )
    begun = time.monotonic()

    verdicts = score(rows(*["fine"] * 5, "sleeps", *["fine"] * 5, "backtracks", *["fine"] * 5), cfg)

    assert time.monotonic() - begun < 20
    assert [i for i, verdict in enumerate(verdicts) if verdict.status == "timeout"] == [5, 11]
    assert all(verdict.score == 1.0 for i, verdict in enumerate(verdicts) if i not in (5, 11))
    assert verdicts[5].score is None and "0.5 s (reward.timeout_s)" in str(verdicts[5].message)


def test_a_time_limit_counts_for_each_sample_and_not_for_all_together(tmp_path):
    code = "import time\n\ndef compute_score(solution_str):\n    time.sleep(0.1)\n    return 1.0\n"

    assert scores(score(rows(*"abcdefghij"), config(tmp_path, code, timeout_s=0.6))) == [1.0] * 10


def test_a_batch_function_that_hangs_costs_only_the_sample_it_hangs_on(tmp_path):
    code = """
        import time

        def mine(completions):
            if "hangs" in completions:
                time.sleep(60)
            return [1.0] * len(completions)
        """

    verdicts = score(rows("a", "hangs", "c"), config(tmp_path, code, "mine", timeout_s=0.4))

    assert [verdict.status for verdict in verdicts] == ["ok", "timeout", "ok"]


def test_math_that_never_ends_is_killed():
    batch = [
        row(r"\boxed{9^{9^{9^{9}}}}", "5", 0, data_source="lighteval/MATH"),
        row(r"\boxed{2+3}", "5", 1, data_source="lighteval/MATH"),
    ]

    verdicts = score(batch, config(timeout_s=2.0))

    assert verdicts[1].score == 1.0
    assert verdicts[0].status == "timeout" or verdicts[0].score == 0.0


def test_a_worker_that_dies_costs_only_the_sample_it_died_of(tmp_path):
    code = """
        import os, signal, sys

        def compute_score(solution_str):
            if solution_str == "crashes":
                os.kill(os.getpid(), signal.SIGSEGV)
            if solution_str == "exits":
                sys.exit(3)
            if solution_str == "leaves":
                os._exit(4)
            return 1.0
        """

    verdicts = score(rows("a", "crashes", "b", "exits", "c", "leaves", "d"), config(tmp_path, code))

    assert [verdict.score for verdict in verdicts] == [1.0, None, 1.0, None, 1.0, None, 1.0]
    assert [verdict.status for verdict in verdicts][1::2] == ["error"] * 3
    assert "signal SIGSEGV" in str(verdicts[1].message)
    assert "SystemExit: 3" in str(verdicts[3].message)
    assert "exit code 4" in str(verdicts[5].message)


def test_a_call_that_raised_is_tried_again_with_growing_pauses(tmp_path):
    code = f"""
        import pathlib, time

        def compute_score(solution_str):
            calls = pathlib.Path({str(tmp_path)!r}) / "calls"
            with calls.open("a") as file:
                file.write(f"{{time.monotonic()}}\\n")
            if len(calls.read_text().split()) < 3:
                raise ConnectionError("busy")
            return 1.0
        """

    (verdict,) = score(rows("a"), config(tmp_path, code, retries=2))

    times = [float(line) for line in (tmp_path / "calls").read_text().split()]
    assert verdict.score == 1.0
    assert 0.25 <= times[1] - times[0] < times[2] - times[1]


def test_workers_stay_from_step_to_step(tmp_path):
    code = "import os\n\ndef compute_score(solution_str):\n    return {'score': 1.0, 'pid': os.getpid()}\n"

    with RewardPool(config(tmp_path, code, num_workers=2)) as pool:
        first = {verdict.extra["pid"] for verdict in pool.score(rows(*"abcdefgh"))}
        second = {verdict.extra["pid"] for verdict in pool.score(rows(*"abcdefgh"))}

    assert os.getpid() not in first
    assert len(first | second) <= 2


@pytest.mark.parametrize("stuck", ["time.sleep(60)", "re.match(r'(a+)+$', 'a' * 60 + 'b')"])
def test_workers_die_with_their_parent_even_inside_a_call(tmp_path, stuck):
    (tmp_path / "stuck.py").write_text(
        f"import os, pathlib, re, time\n\ndef compute_score(solution_str):\n"
        f"    pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\n    {stuck}\n    return 1.0\n"
    )
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from tasks.config import RunConfig; from tasks.rewards.pool import RewardRow, score\n"
            "cfg = RunConfig(custom_reward_function={'path': sys.argv[1]}, reward={'timeout_s': 100})\n"
            "score([RewardRow('s', 'd', 'p', 'r', '1')], cfg)",
            str(tmp_path / "stuck.py"),
        ],
        cwd=Path(__file__).parents[1],
    )
    pid_file = tmp_path / "pid"
    wait_until(lambda: pid_file.exists() and pid_file.read_text() != "", 60)

    parent.send_signal(signal.SIGKILL)
    parent.wait()

    wait_until(lambda: not is_running(int(pid_file.read_text())), 5)


def wait_until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# B72: checkers that use alarm signals.


def test_a_checker_with_alarm_signals_works_though_the_stage_runs_on_a_thread(tmp_path):
    cfg = config(
        tmp_path,
        """
        import signal

        def compute_score(solution_str, ground_truth):
            def too_late(number, frame):
                raise TimeoutError
            signal.signal(signal.SIGALRM, too_late)
            signal.alarm(1)
            return float(solution_str == ground_truth)
        """,
    )
    results: list[Verdict] = []
    thread = threading.Thread(target=lambda: results.extend(score(rows(*["1"] * 8), cfg)))

    thread.start()
    thread.join()

    assert scores(results) == [1.0] * 8


def test_if_every_row_errors_the_step_stops_whatever_the_limit(tmp_path):
    cfg = config(tmp_path, "def compute_score(solution_str):\n    raise RuntimeError('bug')\n", max_error_share=1.0)

    verdicts = score(rows("a", "b", "c"), cfg)

    assert scores(verdicts) == [None] * 3
    with pytest.raises(RewardError, match=r"3 of 3 samples .*3 x compute_score: RuntimeError: bug.*rollouts are kept"):
        check_error_share(verdicts, cfg)


def test_some_errors_are_allowed_up_to_the_limit(tmp_path):
    code = "def compute_score(solution_str):\n    return 1 / (solution_str != 'bad')\n"
    cfg = config(tmp_path, code, max_error_share=0.25)

    check_error_share(score(rows("a", "b", "c", "bad"), cfg), cfg)
    with pytest.raises(RewardError, match="2 of 4"):
        check_error_share(score(rows("a", "b", "bad", "bad"), cfg), cfg)


# B74: a judge over HTTP that is out of order for a while.

JUDGE = """
    import urllib.request

    def compute_score(solution_str, url):
        with urllib.request.urlopen(f"{url}/{solution_str}") as reply:
            return float(reply.read())
    """


@pytest.fixture
def judge():
    """A judge that scores every answer 1; `down` names the answers for which it is out of order, how many times."""
    down: dict[str, int] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = self.path.strip("/")
            down[answer] = down.get(answer, 0) - 1
            self.send_response(503 if down[answer] >= 0 else 200)
            self.end_headers()
            self.wfile.write(b"1.0")

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", down
    server.shutdown()
    server.server_close()


def judge_config(folder: Path, url: str, **reward: object) -> RunConfig:
    cfg = config(folder, JUDGE, retries=1, **reward)
    custom = cfg.custom_reward_function.model_copy(update={"reward_kwargs": {"url": url}})
    return cfg.model_copy(update={"custom_reward_function": custom})


def test_a_judge_that_recovers_costs_retries_and_no_score(tmp_path, judge):
    url, down = judge
    down.update({"a": 1, "c": 1})
    cfg = judge_config(tmp_path, url)

    verdicts = score(rows("a", "b", "c", "d"), cfg)

    assert scores(verdicts) == [1.0] * 4
    check_error_share(verdicts, cfg)


def test_a_judge_that_stays_down_gives_no_scores_and_stops_the_step_until_it_is_back(tmp_path, judge):
    url, down = judge
    down.update({"a": 100, "c": 100})
    cfg = judge_config(tmp_path, url, max_error_share=0.4)
    batch = rows("a", "b", "c", "d")
    with RewardPool(cfg) as pool:
        verdicts = pool.score(batch)
        assert scores(verdicts) == [None, 1.0, None, 1.0]
        assert [verdict.status for verdict in verdicts] == ["error", "ok", "error", "ok"]
        with pytest.raises(RewardError, match="2 x compute_score: HTTPError: HTTP Error 503"):
            check_error_share(verdicts, cfg)

        down.clear()

        assert scores(pool.score(batch)) == [1.0] * 4


# B38, B83: what a function returns beside the score.


def test_extras_of_any_kind_are_kept_by_the_written_rule(tmp_path):
    cfg = config(
        tmp_path,
        """
        import numpy as np
        from decimal import Decimal

        class Thing:
            def __repr__(self):
                return "a thing"

        def compute_score(solution_str):
            return {
                "score": 1.0, "tags": {"b", "a"}, "raw": b"\\x00\\xff", "price": Decimal("1.10"),
                "grid": np.arange(4).reshape(2, 2), "loss": float("nan"), "essay": "x" * 70_000,
                "thing": Thing(), "plain": {"n": [1, 2.5, None, True]}, 5: "key", "vast": list(range(300_000)),
            }
        """,
    )

    (verdict,) = score(rows("a"), cfg)

    extra = verdict.extra
    assert verdict.score == 1.0
    assert extra["tags"] == ["a", "b"]
    assert extra["raw"] == {"base64": "AP8="}
    assert extra["price"] == "1.10"
    assert extra["grid"] == [[0, 1], [2, 3]]
    assert extra["loss"] is None
    assert extra["essay"] == "x" * 65_536 + "… [cut: 70000 characters in all]"
    assert extra["thing"] == "a thing"
    assert extra["plain"] == {"n": [1, 2.5, None, True]}
    assert extra["5"] == "key" and extra["vast"] is None
    assert set(extra["_notes"]) == {"tags", "raw", "price", "loss", "essay", "thing", "5", "vast"}
    assert extra["_notes"]["loss"] == "nan became null"


def test_values_without_a_json_form_are_noted_by_their_path():
    cycle: list = []
    cycle.append(cycle)

    value, notes = jsonable({"a": [{"b": float("inf")}], "c": cycle})

    assert value["a"] == [{"b": None}]
    assert notes["a[0].b"] == "inf became null"
    assert any(path.startswith("c[0]") for path in notes)


STRANGE = ["\ud800 half", "🙂", "a\x00b", "\u202eright to left", "x" * 1_000_000]


def test_strange_texts_reach_the_artifact_and_can_be_recovered(tmp_path):
    cfg = config(
        tmp_path,
        """
        def compute_score(solution_str):
            return {"score": 1.0, "pred": solution_str, "echo": solution_str}
        """,
    )
    verdicts = score(rows(*STRANGE), cfg)
    table = build_table(
        "rewards",
        {
            "sample_id": [f"s{i}" for i in range(5)],
            "group_id": ["g"] * 5,
            "score": scores(verdicts),
            "status": [verdict.status for verdict in verdicts],
            "parts": [list(verdict.parts.items()) for verdict in verdicts],
            "extracted": [verdict.extracted for verdict in verdicts],
            "extra": [json_text(verdict.extra) for verdict in verdicts],
            "message": [verdict.message for verdict in verdicts],
            "seconds": [verdict.seconds for verdict in verdicts],
        },
    )
    with RunWriter.create(tmp_path / "run", "test") as run:
        artifact = run.commit(1, "rewards", table, key="k", policy_version=0, started_at=datetime.now(UTC))

    back = read_table(artifact)

    echoes = [json.loads(text) for text in back["extra"].to_pylist()]
    assert [extra["echo"] for extra in echoes[:4]] == STRANGE[:4]
    assert echoes[4]["_notes"] == {"echo": "cut to 65536 of 1000000 characters"}
    assert back["extracted"].to_pylist()[:2] == ["\\ud800 half", "🙂"]
    assert back["score"].to_pylist() == [1.0] * 5


def test_strange_responses_reach_the_artifact_with_their_token_ids_untouched(tmp_path):
    ids = [[i, 7, i] for i in range(5)]
    table = build_table(
        "rollouts",
        {
            "sample_id": [f"s{i}" for i in range(5)],
            "group_id": ["g"] * 5,
            "sample_index": list(range(5)),
            "response_ids": ids,
            "response_text": STRANGE,
            "rollout_log_probs": [None] * 5,
            "finish_reason": ["stop"] * 5,
            "seed": [0] * 5,
            "policy_version": [0] * 5,
        },
    )
    with RunWriter.create(tmp_path / "run", "test") as run:
        back = read_table(run.commit(1, "rollouts", table, key="k", policy_version=0, started_at=datetime.now(UTC)))

    assert back["response_text"].to_pylist() == ["\\ud800 half", *STRANGE[1:]]
    assert back["response_ids"].to_pylist() == ids


def test_a_function_that_prints_without_end_neither_floods_nor_fails(tmp_path, capfd):
    (tmp_path / "loud.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    print('x' * 1_000_000)\n"
        "    return 1.0\n"
    )
    cfg = RunConfig(custom_reward_function={"path": str(tmp_path / "loud.py")})
    rows = [RewardRow(f"s{i}", "d", "p", "r", "a") for i in range(8)]
    assert [verdict.score for verdict in score(rows, cfg)] == [1.0] * 8
    printed = capfd.readouterr().err
    assert 10_000 < len(printed) < 100_000
    assert "the rest is not shown" in printed
