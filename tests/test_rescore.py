"""Another reward function over kept responses: what flips, with the run as it was."""

import json

import pytest
from planted import copy_of
from tiny_runs import run
from typer.testing import CliRunner

from flows.audit.rescore import flip_of, rescore, with_reward
from flows.cli import app
from flows.run_folder import config_of
from storage import RunWriter, open_run
from storage.retention import Retention, drop, what_to_drop


@pytest.fixture(scope="module")
def trained(tiny_run_in, tmp_path_factory):
    """Two steps whose reward is the parity of the response's first letter; no verdict for the prompt with answer 3."""
    folder = tmp_path_factory.mktemp("rescored")
    cfg = tiny_run_in(folder)("reward.retries=0", "reward.max_error_share=0.9")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if ground_truth == '3':\n"
        "        raise ValueError('no rule')\n"
        "    return float(ord((solution_str or 'a')[0]) % 2)\n"
    )
    return run(cfg)[0]


def rules(tmp_path, body, name="compute_score", more=""):
    path = tmp_path / "rules.py"
    path.write_text(f"def {name}(data_source, solution_str, ground_truth, extra_info{more}):\n    {body}\n")
    return str(path)


def answers(the_run, step):
    prompts = the_run.step(step).table("prompts")
    by_group = dict(zip(prompts["group_id"].to_pylist(), prompts["ground_truth"].to_pylist(), strict=True))
    return [json.loads(by_group[name]) for name in the_run.step(step).table("rollouts")["group_id"].to_pylist()]


def test_the_run_s_own_function_changes_nothing(trained):
    own = config_of(trained, 1).custom_reward_function.path
    for one in rescore(trained, [1, 2], own):
        missing = answers(trained, one.step).count("3")
        assert one.flips == {
            "up": 0, "down": 0, "same": 32 - missing, "now missing": 0, "now judged": 0, "still missing": missing,
        }  # fmt: skip
        assert one.old_mean == one.new_mean and one.changes == []


def test_flips_are_counted_by_direction_with_means_and_the_largest_first(trained, tmp_path):
    of_parity = "3.0 * (ord((solution_str or 'a')[0]) % 2) - 1.0"
    body = f"return 0.25 if ground_truth == '3' else (None if ground_truth == '4' else {of_parity})"
    results = {one.step: one for one in rescore(trained, [1, 2], rules(tmp_path, body))}
    for step, one in results.items():
        old = trained.step(step).table("rewards")["score"].to_pylist()
        answer = answers(trained, step)
        plain = [score for score, text in zip(old, answer, strict=True) if text not in ("3", "4")]
        assert one.flips["up"] == plain.count(1.0) and one.flips["down"] == plain.count(0.0)
        assert one.flips["now judged"] == answer.count("3") and one.flips["now missing"] == answer.count("4")
        known = [score for score in old if score is not None]
        assert one.old_mean == pytest.approx(sum(known) / len(known))
        new = [2.0 if score else -1.0 for score in plain] + [0.25] * answer.count("3")
        assert one.new_mean == pytest.approx(sum(new) / len(new))
        assert one.statuses.get("not_applicable", 0) == answer.count("4")
        kinds = [change.flip for change in one.changes]
        missing = answer.count("3") + answer.count("4")
        assert all(kind in ("now judged", "now missing") for kind in kinds[:missing])
        sizes = [abs(change.new - change.old) for change in one.changes[missing:]]
        assert sizes == sorted(sizes, reverse=True) and len(kinds) == 32
        ids = trained.step(step).table("rewards")["sample_id"].to_pylist()
        assert {change.sample_id for change in one.changes} == set(ids)
        assert all(old[ids.index(change.sample_id)] == change.old for change in one.changes)
    assert sum(answers(trained, step).count("3") for step in (1, 2)) == 4


def test_a_function_that_raises_or_hangs_gives_no_score_within_the_run_s_time_limit(trained, tmp_path):
    body = "import time; return 1 / 0 if ground_truth == '0' else time.sleep(60) if ground_truth == '1' else 1.0"
    found = list(rescore(trained, [1, 2], rules(tmp_path, body), ["reward.timeout_s=0.3"]))
    texts = [text for one in found for text in answers(trained, one.step)]
    statuses = {name: sum(one.statuses.get(name, 0) for one in found) for name in ("error", "timeout", "ok")}
    assert statuses == {
        "error": texts.count("0"),
        "timeout": texts.count("1"),
        "ok": 64 - texts.count("0") - texts.count("1"),
    }
    late = [change for one in found for change in one.changes if change.message and "no verdict from" in change.message]
    assert len(late) == texts.count("1") and all(change.new is None for change in late)


def test_a_function_can_be_named_in_the_file_built_in_or_given_arguments(trained, tmp_path):
    path = rules(tmp_path, "return top", name="always", more=", top=1.0")
    (one,) = rescore(trained, [1], f"{path}:always", ["custom_reward_function.reward_kwargs.top=7.0"])
    assert one.new_mean == 7.0
    (one,) = rescore(trained, [1], "repetition")
    assert one.statuses == {"ok": 32}
    cfg = with_reward(config_of(trained, 1), "repetition")
    assert cfg.custom_reward_function.path is None and [entry.name for entry in cfg.reward.functions] == ["repetition"]


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ("nonsense", "no reward function. Give a file"),
        ("nowhere.py", "there is no file"),
        ("rules.py:missing", "has no function missing"),
        ("rules.py", "returned"),
    ],
)
def test_what_is_no_reward_function_is_refused_in_words(trained, tmp_path, monkeypatch, reward, told):
    rules(tmp_path, "return 'good'")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=told):
        list(rescore(trained, [1], reward))


def test_nothing_is_written_into_the_run_and_its_lock_is_not_taken(trained, tmp_path):
    copied = copy_of(trained, tmp_path)
    with RunWriter(copied.root):
        before = {path: path.stat().st_mtime_ns for path in copied.root.rglob("*")}
        list(rescore(copied, [1, 2], rules(tmp_path, "return 1.0")))
        assert {path: path.stat().st_mtime_ns for path in copied.root.rglob("*")} == before


def test_steps_without_rows_are_told_and_the_others_scored(trained, tmp_path):
    copied = copy_of(trained, tmp_path)
    with RunWriter(copied.root) as writer:
        drop(writer, what_to_drop(writer, Retention("last", 1), 2))
    found = list(rescore(open_run(copied.root), [1, 2], rules(tmp_path, "return 1.0")))
    assert "were dropped on" in found[0].why and found[1].why == "" and found[1].new_mean == 1.0


def test_the_command_shows_flips_and_prints_json(trained, tmp_path):
    words = ["rescore", str(trained.root), "--reward", rules(tmp_path, "return 1.0"), "--steps", "1..2", "--limit", "3"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert [row["step"] for row in rows] == [1, 2] and all(len(row["changes"]) <= 3 for row in rows)
    assert all(sum(row["flips"].values()) == 32 for row in rows)
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0 and "the largest of" in shown.stdout


def test_how_a_score_flips():
    pairs = {(0.0, 1.0): "up", (1.0, 0.5): "down", (1.0, 1.0): "same", (1.0, None): "now missing"}
    pairs |= {(None, 0.0): "now judged", (None, None): "still missing"}
    assert {pair: flip_of(*pair) for pair in pairs} == pairs
