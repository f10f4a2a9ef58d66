"""Plays this team with transformers and peft: ``python team.py "3+5+9=?"``.

Needs ``pip install torch transformers peft`` (and ``gguf`` for a base of that format). The agents
act in the order of turns.json, each shown the task and the turns that it sees, as in training."""

import json
import re
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.append(str(HERE))
import team_tools  # type: ignore  # noqa: E402  (it lies beside this file)


def opening(team: Any, turn: Any, task: str, texts: list[str]) -> list[Any]:
    """Messages that an agent is shown."""
    said = [re.sub(team["thinking"], "", text) for text in texts]
    lines = [team["line"].format(team["turns"][i]["agent"], said[i]) for i in turn["sees"]]
    user = "\n".join([task, *filter(None, [*lines, turn["message"]])])
    system = turn["system"]
    if team["bases"][turn["base"]]["system_in_user"] and system:  # the template takes none
        system, user = "", f"{system}\n\n{user}"
    chat = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return chat if system else chat[1:]


def prompt(team: Any, turn: Any, chat: list[Any], tokenizer: Any) -> Any:
    """Ids of a conversation, in the chat template of the agent's base."""
    how = {"add_generation_prompt": True, **team["bases"][turn["base"]]["template"]}
    text = tokenizer.apply_chat_template(chat, turn["shown"] or None, tokenize=False, **how)
    return tokenizer.encode(text, add_special_tokens=False)


def play(team: Any, task: str, tokenizers: Any, write: Any) -> Any:
    """Lets the agents act, one after another; yields each turn and its text."""
    texts: list[str] = []
    for turn in team["turns"]:
        eos, tokenizer = team["bases"][turn["base"]]["eos"], tokenizers[turn["base"]]
        chat, kept = opening(team, turn, task, texts), []
        for left in range(turn["most_calls"], -1, -1):
            ids = prompt(team, turn, chat, tokenizer)
            held = {**turn, "grammar": turn["calling" if left else "grammar"]}
            kept = [i for i in write(held, ids) if i not in eos]
            if not (answered := team_tools.messages(turn, tokenizer, kept) if left else []):
                break
            chat += answered
        text = tokenizer.decode(kept, skip_special_tokens=True).lstrip()
        texts.append(re.split(turn["stop"], text, maxsplit=1)[0].strip())
        yield turn, texts[-1]


if __name__ == "__main__":
    import torch  # type: ignore
    import transformers
    from peft import PeftModel  # type: ignore

    def load(base: Any) -> tuple[Any, Any]:
        """Loads the tokenizer and the model of a base, with the adapters of its agents."""
        given = {"gguf_file": base["model"]} if base["model"].lower().endswith(".gguf") else {}
        there = HERE if given else HERE / base["model"]
        source = there if there.exists() else base["model"]
        model = getattr(transformers, base["loader"]).from_pretrained(source, **given)
        model = PeftModel.from_pretrained(model, HERE / base["adapters"][0], adapter_name="a0")
        for n, name in enumerate(base["adapters"][1:], 1):
            model.load_adapter(HERE / name, adapter_name=f"a{n}")
        return transformers.AutoTokenizer.from_pretrained(source, **given), model

    team = json.loads((HERE / "turns.json").read_text("utf-8"))
    sys.stderr.write(team["lacks"])
    tokenizers, models = zip(*map(load, team["bases"]), strict=True)

    def write(turn: Any, ids: Any) -> list[int]:
        base, model = team["bases"][turn["base"]], models[turn["base"]]
        tokenizer, eos = tokenizers[turn["base"]], base["eos"]
        model.set_adapter(f"a{base['adapters'].index(turn['adapter'])}")
        masks = team_tools.masks(turn, tokenizer, eos, len(ids))
        how = {"eos_token_id": eos, "tokenizer": tokenizer, "logits_processor": masks}
        how |= {"max_new_tokens": min(turn["max_new_tokens"], base["context"] - len(ids))}
        how |= {"attention_mask": torch.ones_like(rows := torch.tensor([ids])), **turn["sampling"]}
        return model.generate(rows, **how)[0, len(ids) :].tolist()

    for turn, text in play(team, sys.argv[1], tokenizers, write):
        print(f"{turn['agent']}: {text}")
