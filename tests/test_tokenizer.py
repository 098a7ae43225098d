"""Loading a tokenizer, and trusting its ids."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tasks.config import ModelConfig
from tasks.tokenizer import TokenizerError, check_round_trip, load_tokenizer

WORDS = ["<unk>", "<eos>", "Ann", "has", "1", "2", "+", "=", "how", "many", "?", "####"]


def word_tokenizer(folder: Path, **config: object) -> Path:
    """Save a tokenizer of twelve words, and a config.json if it has any values."""
    raw = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>", unk_token="<unk>").save_pretrained(folder)
    if config:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def byte_tokenizer(folder: Path) -> Path:
    """Save a byte-level BPE tokenizer that holds any text."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<eos>"])
    raw.train_from_iterator(["Ann has 12 apples and buys 30 more."], trainer)
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>").save_pretrained(folder)
    return folder


def test_ids_are_those_of_tokenizer_json_even_where_the_model_type_makes_transformers_choose_otherwise(
    tmp_path, caplog
):
    folder = word_tokenizer(tmp_path, model_type="qwen2")

    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))

    assert tokenizer("Ann has 1 + 2 how many ?", add_special_tokens=False)["input_ids"] == [2, 3, 4, 6, 5, 8, 9, 10]
    assert tokenizer.eos_token_id == 1
    assert "Qwen2Tokenizer" in caplog.text


def test_a_tokenizer_that_agrees_with_its_file_is_kept_without_a_warning(tmp_path, caplog):
    tokenizer = load_tokenizer(ModelConfig(path=str(byte_tokenizer(tmp_path))))

    check_round_trip(tokenizer, "Ann has 12 apples , and 3\nמ 🙂 .")
    assert not caplog.records


def test_ids_of_a_padded_vocabulary_decode_to_nothing(tmp_path):
    tokenizer = load_tokenizer(ModelConfig(path=str(word_tokenizer(tmp_path))))

    assert tokenizer.batch_decode([[2, 3, 500, 1], [1000]], skip_special_tokens=True) == ["Ann has", ""]


def test_the_chat_template_can_be_replaced(tmp_path):
    template = "{% for m in messages %}{{ m['content'] }} {% endfor %}####"
    tokenizer = load_tokenizer(ModelConfig(path=str(word_tokenizer(tmp_path)), custom_chat_template=template))

    talk = [{"role": "user", "content": "how many ?"}]

    assert tokenizer.apply_chat_template(talk, tokenize=False) == "how many ? ####"


def test_a_tokenizer_path_of_its_own_goes_before_the_models(tmp_path):
    folder = word_tokenizer(tmp_path / "tokenizer")

    assert len(load_tokenizer(ModelConfig(path="/no/such/model", tokenizer_path=str(folder)))) == len(WORDS)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (ModelConfig(), "actor_rollout_ref.model.path"),
        (ModelConfig(path="/no/such/folder"), "is no folder"),
        (ModelConfig(tokenizer_path="./none"), "actor_rollout_ref.model.tokenizer_path=./none is no folder"),
    ],
)
def test_a_missing_model_is_refused_with_its_key(model, words):
    with pytest.raises(TokenizerError, match=words):
        load_tokenizer(model)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match=r"holds no tokenizer.*tokenizer\.json"):
        load_tokenizer(ModelConfig(path=str(tmp_path)))


def test_a_text_that_does_not_come_back_is_refused(tmp_path):
    tokenizer = load_tokenizer(ModelConfig(path=str(word_tokenizer(tmp_path))))

    with pytest.raises(TokenizerError, match="does not give back"):
        check_round_trip(tokenizer, "Bob has 1")
