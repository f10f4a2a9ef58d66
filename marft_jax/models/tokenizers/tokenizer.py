"""Text to token ids and back, and conversations to prompts.

Like transformers, ``encode`` and ``chat`` turn a special token that is spelled out in the text into
that token: whoever writes the text of a task can forge the end of a message.
"""

from __future__ import annotations

import codecs
import contextlib
import datetime
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from marft_jax.errors import BadInput, printable, reason
from marft_jax.formats.foreign import read_settings, readable
from marft_jax.models.tokenizers import thinking

Message = Mapping[str, Any]
"""``{"role": "system" | "user" | "assistant" | "tool", "content": text}``, and ``tool_calls`` of an
assistant, ``tool_call_id`` of a tool's answer."""
Tools = Sequence[Mapping[str, Any]]
"""Definitions of tools, as in OpenAI's API."""

FALLBACK_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""For models that come without a chat template."""

_FOLDING = (
    "{%- if messages[0]['role'] == 'system' -%}{%- set messages = [{'role': 'user', 'content': "
    "messages[0]['content'] ~ '\n\n' ~ messages[1]['content']}] + messages[2:] -%}{%- endif -%}"
)
"""``_fold_system`` as a template does it, where a user's message follows the system prompt."""
_TAIL = 16  # ids of a prompt, in which a thought may be opened
_MARK = re.compile(r"[<\[|｜]..")
_PROBE, _LAST = "qxz", "qxz-zxq"


class Tokenizer:
    """A tokenizer of transformers with its chat template.

    A template that does not take a system message gets it in front of the first user message.

    Args:
        tokenizer: of transformers, fast or slow.
        eos_ids: further tokens that end an action, beside the tokenizer's own and the one that the
            template writes after an assistant's message.
        source: where it came from, for messages.

    Attributes:
        backend: the tokenizer of transformers.
        tokens: the ids that have a token; the model's embedding may have more rows.
        vocab_size: ids are below this.
        eos_ids: tokens that end an action.
        end_id: the one that the template writes after an assistant's message; where it writes none,
            the tokenizer's own.
        pad_id: fills rows; may equal an eos id.
        marks: special tokens around a model's thinking, see ``thinking``.
        added: tokens at which a text is split before all else, most of them special.
        calls: form of its calls of tools, see ``tools.calls.find_form``.
        started: whose date a template shows that asks for one, in seconds since 1970.

    Raises:
        BadInput: the template cannot be rendered, or nothing ends an action.
    """

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int] = (), source: str = "tokenizer"):
        self.backend, self._source, self._rows = tokenizer, source, sys.maxsize
        self._template_settings: dict[str, Any] = {}
        self.date(int(time.time()))
        if not tokenizer.chat_template:
            tokenizer.chat_template = FALLBACK_TEMPLATE
            plain = "`System: ...`, `User: ...` and `Assistant: ...`, a line each"
            print(
                f"marft_jax: {printable(source)}: has no chat template; uses {plain}",
                file=sys.stderr,
            )
        known = (
            tokenizer.get_vocab().values()
            if getattr(tokenizer, "is_fast", False)
            else range(len(tokenizer))
        )
        self.tokens = frozenset[int](known)
        self.vocab_size: int = max(self.tokens, default=-1) + 1
        added: Mapping[int, Any] = tokenizer.added_tokens_decoder
        self.calls, self.added = "auto", {i: str(token) for i, token in added.items()}
        special = {i: str(token) for i, token in added.items() if token.special}
        self.marks: dict[int, str] = thinking.marks_of(special)
        self._special = _any_of(special.values())
        # white space and words are no borders of calls, though some tokenizers add tokens of them
        self._alike = _any_of(token for token in self.added.values() if _MARK.search(token))
        self._does = {token: self.marks.get(i, "") for i, token in special.items()}
        try:
            self._fold_system = not self._takes_system()
            end = self._end_of_turn()
        except Exception as error:  # a template is a program: anything can go wrong in it
            raise BadInput(f"{source}: its chat template fails: {reason(error)}") from error
        ends = [i for i in (tokenizer.eos_token_id, *eos_ids, end) if i is not None]
        if wrong := [i for i in ends if type(i) is not int or i < 0]:
            raise BadInput(
                f"{source}: expected the ids of tokens that end a turn, got {wrong!r:.60}"
            )
        # the end of a thought ends no action
        self.eos_ids: tuple[int, ...] = tuple(i for i in dict.fromkeys(ends) if i not in self.marks)
        if not self.eos_ids:
            raise BadInput(f"{source}: expected an end-of-sequence token, found none")
        self.end_id: int = self.eos_ids[0] if end is None else end
        pad = tokenizer.pad_token_id
        self.pad_id: int = self.eos_ids[0] if pad is None else pad

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Ids of ``text``, without tokens before or after it unless they are asked for."""
        ids = list(self.backend.encode(text, add_special_tokens=special))
        self._check(ids)
        return ids

    def _check(self, ids: Iterable[int]) -> None:
        if (worst := max(ids, default=0)) >= self._rows:
            raise BadInput(
                f"{self._source}: expected tokens below {self._rows}, the rows of the model's "
                f"embedding, got {worst} ({self.backend.convert_ids_to_tokens(worst)!r:.40}); "
                "take it out of the text, or use the tokenizer that belongs to these weights"
            )

    def fit(self, rows: int) -> None:
        """Refuses, from now on, texts with tokens that a model's embedding has no row for; JAX
        would take another row in silence.

        Raises:
            BadInput: every prompt has such a token, or it ends a turn.
        """
        self._rows = rows
        self._check(self.eos_ids)
        self.chat([_message("system", "a"), _message("user", "b")])
        self.pad_id = self.pad_id if self.pad_id < rows else self.eos_ids[0]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of ``ids``, without special and eos tokens unless they are asked for."""
        kept = [int(i) for i in ids if special or i not in self.eos_ids]

        if special:
            return self._plain(kept, special=True)
        runs = ((mark, [*run]) for mark, run in itertools.groupby(kept, self.marks.get))
        return thinking.show(
            (mark, self._plain(run)) if mark is None else (mark, "") for mark, run in runs
        )

    def said(self, prompt: Sequence[int], ids: Sequence[int]) -> str:
        """Text of the ids of an action. It begins with ``<think>`` where the prompt's end does."""
        before = self.decode(prompt[-_TAIL:], special=True).rstrip()
        return thinking.OPENS * before.endswith(thinking.OPENING) + self.decode(ids)

    def _plain(self, ids: Sequence[int], *, special: bool = False) -> str:
        return self.backend.decode(
            [*ids], skip_special_tokens=not special, clean_up_tokenization_spaces=False
        )

    def spell(self, ids: Sequence[int], mark: str) -> str:
        """Text of sampled ids without the end of a turn, in which all other special tokens stand.

        Args:
            mark: stands behind the first character of what is spelled like a token of ``added``,
                but was sampled as other tokens.
        """
        kept, text = [int(i) for i in ids if i not in self.eos_ids], ""
        for token, run in itertools.groupby(kept, self.added.get):
            same = [*run]
            plain = self._plain(same) if token is None else ""
            text += self._alike.sub(lambda match: match[0][0] + mark + match[0][1:], plain)
            text += (token or "") * len(same)
        return text

    def show(self, text: str, mark: str) -> str:
        """Returns what ``decode`` gives of the ids of a spelled text."""
        parts = self._special.split(text)  # every second one is a special token
        does = [self._does.get(part, "") if n % 2 else None for n, part in enumerate(parts)]
        shown = zip(does, parts, strict=True)
        return thinking.show(one for one in shown if one[0] != "").replace(mark, "").strip()

    def extends(self, other: Tokenizer, rows: int) -> bool:
        """True where every token of another tokenizer has the same id here, below ``rows``."""
        same = other.backend.get_vocab().items() <= self.backend.get_vocab().items()
        return same and other.vocab_size <= rows

    def gaps(self, rows: int) -> tuple[tuple[int, int], ...]:
        """Ids below ``rows`` without a token, as ranges (first, end)."""
        edges = [-1, *sorted(i for i in self.tokens if i < rows), rows]
        return tuple((a + 1, b) for a, b in itertools.pairwise(edges) if a + 1 < b)

    def chat(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Conversation as a prompt for the assistant's next message, who may call tools."""
        return self.encode(self._render(messages, tools=tools))

    def write_call(
        self, name: str, arguments: Mapping[str, Any], key: str = "call00000"
    ) -> str | None:
        """Text in which an assistant calls a tool, with the special tokens of the call; None where
        the template has no tools.

        Args:
            key: the id of the call: some templates accept only nine letters and digits.
        """
        call = _call(name, key, arguments)
        parameters = {"type": "object", "properties": {}}
        function = {"name": name, "description": name, "parameters": parameters}
        tool = {"type": "function", "function": function}
        talk = [_message("user", "a"), {**_message("assistant", ""), "tool_calls": [call]}]
        answer = {**_message("tool", _PROBE), "name": name, "tool_call_id": call["id"]}
        try:
            before = self._render(talk[:1], tools=[tool])
            after = self._render(talk, prompt=False, tools=[tool])
            whole = self._render([*talk, answer], tools=[tool])
        except Exception:  # as below
            return None
        if not (name in before and after.startswith(before) and _PROBE in whole):
            return None
        ids = self.encode(after[len(before) :])
        call_ids = itertools.takewhile(lambda i: i not in self.eos_ids, ids)
        return self.decode([*call_ids], special=True).strip("\n")

    def opening(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """``chat`` in two pieces: the conversation, and what opens the assistant's message."""
        whole, before = self._render(messages), self._render(messages, prompt=False)
        self._check_continues(whole.startswith(before))
        return self.encode(before), self.encode(whole[len(before) :])

    def reply(
        self, new: Sequence[Message], *, after_action: bool = True, tools: Tools = ()
    ) -> list[int]:
        """Continues a conversation whose ids are kept: messages of others, and what opens the
        assistant's next one.

        Args:
            after_action: the ids end with an assistant's message and its end-of-turn token; else
                with another user's message.
        """
        told = _message("assistant", _PROBE)
        ids = self._behind_calls(new, tools)
        if ids is None:
            messages = [_message("user", "a"), told, *new]
            _, probe, after = self._render(messages, tools=tools).partition(_PROBE)
            self._check_continues(bool(probe) and all(_is_in(after, m["content"]) for m in new))
            ids = self.encode(after.lstrip(" "))
            ids = ids[1:] if ids[0] in {*self.eos_ids, *self.marks} else ids
        newline = self.encode("\n")
        return ids[len(newline) :] if not after_action and ids[: len(newline)] == newline else ids

    def _behind_calls(self, new: Sequence[Message], tools: Tools) -> list[int] | None:
        """Ids behind the calls that messages of the role ``tool`` answer; None without them, or
        where the template does not end an assistant's message with calls by an eos token."""
        answers = [message for message in new if message["role"] == "tool"]
        calls = [_call(m.get("name", _PROBE), m.get("tool_call_id", _PROBE), {}) for m in answers]
        calls[-1:] = [_call(c["function"]["name"], c["id"], {_PROBE: _LAST}) for c in calls[-1:]]
        told = {**_message("assistant", ""), "tool_calls": calls}
        try:
            text = self._render([_message("user", "a"), told, *new], tools=tools) if calls else ""
        except Exception:  # as below
            return None
        _, last, after = text.partition(_LAST)
        ids = self.encode(after)
        end = next((n for n, i in enumerate(ids) if i in self.eos_ids), None)
        if not last or end is None or not all(_is_in(after, m["content"]) for m in new):
            return None
        return ids[end + 1 :]

    def _check_continues(self, continues: bool) -> None:
        if not continues:
            raise BadInput(
                f"--team.context shared: the chat template of {self._source} cannot be continued "
                "message by message; use --team.context own"
            )

    def template(self) -> str:
        """Returns the chat template with what is decided here: thinking, and a system prompt that
        is put in front of the user's message. Other programs make the same prompts with it."""
        decided = self._template_settings.items()
        settings = [f"{{%- set {name} = {json.dumps(value)} -%}}" for name, value in decided]
        folds = [_FOLDING] if self._fold_system else []
        return "".join([*settings, *folds, self.backend.get_chat_template()])

    def think(self, mode: bool | str) -> None:
        """Turns thinking before the answer on or off.

        Args:
            mode: true or false, or on with a level of effort.

        Raises:
            BadInput: on, for a model that knows no such mode, or not that level.
        """
        known = self._variables()
        on = {name: bool(mode) for name in ("enable_thinking", "thinking") if name in known}
        level = {"reasoning_effort": mode} if isinstance(mode, str) else {}
        expected = [*level] or ["enable_thinking", "thinking", "reasoning_effort"]
        self._template_settings = on | level
        try:
            if mode and not known.intersection(expected):
                raise BadInput(f"expected one that reads {' or '.join(expected)}")
            if mode:
                self._render([_message("user", "a")])
        except Exception as error:  # as below
            what = f"--model.thinking {mode}: the chat template of {self._source} has no such mode"
            raise BadInput(f"{what}: {reason(error)}") from None

    def _variables(self) -> set[str]:
        """Names that the chat template reads."""
        from jinja2 import meta
        from transformers.utils import chat_template_utils

        source = self.backend.get_chat_template()
        environment = chat_template_utils._compile_jinja_template(source).environment
        return meta.find_undeclared_variables(environment.parse(source))

    @property
    def shows_date(self) -> bool:
        """True for a template that writes the date into prompts."""
        return "strftime_now" in str(self.backend.chat_template)

    def date(self, started: int) -> None:
        """Sets the moment whose date (UTC) a template shows: that of a run's start, because a
        prompt must not change while a run goes on."""
        self.started = started

    def save(self, folder: Path) -> None:
        """Writes the files from which transformers makes the same tokenizer."""
        self.backend.save_pretrained(folder)

    def _render(self, messages: Sequence[Message], prompt: bool = True, tools: Tools = ()) -> str:
        plain = [thinking.for_template(message, self.marks) for message in messages]
        self._set_clock(tools)
        return self.backend.apply_chat_template(
            _fold_system(plain) if self._fold_system else plain,
            add_generation_prompt=prompt,
            tokenize=False,
            **({"tools": list(tools)} if tools else {}),
            **self._template_settings,
        )

    def _set_clock(self, tools: Tools) -> None:
        """Replaces the clock of the template that transformers has compiled; settings of a template
        hold no functions."""
        from transformers.utils import chat_template_utils

        used = self.backend.get_chat_template(tools=list(tools) or None)
        if "strftime_now" not in used:
            return
        moment = datetime.datetime.fromtimestamp(self.started, datetime.UTC)
        compiled = chat_template_utils._compile_jinja_template(used)
        compiled.globals["strftime_now"] = moment.strftime

    def _takes_system(self) -> bool:
        self._fold_system = False
        try:
            return _PROBE in self._render([_message("system", _PROBE), _message("user", "a")])
        except Exception:  # as above; a template that fails altogether is found out later
            return False

    def _end_of_turn(self) -> int | None:
        """Special token right after an assistant's message."""
        text = self._render([_message("user", "a"), _message("assistant", _PROBE)], prompt=False)
        after = self.encode(text.rpartition(_PROBE)[2].strip())[:1]
        special = {*self.backend.all_special_ids, *self.backend.added_tokens_decoder}
        return after[0] if after and after[0] in special - self.marks.keys() else None


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes and a few roles, for models that we train ourselves.

    Ids 0 to 255 are bytes, 256 pads, 257 ends a turn; 258, 259 and 260 open a system, a user and an
    assistant message.
    """

    PAD, END, SYSTEM, USER, ASSISTANT = range(256, 261)
    FILES = Path(__file__).with_name("bytes")

    def __init__(self) -> None:
        fast = import_transformers().PreTrainedTokenizerFast
        super().__init__(fast.from_pretrained(self.FILES), source="the built-in model")
        self.date(0)  # its template shows none


def from_directory(directory: Path) -> Tokenizer:
    """Tokenizer files of a model directory.

    Raises:
        BadInput: there are none, or they cannot be read.
    """
    names = ("tokenizer.json", "vocab.json", "tekken.json", "tokenizer.model")
    with readable(directory, "tokenizer"):
        if not any((directory / name).is_file() for name in names):
            raise BadInput(
                f"{directory}: expected tokenizer.json or tokenizer.model, found neither"
            )
        with _without_marks(directory) as folder:
            tokenizer = _without_its_code(folder)
    eos_ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        eos = read_json(directory / name).get("eos_token_id")
        eos_ids += eos if isinstance(eos, list) else [] if eos is None else [eos]
    return Tokenizer(tokenizer, eos_ids, str(directory))


@contextlib.contextmanager
def _without_marks(directory: Path) -> Iterator[Path]:
    """Yields the folder, or a copy whose texts begin without a byte order mark: transformers takes
    it for a fault, and that of a template for text."""
    texts = [file for file in directory.iterdir() if file.suffix in (".json", ".jinja", ".txt")]
    marked = [x for x in texts if x.is_file() and x.read_bytes().startswith(codecs.BOM_UTF8)]
    if not marked:
        yield directory
        return
    with tempfile.TemporaryDirectory() as copy:
        for file in directory.iterdir():
            copied = Path(copy, file.name)
            if file in marked:
                copied.write_bytes(file.read_bytes().removeprefix(codecs.BOM_UTF8))
            else:
                copied.symlink_to(file.absolute())
        yield Path(copy)


def _without_its_code(directory: Path) -> Any:
    """Tokenizer of a folder whose own Python files, named by ``auto_map``, are never run."""
    library, known = import_transformers(), {"local_files_only": True, "trust_remote_code": False}
    try:
        return library.AutoTokenizer.from_pretrained(directory, **known)
    except ValueError:
        if not (directory / "tokenizer.json").is_file():
            raise
    return library.PreTrainedTokenizerFast.from_pretrained(directory, **known)


def import_transformers() -> Any:
    """Imports transformers, late: it takes seconds, and the built-in model does without."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # "PyTorch was not found"
    import transformers

    return transformers


def _fold_system(messages: list[dict[str, str]]) -> list[dict[str, str]]:
    """Puts the system message in front of the text of a user who begins, or else makes it one."""
    system = "\n\n".join(m["content"] for m in messages if m["role"] == "system")
    others = [m for m in messages if m["role"] != "system"]
    if system and others and others[0]["role"] == "user":
        return [_message("user", f"{system}\n\n{others[0]['content']}"), *others[1:]]
    return [_message("user", system), *others] if system else others


def _call(name: str, key: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": key, "type": "function", "function": {"name": name, "arguments": arguments}}


def _any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    longest = sorted(tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest)) or '(?!)'})")


def _is_in(text: str, content: str) -> bool:
    """True where a rendered text has a content, as it is or as a text of JSON."""
    return any(form in text for form in (content.strip(), json.dumps(content, ensure_ascii=False)))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def read_json(path: Path) -> dict[str, Any]:
    """Settings in a file; none where there is no such file."""
    return read_settings(path) if path.is_file() else {}
