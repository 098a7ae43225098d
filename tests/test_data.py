"""Prompts: reading, templating, filtering, cutting, and their order."""

import json
import logging
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tasks.config import RunConfig
from tasks.data import DataError, PreparedPrompts, cut, prepare_prompts, prompt_order, step_rows, steps_per_epoch
from tasks.seeds import sample_seed

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw)
    made.chat_template = TEMPLATE
    return made


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def config(files: str | list[str], **data: object) -> RunConfig:
    rollout = data.pop("rollout", {})
    values = {"train_batch_size": 1, "train_files": files, "val_files": files, **data}
    return RunConfig(data=values, actor_rollout_ref={"rollout": rollout})


def rows_of_lengths(path: Path, *lengths: int) -> str:
    """A file of text prompts of so many tokens; each begins with `<` and ends with `>`."""
    return write_jsonl(path, [{"prompt": "<" + "x" * (n - 2) + ">", "answer": str(n)} for n in lengths])


def token_lengths(prepared: PreparedPrompts) -> list[int]:
    return [len(ids) for ids in prepared.table["prompt_ids"].to_pylist()]


def test_verls_parquet_rows_are_read(tmp_path, tokenizer):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1+2?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"index": 7, "split": "train"},
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")

    prepared = prepare_prompts(config(str(tmp_path / "train.parquet")), "train", tokenizer)

    (got,) = prepared.table.to_pylist()
    assert got["data_source"] == "openai/gsm8k"
    assert json.loads(got["prompt"]) == [{"role": "user", "content": "1+2?"}]
    assert got["prompt_text"] == "<user>1+2?<assistant>"
    assert tokenizer.decode(got["prompt_ids"]) == "<user>1+2?<assistant>"
    assert json.loads(got["ground_truth"]) == "3"
    assert json.loads(got["extra_info"]) == {
        "ability": "math",
        "reward_model": {"style": "rule"},
        "index": 7,
        "split": "train",
    }


def test_trls_text_prompts_are_used_as_they_are_and_their_columns_are_kept(tmp_path, tokenizer):
    file = write_jsonl(tmp_path / "sums.jsonl", [{"prompt": "1+2=", "solution": [3, 4], "level": "easy"}])

    (got,) = prepare_prompts(config(file), "train", tokenizer).table.to_pylist()

    assert got["prompt_text"] == "1+2=" and got["data_source"] == "sums"
    assert json.loads(got["ground_truth"]) == [3, 4]
    assert json.loads(got["extra_info"]) == {"solution": [3, 4], "level": "easy"}


def test_columns_of_other_names_are_read_by_their_keys(tmp_path, tokenizer):
    file = write_jsonl(tmp_path / "a.jsonl", [{"question": "1+2?", "answer": "3", "src": "mine"}])
    cfg = config(file, prompt_key="question", ground_truth_key="answer", reward_fn_key="src", text_as_user_message=True)

    (got,) = prepare_prompts(cfg, "train", tokenizer).table.to_pylist()

    assert got["prompt_text"] == "<user>1+2?<assistant>"
    assert (got["data_source"], json.loads(got["ground_truth"])) == ("mine", "3")


def test_messages_and_texts_may_be_mixed_and_stay_in_order(tmp_path, tokenizer):
    rows = [{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}, {"prompt": "c"}]

    prepared = prepare_prompts(config(write_jsonl(tmp_path / "a.jsonl", rows)), "train", tokenizer)

    assert prepared.table["prompt_text"].to_pylist() == ["a", "<user>b<assistant>", "c"]
    assert prepared.table["prompt_index"].to_pylist() == [0, 1, 2]
    assert prepared.table["ground_truth"].null_count == 3


def test_files_of_both_kinds_are_joined_even_if_only_one_has_a_column(tmp_path, tokenizer):
    pq.write_table(pa.table({"prompt": ["a"], "level": [1]}), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text('[{"prompt": "b"}]')

    prepared = prepare_prompts(config([str(tmp_path / "a.parquet"), str(tmp_path / "b.json")]), "train", tokenizer)

    assert [json.loads(text) for text in prepared.table["extra_info"].to_pylist()] == [{"level": 1}, {}]
    assert [(Path(file.path).name, file.rows) for file in prepared.files] == [("a.parquet", 1), ("b.json", 1)]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"question": "a"}', r"a\.jsonl row 0 has no column 'prompt'.*it has question.*data\.prompt_key"),
        ('{"prompt": 3}', "must hold a text or a list of messages"),
        ("{", r"a\.jsonl line 1 is no JSON"),
        ("[1]", r"a row must be a JSON object"),
        ('{"prompt": ""}', r"a\.jsonl row 0 has an empty prompt"),
    ],
)
def test_a_row_that_cannot_be_read_is_named(tmp_path, tokenizer, line, words):
    (tmp_path / "a.jsonl").write_text(line + "\n")

    with pytest.raises(DataError, match=words):
        prepare_prompts(config(str(tmp_path / "a.jsonl")), "train", tokenizer)


def test_a_missing_file_is_named_with_its_key(tokenizer):
    with pytest.raises(DataError, match=r"data\.val_files: there is no file"):
        prepare_prompts(config("/no/such.parquet"), "val", tokenizer)


def test_messages_without_a_chat_template_are_refused(tmp_path, tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    file = write_jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "b"}]}])

    with pytest.raises(DataError, match="custom_chat_template"):
        prepare_prompts(config(file), "train", bare)


# B81: prompts of 100, 512, 513 and 600 tokens against data.max_prompt_length=512.


def test_over_long_prompts_are_filtered_and_counted(tmp_path, tokenizer, caplog):
    file = rows_of_lengths(tmp_path / "a.jsonl", 100, 512, 513, 600)
    for truncation in ("error", "left", "right"):
        cfg = config(file, max_prompt_length=512, filter_overlong_prompts=True, truncation=truncation)
        with caplog.at_level(logging.INFO):
            prepared = prepare_prompts(cfg, "train", tokenizer)

        assert token_lengths(prepared) == [100, 512]
        assert prepared.counts == {"read": 4, "filtered_overlong": 2, "filtered_no_room": 0, "cut": 0, "kept": 2}
        assert "4 rows read" in caplog.text and "4 -> 2" in caplog.text


@pytest.mark.parametrize(
    ("truncation", "starts", "ends"), [("left", "x", ">"), ("right", "<", "x"), ("middle", "<", ">")]
)
def test_over_long_prompts_are_cut_where_the_word_says(tmp_path, tokenizer, truncation, starts, ends):
    file = rows_of_lengths(tmp_path / "a.jsonl", 100, 512, 513, 600)

    prepared = prepare_prompts(config(file, max_prompt_length=512, truncation=truncation), "train", tokenizer)

    assert token_lengths(prepared) == [100, 512, 512, 512]
    assert prepared.counts["cut"] == 2
    for row in prepared.table.to_pylist()[2:]:
        assert row["prompt_text"][0] == starts and row["prompt_text"][-1] == ends
        assert tokenizer.decode(row["prompt_ids"]) == row["prompt_text"]


def test_truncation_error_refuses_the_data_before_training_with_counts_and_examples(tmp_path, tokenizer):
    file = rows_of_lengths(tmp_path / "a.jsonl", 100, 512, 513, 600)

    with pytest.raises(DataError) as refusal:
        prepare_prompts(config(file, max_prompt_length=512, truncation="error"), "train", tokenizer)

    assert "2 of 4 prompts are longer than 512 tokens" in str(refusal.value)
    assert "a.jsonl row 2 with 513 tokens, a.jsonl row 3 with 600 tokens" in str(refusal.value)
    assert "data.filter_overlong_prompts=true" in str(refusal.value)


def test_cutting_keeps_the_named_tokens():
    ids = list(range(7))

    assert cut(ids, 3, "left") == [4, 5, 6]
    assert cut(ids, 3, "right") == [0, 1, 2]
    assert cut(ids, 3, "middle") == [0, 5, 6]


# B85: too few prompts after filtering.


def test_too_few_prompts_after_filtering_are_refused_with_the_counts(tmp_path, tokenizer):
    few = rows_of_lengths(tmp_path / "few.jsonl", *[5] * 5, *[30] * 4)
    none = rows_of_lengths(tmp_path / "none.jsonl", *[30] * 9)
    for file, left in ((few, 5), (none, 0)):
        cfg = config(file, train_batch_size=8, max_prompt_length=10, filter_overlong_prompts=True)
        with pytest.raises(DataError) as refusal:
            prepare_prompts(cfg, "train", tokenizer)
        assert f"{left} prompts are left, too few for data.train_batch_size=8" in str(refusal.value)
        assert "9 rows read" in str(refusal.value) and f"9 -> {left}" in str(refusal.value)


def test_exactly_one_batch_left_is_one_step_per_epoch(tmp_path, tokenizer):
    file = rows_of_lengths(tmp_path / "a.jsonl", *[5] * 8, 30)
    cfg = config(file, train_batch_size=8, max_prompt_length=10, filter_overlong_prompts=True)

    rows = prepare_prompts(cfg, "train", tokenizer).table.num_rows

    assert steps_per_epoch(rows, 8) == 1
    assert [step_rows(step, rows, 8, seed=0, shuffle=True)[0] for step in (1, 2, 3)] == [0, 1, 2]


def test_validation_data_may_be_smaller_than_a_training_step_but_not_empty(tmp_path, tokenizer):
    one = rows_of_lengths(tmp_path / "one.jsonl", 5)
    (tmp_path / "none.jsonl").write_text("")

    assert prepare_prompts(config(one, train_batch_size=8), "val", tokenizer).table.num_rows == 1
    with pytest.raises(DataError, match="0 prompts are left"):
        prepare_prompts(config(str(tmp_path / "none.jsonl")), "val", tokenizer)


def test_only_the_first_rows_are_read_when_samples_are_limited(tmp_path, tokenizer):
    file = rows_of_lengths(tmp_path / "a.jsonl", 3, 4, 5, 6)

    prepared = prepare_prompts(config(file, train_max_samples=2), "train", tokenizer)

    assert token_lengths(prepared) == [3, 4] and prepared.counts["read"] == 2


# B92: a prompt that fills the model's context.


def test_a_prompt_that_leaves_no_room_for_one_token_is_dropped_and_counted(tmp_path, tokenizer):
    file = rows_of_lengths(tmp_path / "a.jsonl", 64, 63)
    cfg = config(file, max_prompt_length=64, max_response_length=16, rollout={"max_model_len": 64})

    prepared = prepare_prompts(cfg, "train", tokenizer)

    assert token_lengths(prepared) == [63]
    assert prepared.counts["filtered_no_room"] == 1


def test_the_models_own_context_counts_where_none_is_configured(tmp_path, tokenizer):
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 64}')
    file = rows_of_lengths(tmp_path / "a.jsonl", 64, 63)
    cfg = config(file).model_copy(
        update={"actor_rollout_ref": RunConfig(actor_rollout_ref={"model": {"path": str(tmp_path)}}).actor_rollout_ref}
    )

    assert token_lengths(prepare_prompts(cfg, "train", tokenizer)) == [63]


# B83 on the way in.


def test_prompts_with_half_a_surrogate_pair_are_tokenised_as_their_escape(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(r'{"prompt": "a\ud83d \u0000 \u202e", "note": "\udc00"}' + "\n")

    (got,) = prepare_prompts(config(str(tmp_path / "a.jsonl")), "train", tokenizer).table.to_pylist()

    assert got["prompt_text"] == "a\\ud83d \x00 \u202e"
    assert json.loads(got["prompt"]) == "a\ud83d \x00 \u202e"
    assert json.loads(got["extra_info"]) == {"note": "\udc00"}


# Order.


def test_the_order_of_prompts_is_a_fixed_function_of_seed_and_epoch():
    assert prompt_order(0, 0, 8, shuffle=True).tolist() == [7, 2, 5, 1, 0, 6, 4, 3]
    assert prompt_order(0, 0, 8, shuffle=False).tolist() == list(range(8))
    assert prompt_order(0, 1, 1000, True).tolist() != prompt_order(0, 0, 1000, True).tolist()
    assert prompt_order(1, 0, 1000, True).tolist() != prompt_order(0, 0, 1000, True).tolist()


def test_an_epoch_takes_every_prompt_once_and_drops_the_rest_of_the_last_step():
    steps = [step_rows(step, rows=10, train_batch_size=3, seed=5, shuffle=True) for step in range(1, 7)]

    assert [epoch for epoch, _ in steps] == [0, 0, 0, 1, 1, 1]
    for epoch in (0, 1):
        taken = np.concatenate([rows for e, rows in steps if e == epoch])
        assert taken.tolist() == prompt_order(5, epoch, 10, True)[:9].tolist()


def test_a_step_of_an_empty_epoch_is_refused():
    with pytest.raises(DataError, match=r"data\.train_batch_size=8"):
        step_rows(1, rows=5, train_batch_size=8, seed=0, shuffle=True)


def test_the_digest_knows_the_content_and_not_the_place(tmp_path, tokenizer):
    def digest(name: str, *lengths: int, **data: object) -> str:
        return prepare_prompts(config(rows_of_lengths(tmp_path / name, *lengths), **data), "train", tokenizer).digest

    first = digest("a.jsonl", 3, 4)
    assert digest("a.jsonl", 3, 5) != first
    assert digest("a.jsonl", 3, 4, max_prompt_length=9) != first
    assert digest("a.jsonl", 3, 4) == first


def test_sample_seeds_depend_on_each_part_and_on_nothing_else():
    seeds = {
        sample_seed(run, step, prompt, slot, sample)
        for run in (0, 1)
        for step in (1, 2)
        for prompt in (0, 11)
        for slot in (0, 1)
        for sample in (0, 1)
    }

    assert len(seeds) == 32
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert sample_seed(0, 1, 2, 3, 4) == 4_122_625_895_020_460_734


def test_a_null_prompt_a_message_without_content_and_an_image_are_refused_and_text_parts_are_joined(
    tmp_path, tokenizer
):
    def prepared(prompt):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"prompt": prompt, "answer": "1"}))
        return prepare_prompts(config(str(path)), "train", tokenizer)

    with pytest.raises(DataError, match="is null"):
        prepared(None)
    with pytest.raises(DataError, match="has no content"):
        prepared([{"role": "user"}])
    with pytest.raises(DataError, match="images"):
        prepared([{"role": "user", "content": [{"type": "image", "url": "x"}]}])
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    joined, plain = prepared([{"role": "user", "content": parts}]), prepared([{"role": "user", "content": "one two"}])
    assert joined.table["prompt_ids"].equals(plain.table["prompt_ids"])
