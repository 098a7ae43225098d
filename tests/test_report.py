"""`grpoflow report` and `show --tokens` without a browser: what the file holds, and what the terminal prints."""

import io
import json
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from planted import rewrite, tokens_of
from reports import blobs, unpacked
from rich.console import Console
from tiny_runs import run as train
from typer.testing import CliRunner

from benchmarks.report import synthetic_run
from flows.audit.pieces import pieces_of
from flows.audit.report import TOKENS_UNASKED, report_command, write_report
from flows.audit.report.pack import halves, pack_array, smallest_ints
from flows.audit.report.page import SCRIPTS, _source
from flows.audit.report.private import public, public_text
from flows.audit.token_columns import TokenColumns, kl_k3, per_sample
from flows.audit.tokens import show_tokens, visible
from flows.cli import app
from flows.run_folder import GoBack
from flows.tracking import deliver_pending
from flows.train import keep_report
from storage import Ragged, StorageError, open_run
from tasks.tokenizer import load_tokenizer

STEPS = ("trainer.total_training_steps=3", "trainer.total_epochs=9", "trainer.save_freq=2", "trainer.test_freq=3")
SECRET = "custom_reward_function.reward_kwargs={api_key: hunter2}"


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_run_in):
    """A run of three steps that went back once, and its report's text: (run, text)."""
    folder = tmp_path_factory.mktemp("report")
    config = tiny_run_in(folder)
    reward = f"actor_rollout_ref.model.tokenizer_path={folder / 'model'}"
    train(config(*STEPS, reward))
    the_run, _ = train(config(*STEPS, reward, "trainer.seed=7"), back=GoBack(3))
    write_report(the_run, folder / "report.html")
    return the_run, (folder / "report.html").read_text()


@pytest.fixture
def copied(made, tmp_path):
    """The run in a folder of its own, to be damaged."""
    return open_run(shutil.copytree(made[0].root, tmp_path / "copied"))


# ------------------------------------------------------------------------------------------------------------ the file


def test_the_file_asks_nothing_of_a_network(made):
    _, text = made
    linked = re.findall(r"""(?:src|href)=["']([^"'>]*)""", text)
    assert linked and all(target.startswith(("#", "data:", "${")) for target in linked)
    assert "default-src 'none'" in text
    script = text.rsplit("<script>", 1)[1]
    for call in ("fetch(", "XMLHttpRequest", "localStorage", "sessionStorage", "import(", "@import", "innerHTML"):
        assert call not in script


def test_no_script_of_ours_can_end_the_script_element_or_write_markup():
    for name in SCRIPTS:
        source = _source(f"{name}.js")
        assert "</" not in source.replace("</g", "") and "innerHTML" not in source and "<!--" not in source


def test_the_policy_names_the_one_script_that_may_run(made):
    import base64
    import hashlib

    _, text = made
    script = re.search(r"<script>(.*?)</script>", text, re.S).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text


def test_every_metric_of_every_step_is_in_the_file(made):
    the_run, text = made
    about = unpacked(text, "run")["curves"]
    assert about["steps"] == [1, 2, 3]
    values = unpacked(text, "curves").reshape(len(about["names"]), -1)
    for column, step in enumerate(about["steps"]):
        metrics = the_run.step(step).record["metrics"]
        for row, name in enumerate(about["names"]):
            wanted = metrics.get(name)
            assert np.isnan(values[row, column]) if wanted is None else values[row, column] == np.float32(wanted)


def test_token_columns_are_those_of_the_artifacts_to_three_digits(made):
    the_run, text = made
    rollouts, old, ref = (the_run.step(2).table(name) for name in ("rollouts", "old_log_probs", "ref_log_probs"))
    flat = {
        "log_prob": old["old_log_probs"],
        "entropy": old["entropy"],
        "advantage": the_run.step(2).table("advantages")["advantages"],
    }
    for name, column in flat.items():
        wanted = Ragged.from_arrow(column).values
        np.testing.assert_allclose(unpacked(text, f"step-2-token-{name}"), wanted, rtol=1e-3)
    doubles = [
        Ragged.from_arrow(column).values.astype(np.float64)
        for column in (rollouts["rollout_log_probs"], old["old_log_probs"], ref["ref_log_probs"])
    ]
    np.testing.assert_allclose(unpacked(text, "step-2-token-gap"), doubles[0] - doubles[1], rtol=1e-3, atol=1e-15)
    np.testing.assert_allclose(unpacked(text, "step-2-token-ref_gap"), doubles[1] - doubles[2], rtol=1e-3, atol=1e-15)
    vocabulary = unpacked(text, "step-2-vocabulary")
    ids = np.asarray(vocabulary["ids"])[unpacked(text, "step-2-token-ids")]
    assert ids.tolist() == Ragged.from_arrow(rollouts["response_ids"]).values.tolist()
    assert vocabulary["texts"][vocabulary["ids"].index(ids[0])] is not None


def test_samples_carry_their_numbers_and_texts(made):
    the_run, text = made
    rows = the_run.step(3).samples().to_pylist()
    columns = unpacked(text, "step-3-samples")["columns"]
    assert columns["sample_id"] == [row["sample_id"] for row in rows]
    assert columns["score"] == [row["score"] for row in rows]
    assert columns["response_text"] == [row["response_text"] for row in rows]
    assert columns["length"] == [len(row["response_ids"]) for row in rows]
    assert columns["seed"] == [str(row["seed"]) for row in rows]
    gaps = [
        max(abs(np.subtract(row["rollout_log_probs"], row["old_log_probs"], dtype=np.float64)), default=np.nan)
        for row in rows
    ]
    np.testing.assert_allclose(np.asarray(columns["gap_max"], float), gaps, rtol=1e-6)
    prompt = unpacked(text, "step-3-samples")["groups"][rows[0]["group_id"]]
    assert prompt["prompt_text"] == rows[0]["prompt_text"]


def test_stages_are_measured_against_the_plan(made):
    _, text = made
    stages = {stage["stage"]: stage for stage in unpacked(text, "step-2")["stages"]}
    assert stages["rollouts"]["planned"] == {"rows": 32, "longest": 6, "column": "response_ids"}
    assert stages["rollouts"]["rows"] == 32 and stages["rollouts"]["shapes"]["longest"] <= 6
    assert stages["prompts"]["planned"]["rows"] == stages["prompts"]["rows"] == 8
    assert stages["advantages"]["parents"]["rewards"] == stages["rewards"]["digest"]


def test_lineages_and_events_are_told(made):
    _, text = made
    assert "Branches off lineage 1 at step 3" in text and "trainer.seed" in text
    assert text.count('class="event opened"') == 2
    stages = {stage["stage"]: stage for stage in unpacked(text, "step-3")["stages"]}
    assert stages["rollouts"]["lineage"] == 2 and stages["rollouts"]["attempts"] == 1


def test_commands_of_a_report_name_the_history_that_it_shows(made, tmp_path):
    the_run, text = made
    first = write_report(open_run(the_run.root, lineage=1), tmp_path / "first.html").path.read_text()
    assert f"grpoflow report &#39;{the_run.root.name}#1&#39; --step" in first
    assert f"grpoflow report {the_run.root.name} --step" in text


def test_folders_and_secrets_stay_here(tmp_path, tiny_run_in):
    the_run, _ = train(tiny_run_in(tmp_path)("trainer.total_training_steps=1"))
    text = _report(the_run, tmp_path).read_text()
    inside = text + "".join(json.dumps(unpacked(text, name)) for name in blobs(text) if not blobs(text)[name][1])
    assert str(tmp_path) not in inside and "…/train.jsonl" in text
    assert public({"reward_kwargs": {"api_key": "hunter2", "max_tokens": 5}}) == {
        "reward_kwargs": {"api_key": "(hidden)", "max_tokens": 5}
    }
    assert public_text("cannot read /home/ann/runs/a.arrow: /x") == "cannot read …/a.arrow: /x"
    assert public_text("https://ann:pw@mlflow.example/path/to") == "https://mlflow.example/path/to"
    assert public_text("s3://bucket/a/b and 1/2 and org/model") == "s3://bucket/a/b and 1/2 and org/model"


def test_the_steps_asked_for_are_in_the_file_and_no_others(made, tmp_path):
    the_run, text = made
    assert unpacked(text, "run")["steps"] == [1, 2, 3]
    one = write_report(the_run, tmp_path / "one.html", steps=[2]).path.read_text()
    assert unpacked(one, "run")["steps"] == [2]
    assert not [name for name in blobs(one) if name.startswith(("step-1", "step-3"))]
    with pytest.raises(StorageError, match=r"has no step 9; it has 1\.\.3"):
        write_report(the_run, tmp_path / "none.html", steps=[2, 9])
    assert not (tmp_path / "none.html").exists()


def test_a_long_run_puts_in_its_last_step_alone_and_a_huge_one_none(tmp_path, monkeypatch):
    the_run = synthetic_run(tmp_path / "long", samples=8, tokens=TOKENS_UNASKED // 10, words=50, steps=3)
    assert write_report(the_run, tmp_path / "r.html").steps == (3,)
    monkeypatch.setattr("flows.audit.report.LARGEST_UNASKED", 1000)
    assert write_report(the_run, tmp_path / "r.html").steps == ()
    assert write_report(the_run, tmp_path / "r.html", steps=[3]).steps == (3,)


def test_two_runs_are_compared(made, tmp_path, tiny_run_in):
    the_run, _ = made
    other, _ = train(tiny_run_in(tmp_path)("trainer.total_training_steps=1", "algorithm.adv_estimator=rloo"))
    text = write_report(the_run, tmp_path / "both.html", compare=other).path.read_text()
    run = unpacked(text, "run")
    assert run["other_curves"]["steps"] == [1] and run["compare"]["name"] != run["name"]
    differs = re.findall(r'data-differs="yes"><th scope="row"><code>([^<]+)', text)
    assert "algorithm.adv_estimator" in differs and "algorithm.gamma" not in differs


def test_checks_are_put_in_when_they_are_asked_for(made, tmp_path):
    the_run, text = made
    assert 'id="checks"' not in text and "--verify" in text
    checked = write_report(the_run, tmp_path / "checked.html", steps=[2], verified=True).path.read_text()
    verdicts = dict(re.findall(r'<tr><th scope="row">([^<]+)</th><td class="when"><span class="\w+">([^<]+)<', checked))
    assert verdicts["advantages"] == "✓ passed" and verdicts["files"] == "✓ passed"


# -------------------------------------------------------------------------------------------- missing and damaged (B42)


def test_b42_a_missing_stage_is_missing_and_never_zeros(copied, tmp_path):
    shutil.rmtree(copied.step(2).folder / "advantages")
    text = write_report(copied, tmp_path / "r.html").path.read_text()
    step = unpacked(text, "step-2")
    assert {one["stage"]: one["state"] for one in step["stages"]}["advantages"] == "missing"
    assert "advantage" not in step["token_columns"] and "mask" not in step["token_columns"]
    columns = unpacked(text, "step-2-samples")["columns"]
    assert "advantage" not in columns and "group_mean" not in columns and "score" in columns


def test_a_damaged_stage_takes_only_its_own_columns_away(copied, tmp_path):
    part = copied.step(2).used("rewards") / "part-00000.arrow"
    part.write_bytes(part.read_bytes()[:-9] + bytes(9))
    text = write_report(copied, tmp_path / "r.html").path.read_text()
    stages = {stage["stage"]: stage for stage in unpacked(text, "step-2")["stages"]}
    assert stages["rewards"]["state"] == "damaged" and "part-00000.arrow" in stages["rewards"]["why"]
    columns = unpacked(text, "step-2-samples")["columns"]
    assert "score" not in columns and "advantage" in columns


def test_without_rollouts_a_step_has_stages_and_no_samples(copied, tmp_path):
    shutil.rmtree(copied.step(2).folder / "rollouts")
    text = write_report(copied, tmp_path / "r.html", steps=[2]).path.read_text()
    assert "step-2" in blobs(text) and "step-2-samples" not in blobs(text)


def test_a_run_without_a_tokenizer_shows_ids_and_says_why(copied, tmp_path):
    config = copied.root / "config.yaml"
    identity = json.loads((copied.root / "run.json").read_text())
    config.write_text(config.read_text().replace("/model", "/gone"))
    identity["documents"] = {}
    (copied.root / "run.json").write_text(json.dumps(identity))
    for lineage in (copied.root / "lineages").iterdir():
        lineage.write_text(lineage.read_text().replace("/model", "/gone"))
    lost = open_run(copied.root)
    text = write_report(lost, tmp_path / "r.html", steps=[2]).path.read_text()
    assert set(unpacked(text, "step-2-vocabulary")["texts"]) == {None}
    assert "is not on this machine" in unpacked(text, "step-2")["no_texts"]
    with pytest.raises(StorageError, match=r"there is no tokenizer\.json"):
        write_report(lost, tmp_path / "r.html", steps=[2], tokenizer=tmp_path)


def test_a_run_that_has_made_no_step_has_a_report(tmp_path, tiny_run_in):
    the_run, _ = train(tiny_run_in(tmp_path)("trainer.val_only=true"))
    text = _report(the_run, tmp_path).read_text()
    assert unpacked(text, "run")["steps"] == [] and "No step's batch is in this file" in text


# ------------------------------------------------------------------------------------------------------ texts of others


def test_what_a_response_says_is_never_markup(tmp_path):
    the_run = synthetic_run(tmp_path / "hostile", samples=8, tokens=40, words=30)
    text = write_report(the_run, tmp_path / "r.html").path.read_text()
    responses = unpacked(text, "step-1-samples")["columns"]["response_text"]
    assert any("</script>" in response and "\0" in response for response in responses)
    assert text.count("</script>") == len(blobs(text)) + 1
    assert "\0" not in text and "\u202e" not in text


def test_a_name_with_markup_is_escaped(copied, tmp_path):
    with (copied.root / "ledger.jsonl").open("a") as ledger:
        ledger.write(
            json.dumps(
                {"event": "closed", "state": "failed", "at": "2026-01-01T00:00:00Z", "reason": "<img src=x onerror=a>"}
            )
        )
    text = write_report(copied, tmp_path / "r.html").path.read_text()
    assert "&lt;img src=x" in text and "<img" not in text


# ------------------------------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("top", [1e-9, 0.003, 1.0, 65504.0, 3e8])
def test_numbers_keep_three_digits_whatever_their_size(top):
    values = np.concatenate([np.geomspace(top * 1e-7, top, 999), [-top, 0.0, np.nan]])
    packed, factor = halves(values)
    np.testing.assert_allclose(packed.astype(np.float64) * factor, values, rtol=6e-4)


def test_packing_turns_round():
    for array in (
        np.arange(7, dtype=np.uint32) * 70_000,
        np.linspace(-1, 1, 5, dtype=np.float32),
        np.empty(0, np.uint8),
    ):
        text = f'<script type="text/plain" id="data-x" data-type="{array.dtype}" data-factor="1.0">{pack_array(array)}<'
        assert unpacked(text, "x").tolist() == array.tolist()
    assert [smallest_ints(np.asarray([top])).dtype.name for top in (255, 256, 65536)] == ["uint8", "uint16", "uint32"]


def test_statistics_of_samples_skip_empty_responses():
    lengths = np.asarray([2, 0, 3, 0])
    floats = {"gap": np.asarray([1.0, -3.0, 0.0, 2.0, 1.0]), "log_prob": np.asarray([-1.0, -3.0, -1.0, -2.0, -6.0])}
    found = per_sample(TokenColumns(np.arange(5), lengths, floats, np.asarray([True, False, True, True, True])))
    np.testing.assert_array_equal(found["gap_max"], [3.0, np.nan, 2.0, np.nan])
    np.testing.assert_array_equal(found["log_prob_mean"], [-2.0, np.nan, -3.0, np.nan])
    assert found["masked"].tolist() == [1, 0, 0, 0]


def test_a_sample_without_log_probs_has_none_and_its_neighbours_keep_theirs():
    rows = pa.chunked_array([pa.array([[1, 2], [3], [4, 5]], pa.large_list(pa.int32()))])
    spoken = pa.chunked_array([pa.array([[-1.0, -2.0], None, [-3.0, -4.0]], pa.large_list(pa.float32()))])
    tokens = TokenColumns.of({"response_ids": rows, "rollout_log_probs": spoken})
    np.testing.assert_array_equal(tokens.floats["log_prob"], [-1, -2, np.nan, -3, -4])


def test_k3_is_the_kl_estimate_of_the_article():
    assert kl_k3(np.asarray([0.0]))[0] == 0
    np.testing.assert_allclose(kl_k3(np.asarray([np.log(2)])), [0.5 - 1 + np.log(2)])


# ------------------------------------------------------------------------------------------------------ texts of tokens


def test_token_texts_put_together_are_the_decoded_text(made):
    the_run, _ = made
    from flows.run_folder import config_of

    tokenizer = load_tokenizer(config_of(the_run, 2).actor_rollout_ref.model)
    ids = [row for rows in the_run.step(2).table("rollouts")["response_ids"].to_pylist() for row in rows]
    pieces = pieces_of(the_run, sorted(set(ids)))
    assert pieces.why_none is None
    assert "".join(pieces.texts[number] for number in ids) == tokenizer.decode(ids)
    assert pieces.special == {number for number in set(ids) if number in tokenizer.all_special_ids} | (
        pieces.special - set(ids)
    )


def test_a_part_of_a_character_is_bytes_and_the_space_before_a_word_stays(made, tmp_path):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = [*pre_tokenizers.ByteLevel.alphabet()]
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate([*letters, "Ġa"])}, [("Ġ", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = tokenizer.encode(" a🙂").ids
    pieces = pieces_of(made[0], sorted(set(ids)), tmp_path)
    assert [pieces.texts[number] for number in ids] == [" a", b"\xf0", b"\x9f", b"\x99", b"\x82"]


# ---------------------------------------------------------------------------------------------------- the command line


def test_the_command_writes_a_file_and_says_what_is_in_it(made, tmp_path, monkeypatch):
    the_run, _ = made
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["report", str(the_run.root), "--step", "2", "--step", "3"])
    assert result.exit_code == 0
    assert re.match(rf"{the_run.root.name}-report\.html: 0\.\d MB, with the batches of steps 2\.\.3\.", result.output)
    assert (tmp_path / f"{the_run.root.name}-report.html").stat().st_size > 50_000
    assert [path.name for path in tmp_path.iterdir()] == [f"{the_run.root.name}-report.html"]
    with pytest.raises(StorageError, match="is no run"):
        report_command(tmp_path, None, None, None)


def test_a_report_is_not_put_into_a_run(copied):
    for name in ("r.html", "config.yaml"):
        told = CliRunner().invoke(app, ["report", str(copied.root), "-o", str(copied.root / name)])
        assert "lies in the folder of a run" in str(told.exception)
    assert not (copied.root / "r.html").exists()


def test_ids_that_are_none_and_columns_that_are_not_aligned_are_told(copied, tmp_path):
    row = next(i for i, ids in enumerate(tokens_of(copied, 2)) if len(ids) > 1)

    def below_zero(columns):
        columns["response_ids"][row] = [-5, *columns["response_ids"][row][1:]]
        return columns

    rewrite(copied, 2, "rollouts", below_zero)
    write_report(copied, tmp_path / "r.html", steps=[2])

    def shorter(columns):
        columns["entropy"][row] = columns["entropy"][row][1:]
        return columns

    rewrite(copied, 2, "old_log_probs", shorter)
    with pytest.raises(StorageError, match=f"entropy is not aligned with response_ids: .* in row {row} of"):
        write_report(copied, tmp_path / "r.html", steps=[2])


def test_a_report_leaves_the_run_as_it_was(copied, tmp_path):
    before = {path: path.stat().st_mtime_ns for path in copied.root.rglob("*")}
    write_report(copied, tmp_path / "r.html", verified=False)
    assert {path: path.stat().st_mtime_ns for path in copied.root.rglob("*")} == before


# ------------------------------------------------------------------------------------------------------- the run's end


def test_the_end_of_a_run_sends_a_report_to_mlflow_and_deliver_brings_it_later(tmp_path, tiny_run_in, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    cfg = tiny_run_in(tmp_path)("tracking.enabled=true", "trainer.total_training_steps=1")
    the_run, output = train(cfg)
    assert "warning: no report" not in output
    text = (the_run.root / "report.html").read_text()
    assert '<span class="state finished">' in text and unpacked(text, "run")["steps"] == [1]
    told = [json.loads(line) for line in (the_run.root / "tracking.jsonl").read_text().splitlines()]
    client = MlflowClient(tracking_uri=told[0]["uri"])
    kept = client.list_artifacts(told[0]["mlflow_run"])
    assert {one.path: one.file_size for one in kept}["report.html"] == len(text.encode())
    later = f"sqlite:///{tmp_path / 'later.db'}"
    delivery = deliver_pending(the_run, later)
    there = MlflowClient(tracking_uri=later).list_artifacts(delivery.mlflow_run_id)
    assert delivery.problem is None and "report.html" in {one.path for one in there}


def test_no_report_is_made_where_nobody_wants_one(tmp_path, tiny_run_in):
    cfg = tiny_run_in(tmp_path)("tracking.enabled=true", "tracking.report=false", "trainer.total_training_steps=1")
    the_run, _ = train(cfg)
    assert not (the_run.root / "report.html").exists()


def test_a_report_that_cannot_be_written_is_a_warning(copied):
    copied.document("report.html").mkdir()
    said = []
    keep_report(copied, "finished", said.append)
    assert not list(copied.root.glob(".*"))
    assert len(said) == 1 and said[0].startswith("warning: no report was written for MLflow (IsADirectoryError")


# --------------------------------------------------------------------------------------------------------- the terminal


def printed(the_run, step, sample, by, *, width=100, **options):
    """What `show --tokens` prints without colour."""
    output = io.StringIO()
    console = Console(file=output, width=width, **options)
    settings = {"top": 3, "limit": 2, "as_json": False}
    show_tokens(the_run.root, step, sample, by, **settings, console=console)
    return output.getvalue()


@pytest.mark.parametrize("by", ["advantage", "gap", "entropy", "kl", "log_prob", "mask"])
def test_without_colour_each_value_stands_beside_its_token(made, by):
    the_run, _ = made
    row = the_run.step(2).samples().to_pylist()[0]
    text = printed(the_run, 2, row["sample_id"], by, width=2000)
    values = re.findall(r"\(([^() ]+)\)", text.split("\n\n")[1])
    assert len(values) == len(row["response_ids"])
    rollout, old, ref = (np.asarray(row[name]) for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs"))
    wanted = {
        "advantage": row["advantages"],
        "gap": rollout - old,
        "entropy": row["entropy"],
        "kl": kl_k3(old - ref),
        "log_prob": old,
        "mask": row["loss_mask"],
    }[by]
    np.testing.assert_allclose([float(value) for value in values], np.asarray(wanted, float), rtol=6e-3, atol=1e-15)


def test_the_largest_of_the_step_are_listed_with_their_places(made):
    the_run, _ = made
    text = printed(the_run, 2, None, "entropy")
    rows = the_run.step(2).samples().to_pylist()
    top = max((value, row["sample_id"], place) for row in rows for place, value in enumerate(row["entropy"]))
    first = text.split("3 largest")[1].splitlines()[2].split()
    assert first[:2] == [top[1], str(top[2])] and float(first[-1]) == pytest.approx(top[0], rel=5e-3)
    assert "… 30 more samples" in text


def test_colour_marks_what_is_below_zero_by_an_underline_too(made):
    the_run, _ = made
    text = printed(the_run, 2, None, "gap", force_terminal=True, color_system="truecolor")
    assert "\x1b[4;" in text and "underlined: below 0" in text
    bare = printed(the_run, 2, None, "gap", force_terminal=True, color_system="truecolor", no_color=True)
    assert ";2;" not in bare and re.search(r"\([+-]", bare)


def test_a_narrow_terminal_loses_no_token(made):
    the_run, _ = made
    sample = the_run.step(2).samples()["sample_id"][0].as_py()
    wide, narrow = (printed(the_run, 2, sample, "log_prob", width=width) for width in (400, 30))
    assert max(map(len, narrow.splitlines())) <= 30
    assert re.sub(r"\s", "", narrow.split("3 lowest")[0]) == re.sub(r"\s", "", wide.split("3 lowest")[0])


def test_nothing_in_a_response_steers_the_terminal():
    assert visible("\x1b[31m a\n\t\0\u202e\u200b", 5) == "␛[31m·a⏎⇥␀⟨U+202E⟩⟨U+200B⟩"
    assert visible(b"\xe2\x80", 5) == "⟨e2 80⟩" and visible("", 5) == "⟨5⟩" and visible(None, 5) == "⟨5⟩"


def test_json_has_every_value_and_a_wrong_word_gets_its_ways_out(made):
    the_run, _ = made
    root = str(the_run.root)
    sample = the_run.step(2).samples()["sample_id"][0].as_py()
    shown = CliRunner().invoke(app, ["show", root, "--sample", sample, "--tokens", "--by", "gap", "--json"])
    (values,) = json.loads(shown.output)
    assert values["sample_id"] == sample and len(values["gap"]) == len(values["texts"]) == len(values["ids"])
    for words, message in (
        (("--by", "colour"), "there are advantage, gap"),
        (("--step", "2", "--sample", "x"), "has no"),
    ):
        result = CliRunner().invoke(app, ["show", root, "--tokens", *words])
        assert isinstance(result.exception, ValueError | StorageError) and message in str(result.exception)


def test_a_value_whose_stage_is_missing_is_refused(copied):
    shutil.rmtree(copied.step(2).folder / "ref_log_probs")
    with pytest.raises(StorageError, match="has no kl: it needs old_log_probs and ref_log_probs, which is missing"):
        printed(copied, 2, None, "kl")


# ------------------------------------------------------------------------------------------------------------ the wheel


@pytest.mark.slow
def test_the_templates_are_in_the_wheel(tmp_path):
    import subprocess
    import sys

    pytest.importorskip("hatchling", reason="hatchling, which builds the wheel, is not installed here")
    root = Path(__file__).parents[1]
    words = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(tmp_path),
        str(root),
    ]
    subprocess.run(words, check=True)
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    wanted = {f"flows/audit/report/templates/{name}.js" for name in SCRIPTS}
    assert wanted | {"flows/audit/report/templates/report.html.j2", "flows/audit/report/templates/report.css"} <= set(
        names
    )


def _report(the_run, folder):
    return write_report(the_run, folder / "report.html").path
