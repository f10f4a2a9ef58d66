"""Plays this team through an OpenAI endpoint: ``python client.py "3+5+9=?"``.

Needs ``pip install openai`` and a server that serves each agent as a model (README.md has the
commands). ``turns.json`` lists the turns, each with the messages that its agent is shown and how it
samples; ``{task}`` and ``{texts[0]}`` in them stand for the task and the text of the first turn.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai


def play(
    plan: Mapping[str, Any], task: str, agents: Mapping[str, openai.OpenAI]
) -> Iterator[tuple[str, str]]:
    """Lets the agents act one after another; yields the name and the text of each.

    Args:
        plan: content of ``turns.json``.
        agents: client of the server of each agent, by the agent's name.
    """
    texts: list[str] = []  # without thoughts, as the other agents see them

    def fill(content: str) -> str:
        lines = [(line, line.format(task=task, texts=texts)) for line in content.split("\n")]
        # the empty text of an agent without a name is no line
        return "\n".join(filled for line, filled in lines if filled or not line)

    for turn in plan["turns"]:
        messages: Any = [{**m, "content": fill(m["content"])} for m in turn["messages"]]
        completions = agents[turn["agent"]].chat.completions
        reply = completions.create(model=turn["agent"], messages=messages, **turn["sampling"])
        text = (reply.choices[0].message.content or "").strip()
        texts.append(re.sub(plan["thinking"], "", text))
        yield turn["agent"], text


def main() -> None:
    """Prints a line per turn."""
    parser = argparse.ArgumentParser(description="Plays this team; OPENAI_API_KEY is the key.")
    parser.add_argument("task")
    parser.add_argument("--url", nargs="+", default=["http://127.0.0.1:8000/v1"],
                        help="of the server, or of one for each base")  # fmt: skip
    flags = parser.parse_args()
    key = os.environ.get("OPENAI_API_KEY", "none")
    plan = json.loads(Path(__file__).with_name("turns.json").read_text("utf-8"))
    try:
        agents = {
            model.id: client
            for client in (openai.OpenAI(base_url=url, api_key=key) for url in flags.url)
            for model in client.models.list()
        }
        if missing := {turn["agent"] for turn in plan["turns"]} - agents.keys():
            sys.exit(f"expected a server of {', '.join(sorted(missing))}, got {[*agents]}")
        for name, text in play(plan, flags.task, agents):
            print(f"{name}: {text}", flush=True)
    except openai.OpenAIError as error:
        sys.exit(f"{' '.join(flags.url)}: {error}")


if __name__ == "__main__":
    main()
