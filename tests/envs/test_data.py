"""Rows of data: fields found, bad rows named by their place, order, held-out questions."""

import dataclasses
import decimal
import json
import re

import numpy as np
import pytest

from marft_jax import check
from marft_jax.envs.base import OneOf, Task, held_out, make
from marft_jax.envs.datasets import load
from marft_jax.envs.maths import Settings
from marft_jax.errors import BadInput
from marft_jax.extras.judge import environment as judged
from marft_jax.plugins import name_of


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(count, prefix="q"):
    return [
        {"question": f"{prefix}{index}", "answer": f"so #### {index}"} for index in range(count)
    ]


def split(source, eval_source, holdout, side):
    sources, eval_sources = ((name,) if name else () for name in (source, eval_source))
    env = Settings(data=sources, eval_data=eval_sources, holdout=holdout)
    return [task for group in load.split_tasks(env, side) for task in group]


@pytest.mark.parametrize("row, task", [
    ({"question": "q", "answer": "9 * 2 = 18\n#### 18"}, Task("q", "18")),
    ({"question": "q", "answer": "#### 1,080"}, Task("q", "1,080")),
    ({"problem": "p", "final_answer": "\\frac{1}{2}"}, Task("p", "\\frac{1}{2}")),
    ({"problem": "p", "answer": "5", "solution": "is \\boxed{6}"}, Task("p", "5")),
    ({"problem": "p", "solution": "is \\boxed{\\frac{1}{2}}."}, Task("p", "\\frac{1}{2}")),
    ({"question": "q", "final_answer": ["2", "$3$"], "solution": ["?"]}, Task("q", "2, $3$")),
    ({"problem": "p", "answer": 52.0}, Task("p", "52")),
    ({"problem": "p", "answer": 0}, Task("p", "0")),
    ({"problem": "p", "answer": None, "solution": "\\boxed{7}"}, Task("p", "7")),
    ({"problem": "(A) x (B) y", "final_answer": "B", "choices": ["(A) x", "(B) y"]},
     Task("(A) x (B) y", "B")),
    ({"question": "which?", "options": ["x", "y"], "gold": [1]},
     Task("which?\n(A) x\n(B) y", "B")),
    ({"question": "which?", "options": ["(A)x", "(B)y"], "label": "A"},
     Task("which?\n(A)x\n(B)y", "A")),
    ({"question": "which?", "choices": ["0", "1"], "answer": 1},
     Task("which?\n(A) 0\n(B) 1", OneOf(("B", "1")))),
    ({"problem": "p", "solution": "\\boxed{1} and \\boxed{2}"}, Task("p", "1, 2")),
])  # fmt: skip
def test_fields_found_in_the_wild(row, task):
    assert load.as_task(row) == task


CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"}]


@pytest.mark.parametrize("row, task", [
    ({"Question ": "q", "ANSWER": "1"}, Task("q", "1")),
    ({"data_source": "d", "prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": 3},
      "extra_info": {"answer": "no"}}, Task("Be brief.\nq", "3")),
    ({"prompt": CHAT, "solution": "$\\frac{1}{2}$"}, Task("Be brief.\nq", "$\\frac{1}{2}$")),
    ({"prompt": CHAT, "solution": "42"}, Task("Be brief.\nq", "42")),
    ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "q"}]}],
      "completion": [{"role": "assistant", "content": "It is \\boxed{7}."}]}, Task("q", "7")),
    ({"prompt": [{"role": "user", "content": ["q", {"type": "image"}, {"text": 5}]}],
      "answer": 7}, Task("q5", "7")),
    ({"messages": [*CHAT, {"role": "assistant", "content": "so #### 5"}]},
     Task("Be brief.\nq", "5")),
    ({"messages": [*CHAT, {"role": "assistant", "content": "?"}, CHAT[1] | {"content": "r"}],
      "label": 1}, Task("Be brief.\nuser: q\nassistant: ?\nuser: r", "1")),
    ({"prompt": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"}],
      "answer": 7}, Task("s\nq", "7")),
    ({"prompt": [CHAT[0] | {"role": "developer"}, CHAT[1]], "answer": 7},
     Task("Be brief.\nq", "7")),
    ({"system_prompt": "s", "question": "q", "answer": 7}, Task("s\nq", "7")),
    ({"system": "s", "conversations": [{"from": "human", "value": "q"},
      {"from": "gpt", "value": "It is \\boxed{7}."}]}, Task("s\nq", "7")),
    ({"prompt": json.dumps(CHAT), "answer": 7}, Task("Be brief.\nq", "7")),
    ({"prompt": str(CHAT), "reward_model": str({"ground_truth": "7"})},
     Task("Be brief.\nq", "7")),
    ({"system": None, "question": "q", "answer": 7}, Task("q", "7")),
])  # fmt: skip
def test_rows_and_chats_of_other_trainers(tmp_path, row, task):
    assert load.load(write(tmp_path / "a.jsonl", [row])) == [task]


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_a_table_of_a_spreadsheet(tmp_path, separator):
    lines = [
        ["Question", "Answer", "level"],
        ['"1, 2; 3\n""and"" so on?"', "6", "2"],
        ["q", "4", "1"],
    ]
    path = tmp_path / "a.csv"
    path.write_text(
        "\ufeff" + "\r\n".join(separator.join(line) for line in lines), encoding="utf-8"
    )
    assert load.load(str(path)) == [Task('1, 2; 3\n"and" so on?', "6"), Task("q", "4")]
    assert load.load(str(path), Settings(filters=("Level<=1",))) == [Task("q", "4")]


def run_check(*flags):
    with pytest.raises(SystemExit) as left:
        check.main(flags)
    return left.value.code


def test_a_preview_shows_rows_lengths_in_tokens_and_what_is_left_out(tmp_path, capsys):
    data = [{"frage": "q" * n, "answer": n} for n in (1, 2, 30)] + [{"frage": "", "answer": 1}]
    source = write(tmp_path / "a.jsonl", data)
    assert run_check("--data", source, "--env.question_field", "frage") == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"{source}: 4 rows, 3 tasks, 1 left out"
    assert shown[1:3] == ["  question: q", "  answer:   1"]
    lengths = "questions in tokens of tiny: shortest 1, median 2, 95 % 27, longest 30"
    assert lengths in shown and shown[-2].startswith(f"left out: {source} line 4: expected a quest")


@pytest.mark.parametrize("flags, shown, fault", [
    ([], "1 rows, 0 tasks, 1 left out", "expected rows that are tasks, got 1 rows, 0 tasks"),
    (["--env.question_field", "frage", "--env.filters", "level<3"], "", "--env.filters"),
    (["--base", "."], "", "expected tokenizer.json"),
    (["--base", "no.gguf"], "", "--base: no such file: no.gguf"),
])  # fmt: skip
def test_a_preview_without_a_task_or_a_tokenizer_is_bad_input(
    flags, shown, fault, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "a.jsonl", [{"frage": "q", "answer": 1, "level": 3}])
    assert run_check("--data", source, *flags) == 2
    out, err = capsys.readouterr()
    assert shown in out and fault in err and "--model.base" not in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", ["a.json", "b.json", "c.jsonl", "C.JSONL", "d.parquet"])
def test_every_file_format_gives_the_same_tasks(tmp_path, name):
    path, content = tmp_path / name, rows(5)
    if name == "a.json":
        path.write_text(json.dumps(content))
    elif name == "b.json":
        path.write_text(json.dumps({"data": content}))
    elif name.lower() == "c.jsonl":
        write(path, content)
    else:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(content), path)
    assert load.load(str(path)) == [Task(f"q{index}", str(index)) for index in range(5)]


GOOD = '{"question": "q", "answer": "1"}'


@pytest.mark.parametrize("name, text, message", [
    ("a.jsonl", GOOD + '\n\n{"question": "q"}\n', "a.jsonl line 3: no answer"),
    ("a.jsonl", '{"question": "q", "answer": "work ####"}\n', "a.jsonl line 1: no answer"),
    ("a.jsonl", '{"prompt": "q", "solution": "It is seven."}', "line 1: no answer"),
    ("a.jsonl", '{"answer": "1"}\n', "a.jsonl line 1: expected a question"),
    ("a.jsonl", GOOD + '\n{"question"\n', "a.jsonl line 2: not JSON"),
    ("a.jsonl", "[1]\n[2]\n", "a.jsonl line 1: expected an object"),
    ("a.jsonl", "\n", "expected at least one row"),
    ("a.json", f'[{GOOD}, {{"question": "q"}}]', "a.json row 2: no answer"),
    ("a.json", '[\n{"question": "q",\n', "line 3 column"),
    ("a.json", '{"rows": []}', "a list, or"),
    ("a.jsonl", '{"question": "q", "answer": {"value": 5}}', "an answer of text or num"),
    ("a.jsonl", '{"question": "q", "answer": [5, {"value": 5}]}', "an answer of text or num"),
    ("a.jsonl", '{"question": "q", "answer": NaN}', "a.jsonl line 1: no answer"),
    ("a.jsonl", '{"question": "q", "answer": "\\ud800"}', "surrogates not allowed"),
    ("a.jsonl", '{"prompt": [{"role": "user", "content": [{"text": {"a": 1}}]}]}',
     "a.jsonl line 1: expected messages of text"),
    ("a.jsonl", "[" * 5000, "a.jsonl: not a readable file of rows (nested more than 64 deep)"),
    ("a.parquet", "not parquet", "not a readable file of rows"),
    ("a.txt", "question,answer", "expected a file .json, .jsonl, .parquet, .csv"),
    ("a.csv", "question,answer\n", "expected at least one row"),
    ("a.csv", "question,answer\nq,1\nq\n", "a.csv line 3: expected 2 cells"),
    ("a.csv", 'question,answer\n"q,1\n', "not a readable file of rows"),
    ("a.csv", "Frage;Wert\nq;1\nr;2\n",
     "got fields frage, wert; --env.question_field names another (2 of 2 rows are bad)"),
    ("a.csv", "question,wert\nq,1\n", "--env.answer_field names another"),
])  # fmt: skip
def test_bad_files_are_named_with_their_line(tmp_path, name, text, message):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BadInput) as error:
        load.load(str(path))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("source, message", [
    ("no/such/file.jsonl", "No such file"),
    ("nothing", "no such file"),
    (None, "--env.data"),
])  # fmt: skip
def test_missing_data_is_one_clear_line(source, message):
    with pytest.raises(BadInput) as error:
        split(source, None, 0.1, "train")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_hub_id_without_a_hub_is_one_clear_line():
    pytest.importorskip("datasets")
    with pytest.raises(BadInput) as error:
        load.load("nobody/no-such-data:train")
    assert "as a hub id it cannot be loaded" in str(error.value)
    assert "\n" not in str(error.value)


def test_held_out_questions_are_never_trained_on(tmp_path):
    source = write(tmp_path / "a.jsonl", rows(400))
    train = split(source, None, 0.1, "train")
    held = split(source, None, 0.1, "eval")
    assert len(train) + len(held) == 400 and 20 < len(held) < 60
    assert not set(train) & set(held)
    assert held == [task for task in load.load(source) if held_out(task.question, 0.1)]
    pick = load.training_order([train])
    assert not {pick(position) for position in range(2 * len(train))} & set(held)


def test_the_side_of_a_question_does_not_depend_on_the_other_rows(tmp_path):
    few = split(write(tmp_path / "a.jsonl", rows(100)), None, 0.2, "eval")
    many = split(write(tmp_path / "b.jsonl", rows(200)), None, 0.2, "eval")
    assert set(few) < set(many)


def test_questions_of_the_evaluation_file_are_removed_from_training(tmp_path):
    source = write(tmp_path / "a.jsonl", rows(20))
    benchmark = write(tmp_path / "b.jsonl", rows(5))
    train = split(source, benchmark, 0.1, "train")
    assert [task.question for task in train] == [f"q{index}" for index in range(5, 20)]
    assert len(split(source, benchmark, 0.1, "eval")) == 5
    with pytest.raises(BadInput, match="to train on, got none"):
        split(benchmark, source, 0.1, "train")


def test_an_empty_side_is_refused(tmp_path):
    source = write(tmp_path / "a.jsonl", rows(3))
    with pytest.raises(BadInput, match="to evaluate on, got none; change --env.holdout 0"):
        split(source, None, 0.0, "eval")
    with pytest.raises(BadInput, match="to train on, got none; change --env.holdout 1"):
        split(source, None, 1.0, "train")


def test_the_order_repeats_and_differs_between_epochs(tmp_path):
    tasks = load.load(write(tmp_path / "a.jsonl", rows(50)))
    pick, again = load.training_order([tasks]), load.training_order([tasks])
    order = [pick(position) for position in range(150)]
    assert order == [again(position) for position in range(150)]
    epochs = [order[start : start + 50] for start in (0, 50, 100)]
    assert all(sorted(epoch) == sorted(tasks) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0] and epochs[0] != tasks
    far = 5 * 1_000_003 + 17
    assert pick(far) == again(far)


def test_the_maths_environment_asks_trains_and_grades(tmp_path):
    source = write(tmp_path / "a.jsonl", rows(60))
    settings = Settings(data=(source,), holdout=0.2, workers=1)
    train, evaluation = make(settings, "train"), make(settings, "eval")
    try:
        assert train.size + evaluation.size == 60
        held = {evaluation.create().reset(index) for index in range(evaluation.size)}
        assert len(held) == evaluation.size
        assert not held & {train.create().reset(position) for position in range(300)}
        assert train.create().reset(41) == train.create().reset(41)
    finally:
        train.close()
        evaluation.close()


@pytest.mark.parametrize("name, count, first", [
    ("gsm8k/train.jsonl", 7473, "72"),
    ("gsm8k/test.jsonl", 1319, "18"),
    ("gsm8k/test.parquet", 1319, "18"),
    ("math/test.jsonl", 5000, "41"),
    ("math/math500.jsonl", 500, "\\left( 3, \\frac{\\pi}{2} \\right)"),
    ("aime/aime2024.jsonl", 30, "204"),
    ("aime/aimo_validation.jsonl", 90, "116"),
    ("cmath/test.jsonl", 1098, "18"),
    ("gaokao_mathqa/test.jsonl", 351, "D"),
])  # fmt: skip
def test_benchmarks_as_users_have_them(shared_data, name, count, first):
    tasks = load.load(str(shared_data / name))
    assert len(tasks) == count and tasks[0].answer == first
    assert all(task.question.strip() and task.answer.strip() for task in tasks)


def test_a_few_bad_rows_are_left_out_and_reported(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(9)) + '{"question": "q9"\n')
    tasks = load.load(str(path), Settings(max_bad_rows=0.1))
    assert len(tasks) == 9
    told = capsys.readouterr().err
    assert "left out 1 of 10 rows" in told and "line 10: not JSON" in told
    with pytest.raises(BadInput, match="line 10: not JSON.*--env.max_bad_rows"):
        load.load(str(path), Settings(max_bad_rows=0.09))


def test_fields_can_be_named(tmp_path):
    source = write(tmp_path / "a.jsonl", [{"frage": "q", "antwort": 3, "question": "no"}])
    fields = {"question_field": "frage", "answer_field": "antwort"}
    assert load.load(source, Settings(**fields)) == [Task("q", "3")]
    with pytest.raises(BadInput, match="expected one in antwort"):
        load.load(write(tmp_path / "b.jsonl", [{"frage": "q", "answer": "3"}]),
                  Settings(**fields))  # fmt: skip


@pytest.mark.parametrize("filters, kept", [
    (["level=1|3"], "13"),
    (["level!=1"], "23"),
    (["level<=2"], "12"),
    (["level >= 2", "kind=b"], "2"),
    (["other!=x"], "123"),
])  # fmt: skip
def test_filters_keep_the_rows_that_fit_all(tmp_path, filters, kept):
    content = [{"question": n, "answer": n, "level": int(n), "kind": "ab"[n == "2"]} for n in "123"]
    source = write(tmp_path / "a.jsonl", content)
    tasks = load.load(source, Settings(filters=filters))
    assert "".join(task.question for task in tasks) == kept


@pytest.mark.parametrize(
    "text, message",
    [("level", "field=value"), ("level<=x", "field<=num"), ("level=9", "that fits")],
)
def test_filters_that_mean_nothing_are_refused(tmp_path, text, message):
    source = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "1", "level": 1}])
    with pytest.raises(BadInput, match=message):
        load.load(source, Settings(filters=[text]))


def test_sources_are_mixed_by_weight_and_each_task_comes_in_turn(tmp_path):
    many = write(tmp_path / "a.jsonl", rows(100, "many"))
    few = write(tmp_path / "b.jsonl", rows(10, "few"))
    env = Settings(data=(many, few), holdout=0.0)
    pick, size = load.chooser(dataclasses.replace(env, weights=(3.0, 1.0)), "train")
    order = [pick(position).question for position in range(400)]
    assert size == 110 and order == [pick(position).question for position in range(400)]
    for start in range(0, 400, 40):
        assert sum(name.startswith("few") for name in order[start : start + 40]) == 10
    turns = [name for name in order if name.startswith("few")]
    assert all(len(set(turns[start : start + 10])) == 10 for start in range(0, 100, 10))
    assert turns[:10] != turns[10:20]
    plain, _ = load.chooser(env, "train")
    assert len({plain(position).question for position in range(110)}) == 110
    for weights in ((1.0,), (1.0, 2.0, 3.0)):
        with pytest.raises(BadInput, match="--env.weights"):
            load.chooser(dataclasses.replace(env, weights=weights), "train")


TABLE = {"Question": "Largest?", "A": "3", "B": "8", "C": "5", "D": "1"}
CITIES = {"question": "Capital?", "options": ["Oslo", "Bern"]}


def picked(choices, answer):
    return {"question": "q", "choices": choices, "answer": answer}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (TABLE | {"Answer": "1"}, "got '1': it means several"),  # B by its index, D by its text
        (TABLE | {"Answer": 4}, "expected the label of a choice (A, B, C, D), got 4: it means non"),
        (TABLE | {"Answer": "E"}, "got 'E': it means none"),
        (TABLE | {"C": "", "Answer": "D"}, "got 'D': it means none"),
        (TABLE | {"C": "", "Answer": 2}, "got 2: it means none"),
        (CITIES | {"answer": -1}, "got -1: it means none"),
        (picked(["1", "2"], 1), "got 1: it means several"),
        (picked(["x", "x"], "x"), "got 'x': it means several"),
        (picked(["B", "A"], "A"), "got 'A': it means several"),
        (picked({"label": ["A"], "text": ["x", "y"]}, "A"), "expected a label for each choice"),
        (picked(["Bonn", None, "Rome"], 1), "it means none"),
        (picked(["Bonn", "Rome"], True), "it means none"),
        (picked([{"foo": "A", "bar": "x"}, {"foo": "B", "bar": "y"}], "A"), "`label` and `text`"),
        (picked([{"label": "A", "text": {"x": 1}}], "A"), "text or numbers"),
        (picked([{"label": "A", "text": "x"}, {"text": "y"}], "A"), "a label for each choice"),
    ],
)  # fmt: skip
def test_a_row_whose_answer_is_ambiguous_is_refused_with_its_place(tmp_path, row, message):
    with pytest.raises(BadInput) as error:
        load.load(write(tmp_path / "a.jsonl", [row]))
    assert "a.jsonl line 1: " in str(error.value) and message in str(error.value)


def test_choices_in_columns_of_a_table_are_shown(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("Question,A,B,C,D,Answer\nLargest of 3 8 5 1?,3,8,5,1,B\n")
    shown = "Largest of 3 8 5 1?\n(A) 3\n(B) 8\n(C) 5\n(D) 1"
    assert load.load(str(path)) == [Task(shown, "B")]
    row = {"question": "q", "option_a": "x", "Option B": "y", "answer": "b"}
    assert load.load(write(tmp_path / "a.jsonl", [row])) == [Task("q\n(A) x\n(B) y", "B")]
    row = {"question": "a+b=?", "a": 3, "b": 4, "answer": 7}
    assert load.load(write(tmp_path / "a.jsonl", [row])) == [Task("a+b=?", "7")]


@pytest.mark.parametrize(("row", "question"), [
    ({"Body": "Ann has 7 pens.", "Question": "How many?", "Answer": 4.0},
     "Ann has 7 pens.\nHow many?"),
    ({"context": "It rains.", "question": "q", "answer": "1"}, "It rains.\nq"),
    ({"passage": ["It", "rains."], "question": "q", "answer": "1"}, "It\nrains.\nq"),
    ({"context": "It rains.", "question": "It rains. Does it?", "answer": "1"},
     "It rains. Does it?"),
    ({"instruction": "Double it.", "input": "21", "answer": 42}, "Double it.\n21"),
    ({"instruction": "q", "input": "", "answer": 42}, "q"),
    ({"question": "q", "input": "x", "answer": 42}, "q"),
    ({"question": "q", "context": None, "explanation": "e", "id": 3, "answer": 42}, "q"),
])  # fmt: skip
def test_what_a_question_is_about_is_shown_with_it(tmp_path, row, question):
    [task] = load.load(write(tmp_path / "a.jsonl", [row]))
    assert task.question == question


def answered(text):
    return [{"role": "user", "content": "q"}, {"role": "assistant", "content": text}]


def asked(text, *more):
    return [CHAT[0], {"role": "user", "content": "q"}, *more, *answered(text)[1:]]


SIX, TWELVE = answered("It is \\boxed{6}."), answered("It is \\boxed{12}.")
LAYOUTS = {
    "beside": ({"prompt": SIX[:1]}, TWELVE[1:], SIX[1:]),
    "beside, as text": ({"prompt": "q"}, TWELVE[1:], SIX[1:]),
    "inside": ({"question": "q"}, TWELVE, SIX),
    "system": ({"prompt": "q"}, asked("\\boxed{12}"), asked("\\boxed{6}")),
    "several turns": ({"prompt": "q"}, asked("\\boxed{12}", *SIX), asked("\\boxed{6}", *TWELVE)),
    "texts": ({"prompt": "q"}, "It is \\boxed{12}.", "It is \\boxed{6}."),
    "chats as texts": ({"prompt": "q"}, json.dumps(TWELVE), json.dumps(SIX)),
    "one message": ({"prompt": "q"}, TWELVE[1], SIX[1]),
    "scores": ({"prompt": "q", "score_chosen": 9.5, "score_rejected": 2.0}, TWELVE, SIX),
    "margin": ({"prompt": "q", "margin": 0.4}, TWELVE, SIX),
    "label": ({"prompt": "q", "label": 1}, TWELVE, SIX),
    "from and value": (
        {"prompt": "q"}, *([{"from": "human", "value": "q"}, {"from": "gpt", "value": text}]
                           for text in ("\\boxed{12}", "\\boxed{6}")),
    ),
    "all messages": ({"prompt": "q", "messages": SIX}, TWELVE, SIX),
}  # fmt: skip
PAIRS = [("chosen", "rejected"), ("chosen_response", "rejected_response"),
         ("response_0", "response_1"), ("response_a", "response_b"), ("output_1", "output_2"),
         ("preferred", "dispreferred"), ("response_j", "response_k")]  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "names"),
    [*((layout, PAIRS[0]) for layout in LAYOUTS), *(("beside", names) for names in PAIRS[1:])],
)
def test_neither_text_of_a_pair_is_the_answer_in_any_order_of_columns(tmp_path, layout, names):
    more, right, wrong = LAYOUTS[layout]
    sides = dict(zip(names, (right, wrong), strict=True))
    for row in (more | sides, more | dict(reversed(sides.items())), sides | more):
        source = write(tmp_path / "a.jsonl", [row])
        with pytest.raises(BadInput, match=r"line 1: no answer.*preference"):
            load.load(source)
        [task] = load.load(write(tmp_path / "b.jsonl", [row | {"answer": "5"}]))
        assert task.answer == "5" and "boxed" not in task.question


PREFERENCES = [
    {"prompt": "q", "chosen": answered("\\boxed{1}"), "rejected": answered("\\boxed{2}")},
    {"prompt": "q", "rejected": answered("\\boxed{2}"), "chosen": answered("\\boxed{1}")},
    {"prompt": "q", "chosen": "1", "rejected": "2"},
    {"prompt": "q", "completion": "\\boxed{2}", "rejected_response": "\\boxed{2}"},
    {"prompt": "q", "completion": "\\boxed{1}", "label": True},
    {"prompt": "q", "completion": "\\boxed{2}", "label": False},
    {"prompt": answered("x")[:1], "completion": answered("\\boxed{2}")[1:], "label": False},
    {"prompt": "q", "completion": "\\boxed{2}", "label": "false"},
    {"prompt": "q", "solution": "\\boxed{2}", "is_correct": False},
    {"prompt": "q", "completion": "\\boxed{2}", "reward": 0.0},
    {"prompt": "q", "completion": "\\boxed{2}", "Label": "0.0"},
    {"messages": answered("\\boxed{2}"), "label": False} | {"prompt": "q"},
    {"instruction": "q", "preference": 1, "correct_answers": ["None"],
     "incorrect_answers": ["None"],
     "completions": [{"response": "\\boxed{2}", "overall_score": 1.0},
                     {"response": "\\boxed{1}", "overall_score": 9.0}]},
    {"prompt": "q", "response_0": "\\boxed{1}", "response_1": "\\boxed{2}", "label": 1,
     "better_response_id": 0},
]  # fmt: skip


@pytest.mark.parametrize("row", PREFERENCES)
def test_a_preference_pays_nothing_and_says_what_it_is_good_for(tmp_path, row):
    source = write(tmp_path / "a.jsonl", [row])
    with pytest.raises(BadInput, match=r"line 1: no answer.*demonstrations .*marft_jax.imitate"):
        load.load(source)
    assert load.load(source, judged.Settings()) == [Task("q", "")]  # no reference for a judge
    [task] = load.load(write(tmp_path / "b.jsonl", [row | {"answer": "5"}]))
    assert task.answer == "5"


@pytest.mark.parametrize(
    "answer",
    ["proof", "Proof", "notfound", "not found", "Not Found.", "N/A", "n/a", "NA", "None", "null",
     "nan", "see solution", "See the solution.", "\\text{proof}", "no answer", "Not available"],
)  # fmt: skip
def test_a_row_whose_answer_is_a_word_for_none_is_left_out_and_counted(tmp_path, capsys, answer):
    rows = [{"problem": "p", "answer": answer}, {"problem": "q", "answer": "7"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load.load(str(tmp_path / "a.jsonl")) == [Task("q", "7")]
    assert "left out 1 of 2 tasks: their answer is a word for none" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["proofs", "no", "0", "none of them", "N", "DNE", "undefined"])
def test_words_that_are_answers_stay(answer):
    assert load.as_task({"problem": "p", "answer": answer}) == Task("p", answer)


def test_none_may_be_a_choice():
    row = {"problem": "p", "choices": ["All", "None"], "answer": "None"}
    assert load.as_task(row).answer == OneOf(["B", "None"])


TWICE = {
    "a.csv": "question,answer,answer\nq,1,2\n",
    "b.csv": "question;Answer;answer \nq;1;2\n",
    "c.csv": "\ufeffquestion\tanswer\tquestion\nq\t1\tr\n",
    "a.jsonl": '{"question": "q", "answer": "1", "answer": "2"}\n',
    "b.jsonl": '{"question": "q", "Answer": "1", "answer": "2"}\n',
    "c.jsonl": '{"question": "q", "answer": "1", "reward_model": {"x": 1, "x": 2}}\n',
    "a.json": '[{"question": "q", "answer": "1", "question": "r"}]',
    "b.json": '{"data": [], "data": [{"question": "q", "answer": "1"}]}',
    "c.json": '[{"question": "q", " answer": "1", "answer": "2"}]',
}


@pytest.mark.parametrize("name", TWICE)
def test_two_columns_or_keys_of_one_name_are_refused_with_the_name(tmp_path, name):
    (tmp_path / name).write_text(TWICE[name], encoding="utf-8")
    with pytest.raises(BadInput, match=f"{name}.*(stands twice|expected one column)") as error:
        load.load(str(tmp_path / name))
    assert "\n" not in str(error.value)


def test_two_columns_of_one_name_in_a_parquet_file_are_refused(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.Table.from_arrays([["q"], ["1"], ["2"]], names=["question", "answer", "answer"])
    parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(BadInput, match="the key 'answer' stands twice"):
        load.load(str(tmp_path / "a.parquet"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "question,answer,,\nq,1,,\n"),  # columns without a name
        ("a.jsonl", '{"Question": "q", "question": "q", "answer": "1"}\n'),  # one value
        ("a.jsonl", '{"question": "q", "answer": "1", "x": {"answer": "2"}}\n'),
    ],
)
def test_names_that_only_seem_to_stand_twice_are_no_fault(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert load.load(str(tmp_path / name)) == [Task("q", "1")]


@pytest.mark.parametrize(("context", "shown"), [
    ({"title": ["Mill"], "sentences": [["The mill is old.", " Ida built it."]]},
     "Mill\nThe mill is old. Ida built it."),
    ([["Barn", ["Jan built it."]]], "Barn\nJan built it."),
    ([{"title": "Barn", "text": "Jan built it."}], "Barn\nJan built it."),
    ([{"is_supporting": True, "paragraph_text": "Jan built it.", "title": "Barn"}],
     "Barn\nJan built it."),
    ({"contexts": ["One.", "Two."], "labels": ["YES"]}, "One. Two."),
    ([{"title": "Barn", "sentences": ["Jan", "built."]}], "Barn\nJan built."),
    (["One.", "Two."], "One.\nTwo."),
    ('[["Barn", ["Jan built it."]]]', "Barn\nJan built it."),
    ("[1] One. [2] Two.", "[1] One. [2] Two."),
    ([{"score": 3, "answer": "SECRET"}], ""),
])  # fmt: skip
def test_passages_are_shown_in_any_layout(tmp_path, context, shown):
    for name in ("context", "Paragraphs", "documents", "passage"):
        row = {"question": "q", "answer": "1", name: context}
        [task] = load.load(write(tmp_path / "a.jsonl", [row]))
        assert task.question == (f"{shown}\nq" if shown else "q")


def test_check_says_how_many_rows_have_a_system_message(tmp_path, capsys):
    rows = [{"prompt": CHAT, "answer": 1}, {"prompt": CHAT[1:], "answer": 1}]
    assert run_check("--data", write(tmp_path / "a.jsonl", rows)) == 0
    shown = capsys.readouterr().out.splitlines()
    assert "1 tasks have a system message, which stands above the question" in shown
    code = [{"prompt": CHAT, "tests": [{"input": "1", "output": "2"}]}]
    assert run_check("--data", write(tmp_path / "b.jsonl", code), "--env.name", "code") == 0
    assert "question: Be brief. q" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("right", "wrong"), [("B", "ACD"), ("2", "134"), ("moss", ["fern", "a", "b"]), ("D", "xyz")]
)
def test_the_right_one_of_texts_in_columns_is_known_whatever_the_texts_are(right, wrong):
    columns = {f"distractor{i}": text for i, text in enumerate(wrong, 1)}
    task = load.as_task({"question": "q", "correct_answer": right, **columns})
    labels = dict(re.findall(r"\((.)\) (.+)", task.question))
    answers = task.answer if isinstance(task.answer, tuple) else (task.answer,)
    assert labels[answers[0]] == right
    assert not {*answers[1:]} & {*labels}  # the label of another choice
    said = load.as_task({"question": "q", "correct_answer": right, **columns, "distractor1": right})
    assert "as right and as wrong" in said


TASKS = [Task("q0", "0"), Task("q1", "1")]
LINES = [json.dumps(row) for row in rows(2)]


@pytest.mark.parametrize("suffix", ["json", "jsonl", "JSON"])
@pytest.mark.parametrize("text", [
    "\n".join(LINES),
    "\n\n".join(LINES) + "\n\n",
    "\ufeff" + "\r\n".join(LINES),
    f"[{', '.join(LINES)}]",
    json.dumps(rows(2), indent=1),
    "\n" + "\n".join(["[", f"{LINES[0]},", LINES[1], "]"]),
], ids=repr)  # fmt: skip
def test_rows_are_a_list_or_lines_under_either_suffix(tmp_path, suffix, text):
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(text.encode())
    assert load.load(str(path)) == TASKS


def test_a_line_separator_within_a_text_ends_no_row(tmp_path):
    row = {"question": "a\u2028b\x85c", "answer": "1"}
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join([json.dumps(row, ensure_ascii=False)] * 2), encoding="utf-8")
    assert load.load(str(path)) == [Task("a\u2028b\x85c", "1")] * 2


SHORT = [0.1, 132.04, 4206.9, 19.99, 1234567.8, 42.0, 1e-7]


def graded(answers):
    """The answers of tasks as the numbers that they are."""
    return [float(task.answer) for task in answers]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("place", ["a column", "a list", "a structure", "Python", "a table"])
def test_an_answer_has_the_digits_of_its_own_type(tmp_path, dtype, place):
    """Of 32 bits as pandas and Arrow write them, 0.1 is not 0.10000000149011612."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    numbers = np.asarray([x for x in SHORT if dtype != "float16" or x < 5000], dtype)
    expected = [float(str(x)) for x in numbers]
    asked = [f"q{i}" for i in range(len(numbers))]
    column = pyarrow.array(numbers)
    if place == "a list":
        column = pyarrow.array([[x] for x in numbers], pyarrow.list_(column.type))
    if place == "a structure":
        fields = [pyarrow.field("ground_truth", column.type)]
        column = pyarrow.StructArray.from_arrays([column], fields=fields)
    name = "reward_model" if place == "a structure" else "answer"
    table = pyarrow.table({"question": asked, name: column})
    source = str(tmp_path / "a.parquet")
    parquet.write_table(table, source)
    if place == "Python":
        source = name_of(
            [{"question": q, "answer": x} for q, x in zip(asked, numbers, strict=True)]
        )
    if place == "a table":
        source = name_of(table)
    assert graded(load.load(source)) == expected


@pytest.mark.parametrize("value, text", [
    (decimal.Decimal("1.5000"), "1.5"),
    (decimal.Decimal("1E+3"), "1000"),
    (np.float32(7), "7"),
    (np.array([1, 2]), "1, 2"),
    (1e21, "1000000000000000000000"),
    (np.float32(2.5e-5), "0.000025"),
], ids=repr)  # fmt: skip
def test_numbers_of_other_types_are_plain_texts(value, text):
    assert load.load(name_of([{"question": "q", "answer": value}])) == [Task("q", text)]


@pytest.mark.parametrize("value", [np.float32("nan"), decimal.Decimal("NaN"), np.array([])])
def test_no_number_is_no_answer(value):
    with pytest.raises(BadInput, match="no answer"):
        load.load(name_of([{"question": "q", "answer": value}]))


LATIN, WIDE = "question,answer\ncaf\u00e9,1\n", "question,answer\nq,1\n"


@pytest.mark.parametrize("name, content", [
    ("a.jsonl", b"\xff\xfe\x00"),
    ("a.csv", LATIN.encode("latin-1")),
    ("a.csv", WIDE.encode("utf-16")),
    ("a.jsonl", '{"question": "caf\u00e9", "answer": 1}'.encode("latin-1")),
    ("a.jsonl", '{"question": "q", "answer": 1}'.encode("utf-16-le")),
])  # fmt: skip
def test_text_of_another_encoding_is_to_be_saved_as_utf_8(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=f"{name}.*save it as UTF-8") as error:
        load.load(str(tmp_path / name))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "\n", "\ufeff", "question,answer\n", " \n\n"])
@pytest.mark.parametrize("name", ["a.csv", "a.jsonl"])
def test_a_file_without_a_row_is_not_a_matter_of_fields(tmp_path, capsys, name, text):
    text = text if name == "a.csv" else text.replace("question,answer", "")
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert run_check("--data", str(tmp_path / name)) == 2
    told = capsys.readouterr().err
    assert "expected rows, got none" in told and "_field" not in told


@pytest.mark.parametrize("count, weights", [(1, ["1", "2"]), (2, ["1"]), (2, ["1", "2", "3"])])
def test_weights_are_as_many_as_sources_wherever_they_are_given(tmp_path, capsys, count, weights):
    sources = [write(tmp_path / f"{i}.jsonl", rows(9)) for i in range(count)]
    assert run_check("--data", *sources, "--env.weights", *weights) == 2
    assert f"each of the {count} sources" in capsys.readouterr().err
    assert run_check("--data", *sources, "--env.weights", *["1"] * count) == 0


@pytest.mark.parametrize("data, told", [(rows(1) * 3, True), (rows(2), False)])
def test_a_single_task_to_train_on_is_remarked(tmp_path, capsys, data, told):
    source = write(tmp_path / "a.jsonl", data)
    load.chooser(Settings(data=(source,), holdout=0.0), "train")
    assert ("one task" in capsys.readouterr().err) == told
