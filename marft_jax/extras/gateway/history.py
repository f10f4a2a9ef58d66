"""Calls of an episode as acts: their ids, their random numbers, and whom they see.

A conversation is kept as ids, by its agent and its messages. A call that continues one encodes only
what is new; one whose messages of the assistant are not what that agent wrote there starts anew.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from marft_jax.errors import BadInput, described
from marft_jax.extras.gateway.answers import Choice
from marft_jax.extras.gateway.errors import ApiError, naming
from marft_jax.extras.gateway.protocol import Call
from marft_jax.models.tokenizers.tokenizer import Message, Tokenizer
from marft_jax.plugins import load_extra, shown
from marft_jax.sampling.stops import cut
from marft_jax.team.prompts import Team
from marft_jax.tools import check_form, find_calls, for_model, form_with_calls, with_ids
from marft_jax.types import Act, Sampling, Turn, without_thinking

_Spoken = tuple[Any, ...]
Sampled = tuple[np.ndarray, np.ndarray, bool, np.ndarray]


def prompts_of(team: Team, agent: int, call: Call) -> list[np.ndarray]:
    """Encodes the prompts of a call: texts as they are, or one conversation.

    Raises:
        ApiError: an id has no token, a prompt is empty, or the chat template refuses the messages.
    """
    if not call.prompts:
        return [_encode_chat(team, agent, call)]
    tokenizer, prompts = team.tokenizers[agent], list[np.ndarray]()
    for prompt in call.prompts:
        ids = tokenizer.encode(prompt, special=True) if isinstance(prompt, str) else [*prompt]
        if not ids or not {*ids} <= tokenizer.tokens:
            what = f"prompt: expected ids that have a token, at least one, got {shown(prompt)}"
            raise ApiError(400, what, "prompt")
        prompts.append(np.asarray(ids, np.int32))
    return prompts


def _encode_chat(team: Team, agent: int, call: Call) -> np.ndarray:
    """Encodes a conversation; the agent's own system prompt opens it where it has none."""
    system, messages = team.system(agent), call.messages
    if system and not any(message["role"] == "system" for message in messages):
        messages = [{"role": "system", "content": system}, *messages]
    try:
        tokenizer = team.tokenizers[agent]
        shown = tokenizer.chat(*for_model(messages, call.tools, tokenizer))
        return np.asarray(shown, np.int32)
    except Exception as error:  # templates refuse what they like
        what = f"messages: the chat template refuses them: {described(error)}"
        raise ApiError(400, what, "messages") from None


def check_tools(tokenizer: Tokenizer, call: Call) -> None:
    """Raises ``ApiError`` for tools and their answers where the chat template has none."""
    if call.tools or any("tool_calls" in m or m["role"] == "tool" for m in call.messages):
        with naming("tools", "unsupported_parameter"):
            check_form(tokenizer)


def form_of(team: Team, agent: int, call: Call) -> str:
    """Returns the form of the answer (``Request.form``).

    If a call is required, it is a call of a tool. Otherwise the schema is that of the call, or the
    agent's own: with tools it is a call or JSON of the schema, without tools the schema alone.

    Raises:
        ApiError: a tool's name or the schema of its arguments cannot be a constraint.
    """
    form, tokenizer = call.form or team.profiles[agent].form, team.tokenizers[agent]
    tools = {tool["function"]["name"]: tool for tool in call.tools}
    tools = {name: tools[name] for name in call.required or tools}
    with naming("tools"):
        if call.required or form and tools:
            form = form_with_calls("" if call.required else form, [*tools.values()], tokenizer)
            for name, tool in tools.items():
                parameters = json.dumps(tool["function"].get("parameters") or {})
                load_extra("form.check")(parameters, f"tools: {name}: parameters")
        if form:
            load_extra("form.check")(form, "tools", tokenizer)
    return form


def choice_of(
    call: Call,
    tokenizer: Tokenizer,
    sampled: Sampled,
    text: str,
    stop: Sequence[str],
    form: str = "",
    prefix: str | None = None,
) -> Choice:
    """Makes a choice of what an agent sampled: its calls of tools, and what it says beside them.

    Args:
        sampled: the ids, their log-probs, a flag for an answer that was cut off, and the prompt.
        text: of the ids, up to a stop text. A prompt that is continued keeps its white space.
        stop: texts that end it.
        form: see ``form_of``.
        prefix: of the ids of calls; None: a random one.
    """
    ids, names = sampled[0].tolist(), [tool["function"]["name"] for tool in call.tools]
    if call.prompts:
        text = cut(tokenizer.decode(ids), stop)[0].rstrip("\ufffd")
    content, calls = find_calls(ids, call.tools, tokenizer, form)
    if text.startswith("<think>") and not content.startswith("<think>"):
        content = f"<think>{content}"  # the prompt opened it
    known = [called for called in calls if called.name in names]  # a client cannot answer others
    if known:
        text = cut(content, call.stop)[0]
    known = with_ids(known if call.parallel else known[:1], prefix or secrets.token_hex(3)[:5])
    return Choice(text, *sampled, tokenizer.decode, calls=known)


def sampling_of(team: Team, call: Call, agent: int, prompt: int = 0) -> Sampling:
    """Sampling of an agent; no more tokens than it may write, and than there is room for."""
    usual, room = team.sampling[agent], team.contexts[agent] - prompt
    if room < 1:
        what = f"messages: {prompt} tokens fill the context of {team.contexts[agent]}"
        raise ApiError(400, what, "messages", "context_length_exceeded")
    wanted = usual._replace(**call.sampling)
    return wanted._replace(max_new_tokens=min(wanted.max_new_tokens, usual.max_new_tokens, room))


class History:
    """What was said in an episode.

    Attributes:
        rewritten: calls whose conversation was changed by the program.
        refused: why the last refused call was refused.
    """

    def __init__(self, team: Team) -> None:
        self._team = team
        self._turns: list[Turn] = []
        self._said: dict[tuple[int, _Spoken], Turn] = {}
        self._written: list[tuple[int, _Spoken]] = []  # agent and message of each turn
        self._asked: Counter[bytes] = Counter()
        self.rewritten, self.refused = 0, ""

    def acts(self, call: Call) -> list[Act]:
        """Acts that answer a call, one for each of its choices.

        Raises:
            ApiError: no such agent, or what cannot be trained.
        """
        names = self._team.names
        model = names[0] if len(names) == 1 else call.model  # one agent answers to every name
        if model not in names:
            what = f"model: expected one of {', '.join(names)}, got {model!r:.80}"
            raise ApiError(404, what, "model", "model_not_found")
        agent = names.index(model)
        check_tools(self._team.tokenizers[agent], call)
        form, acts = form_of(self._team, agent, call), list[Act]()
        for prompt, start, known in self._prompts(agent, call):
            sampling = sampling_of(self._team, call, agent, len(prompt))
            decode = self._team.decoders[agent]
            text = {"role": "user", "content": decode(prompt.tolist()) if call.prompts else ""}
            sees = self._sees((*call.messages, text), known)
            act = Act(agent, prompt, 0, sees, sampling, start, form=form)
            acts += [act._replace(number=self._number(act, call.seed)) for _ in range(call.n)]
        return acts

    def take(self, call: Call, turns: Sequence[Turn]) -> list[Choice]:
        """Remembers the turns of a call, and makes its choices of them."""
        choices: list[Choice] = []
        for turn in turns:
            tokenizer = self._team.tokenizers[turn.agent]
            sampled = turn.action, turn.logprobs, turn.truncated, turn.prompt
            stop, prefix = call.stop or self._team.sampling[turn.agent].stop, f"c{turn.index:04d}"
            choice = choice_of(call, tokenizer, sampled, turn.text, stop, turn.form, prefix)
            choices.append(choice)
            spoken = _spoken(call, [*call.messages, choice.message])
            if not call.prompts:
                self._said[turn.agent, spoken] = turn
            self._turns.append(turn)
            self._written.append((turn.agent, spoken[-1]))
        return choices

    def _prompts(self, agent: int, call: Call) -> list[tuple[np.ndarray, int, Turn | None]]:
        """Ids of each prompt, how many of these are known, and the turn that it continues."""
        messages = call.messages
        last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
        spoken, new = _spoken(call, messages[: last + 1]), messages[last + 1 :]
        if new and (known := self._said.get((agent, spoken))) is not None:
            try:
                if (act := self._team.resume(known, new, call.tools)) is not None:
                    return [(act.prompt, act.start, known)]
            except BadInput:  # a template that cannot be continued
                pass
        self.rewritten += last >= 0 and not self._is_of_another(agent, spoken[-1])
        return [(prompt, 0, None) for prompt in prompts_of(self._team, agent, call)]

    def _is_of_another(self, agent: int, message: Any) -> bool:
        """True for what others wrote and this agent did not: it is handed their conversation."""
        writers = {writer for writer, written in self._written if written == message}
        return bool(writers) and agent not in writers

    def _sees(self, messages: Sequence[Message], known: Turn | None) -> tuple[int, ...]:
        """Earlier turns whose text the messages contain, and those of the same conversation."""
        shown = "\n".join(message["content"] for message in messages)
        heard = {_message(message) for message in messages}
        before = () if known is None else (*known.sees, known.index)
        repeated = [
            turn.index
            for turn, (_, written) in zip(self._turns, self._written, strict=True)
            if (said := without_thinking(turn.text)) and (said in shown or written in heard)
        ]
        return tuple(sorted({*before, *repeated}))

    def _number(self, act: Act, seed: int | None) -> int:
        """Number of a random stream: from what is asked, and how often that was asked before."""
        content = f"{act.agent} {tuple(act.sampling)} {seed} ".encode() + act.prompt.tobytes()
        self._asked[content] += 1
        digest = hashlib.blake2b(content + b" %d" % self._asked[content], digest_size=8)
        return int.from_bytes(digest.digest(), "big")


def _spoken(call: Call, messages: Sequence[Message]) -> _Spoken:
    """What a conversation is known by: its tools, and every word of its messages."""
    return (json.dumps(call.tools), *map(_message, messages))


def _message(message: Message) -> tuple[Any, ...]:
    functions = [call["function"] for call in message.get("tool_calls", ())]
    calls = tuple((function["name"], function["arguments"]) for function in functions)
    return message["role"], message["content"] or "", calls
