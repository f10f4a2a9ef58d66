"""Rows in the layouts of published data sets, with contents of our own.

Each becomes a task that shows what the question is about and not the answer, pays a right answer
and no wrong one; or it is refused with a line that names what is missing. ``SECRET`` marks the
texts of a row that give the answer away.
"""

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from marft_jax.envs.base import make
from marft_jax.envs.datasets import load
from marft_jax.envs.maths import Settings
from marft_jax.errors import BadInput


class Layout(NamedTuple):
    row: Any
    right: Sequence[str]
    wrong: Sequence[str]
    shown: Sequence[str] = ()


def user(text, system=None):
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": text}]


def talk(text, reply):
    return [*user(text), {"role": "assistant", "content": reply}]


def human(text, reply):
    return [{"from": "human", "value": text}, {"from": "gpt", "value": reply}]


Q = "Ann packs 12 boxes of 34 nuts. How many nuts?"
ASK = {"question": Q}
PROBLEM = {"problem": Q}
N = (("408", "\\boxed{408}", "The answer is 408."), ("407", "\\boxed{46}"), ("12 boxes",))
WORK = "SECRET: 12 times 34 is \\boxed{408}."
MILL, BARN = " Ida Berg built it.", "Jan Vik built the barn."
WHO = {"question": "Who built the mill?"}
IDA = (("Ida Berg", "The answer is Ida Berg."), ("Jan Vik",), ("Ida Berg built it.", BARN))
PICK = {"question": "Which is a river?"}
RIVER = (("(B)", "The answer is B."), ("(A)", "(C)"), ("Oslo", "Rhine", "Mount Blanc"))
THREE = ["Oslo", "Rhine", "Mount Blanc"]
LETTERS = ["A", "B", "C"]
TEXT = (("Rhine", "The answer is Rhine."), ("Oslo", "Mount Blanc"), tuple(THREE))
YES = (("True", "\\boxed{True}"), ("False",))

TASKS = {
    "gsm8k": Layout(ASK | {"answer": "SECRET 12 * 34 = <<12*34=408>>408\n#### 408"}, *N),
    "gsm8k socratic": Layout(ASK | {"answer": "SECRET? ** 12*34\n#### 408"}, *N),
    "MATH": Layout(PROBLEM | {"level": "Level 2", "type": "Algebra", "solution": WORK}, *N),
    "MATH-500": Layout(PROBLEM | {"solution": WORK, "answer": "408", "subject": "Algebra",
                                  "level": 2, "unique_id": "x.json"}, *N),
    "AIME": Layout({"ID": "1", "Problem": Q, "Solution": WORK, "Answer": 408}, *N),
    "AIMO": Layout(PROBLEM | {"id": 0, "answer": 408.0, "url": "x", "solution": WORK}, *N),
    "NuminaMath-CoT": Layout(PROBLEM | {"source": "s", "solution": WORK,
                                        "messages": talk(Q, WORK)}, *N),
    "NuminaMath-TIR": Layout(PROBLEM | {"solution": f"```python\nSECRET\n```\n{WORK}",
                                        "messages": talk(Q, WORK)}, *N),
    "NuminaMath-1.5": Layout(PROBLEM | {
        "solution": WORK, "answer": "408", "problem_type": "Algebra", "source": "s",
        "question_type": "math-word-problem", "problem_is_valid": "Yes", "synthetic": False}, *N),
    "OpenR1-Math": Layout(PROBLEM | {
        "solution": WORK, "answer": "408", "generations": [WORK], "correctness_count": 1,
        "is_reasoning_complete": [True], "correctness_math_verify": [True],
        "messages": talk(Q, WORK)}, *N),
    "DAPO-Math": Layout({
        "data_source": "d", "prompt": user(f"Solve it, last line `Answer: X`.\n\n{Q}"),
        "ability": "MATH", "reward_model": {"ground_truth": "408", "style": "rule"},
        "extra_info": {"index": "SECRET"}}, *N),
    "OpenMathReasoning": Layout(PROBLEM | {
        "expected_answer": "408", "problem_type": "has_answer_extracted",
        "generated_solution": WORK, "pass_rate_72b_tir": "0.5"}, *N),
    "DeepMath": Layout(ASK | {"final_answer": "408", "difficulty": 3.0, "topic": "a",
                              "r1_solution_1": WORK, "r1_solution_2": WORK}, *N),
    "SVAMP": Layout({"ID": "c", "Body": "Ann packs 12 boxes of 34 nuts.", "Question": "How many?",
                     "Equation": "( 12.0 * 34.0 )", "Answer": "408", "Type": "x"},
                    *N[:2], ("12 boxes", "How many?")),
    "SVAMP on the hub": Layout({"Body": "Ann packs 12 boxes of 34 nuts.", "Question": "How many?",
                                "question_concat": Q, "Answer": 408.0}, *N),
    "ASDiv": Layout({"body": "Ann packs 12 boxes of 34 nuts.", "question": "How many?",
                     "formula": "SECRET", "answer": "408 (nuts)", "solution_type": "x"},
                    ("408", "The answer is 408."), ("407",), ("12 boxes",)),
    "AQuA-RAT": Layout(PICK | {"options": ["A)Oslo", "B)Rhine", "C)Mount Blanc"],
                               "rationale": "SECRET", "correct": "B"}, *RIVER),
    "MathQA": Layout({"Problem": "12 times 34?", "Rationale": "SECRET", "correct": "b",
                      "options": "a ) 46 , b ) 408 , c ) 1,234 , d ) none of these",
                      "annotated_formula": "SECRET", "category": "gain"},
                     ("(B)", "The answer is B."), ("(A)", "(C)"), ("408", "1,234", "none of")),
    "CMATH": Layout({"question": "12\u4e5834\u7b49\u4e8e\u591a\u5c11\uff1f", "golden": "408",
                     "grade": 3, "reasoning_step": 1}, *N[:2]),
    "GAOKAO of AGIEval": Layout(PICK | {
        "passage": None, "options": ["(A)Oslo", "(B)Rhine", "(C)Mount Blanc"], "label": "B",
        "answer": None, "other": {"source": "SECRET"}}, *RIVER),
    "OlympiadBench": Layout(ASK | {
        "id": 1, "solution": [WORK], "final_answer": ["408"], "context": None, "image_1": None,
        "modality": "Text-only", "is_multiple_answer": False, "unit": None, "error": None}, *N),
    "Skywork-OR1": Layout({
        "data_source": "s", "prompt": user(Q), "ability": "math",
        "reward_model": {"ground_truth": '["408"]', "style": "rule"},
        "extra_info": {"index": 1, "model_difficulty": {"m": 7}}}, *N),
    "SYNTHETIC-1": Layout({"problem_id": "p", "task_type": "verifiable_math", "prompt": Q,
                           "verification_info": '{"ground_truth": "408"}', "metadata": "{}",
                           "gold_standard_solution": WORK}, *N),
    "SYNTHETIC-2": Layout({"prompt": Q, "task_type": "math", "difficulty": "easy",
                           "verification_info": {"ground_truth": "408"}}, *N),
    "INTELLECT math": Layout({"prompt": Q, "solve_rate_qwen_r1_distill_7b": 0.5,
                              "verification_info": "{'ground_truth': '408'}"}, *N),
    "NeMo-Gym math": Layout({"responses_create_params": {"input": user(Q)},
                             "expected_answer": "408"}, *N),
    "NeMo-Gym choices": Layout({
        "responses_create_params": {"input": user("Which is a river?", "End with a letter.")},
        "options": [{"A": "Oslo"}, {"B": "Rhine"}, {"C": "Mount Blanc"}], "expected_answer": "B"},
        RIVER[0], RIVER[1], ("End with a letter.\nWhich", *THREE)),
    "verl gsm8k": Layout({
        "data_source": "openai/gsm8k", "prompt": user(f"{Q} Put it after ####."),
        "ability": "math", "reward_model": {"style": "rule", "ground_truth": "408"},
        "extra_info": {"split": "train", "answer": "SECRET #### 408", "question": Q}}, *N),
    "verl in a table": Layout({
        "prompt": str(user(Q, "Be brief.")), "data_source": "s",
        "reward_model": str({"style": "rule", "ground_truth": "408"})},
        N[0], N[1], ("Be brief.\nAnn packs",)),
    "TRL prompts": Layout({"prompt": user(Q, "Be brief."), "solution": "$408$"},
                          N[0], N[1], ("Be brief.\nAnn packs",)),
    "TRL prompt and completion": Layout({"prompt": Q, "completion": WORK}, *N),
    "ARC": Layout(PICK | {"id": "M_1", "choices": {"text": THREE, "label": LETTERS},
                          "answerKey": "B"}, *RIVER),
    "ARC with numbers": Layout(PICK | {"choices": {"text": THREE, "label": ["1", "2", "3"]},
                                       "answerKey": "2"}, ("(2)", "2"), ("(1)", "(3)", "3")),
    "MMLU": Layout(PICK | {"subject": "geo", "choices": THREE, "answer": 1}, *RIVER),
    "MMLU, choices as text": Layout(PICK | {"choices": str(THREE), "answer": "1"}, *RIVER),
    "MMLU-Pro": Layout({"question_id": 1, **PICK, "options": THREE, "answer": "B",
                        "answer_index": 1, "cot_content": "SECRET", "category": "geo"}, *RIVER),
    "C-Eval": Layout({"id": 0, **PICK, "A": "Oslo", "B": "Rhine", "C": "Mount Blanc", "D": "Etna",
                      "answer": "B", "explanation": "SECRET"}, *RIVER),
    "CommonsenseQA": Layout(PICK | {"id": "x", "question_concept": "river",
                                    "choices": {"label": LETTERS, "text": THREE},
                                    "answerKey": "B"}, *RIVER),
    "OpenBookQA": Layout({"question_stem": "Which is a river?", "fact1": "SECRET",
                          "choices": {"text": THREE, "label": LETTERS}, "answerKey": "B"}, *RIVER),
    "SciQ": Layout(PICK | {"distractor1": "Oslo", "distractor2": "Mount Blanc", "distractor3": "",
                           "correct_answer": "Rhine", "support": "SECRET"}, *TEXT),
    "GPQA": Layout({
        "Question": "Which is a river?", "Correct Answer": "Rhine\n", "Incorrect Answer 1": "Oslo",
        "Incorrect Answer 2": "Mount Blanc", "Incorrect Answer 3": None, "Explanation": "SECRET",
        "Pre-Revision Correct Answer": "SECRET", "Canary String": "SECRET"}, *TEXT),
    "trivia with wrong answers": Layout(PICK | {
        "type": "multiple", "correct_answer": "Rhine",
        "incorrect_answers": ["Oslo", "Mount Blanc"]}, *TEXT),
    "TruthfulQA": Layout(PICK | {
        "best_answer": "Rhine", "correct_answers": ["Rhine", "The Rhine"],
        "incorrect_answers": ["Oslo", "Mount Blanc"], "source": "SECRET"}, *TEXT),
    "RACE": Layout({"article": "A river has water.", "answer": "B", "options": THREE, **PICK,
                    "example_id": "high1.txt"}, RIVER[0], RIVER[1], ("has water.\nWhich", "Oslo")),
    "ReClor": Layout({"context": "A river has water.", **PICK, "answers": THREE, "label": 1},
                     RIVER[0], RIVER[1], ("has water.\nWhich", "Oslo")),
    "LogiQA": Layout({"context": "A river has water.", "query": "Which is a river?",
                      "options": THREE, "correct_option": 1},
                     RIVER[0], RIVER[1], ("has water.\nWhich", "Oslo")),
    "MedQA": Layout(PICK | {"answer": "Rhine", "answer_idx": "B", "meta_info": "step1",
                            "options": dict(zip(LETTERS, THREE, strict=True))}, *TEXT),
    "MedQA, key and value": Layout(PICK | {
        "answer": "Rhine", "answer_idx": "B",
        "options": [{"key": k, "value": v} for k, v in zip(LETTERS, THREE, strict=True)]}, *TEXT),
    "choices with ids": Layout(PICK | {
        "choices": [{"id": k, "text": v} for k, v in zip("abc", THREE, strict=True)],
        "answer": "b"}, *RIVER),
    "choices that are missing": Layout(PICK | {"choices": [*THREE, None, None], "answer": "B"},
                                       *RIVER),
    "HotpotQA": Layout(WHO | {
        "id": "5a", "answer": "Ida Berg", "type": "bridge", "level": "easy",
        "supporting_facts": {"title": ["SECRET"], "sent_id": [1]},
        "context": {"title": ["Mill", "Barn"],
                    "sentences": [["The mill is old.", MILL], [BARN]]}}, *IDA),
    "HotpotQA as published": Layout(WHO | {
        "answer": "Ida Berg", "supporting_facts": [["SECRET", 1]],
        "context": [["Mill", ["The mill is old.", MILL]], ["Barn", [BARN]]]}, *IDA),
    "2Wiki": Layout(WHO | {
        "answer": "Ida Berg", "evidences": "[[\"SECRET\"]]", "type": "bridge",
        "context": json.dumps([["Mill", ["The mill is old.", MILL]], ["Barn", [BARN]]])}, *IDA),
    "MuSiQue": Layout(WHO | {
        "answer": "Ida Berg", "answer_aliases": ["Berg"], "answerable": True,
        "question_decomposition": [{"id": 1, "question": "SECRET", "answer": "SECRET"}],
        "paragraphs": [
            {"idx": 0, "title": "Mill", "paragraph_text": MILL, "is_supporting": True},
            {"idx": 1, "title": "Barn", "paragraph_text": BARN, "is_supporting": False}]}, *IDA),
    "TriviaQA": Layout(WHO | {
        "question_id": "t", "entity_pages": {"wiki_context": ["SECRET"]},
        "answer": {"value": "Ida Berg", "aliases": ["Ida Berg", "Berg, Ida"], "type": "x",
                   "normalized_aliases": ["ida berg"], "normalized_value": "ida berg"}},
        ("Ida Berg", "Berg, Ida"), ("Jan Vik",)),
    "NQ open": Layout(WHO | {"answer": ["Ida Berg", "Berg"]}, ("Ida Berg", "Berg"), ("Jan Vik",)),
    "WebQuestions": Layout(WHO | {"url": "x", "answers": ["Ida Berg", "Berg"]},
                           ("Ida Berg", "Berg"), ("Jan Vik",)),
    "search-R1": Layout(WHO | {"golden_answers": ["Ida Berg"], "id": "train_0"}, *IDA[:2]),
    "SQuAD": Layout(WHO | {"title": "Mill", "context": f"The mill is old.{MILL} {BARN}",
                           "answers": {"text": ["Ida Berg", "Berg"], "answer_start": [3, 7]}},
                    ("Ida Berg", "Berg"), ("Jan Vik",), ("Ida Berg built",)),
    "SQuAD as published": Layout(WHO | {
        "context": f"The mill is old.{MILL} {BARN}",
        "answers": [{"text": "Ida Berg", "answer_start": 3}]}, *IDA),
    "BoolQ": Layout({"question": "is the mill old", "passage": "The mill is old.", "answer": True},
                    *YES, ("The mill is old.\nis the",)),
    "StrategyQA": Layout({"question": "Is a mill older than a car?", "answer": True,
                          "facts": ["SECRET"], "decomposition": ["SECRET"]}, *YES),
    "PubMedQA with a field named": Layout({
        "question": "Do nuts help?", "answer": "yes", "long_answer": "SECRET",
        "context": {"contexts": ["Ten people ate nuts."], "labels": ["METHODS"],
                    "reasoning_required_pred": ["SECRET"]}},
        ("yes",), ("no",), ("Ten people ate nuts.\nDo nuts help?",)),
    "FinQA, flat": Layout({
        "question": "What was the growth?", "answer": "408", "program": "SECRET",
        "pre_text": ["In 2019 sales rose."], "post_text": ["All in millions."],
        "table": [["year", "sales"], ["2019", "54"]]},
        *N[:2], ("In 2019 sales rose.", "year | sales\n2019 | 54", "All in millions.")),
    "TabMWP": Layout({"question": "How many nuts?", "choices": None, "answer": "408", "unit": None,
                      "table": "Box | Nuts\n1 | 34", "solution": WORK}, *N[:2], ("Box | Nuts",)),
    "ProofWriter": Layout({"theory": "Ann is kind. Kind people smile.",
                           "question": "Ann smiles.", "answer": "True", "proof": "SECRET"},
                          *YES, ("Kind people smile.\nAnn smiles.",)),
    "BIG-bench": Layout({"input": Q, "target": "408"}, *N),
    "Tulu 3 RLVR": Layout({"messages": user(Q), "ground_truth": "408", "dataset": "gsm8k"}, *N),
    "OpenThoughts": Layout({"system": "Think first.", "conversations": human(Q, WORK)},
                           N[0], N[1], ("Think first.\nAnn packs",)),
    "s1K": Layout(ASK | {"solution": "408", "cot_type": "math", "attempt": "SECRET",
                         "thinking_trajectories": ["SECRET"], "metadata": "{}"}, *N),
    "reference answers": Layout(ASK | {"reference_answer": "408", "source": "s"}, *N),
    "answers of a grader": Layout(ASK | {"gt_answer": "408", "model_answer": "SECRET"}, *N),
}  # fmt: skip
TABLE = {"Question": "Largest?", "A": "3", "B": "8", "C": "5", "D": "1"}
CARRIED = {"question": "q", "options": ["(A) 4", "(B) 6"]}
CITIES = {"question": "Capital?", "options": ["Oslo", "Bern"]}
NUMBERED = {"question": "q", "choices": {"label": ["1", "2"], "text": ["Oslo", "Bern"]}}
NAMES = ["Lewis Carroll", "Charles Dodgson"]
RIVERS = {"question": "q", "choices": ["Rome", "Bonn", "Paris"]}
COUNTED = {"question": "q", "choices": ["1", "2", "3"]}
ROWS = [  # a row, what it pays and what not
    (TABLE | {"Answer": "B"}, ["(B)"], ["(C)", "8"]),
    (TABLE | {"Answer": 2}, ["(C)"], ["(B)", "2"]),
    (TABLE | {"Answer": "8"}, ["(B)", "The answer is 8."], ["(A)", "3", "(A). It is 8"]),
    (CARRIED | {"answer": "6"},
     ["(B)", "The answer is 6.", "I get 6", "A total of 6", "**B**", "\\boxed{B}"],
     ["(A)", "4", "(A), as it is not 6", "The answer is A. Not 6", "A\nand 6"]),
    (CARRIED | {"answer": "(B) 6"}, ["(B)", "The answer is 6."], ["(A)", "4"]),
    (CARRIED | {"answer": 6}, ["(B)", "6"], ["(A)"]),
    (CITIES | {"answer": "Bern"}, ["(B)", "The answer is Bern."], ["(A)", "Oslo"]),
    (CITIES | {"answer": 1}, ["(B)"], ["(A)", "1"]),
    (CITIES | {"answer": "1"}, ["(B)"], ["(A)", "1"]),
    (CITIES | {"gold": "0"}, ["(A)"], ["(B)", "0"]),
    (CITIES | {"label": [1.0]}, ["(B)"], ["(A)"]),
    (NUMBERED | {"answerKey": "1"}, ["(1)", "1"], ["(2)", "(A)"]),
    (NUMBERED | {"answer": 2}, ["(2)"], ["(1)", "(B)"]),
    (NUMBERED | {"answer": "Bern"}, ["(2)", "Bern"], ["(1)", "Oslo"]),
    ({"question": "q", "answer": NAMES}, NAMES, ["Lewis", "Alice"]),
    ({"question": "q", "answer": {"value": NAMES[0], "aliases": NAMES}}, NAMES, ["Alice"]),
    ({"question": "q", "answer": ["3", "three"]}, ["3", "three"], ["4"]),
    ({"question": "q", "final_answer": ["2", "5"]}, ["\\boxed{2, 5}"], ["\\boxed{2}"]),
    ({"question": "q", "answer": ["2", "5"]}, ["\\boxed{2, 5}"], ["\\boxed{2}"]),
    ({"question": "q", "answer": ["2 cm", "5 cm"]}, [], ["\\boxed{2}"]),
    (RIVERS | {"answer": "2"}, ["(C)"], ["(B)", "2"]),
    (RIVERS | {"answer": " 1 "}, ["(B)"], ["(A)"]),
    (COUNTED | {"answer": "2"}, ["(B)", "2"], ["(C)", "3"]),
    ({"question": "q", "choices": ["Bonn", "Rome", None, None], "answer": 1}, ["(B)"], ["(A)"]),
    ({"question": "q", "choices": ["Bonn", None, "Rome"], "answer": 2}, ["(C)"], ["(A)"]),
    ({"question": "q", "options": {"A": "Bonn", "B": "Rome", "C": None}, "answer": "B"},
     ["(B)"], ["(A)"]),
    ({"question": "q", "choices": ["Bonn", "None"], "answer": 1}, ["(B)"], ["(A)"], ["None"]),
    ({"question": "q", "choices": [{"label": "A", "text": "Bonn"}, {"label": "B",
      "text": "Rome"}], "answer": "B"}, ["(B)"], ["(A)"]),
    ({"question": "q", "choices": [{"id": "A", "text": "Bonn"}, {"id": "B",
      "content": "Rome"}], "answer": "Rome"}, ["(B)", "Rome"], ["(A)", "Bonn"]),
    ({"question": "q", "options": [{"text": "Bonn"}, {"text": "Rome"}], "answer": 1},
     ["(B)"], ["(A)"]),
    ({"question": "q", "options": [{"A": "Bonn"}, {"B": "Rome"}], "correct": "B"},
     ["(B)"], ["(A)"]),
    ({"question": "q", "options": "A. Bonn\nB. Rome", "correct_answer": "B"}, ["(B)"], ["(A)"]),
    ({"question": "q", "options": ["Bonn", "Rome"], "correct_option": 1}, ["(B)"], ["(A)"]),
    ({"question": "q", "answers": {"text": ["2", "two"]}}, ["2", "two"], ["3"]),
    ({"question": "q", "Reference Answer": "5"}, ["5"], ["6"]),
    ({"question": "q", "ground-truth": ["5"]}, ["5"], ["6"]),
]  # fmt: skip
TASKS |= {str(n): Layout(*row) for n, row in enumerate(ROWS, 1)}
LEFT_OUT = "they need images"
REFUSED = {
    "Orca-Math": (ASK | {"answer": "She packs twelve boxes and each box has thirty-four nuts so "
                         "we multiply the number of boxes by the number of nuts in one box, which "
                         "gives four hundred and eight nuts in all boxes that she packs."},
                  "expected a short answer"),
    "MetaMathQA": ({"query": Q, "response": "12*34 #### 408\nThe answer is: 408"}, "no answer"),
    "ORZ": ([{"from": "human", "value": Q}, {"from": "assistant",
             "ground_truth": {"value": "408"}}], "expected a question"),
    "QuALITY": ({"article": "a", **PICK, "options": THREE, "gold_label": 2}, "no answer"),
    "MedMCQA": (PICK | {"opa": "x", "opb": "y", "opc": "z", "cop": 1, "exp": "e"}, "no answer"),
    "HellaSwag": ({"ctx": "She runs", "endings": THREE, "label": "1"}, "expected a question"),
    "Social IQa": ({"context": "c", **PICK, "answerA": "x", "answerB": "y", "answerC": "z",
                    "label": "1"}, "count from 0 or 1"),
    "WinoGrande": ({"question": "The _ ran.", "option1": "x", "option2": "y", "answer": "2"},
                   "count from 0 or 1"),
    "DROP as published": (WHO | {"passage": "p", "answer": {"number": "", "spans": ["x"]}},
                          "an answer of text or numbers"),
    "DROP": (WHO | {"passage": "p", "answers_spans": {"spans": ["x"], "types": ["s"]}},
             "no answer"),
    "SQuAD 2 without an answer": (WHO | {"context": "c", "answers": {"text": [],
                                         "answer_start": []}}, "no answer"),
    "countdown": ({"target": 24, "nums": [4, 6, 1]}, "expected a question"),
    "verl countdown": ({"prompt": user("Make 24."), "reward_model": {
        "ground_truth": {"target": 24, "numbers": [4, 6]}}}, "an answer of text or numbers"),
    "IFEval": ({"key": 1, "prompt": "No commas.", "instruction_id_list": ["punctuation:no_comma"],
                "kwargs": [{}]}, "no answer"),
    "SYNTHETIC-1 code": ({"prompt": "Add.", "verification_info":
                          '{"language": "python", "test_cases": [{"input": "1", "output": "2"}]}'},
                         "no answer"),
    "UltraFeedback": ({"instruction": Q, "completions": [{"response": WORK}], "models": ["m"],
                       "correct_answers": ["None"], "incorrect_answers": ["None"]}, "no answer"),
    "UltraFeedback binarized": ({"prompt": Q, "chosen": talk(Q, WORK), "rejected": talk(Q, "3"),
                                 "messages": talk(Q, WORK), "score_chosen": 8.0}, "preference"),
    "HH-RLHF": ({"chosen": "\n\nHuman: q\n\nAssistant: 1", "rejected": "\n\nHuman: q"},
                "expected a question"),
    "KTO": ({"prompt": Q, "completion": WORK, "label": True}, "preference"),
    "PRM": ({"prompt": Q, "completions": ["12", WORK], "labels": [True, False]}, "no answer"),
    "verl geo3k": ({"prompt": user("<image>Find x."), "images": [{"bytes": "x"}],
                    "reward_model": {"ground_truth": "408"}}, LEFT_OUT),
    "MathVista": (ASK | {"image": "images/1.jpg", "answer": "408"}, LEFT_OUT),
    "choices of another kind": (PICK | {"choices": [{"foo": "A", "bar": "x"}], "answer": "A"},
                                "expected choices with `label` and `text`"),
    "choices in a sentence": (PICK | {"options": "Oslo or Rhine", "answer": "B"},
                              "expected a list of choices"),
}  # fmt: skip


@pytest.fixture(scope="module")
def play(tmp_path_factory):
    """Plays the task of a layout: its text, and a function from an answer to a reward."""
    file = tmp_path_factory.mktemp("rows") / "all.jsonl"
    file.write_text("".join(json.dumps(layout.row) + "\n" for layout in TASKS.values()))
    source = make(Settings(eval_data=(str(file),), workers=1, max_bad_rows=0.0), "eval")

    def play(name):
        env = source.create()
        task = env.reset([*TASKS].index(name))

        def pays(text):
            env = source.create()
            env.reset([*TASKS].index(name))
            turn: Any = SimpleNamespace(name="solver", text=text, answers=True)
            return env.step([turn]).reward

        return task, pays

    yield play
    source.close()


@pytest.mark.parametrize("name", TASKS)
def test_a_published_layout_becomes_a_task_that_pays_what_is_right(play, name):
    _, right, wrong, shown = TASKS[name]
    task, pays = play(name)
    assert "SECRET" not in task and [text for text in shown if text not in task] == []
    assert "{" not in task and ("None" not in task or "None" in shown)
    assert shown is not N[2] or "408" not in task
    assert {text: pays(text) for text in right} == dict.fromkeys(right, 1.0)
    assert {text: pays(text) for text in wrong} == dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize("name", REFUSED)
def test_a_published_layout_without_a_checkable_answer_is_refused_in_a_line(tmp_path, capsys, name):
    row, message = REFUSED[name]
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(BadInput) as error:
        load.load(str(tmp_path / "a.jsonl"))
    told = capsys.readouterr().err if message == LEFT_OUT else str(error.value)
    assert message in told and "\n" not in str(error.value)
