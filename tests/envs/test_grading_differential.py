r"""Grading against math-verify alone, on reference answers of five public data sets.

Each of 200 answers is spelled in ten ways that must be right, and a changed answer in two ways that
must be wrong: 2,400 pairs. The file grading_differences.txt lists the pairs that math-verify judges
otherwise. Write it again with ``python tests/envs/test_grading_differential.py``, and read what has
changed.
"""

import json
import logging
import random
import re
import sys
from pathlib import Path

import pytest

from marft_jax.envs.grading import GradingPool

TABLE = Path(__file__).with_name("grading_differences.txt")
SOURCES = {  # file, field of the answer, number of answers
    "MATH-500": ("math/math500.jsonl", "answer", 120),
    "GSM8K": ("gsm8k/test.jsonl", "answer", 30),
    "AIME": ("aime/aime2024.jsonl", "final_answer", 10),
    "CMATH": ("cmath/test.jsonl", "final_answer", 30),
    "GAOKAO": ("gaokao_mathqa/test.jsonl", "final_answer", 10),
}


def references(folder):
    """Answers of each data set, other than whole numbers first."""
    chosen = []
    for name, (file, field, count) in SOURCES.items():
        with (folder / file).open(encoding="utf-8") as lines:
            answers = [str(json.loads(line)[field]).rpartition("####")[2].strip() for line in lines]
        answers = sorted(set(answers))
        random.Random(0).shuffle(answers)
        if name in ("MATH-500", "CMATH"):
            answers.sort(key=lambda answer: answer.isdigit())
        chosen += [(name, answer) for answer in answers[:count]]
    return chosen


def loose(answer):
    """LaTeX with more room: display fractions, brackets that grow, thin spaces."""
    if "\\text" in answer:
        return f"\\displaystyle {answer}"
    answer = re.sub(r"\\frac(?![A-Za-z])", r"\\dfrac", answer)
    answer = re.sub(r"(?<!\\left)(?<!\\)([(\[])", r"\\left\1", answer)
    answer = re.sub(r"(?<!\\right)(?<!\\)([)\]])", r"\\right\1", answer)
    if answer.count("\\left") != answer.count("\\right"):
        return f"{answer}\\,"
    return re.sub(r",(?!\\!|\d{3})\s*", r",\\; ", answer)


def typed(answer):
    """As on a keyboard, where that is unambiguous: 3/4, sqrt(2), pi."""
    answer = re.sub(r"(?<=\d)(?=\\frac)", " ", answer)
    answer = re.sub(r"\\[dt]?frac\{(-?[\w.]+)\}\{(\w+)\}(?![\w\\])", r"\1/\2", answer)
    answer = re.sub(r"(\d)\\sqrt\{(\w+)\}", r"\1*sqrt(\2)", answer)
    answer = re.sub(r"\\sqrt\{(\w+)\}", r"sqrt(\1)", answer)
    answer = re.sub(r"(\d)\\pi", r"\1*\\pi", answer)
    return re.sub(r"\\pi(?![A-Za-z])", "pi", re.sub(r"\\(sin|cos|tan|log|ln)\b ?", r"\1 ", answer))


SIGNS = {r"\pi": "π", r"\infty": "∞", r"\cup": "∪", r"\le": "≤", r"\leq": "≤", r"\ge": "≥",
         r"\geq": "≥", r"\cdot": "·", r"\times": "×", r"\pm": "±", r"\theta": "θ"}  # fmt: skip


def unicode(answer):
    answer = re.sub(r"\\[a-z]+", lambda found: SIGNS.get(found[0], found[0]), answer)
    answer = re.sub(r"\^(?:\{(\d)\}|(\d))(?!\d)", lambda m: "⁰¹²³⁴⁵⁶⁷⁸⁹"[int(m[1] or m[2])], answer)
    answer = re.sub(r"\\sqrt\{(\d+)\}", r"√\1", answer)
    answer = re.sub(r"\\frac\{1\}\{2\}|\\frac12", "½", answer)
    return answer.replace("-", "−")


def measured(answer):
    """A number with a unit, or another answer with its name."""
    if re.fullmatch(r"-?[\d.,]+", answer):
        return f"{answer}\\text{{ kg}}"
    if "=" in answer or re.search(r"[<>]|\\[lg]eq?(?![a-z])|\\text|\\in\b|[A-Z%^]\W*$", answer):
        return answer
    return f"x = {answer}" if not re.search("[a-z]", re.sub(r"\\[a-z]+", "", answer)) else answer


def decimal(answer):
    """A number with a decimal that changes nothing, or digits in groups."""
    if re.fullmatch(r"-?\d{1,3}", answer):
        return f"{answer}.0"
    if re.fullmatch(r"-?\d{4,}", answer):
        return f"{int(answer):,}"
    return f"${answer}$"


FORMS = {
    "boxed": lambda answer: f"We add 12 and 7. Thus $\\boxed{{{answer}}}$.",
    "final": lambda answer: f"Final Answer: The final answer is ${answer}$. I hope it is correct.",
    "tagged": lambda answer: f"<think>12 and 7</think><answer>{answer}</answer>",
    "bold": lambda answer: f"We add 12 and 7.\n\n**Answer:** ${answer}$",
    "loose": lambda answer: f"Thus $\\boxed{{{loose(answer)}}}$.",
    "typed": lambda answer: f"Thus $\\boxed{{{typed(answer)}}}$.",
    "unicode": lambda answer: f"Thus \\boxed{{{unicode(answer)}}}",
    "measured": lambda answer: f"Thus $\\boxed{{{measured(answer)}}}$.",
    "decimal": lambda answer: f"Thus \\boxed{{{decimal(answer)}}}",
    "doubled": lambda answer: f"Thus \\boxed{{{answer}}}",  # of the reference
}


def changed(answer):
    """A wrong answer of the same kind."""
    if numbers := list(re.finditer(r"\d+", answer)):
        last = numbers[-1]
        return f"{answer[: last.start()]}{int(last[0]) + 1}{answer[last.end() :]}"
    if letters := re.findall(r"(?<![A-Za-z\\])[A-Z](?![A-Za-z])", answer):
        return answer.replace(letters[-1], "A" if letters[-1] != "A" else "B")
    return "\\text{something else}" if "\\text" in answer else f"1+({answer})"


def pairs(chosen):
    """Yields source, form, whether it is right, the reference and the text."""
    for source, answer in chosen:
        for form, write in FORMS.items():
            reference = answer.replace("\\", "\\\\") if form == "doubled" else answer
            yield source, form, True, reference, write(answer)
        for form in ("boxed", "tagged"):
            yield source, form, False, answer, FORMS[form](changed(answer))


def alone(reference, text):
    """The verdict of math-verify, with its settings for choices where the reference is one."""
    from math_verify import StringExtractionConfig, parse, verify

    if re.fullmatch("[A-J]", reference):
        config = [StringExtractionConfig(strings=tuple("ABCDEFGHIJ"))]
        found = [parse(part, config, parsing_timeout=None) for part in (reference, text)]
    else:
        found = [parse(part, parsing_timeout=None) for part in (f"${reference}$", text)]
    return verify(*found, timeout_seconds=None)


def compare(folder, grade, every=1):
    """Returns our mistakes, and the lines for what math-verify judges otherwise; of all
    references, or of every n-th."""
    mistakes, lines = [], []
    for source, form, right, reference, text in pairs(references(folder)[::every]):
        if grade(text, reference) != right:
            mistakes.append((source, form, right, reference, text))
        elif alone(reference, text) != right:
            what = "right" if right else "wrong"
            lines.append(f"{what} | {source} | {form} | {reference} | {text}")
    return mistakes, [line.replace("\n", " ") for line in sorted(lines)]


@pytest.fixture(scope="module")
def pool():
    logging.disable(logging.CRITICAL)  # math-verify logs what it cannot read
    pool = GradingPool(1, 30)
    yield pool
    pool.close()
    logging.disable(logging.NOTSET)


@pytest.mark.slow
@pytest.mark.parametrize("every", [8, pytest.param(1, marks=pytest.mark.release)])
def test_we_are_right_and_differ_from_math_verify_only_where_the_table_says(
    every, pool, shared_data
):
    grade = lambda text, ref: pool.grade(text, ref).score == 1  # noqa: E731
    mistakes, lines = compare(shared_data, grade, every)
    assert mistakes == [] and lines
    listed = TABLE.read_text(encoding="utf-8").splitlines()
    listed = [line for line in listed if line and not line.startswith("#")]
    assert lines == (listed if every == 1 else [line for line in listed if line in lines])


def test_the_table_is_made_of_two_thousand_pairs(shared_data):
    found = list(pairs(references(shared_data)))
    assert sum(right for _, _, right, _, _ in found) == 2000 and len(found) == 2400


if __name__ == "__main__":
    ours = GradingPool(1, 30)
    folder = Path(__file__).resolve().parents[3] / "shared" / "data"
    wrong, table = compare(folder, lambda text, ref: ours.grade(text, ref).score == 1)
    ours.close()
    for mistake in wrong:
        print("OUR MISTAKE", *mistake, sep=" | ", file=sys.stderr)
    head = (
        "# Pairs that math-verify alone judges otherwise than is right, and than we do.\n"
        "# What is right | data set | form | reference | text\n"
    )
    TABLE.write_text(head + "\n".join(table) + "\n", encoding="utf-8")
