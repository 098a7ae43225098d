"""Built-in rewards for options, form, repetition and length: what they read, and what they refuse."""

import time

import pytest

from tasks.config import RunConfig
from tasks.rewards import length, multiple_choice, repetition, response_format
from tasks.rewards.functions import BUILTIN, WITHOUT_REFERENCE, configured_functions
from tasks.rewards.pool import RewardRow, score

CITIES = {"options": ["Paris", "London", "Rome", "Berlin"]}
LONG = 100_000


def letter(response, extra_info=None, truth="A"):
    return multiple_choice.compute_score(response, truth, extra_info)["pred"]


# ---------------------------------------------------------------------------------------------------- multiple choice


@pytest.mark.parametrize(
    ("response", "stated"),
    [
        ("The answer is (C).", "C"),
        (r"so \boxed{B}", "B"),
        ("Answer: D", "D"),
        ("The correct answer is B. It is clear.", "B"),
        ("**Answer:** D", "D"),
        ("**Answer**: (D)", "D"),
        ("## Final Answer:\n\nC", "C"),
        ("the answer is: c", "C"),
        ("the answer is (c), of course", "C"),
        ("The correct option is **B) London**.", "B"),
        ("the answer would be option C", "C"),
        ("answer = $C$", "C"),
        ("The answer is $\\boxed{\\text{(D)}}$.", "D"),
        (r"\boxed{\textbf{(B)}\ 5}", "B"),
        (r"\boxed{\text{b}}", "B"),
        ("<think>A or B?</think><answer> B </answer>", "B"),
        ("Answer: A-level? No. Answer: J", "J"),
        ("some thoughts\n\nB", "B"),
        ("some thoughts\n**(B)**\n", "B"),
        ("some thoughts\nC) Rome", "C"),
    ],
)
def test_the_letter_that_is_stated_is_found(response, stated):
    assert letter(response) == stated


@pytest.mark.parametrize(
    ("response", "stated"),
    [
        ("Answer: B. No, the answer is (C).", "C"),
        (r"\boxed{A}, or rather: the answer is B", "B"),
        (r"The answer is B, so \boxed{A}", "A"),
        ("The answer is (A).\nThe answer is a mystery.", "A"),
        ("<answer>A</answer><answer>D</answer>", "D"),
        ("The answer is B.\nC", "B"),
    ],
)
def test_the_last_statement_that_names_an_option_counts(response, stated):
    assert letter(response) == stated


@pytest.mark.parametrize(
    "response",
    [
        "",
        " \n ",
        "no idea",
        "the answer is a mystery",
        "The answer is I think unclear",
        "A cat sat on the mat.",
        "The answer is not B",
        "Answer: Dublin",
        "Answer: D'Artagnan",
        "Answer choices: A) Paris B) London",
        r"\boxed{42}",
        r"\boxed{",
        "<answer></answer>",
        "the answer is (K)",
    ],
)
def test_a_response_that_states_no_option_scores_0_and_has_no_answer(response):
    assert multiple_choice.compute_score(response, "A", format_score=0.5) == {"score": 0.0, "pred": None}


def test_a_wrong_option_gets_the_format_score():
    assert multiple_choice.compute_score("Answer: B", "A", format_score=0.1) == {"score": 0.1, "pred": "B"}
    assert multiple_choice.compute_score("Answer: B", "B", score=2.0) == {"score": 2.0, "pred": "B"}


@pytest.mark.parametrize(
    "options",
    [
        CITIES,
        {"choices": ["Paris", "London", "Rome", "Berlin"]},
        {"options": {"A": "Paris", "B": "London", "C": "Rome", "D": "Berlin"}},
        {"choices": {"label": ["1", "2", "3", "4"], "text": ["Paris", "London", "Rome", "Berlin"]}},
    ],
)
@pytest.mark.parametrize("truth", ["C", "(C)", "c.", 2, 2.0, "Rome", "rome."])
def test_the_reference_is_a_letter_an_index_or_a_text(options, truth):
    assert multiple_choice.compute_score("The answer is (C).", truth, options)["score"] == 1.0
    assert multiple_choice.compute_score("Answer: Rome.", truth, options) == {"score": 1.0, "pred": "C"}
    assert multiple_choice.compute_score(r"\boxed{\text{Paris}}", truth, options) == {"score": 0.0, "pred": "A"}


def test_digits_are_an_index_only_where_they_are_no_text_of_an_option():
    numbers = {"options": ["3", "2", "1", "-1"]}

    assert multiple_choice.compute_score("Answer: B", "2", numbers)["score"] == 1.0
    assert multiple_choice.compute_score("Answer: C", 2, numbers)["score"] == 1.0
    assert multiple_choice.compute_score("Answer: A", "0", numbers)["score"] == 1.0
    assert multiple_choice.compute_score("Answer: -1", "D", numbers)["score"] == 1.0


def test_labels_of_the_data_are_a_reference_and_letters_may_leave_some_out():
    arc = {"choices": {"label": ["1", "2"], "text": ["ice", "fire"]}}
    gaps = {"options": {"A": "ice", "C": "fire"}}

    assert multiple_choice.compute_score("Answer: A", "1", arc)["score"] == 1.0
    assert multiple_choice.compute_score("Answer: C", "fire", gaps)["score"] == 1.0
    assert letter("Answer: B", gaps) is None


def test_a_text_is_found_before_the_letter_it_begins_with():
    pets = {"options": ["no pet", "A cat", "B"]}

    assert letter("Answer: A cat", pets) == "B"
    assert letter("Answer: A", pets) == "A"
    assert letter("Answer: B", pets) == "B"


def test_letters_beyond_the_options_are_none():
    assert letter("Answer: B. Then answer: E", CITIES) == "B"


@pytest.mark.parametrize("truth", ["Madrid", "E", 4, -1, "", True, ["A"]])
def test_a_reference_that_is_no_option_is_an_error(truth):
    with pytest.raises(ValueError, match=r"multiple_choice: the reference answer .* no letter of ABCD.*Paris, London"):
        multiple_choice.compute_score("Answer: A", truth, CITIES)


def test_more_options_than_letters_are_an_error():
    with pytest.raises(ValueError, match="27 options"):
        multiple_choice.compute_score("Answer: A", "A", {"options": list(map(str, range(27)))})


# ------------------------------------------------------------------------------------------------------------- format


@pytest.mark.parametrize(
    ("response", "score_"),
    [
        ("<think>a</think>b", 1.0),
        ("<think>a\n\nb</think>\n\nc\nd", 1.0),
        ("<think></think>b", 1.0),
        ("", 0.0),
        ("b", 0.0),
        ("<think>a</think>", 0.0),
        ("<think>a</think> \n", 0.0),
        ("\n<think>a</think>b", 0.0),
        ("</think>a<think>b", 0.0),
        ("<think>a</think>b</think>", 0.0),
        ("<think>a<think>b</think>c", 0.0),
    ],
)
def test_thoughts_stand_once_at_the_start_and_an_answer_follows(response, score_):
    assert response_format.compute_score(response) == score_


def test_a_pattern_must_match_the_whole_response_and_its_point_takes_line_breaks():
    pattern = r"<answer>.*</answer>"

    assert response_format.compute_score("<answer>4\n2</answer>", pattern) == 1.0
    assert response_format.compute_score("<answer>42</answer>.", pattern) == 0.0
    assert response_format.compute_score("<answer>42</answer>", rf"^{pattern}$") == 1.0


def test_the_pattern_for_responses_that_begin_within_the_thoughts():
    pattern = r"(?!.*<think>).*?</think>\s*\S.*"

    for response, score_ in [("a\nb</think>\nc", 1.0), ("a</think>", 0.0), ("<think>a</think>b", 0.0)]:
        assert response_format.compute_score(response, pattern) == score_


def test_a_pattern_that_is_none_is_an_error():
    with pytest.raises(ValueError, match=r"format: pattern='\(' is no regular expression.*reward\.functions"):
        response_format.compute_score("a", "(")


# ------------------------------------------------------------------------------------------------ repetition, length


def test_repetition_is_the_share_of_runs_of_words_that_stood_before():
    # Pairs: a b, b a, a b, b c: one of four stood before.
    assert repetition.repeated_share(list("ababc"), 2) == 0.25
    assert repetition.compute_score("A b  a\nB c", ngram_size=2, max_penalty=-0.8) == -0.2
    assert repetition.compute_score("a b a b c", ngram_size=3) == 0.0


@pytest.mark.parametrize("text", ["", "one", "one two", "one two three"])
def test_a_text_that_is_too_short_to_repeat_has_no_penalty(text):
    assert str(repetition.compute_score(text)) == "0.0"


@pytest.mark.parametrize("kwargs", [{"ngram_size": 0}, {"max_penalty": 0.5}])
def test_repetition_refuses_numbers_that_mean_nothing(kwargs):
    with pytest.raises(ValueError, match=r"repetition: .*reward\.functions"):
        repetition.compute_score("a", **kwargs)


@pytest.mark.parametrize(
    ("words", "score_"), [(0, -1.0), (1, -0.75), (3, -0.25), (4, 0.0), (6, 0.0), (7, -0.25), (10, -1.0), (100, -1.0)]
)
def test_length_costs_the_distance_from_the_window(words, score_):
    text = "word " * words

    assert length.compute_score(text, min_words=4, max_words=6, falloff_words=4) == score_
    assert length.compute_score(text, min_words=4, max_words=6, falloff_words=4, max_penalty=-2.0) == 2 * score_


def test_a_window_may_be_open_on_one_side():
    assert length.compute_score("a b c", max_words=2, falloff_words=2) == -0.5
    assert length.compute_score("", max_words=2) == 0.0
    assert length.compute_score("a", min_words=2, falloff_words=2) == -0.5
    assert length.compute_score("a " * 1000, min_words=2) == 0.0


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"min_words": 3, "max_words": 2},
        {"min_words": -1, "max_words": 2},
        {"max_words": 2, "falloff_words": 0},
        {"max_words": 2, "max_penalty": 1.0},
    ],
)
def test_length_refuses_a_window_that_is_none(kwargs):
    with pytest.raises(ValueError, match="length: "):
        length.compute_score("a", **kwargs)


# ---------------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize(
    "piece",
    [
        "a",
        " ",
        "\n",
        "(",
        "*",
        "option ",
        "answer is ",
        "answer: ",
        "answer is (((((((((((((",
        "<answer>",
        "</answer>",
        "<think>",
        r"\boxed{",
        r"\boxed{\text{",
        "the the ",
        "A.",
        "\x00é中",
    ],
)
def test_no_response_of_100_000_characters_takes_long(piece):
    text = (piece * LONG)[:LONG]
    begun = time.process_time()

    multiple_choice.compute_score(text, "A", CITIES)
    response_format.compute_score(text)
    response_format.compute_score(text, r"<think>.*?</think>\s*<answer>.*?</answer>")
    repetition.compute_score(text)
    length.compute_score(text, max_words=10)

    assert time.process_time() - begun < 2.0


def test_all_are_built_in_and_add_up_with_weights():
    functions = [
        {"name": "multiple_choice", "weight": 1.0},
        {"name": "format", "weight": 0.5},
        {"name": "repetition", "weight": 0.25, "kwargs": {"ngram_size": 1}},
        {"name": "length", "weight": 0.125, "kwargs": {"max_words": 2, "falloff_words": 4}},
    ]
    text = "<think>b b</think> Answer: B"
    rows = [
        RewardRow("s0", "mine", "p", text, "London", CITIES),
        RewardRow("s1", "mine", "p", "dunno", "London", CITIES),
    ]

    right, none = score(rows, RunConfig(reward={"functions": functions, "retries": 0}))

    assert right.parts == {"multiple_choice": 1.0, "format": 1.0, "repetition": 0.0, "length": -0.5}
    assert (right.score, right.status, right.extracted) == (1.0 + 0.5 - 0.0625, "ok", "B")
    assert none.parts["multiple_choice"] == 0.0 and none.extracted is None


def test_a_response_without_an_option_is_unparsed():
    (verdict,) = score(
        [RewardRow("s0", "mine", "p", "dunno", "A")], RunConfig(reward={"functions": [{"name": "multiple_choice"}]})
    )

    assert (verdict.score, verdict.status) == (0.0, "unparsed")


def test_form_repetition_and_length_need_no_reference():
    functions = configured_functions(RunConfig(reward={"functions": [{"name": name} for name in BUILTIN]}))

    assert [function.name for function in functions if not function.needs_reference] == list(WITHOUT_REFERENCE)


# B79: a weighted sum with parts that do not apply.


def test_parts_that_are_null_are_skipped_and_a_row_without_any_has_no_verdict(tmp_path):
    (tmp_path / "tasks_of_two_kinds.py").write_text(
        "def maths(solution_str, data_source):\n"
        "    return float(solution_str == '4') if data_source == 'maths' else None\n\n"
        "def prose(solution_str, data_source):\n"
        "    return float(solution_str.islower()) if data_source == 'prose' else None\n"
    )
    names = [
        {"name": f"{tmp_path}/tasks_of_two_kinds.py:{name}", "weight": w} for name, w in (("maths", 1), ("prose", 3))
    ]
    rows = [
        RewardRow(f"s{i}", source, "p", text, None)
        for i, (source, text) in enumerate([("maths", "4"), ("maths", "5"), ("prose", "yes"), ("neither", "4")])
    ]

    verdicts = score(rows, RunConfig(reward={"functions": names}))

    assert [verdict.score for verdict in verdicts] == [1.0, 0.0, 3.0, None]
    assert [verdict.status for verdict in verdicts] == ["ok", "ok", "ok", "not_applicable"]
    assert [list(verdict.parts.values()) for verdict in verdicts] == [
        [1.0, None],
        [0.0, None],
        [None, 1.0],
        [None, None],
    ]
