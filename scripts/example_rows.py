"""Writes the data of the main README's example into the folder that it runs in.

    python scripts/example_rows.py

``rows.csv`` has questions and answers; ``shown.jsonl`` has demonstrations of other questions.
"""

from __future__ import annotations

import csv
import json
import random


def main() -> None:
    random.seed(0)
    rows, shown = dict[str, int](), dict[str, str]()
    for i in range(400):
        who, what = random.choice(["Ann", "Bo", "Cem"]), random.choice(["pens", "cards", "nuts"])
        a, b, c = (random.randint(2, 9) for _ in range(3))
        question = f"{who} has {a} {what}, buys {b} and loses {c}. How many are left?"
        if a + b < c or question in rows or question in shown:
            continue
        if i >= 60:
            rows[question] = a + b - c
            continue
        turns = {"planner": f"{a}+{b}={a + b}", "solver": f"{a + b}-{c}={a + b - c}"}
        written = [{"agent": agent, "text": text} for agent, text in turns.items()]
        shown[question] = json.dumps({"task": question, "turns": written})
    with open("rows.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("question", "answer"), *rows.items()])
    with open("shown.jsonl", "w", encoding="utf-8") as file:
        file.writelines(f"{line}\n" for line in shown.values())
    print(f"{len(rows)} rows in rows.csv, {len(shown)} demonstrations in shown.jsonl")


if __name__ == "__main__":
    main()
