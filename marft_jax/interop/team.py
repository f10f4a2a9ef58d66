"""Plays this team with transformers and peft: ``python team.py "3+5+9=?"``.

Needs ``pip install torch transformers peft`` (and ``gguf`` for a base of that format). The agents
act in the order of turns.json, each shown the task and the turns that it sees, as in training."""

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def prompt(team: Any, turn: Any, task: str, texts: list[str], tokenizer: Any) -> str:
    """Writes what an agent is shown, in the base's chat template."""
    said = [re.sub(team["thinking"], "", text) for text in texts]
    lines = [team["line"].format(team["turns"][i]["agent"], said[i]) for i in turn["sees"]]
    user = "\n".join([task, *filter(None, [*lines, turn["message"]])])
    system, how = turn["system"], {"add_generation_prompt": True, **team["template"]}
    if team["system_in_user"] and system:  # the template takes no system message
        system, user = "", f"{system}\n\n{user}"
    chat = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return tokenizer.apply_chat_template(chat if system else chat[1:], tokenize=False, **how)


def play(team: Any, task: str, tokenizer: Any, write: Any) -> Any:
    """Lets the agents act, one after another; yields each turn and its text."""
    texts: list[str] = []
    for turn in team["turns"]:
        ids = tokenizer.encode(prompt(team, turn, task, texts, tokenizer), add_special_tokens=False)
        kept = [i for i in write(turn, ids) if i not in team["eos"]]
        text = tokenizer.decode(kept, skip_special_tokens=True).lstrip()
        texts.append(re.split(turn["stop"], text, maxsplit=1)[0].strip())
        yield turn, texts[-1]


if __name__ == "__main__":
    import torch  # type: ignore
    from peft import PeftModel  # type: ignore
    from transformers import AutoModelForCausalLM, AutoTokenizer

    team = json.loads((HERE / "turns.json").read_text("utf-8"))
    given = {"gguf_file": team["base"]} if team["base"].endswith(".gguf") else {}
    there = HERE if given else HERE / team["base"]
    base = there if there.exists() else team["base"]
    tokenizer = AutoTokenizer.from_pretrained(base, **given)
    model = AutoModelForCausalLM.from_pretrained(base, **given)
    model = PeftModel.from_pretrained(model, HERE / team["adapters"][0], adapter_name="a0")
    for n, name in enumerate(team["adapters"][1:], 1):
        model.load_adapter(HERE / name, adapter_name=f"a{n}")

    def write(turn: Any, ids: Any) -> list[int]:
        model.set_adapter(f"a{team['adapters'].index(turn['adapter'])}")
        how = {"eos_token_id": team["eos"], "tokenizer": tokenizer, **turn["sampling"]}
        how["max_new_tokens"] = min(turn["max_new_tokens"], team["context"] - len(ids))
        mask = torch.ones_like(rows := torch.tensor([ids]))
        return model.generate(rows, attention_mask=mask, **how)[0, len(ids) :].tolist()

    for turn, text in play(team, sys.argv[1], tokenizer, write):
        print(f"{turn['agent']}: {text}")
