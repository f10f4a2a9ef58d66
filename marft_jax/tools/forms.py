"""The forms in which families of models write calls of tools.

A form reads a text whose special tokens are spelled out. Where other tokens spell what looks like a
special token, the text has ``BROKEN`` behind the first character, so that no pattern matches.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from marft_jax.formats.foreign import check_depth

BROKEN = "\ud800"  # a lone surrogate: no decoded text has one
Message = Mapping[str, Any]
"""A message of a conversation, as ``models.tokenizers`` has it."""
Tools = Sequence[Mapping[str, Any]]
"""Definitions of tools, as in OpenAI's API."""


class ToolCall(NamedTuple):
    """A call of a tool; ``arguments`` is a JSON object as text, if the model wrote one."""

    name: str
    arguments: str


Read = Callable[[str, Tools], tuple[str, list[ToolCall]]]
"""Finds the calls in a text; returns the text without its calls, and the calls."""
Write = Callable[[Sequence[Message], Tools, bool], tuple[list[Message], Tools]]
"""Rewrites a conversation and its tools for a chat template that does not write them itself. The
last argument is true if the messages begin the conversation."""


class Form(NamedTuple):
    """A form of calls.

    Attributes:
        read: finds the calls in a text.
        write: None where the model's chat template writes calls and tools.
        token: a model with this token has the form if its chat template writes no calls.
    """

    read: Read
    write: Write | None = None
    token: str = ""


class _Syntax(NamedTuple):
    """How calls are marked: patterns of what opens and what follows a call, and the thoughts."""

    opens: str
    parse: Callable[[str, int, re.Match[str], Mapping[str, Any]], tuple[list[ToolCall], int]]
    closes: str = r"\s*"
    thinks: tuple[str, str] = ("<think>", "</think>")
    several: bool = False  # more calls may follow until the pattern ``closes`` finds its group

    @property
    def thinking(self) -> str:
        """Pattern of a thought, or of the end of a thought that the prompt opened."""
        opens, closes = map(re.escape, self.thinks)
        return rf"{opens}.*?(?:{closes}|\Z)|(?P<thought>{closes})"


def read_calls(syntax: _Syntax, text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Reads calls behind marks. A broken call stays text and costs no other call."""
    known = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}
    opening = re.compile(rf"{syntax.thinking}|(?P<call>{syntax.opens})", re.DOTALL)
    after, calls, spans, at = re.compile(syntax.closes), list[ToolCall](), [(0, 0)][:0], 0
    while part := opening.search(text, at):
        start, at = part.span()
        if part["thought"]:  # so all before it was thought
            calls, spans = [], []
        with contextlib.suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            while part["call"] is not None:
                parsed, end = syntax.parse(text, at, part, known)
                closed = next(after.finditer(text, end))
                calls, spans = calls + parsed, spans + [(start, closed.end())] * bool(parsed)
                start = at = closed.end()
                if not syntax.several or closed[1]:
                    break
        at = max(at, part.start() + 1)
    if not calls:
        return text, []
    for start, end in reversed(spans):
        text = text[:start] + text[end:]
    return text.strip(), calls


def _json(
    text: str, at: int, part: re.Match[str], known: Mapping[str, Any]
) -> tuple[list[ToolCall], int]:
    """Calls as JSON, which ends them: its texts may hold tags and line breaks. Where the opening
    has the name, the JSON is the arguments."""
    try:
        value, end = _DECODER.raw_decode(text, at)
    except ValueError:  # the list may be cut off behind its first calls
        value, end = _DECODER.raw_decode(text, at + 1 if text[at : at + 1] == "[" else at)
    check_depth(value)
    if named := part.groupdict().get("name"):
        value = {"name": named, "arguments": value}
    calls = map(_call, value if isinstance(value, list) else [value])
    # JSON without a mark that has a name, but neither a tool's nor with arguments, is an answer
    marked = part.groupdict().get("mark", True)
    return [c for c in calls if c and (marked or c.name in known or c.arguments != "{}")], end


_DECODER = json.JSONDecoder(strict=False, parse_constant=str)


def _call(read: Any) -> ToolCall | None:
    name = read.get("name") if isinstance(read, dict) else None
    if not isinstance(name, str):
        return None
    given = read.get("arguments")
    arguments = as_object(read.get("parameters") if given is None else given)
    return None if arguments is None else _written(name, arguments)


def _loads(text: str) -> Any:
    """Parses JSON that may hold raw line breaks; NaN, which is no JSON, becomes a text."""
    value = json.loads(text, strict=False, parse_constant=str)
    check_depth(value)
    return value


def _written(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    return ToolCall(name, json.dumps(arguments, ensure_ascii=False, allow_nan=False))


def as_object(given: Any) -> dict[str, Any] | None:
    """Arguments of a call, an object or its JSON text; empty if absent, None for anything else."""
    if given is None or isinstance(given, str) and given.strip() in ("", "null"):
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        while isinstance(given, str):
            given = _loads(given)
    return given if isinstance(given, dict) else None


class _Tags(NamedTuple):
    """Patterns of parameters as tags."""

    opens: re.Pattern[str]  # whose group is the name
    closes: re.Pattern[str]
    last: re.Pattern[str]  # what stands behind the last parameter
    around: re.Pattern[str]  # borders of calls, which no value crosses


def _tagged(
    tags: _Tags, text: str, at: int, part: re.Match[str], known: Mapping[str, Any]
) -> tuple[list[ToolCall], int]:
    """A call whose arguments stand between tags. A value ends at a closing tag behind which the
    next parameter of the tool, or the end of the call, follows."""
    name = part["name"].strip()
    parameters, values = known.get(name, {}).get("properties") or {}, dict[str, Any]()
    while opened := tags.opens.match(text, at):
        border = tags.around.search(text, opened.end())
        for closed in tags.closes.finditer(
            text, opened.end(), border.start() if border else len(text)
        ):
            follows = tags.opens.match(text, closed.end())
            is_next = follows and (not parameters or follows[1] in parameters)
            if is_next or tags.last.match(text, closed.end()):
                break
        else:
            raise ValueError("a value that does not end")
        values[opened[1]] = _typed(text[opened.end() : closed.start()], parameters.get(opened[1]))
        at = closed.end()
    if (last := tags.last.match(text, at)) is None:
        raise ValueError("a call that does not end")
    return [_written(name, values)], last.end()


_KINDS = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


def _typed(text: str, schema: Any) -> Any:
    """Value of a parameter that is written without quotes, by its JSON schema."""
    allowed = {*kinds(schema)}
    if allowed == {"string"}:
        return text
    value: Any = {"True": True, "False": False, "None": None}.get(text.strip(), text)
    if value is text:
        with contextlib.suppress(ValueError, RecursionError):
            value = _loads(text)
    kind = "null" if value is None else _KINDS.get(type(value), "string")
    fits = {kind, "number" if kind == "integer" else kind} & allowed
    return text if "string" in allowed and not fits else value


def kinds(schema: Any) -> Iterator[str]:
    """Types that a JSON schema allows; none where it does not say."""
    if isinstance(schema, Mapping):
        types = schema.get("type")
        yield from [types] if isinstance(types, str) else types or []
        if types is None and all(isinstance(v, str) for v in schema.get("enum") or [0]):
            yield "string"
        for branch in (*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())):
            yield from kinds(branch)


def _gemma(
    text: str, at: int, part: re.Match[str], known: Mapping[str, Any]
) -> tuple[list[ToolCall], int]:
    """Arguments as of Gemma 4: JSON whose keys have no quotes and whose texts have a token."""
    out, depth = "", 0
    while token := _GEMMA.match(text, at):
        (quoted, mark, other), at = token.groups(), token.end()
        if mark:
            out, depth = out + mark, depth + (mark in "{[") - (mark in "}]")
            if not depth:
                return [_written(part["name"], _loads(out))], at
        elif quoted is not None or text[at : at + 1] == ":":
            out += json.dumps(other.strip() if quoted is None else quoted)
        else:
            other = _JSON_WORDS.get(other.strip(), other.strip())
            out += other if _LITERAL.fullmatch(other) else json.dumps(other)
    raise ValueError("arguments that do not end")


_GEMMA = re.compile(
    r'<\|"\|>((?:(?!<\|tool_call>|<tool_call\|>).)*?)<\|"\|>|([{}\[\],:])|'
    r'(\s*"(?:\\.|[^"\\])*"|(?:(?!<\|"\|>|<\|tool_call>|<tool_call\|>)[^{}\[\],:])+)',
    re.DOTALL,
)
_JSON_WORDS = {"None": "null", "True": "true", "False": "false"}
_LITERAL = re.compile(r'|true|false|null|"(?:\\.|[^"\\])*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?')


def _python(
    text: str, at: int, part: re.Match[str], known: Mapping[str, Any]
) -> tuple[list[ToolCall], int]:
    """Calls as Python: ``[add(a=1, b="x")]``, or one in each line. A broken one is a wrong call."""
    if _JSON_LIST.match(text, at):
        return _json(text, at, part, known)
    pieces, depth, end = [""], 0, len(text)
    listed = text[at:].lstrip().startswith("[")
    for token in _PYTHON.finditer(text, at):
        quoted, closes, other = token.groups()
        if closes:
            end = token.start()
            break
        if quoted:
            quoted = quoted.replace(BROKEN, "").replace("\r", "\\r").replace("\n", "\\n")
        else:
            depth += (other in "([{") - (other in ")]}")
        if other in _SPLITS and depth <= listed:
            pieces.append("")
        else:
            pieces[-1] += quoted or other
    if listed:
        pieces[0] = pieces[0].strip()[1:]
        pieces[-1] = pieces[-1].strip().removesuffix("]")
    if not (calls := [call for piece in pieces if (call := _python_call(piece.strip()))]):
        raise ValueError("no call")
    return calls, end


def _python_call(text: str) -> ToolCall | None:
    """A call; its name may have dashes, which Python's names have not."""
    if (part := _CALLED.match(text)) is None:
        return None
    with contextlib.suppress(SyntaxError, RecursionError, MemoryError, ValueError):
        match ast.parse(f"f{text[part.end() :]}", mode="eval").body:
            case ast.Call(func=ast.Name(), args=[], keywords=words):
                return _written(part[1], {str(word.arg): _value(word.value) for word in words})
    return ToolCall(part[1], text)


_CALLED = re.compile(r"([\w.-]+)\s*(?=\()")
_JSON_LIST = re.compile(r"\s*\[?\s*\{")
_SPLITS = (",", "\n")  # of calls
_PYTHON = re.compile(
    r"""('(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
    r"|(<\|tool_call_(?:start|end)\|>|</?function_calls>|<\|python_(?:start|end)\|>)|(.)",
    re.DOTALL,
)
_WORDS = {"true": True, "false": False, "null": None, "NaN": "NaN", "Infinity": "Infinity"}


def _value(node: ast.expr) -> Any:
    """Value of a Python or JSON literal."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _WORDS:
            return _WORDS[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values) if None not in keys:
            pairs = zip(keys, values, strict=True)
            return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
    raise ValueError(f"expected a value, got {ast.unparse(node)}")


def read_fenced(text: str, tools: Tools) -> tuple[str, list[ToolCall]]:
    """Reads fenced blocks, see ``fenced``."""
    parts = list(_FENCED.finditer(text))
    begins = max((part.end() for part in parts if part[0] == "</think>"), default=0)
    blocks = [part for part in parts if part[1] is not None and part.start() >= begins]
    texts_of = {tool["function"]["name"]: only_text(tool["function"]) for tool in tools}
    calls: list[ToolCall] = []
    for block in blocks:
        name, body = block[1], block[2].strip("\n")
        given, parameter = as_object(body), texts_of.get(name)
        if parameter is not None and (given is None or given.keys() != {parameter}):
            given = {parameter: body}
        calls.append(ToolCall(name, body) if given is None else _written(name, given))
    for block in reversed(blocks):
        text = text[: block.start()] + text[block.end() :]
    return (text.strip() if calls else text), calls


_FENCED = re.compile(
    r"<think>.*?(?:</think>|\Z)|</think>"
    r"|^```call[ \t]+([^\s`]+)[ \t]*\n(.*?)^```[ \t]*$",
    re.DOTALL | re.MULTILINE,
)


def only_text(function: Mapping[str, Any]) -> str | None:
    """Returns the name of a tool's only parameter if that is a text; else None."""
    properties: Mapping[str, Any] = (function.get("parameters") or {}).get("properties") or {}
    texts = [name for name, schema in properties.items() if {*kinds(schema)} == {"string"}]
    return texts[0] if texts and len(properties) == 1 else None


def _xml(name: str, opens: str, last: str, close: str, parameter: str, closes: str) -> Form:
    """Calls as tags.

    Args:
        name, last: open and end a call.
        opens, close: tags around all calls.
        parameter, closes: around a value.
    """
    after = rf"\s*(?:{last}(?=\s*(?:<(?!{BROKEN})|\Z))|(?={close})|\Z)"
    patterns = rf"\s*{parameter}", closes, after, f"{opens}|{close}"
    tags = _Tags(*map(re.compile, patterns))
    parse = functools.partial(_tagged, tags)
    return _form(rf"(?:{opens}\s*)?{name}", parse, rf"\s*(?:{close}\s*)?")


def _form(opens: str, parse: Any, closes: str, token: str = "", **more: Any) -> Form:
    return Form(functools.partial(read_calls, _Syntax(opens, parse, closes, **more)), token=token)


_NAME = r"(?P<name>[^\s<>{}\[\]:\"|]+)"
_BLOCK = r"\s*(?:```\w*\s*)?"
_REST = r"[\s,;}\]`]*(</tool_call>|</?[a-z_]*\Z)?"  # a bracket too many, or cut off in the tag
_HEAD = r"(?:(?!<\|(?:start|message|end)\|>).)*"

FORMS = {
    "hermes": _form(rf"(?:<tool_call>|<\|tool_call\|>){_BLOCK}", _json, _REST, several=True),
    "json": _form(
        rf"(?:\A|(?<=</think>)|(?<=\[/THINK\]))\s*(?P<mark>\[TOOL_CALLS\]|<\|\w+\|>|)"
        rf"{_BLOCK}(?=[\[{{])", _json, _REST, several=True,
    ),
    "mistral": _form(
        rf"\[TOOL_CALLS\]\s*{_NAME}(?:\[CALL_ID\]\w*)?(?:\[ARGS\])?\s*(?=\{{)", _json, r"\s*",
        thinks=("[THINK]", "[/THINK]"),
    ),
    "qwen": _xml(
        rf"<function={_NAME}>", "<tool_call>", "</function>", "</tool_call>",
        r"<parameter=([^>\n]+)>\n?", r"\n?</parameter>",
    ),
    "glm": _xml(
        rf"<tool_call>\s*{_NAME}\s*", "<tool_call>", "(?!)", "</tool_call>",
        r"<arg_key>(.*?)</arg_key>\s*<arg_value>", "</arg_value>",
    ),
    "minimax": _xml(
        r'<invoke name="(?P<name>[^"\n]+)">', "<minimax:tool_call>", "</invoke>",
        "</minimax:tool_call>", r'<parameter name="([^"\n]+)">', "</parameter>",
    ),
    "dsml": _xml(
        r'<｜DSML｜invoke name="(?P<name>[^"\n]+)">', "<｜DSML｜(?:function|tool)_calls>",
        "</｜DSML｜invoke>", "</｜DSML｜(?:function|tool)_calls>",
        r'<｜DSML｜parameter name="([^"\n]+)"(?: string="\w+")?>', "</｜DSML｜parameter>",
    ),
    "deepseek": _form(
        rf"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?{_NAME}"
        r"(?:<｜tool▁sep｜>|\n```json\n)\s*(?:```json\n)?", _json,
        r"\s*(?:```)?\s*(?:<｜tool▁call▁end｜>)?\s*(?:<｜tool▁calls▁end｜>)?",
    ),
    "kimi": _form(
        rf"(?:<\|tool_calls_section_begin\|>\s*)?<\|tool_call_begin\|>\s*(?:functions\.)?{_NAME}"
        r"(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*", _json,
        r"\s*(?:<\|tool_call_end\|>)?\s*(?:<\|tool_calls_section_end\|>)?",
        "<|tool_call_argument_begin|>",
    ),
    "harmony": _form(
        rf"(?:<\|start\|>|\A){_HEAD}to=(?:functions\.)?{_NAME}{_HEAD}<\|message\|>\s*", _json,
        r"\s*(?:<\|(?:call|end)\|>)?", thinks=(BROKEN, BROKEN * 2),
    ),
    "gemma": _form(
        rf"<\|tool_call>\s*call:{_NAME}\s*(?=\{{)", _gemma, r"\s*(?:<tool_call\|>)?",
        thinks=("<|channel>", "<channel|>"),
    ),
    "lfm2": _form(
        r"<\|tool_call_start\|>", _python, r"(?:<\|tool_call_end\|>)?", "<|tool_call_start|>"
    ),
    "olmo": _form(
        r"(?:<function_calls>|<\|python_start\|>)", _python,
        r"(?:</function_calls>|<\|python_end\|>)?",
    ),
    "fenced": Form(read_fenced),
}  # fmt: skip
"""Forms by the name of a family that has them."""
