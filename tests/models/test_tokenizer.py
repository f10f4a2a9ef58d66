"""Text to ids and back, and conversations to prompts."""

from __future__ import annotations

import json
import time

import pytest
import sentencepiece
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from marft_jax.errors import BadInput
from marft_jax.extras.gguf import tokenizer as gguf_tokenizer
from marft_jax.extras.gguf import vocabulary
from marft_jax.models.tokenizers import tokenizer
from marft_jax.models.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from marft_jax.run import transcripts
from marft_jax.types import without_thinking

SYSTEM = {"role": "system", "content": "plan"}
USER = {"role": "user", "content": "3+5=?"}
ASSISTANT = {"role": "assistant", "content": "8"}
TEXTS = (
    "the quick brown fox", " leading and  double  spaces ", "3+5+9=?", "é unknown ☃",
    "\nplanner: 12", "",
)  # fmt: skip


def test_bytes_spell_roles_and_turns():
    tok = ByteTokenizer()
    assert tok.chat([SYSTEM, USER]) == [258, *b"plan", 259, *b"3+5=?", 260]
    asked = [259, *b"3+5=?"]
    assert tok.chat([USER, ASSISTANT, USER]) == [*asked, 260, *b"8", 257, *asked, 260]
    assert tok.decode([*"é8".encode(), 257, 256, 258]) == "é8"
    assert tok.decode([0xC3]) == "\ufffd"  # a sampled, broken character is still text
    assert max(tok.chat([SYSTEM, USER, ASSISTANT])) < tok.vocab_size


def fast(template: str | None, named=("<s>", "</s>", "<end>", "<pad>"), **special):
    """A transformers tokenizer with one token per letter and a few special ones."""
    from transformers import PreTrainedTokenizerFast

    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(named))
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **special)


TURNS = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] + '<end>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}"
    "{{ '[' + m['content'] + ']' }}{% endfor %}"
)
GEMMA = (  # no role for the system: its text opens the first user's; and turns alternate
    "{{ bos_token }}{% set before = namespace(text='') %}{% for m in messages %}"
    "{% if m['role'] == 'system' %}{% set before.text = m['content'] + '\n\n' %}{% else %}"
    "{% set turn = loop.index0 - (messages[0]['role'] == 'system') | int %}"
    "{% if (m['role'] == 'user') != (turn % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}"
    "{{ '<s>' + ('model' if m['role'] == 'assistant' else m['role']) + '\n' + before.text }}"
    "{{ m['content'] | trim + '<end>\n' }}{% set before.text = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>model\n' }}{% endif %}"
)
SILENT = "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}"


def test_an_action_ends_at_every_known_end_token():
    inner = fast(TURNS, eos_token="</s>", pad_token="<pad>")
    tok = Tokenizer(inner, [inner.convert_tokens_to_ids("<s>")])
    names = inner.convert_ids_to_tokens(tok.eos_ids)
    assert names == ["</s>", "<s>", "<end>"], "own, configured, the template's end of turn"
    assert tok.pad_id == inner.convert_tokens_to_ids("<pad>")
    assert tok.decode([*tok.encode("8"), *tok.eos_ids, tok.pad_id]) == "8"


def turns_of(opens: str, closes: str, after: str = "", model: str = "assistant") -> str:
    """A chat template with that spelling of a message's beginning and end."""
    role = f"('{model}' if m['role'] == 'assistant' else m['role'])"
    message = f"'{opens}' + {role} + '{after}\\n' + m['content'] + '{closes}'"
    opening = f"{{% if add_generation_prompt %}}{{{{ '{opens}{model}{after}\\n' }}}}{{% endif %}}"
    return f"{{% for m in messages %}}{{{{ {message} }}}}{{% endfor %}}{opening}"


CHATML = turns_of("<|im_start|>", "<|im_end|>\\n")
EOT = "<|eot_id|>"
LLAMA3 = turns_of("<|start_header_id|>", EOT, "<|end_header_id|>")
GEMMA3 = turns_of("<start_of_turn>", "<end_of_turn>\\n", model="model")
BARE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
PUBLISHED = {  # template, the tokenizer's eos, those of generation_config.json, the end of a turn
    "Qwen2.5 Instruct": (CHATML, "<|im_end|>", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>"),
    "Qwen2.5": (CHATML, "<|endoftext|>", ["<|endoftext|>"], "<|im_end|>"),
    "Qwen3": (CHATML, "<|im_end|>", ["<|im_end|>", "<|endoftext|>"], "<|im_end|>"),
    "Llama 3": (LLAMA3, EOT, ["<|end_of_text|>", EOT], EOT),
    "Llama 3.1": (LLAMA3, EOT, ["<|end_of_text|>", "<|eom_id|>", EOT], EOT),
    "Gemma 3": (GEMMA3, "<eos>", ["<eos>", "<end_of_turn>"], "<end_of_turn>"),
    "SmolLM2 Instruct": (CHATML, "<|im_end|>", ["<|im_end|>"], "<|im_end|>"),
    "without a token in its template": (BARE, EOT, ["<eos>"], EOT),
}
NAMED = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    *("<|end_of_text|>", "<|eom_id|>", EOT, "<|start_header_id|>", "<|end_header_id|>"),
)


@pytest.mark.parametrize("model", PUBLISHED)
def test_a_turn_ends_with_the_templates_own_token(model, tmp_path):
    """Whichever else end an action, and in whatever order a model's files name them."""
    template, eos, configured, end = PUBLISHED[model]
    inner = fast(template, NAMED, eos_token=eos)
    inner.save_pretrained(tmp_path)
    ids = inner.convert_tokens_to_ids(configured)
    ids = ids if len(ids) > 1 else ids[0]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tok = tokenizer.from_directory(tmp_path)
    assert inner.convert_ids_to_tokens(tok.end_id) == end
    assert set(inner.convert_ids_to_tokens(tok.eos_ids)) == {eos, end, *configured}


def test_a_chat_is_the_rendered_template_and_nothing_is_added_around_encoded_text():
    tok = Tokenizer(fast(TURNS, eos_token="</s>", bos_token="<s>"))
    rendered = "<s>system:plan<end><s>user:3+5=?<end><s>assistant:"
    assert tok.chat([SYSTEM, USER]) == tok.encode(rendered)
    assert tok.decode(tok.encode("a b")) == "a b" and len(tok.encode("a b")) == 3
    assert tok.pad_id == tok.eos_ids[0]  # padding falls back to the end token


@pytest.mark.parametrize("template", [ALTERNATING, SILENT])
def test_a_template_without_system_messages_shows_them_all_the_same(template):
    tok = Tokenizer(fast(template, eos_token="</s>"))
    assert "plan\n\n3+5=?" in tok.decode(tok.chat([SYSTEM, USER]))


@pytest.mark.parametrize(("messages", "shown"), [
    ([SYSTEM, USER], "[plan\n\n3+5=?]"),
    ([SYSTEM, ASSISTANT], "[plan][8]"),
    ([SYSTEM, ASSISTANT, USER], "[plan][8][3+5=?]"),
    ([USER, SYSTEM, ASSISTANT, USER], "[plan\n\n3+5=?][8][3+5=?]"),
    ([SYSTEM], "[plan]"),
    ([ASSISTANT, USER], "[8][3+5=?]"),
])  # fmt: skip
def test_a_folded_system_message_changes_no_word_of_the_assistants(messages, shown):
    tok = Tokenizer(fast(ALTERNATING, eos_token="</s>"))
    assert tok.decode(tok.chat(messages)) == shown


DATED = "{{ strftime_now('%Y-%m-%d %H:%M:%S') }}|" + TURNS


def test_a_date_in_a_template_is_that_of_the_start_not_of_the_moment():
    tok, other = (Tokenizer(fast(DATED, eos_token="</s>")) for _ in range(2))
    tok.date(1_700_000_000)
    other.date(86400)
    for _ in range(2):  # templates are compiled once for both
        assert tok.decode(tok.chat([USER])).startswith("2023-11-14 22:13:20|")
        assert other.decode(other.chat([USER])).startswith("1970-01-02 00:00:00|")
    assert abs(Tokenizer(fast(DATED, eos_token="</s>")).started - time.time()) < 60


def test_gemmas_template_puts_the_systems_text_into_the_first_users_turn():
    tok = Tokenizer(fast(GEMMA, bos_token="<pad>", eos_token="</s>"))
    ids = tok.chat([SYSTEM, USER])
    assert tok.decode(ids, special=True) == "<pad><s>user\nplan\n\n3+5=?<end>\n<s>model\n"
    assert tok.backend.convert_ids_to_tokens(tok.end_id) == "<end>"


INST = (  # no token opens a message, the end token follows a space
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' </s>' }}{% endif %}{% endfor %}"
)
THINKS = TURNS + "{% if not enable_thinking %}{{ 'no thinking' }}{% endif %}"


@pytest.mark.parametrize("template", [TURNS, INST, GEMMA, None])
def test_a_conversation_continued_piece_by_piece_is_the_rendered_one(template):
    tok = Tokenizer(fast(template, eos_token="</s>" if template != TURNS else "<end>"))
    before, generation = tok.opening([USER])
    assert before + generation == tok.chat([USER])
    again = {"role": "user", "content": "now you"}
    whole = tok.backend.decode(tok.chat([USER, ASSISTANT, again]))
    action = [*tok.encode("8"), tok.end_id]
    pieced = tok.backend.decode([*before, *generation, *action, *tok.reply([again])])
    assert pieced.replace(" ", "") == whole.replace(" ", "")


def test_a_reply_after_a_user_does_not_close_an_action():
    tok = Tokenizer(fast(TURNS.replace("'<end>'", "'<end>\\n'"), eos_token="<end>"))
    said = [{"role": "user", "content": "b"}]
    assert tok.reply(said) == [*tok.encode("\n"), *tok.reply(said, after_action=False)]


def test_a_template_that_rewrites_what_was_said_cannot_be_continued():
    last_only = "{{ messages[-1]['content'] }}{% if add_generation_prompt %}:{% else %}.{% endif %}"
    tok = Tokenizer(fast(last_only, eos_token="</s>"))
    with pytest.raises(BadInput, match="--team.context shared"):
        tok.opening([USER])
    with pytest.raises(BadInput, match="--team.context shared"):
        tok.reply([{"role": "user", "content": "b"}])


LEVELS = TURNS + (
    "{% if not enable_thinking %}quick{% elif reasoning_effort not in ('low', 'xhigh') %}"
    "{{ raise_exception('no such effort') }}{% else %}{{ reasoning_effort }}{% endif %}"
)
OFTEN = TURNS + "{{ 'Reasoning: ' + (reasoning_effort or 'medium') }}"  # as of gpt-oss
DEEP = TURNS + "{% if thinking %}deep{% endif %}{{ messages[0].thinking }}"  # as of Granite


@pytest.mark.parametrize(("template", "mode", "shown"), [
    (LEVELS, False, "quick"),
    (LEVELS, "low", "low"),
    (LEVELS, "xhigh", "xhigh"),
    (LEVELS, "max", None),
    (THINKS, "low", None),
    (OFTEN, False, "Reasoning: medium"),
    (OFTEN, True, "Reasoning: medium"),
    (OFTEN, "high", "Reasoning: high"),
    (DEEP, True, "deep"),
    (DEEP, False, ""),
    (THINKS, False, "no thinking"),
    (THINKS, True, ""),
    (TURNS, False, ""),
    (TURNS, True, None),
])  # fmt: skip
def test_thinking_is_the_templates_mode_and_may_have_levels_of_effort(template, mode, shown):
    tok = Tokenizer(fast(template, eos_token="</s>"))
    if shown is None:
        with pytest.raises(BadInput, match=f"--model.thinking {mode}: the chat template of"):
            tok.think(mode)
    else:
        tok.think(mode)
        assert tok.decode(tok.chat([USER])).endswith("assistant:" + shown)


@pytest.mark.parametrize("opens", ["<think>\n", "[THINK]", "<|channel>thought\n"])
def test_a_thought_that_the_prompt_opened_is_a_thought_though_it_was_cut_off(opens):
    tok = Tokenizer(fast(TURNS + opens, ("</s>", "<think>", "<|channel>"), eos_token="</s>"))
    prompt = tok.chat([USER])
    assert tok.said(prompt, tok.encode("3+5 is")) == "<think>3+5 is"
    assert without_thinking(tok.said(prompt, tok.encode("3+5 is</think> 8"))) == "8"
    assert tok.said(prompt[:-12], tok.encode("3+5 is")) == "3+5 is"


def test_only_what_looks_like_a_border_of_calls_is_marked_where_other_tokens_spell_it():
    tok = Tokenizer(fast(TURNS, ("</s>", "<call>", "!!", "["), eos_token="</s>"))
    ids = [tok.backend.convert_tokens_to_ids("Ġ" if c == " " else c) for c in "<call> !! [x"]
    plain = [i for i in ids if i is not None]
    assert tok.spell([*tok.encode("<call>"), *plain], "*") == "<call><*call> !! [x"
    assert tok.show("<call><*call> x", "*") == "<call> x"


def test_special_tokens_around_thinking_are_shown_as_the_usual_marks():
    """So that no agent is shown another's thinking."""
    named = ("</s>", "<|channel>", "<channel|>")
    tok = Tokenizer(fast(TURNS, named, eos_token="</s>"))
    ids = tok.encode("<|channel>thought\n3+4 is 7.<channel|>So 7.</s>")
    assert tok.decode(ids) == "<think>thought\n3+4 is 7.</think>So 7."
    assert without_thinking(tok.decode(ids)) == "So 7."
    assert tok.decode(ids, special=True).startswith("<|channel>thought")


def test_a_model_without_a_template_gets_a_plain_one(capsys):
    tok = Tokenizer(fast(None, eos_token="</s>"), source="m")
    assert "m: has no chat template; uses `System: ...`" in capsys.readouterr().err
    assert tok.decode(tok.chat([SYSTEM, USER])) == "System: plan\nUser: 3+5=?\nAssistant:"
    finished = tok.chat([USER, ASSISTANT, USER])
    assert finished.count(tok.eos_ids[0]) == 1


def test_unusable_templates_are_one_clear_line():
    with pytest.raises(BadInput, match="m: its chat template fails"):
        Tokenizer(fast("{{ messages[0].nothing.at_all }}", eos_token="</s>"), source="m")
    with pytest.raises(BadInput, match="m: expected an end-of-sequence token"):
        Tokenizer(fast(SILENT), source="m")


def train(folder, kind: str):
    lines = [*TEXTS[:3], "add 3+5+9 and then 2 more is 19", "numbers 10 20 30; 99 bottles"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "tokenizer"), vocab_size=310,
        model_type=kind, byte_fallback=True, split_digits=True, hard_vocab_limit=False,
        remove_extra_whitespaces=kind == "unigram",
        normalization_rule_name="nmt_nfkc" if kind == "unigram" else "identity", minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_bare_sentencepiece_model_cuts_as_sentencepiece_does(kind, tmp_path):
    theirs, ours = train(tmp_path, kind), tokenizer.from_directory(tmp_path)
    assert ours.eos_ids == (theirs.eos_id(),) and ours.vocab_size == theirs.vocab_size()
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


def test_a_sentencepiece_directory_brings_its_template_and_added_tokens(tmp_path):
    theirs = train(tmp_path, "bpe")
    size = theirs.vocab_size()
    added = {str(size): {"content": "<end>", "special": True}}
    settings = {"chat_template": TURNS, "added_tokens_decoder": added}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    ours = tokenizer.from_directory(tmp_path)
    assert ours.eos_ids == (2, 7, size)
    assert ours.chat([USER]).count(size) == 1


def test_scores_of_a_gguf_vocabulary_order_the_merges(tmp_path):
    theirs = train(tmp_path, "bpe")
    ids = range(theirs.vocab_size())
    kinds = [vocabulary.BYTE if theirs.is_byte(i) else vocabulary.NORMAL for i in ids]
    kinds[:3] = [vocabulary.UNKNOWN, vocabulary.CONTROL, vocabulary.CONTROL]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [theirs.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.eos_token_id": 2,
    }
    ours = gguf_tokenizer.from_gguf(metadata, "test")
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text


def test_a_saved_transformers_tokenizer_loads_with_its_template(tmp_path):
    inner = fast(TURNS, eos_token="</s>", pad_token="<pad>")
    inner.save_pretrained(tmp_path)
    tok = tokenizer.from_directory(tmp_path)
    assert tok.chat([SYSTEM, USER]) == Tokenizer(inner).chat([SYSTEM, USER])


def test_missing_or_broken_tokenizer_files_are_one_clear_line(tmp_path):
    with pytest.raises(BadInput, match="tokenizer.json or tokenizer.model, found neither"):
        tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\xff\xff\xff not a model")
    with pytest.raises(BadInput, match="not a readable tokenizer"):
        tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(BadInput, match="not a readable tokenizer"):
        tokenizer.from_directory(tmp_path)


EVIL = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass Evil: pass\n"


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json"])
def test_code_in_a_models_folder_is_never_run_and_nobody_is_asked(where, tmp_path, monkeypatch):
    inner = fast(TURNS, eos_token="</s>", pad_token="<pad>")
    inner.save_pretrained(tmp_path)
    kind = "AutoTokenizer" if where.startswith("tokenizer") else "AutoConfig"
    names: object = ["evil.Evil", "evil.Evil"] if kind == "AutoTokenizer" else "evil.Evil"
    old = json.loads((tmp_path / "tokenizer_config.json").read_text())
    old.pop("tokenizer_class")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(old))
    settings = (old if where.startswith("tokenizer") else {"model_type": "evil"}) | {
        "auto_map": {kind: names}
    }
    (tmp_path / where).write_text(json.dumps(settings))
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.setattr("builtins.input", lambda *prompt: pytest.fail("asked"))
    tok = tokenizer.from_directory(tmp_path)
    assert tok.encode("3+5=?") == Tokenizer(inner).encode("3+5=?")
    (tmp_path / "tokenizer.json").rename(tmp_path / "vocab.json")
    with pytest.raises(BadInput, match="not a readable tokenizer"):
        tokenizer.from_directory(tmp_path)
    assert not (tmp_path / "ran").exists()


HARMONY = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% if '<think>' in m['content'] %}{{ raise_exception('no thinking here') }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>")


def harmony(**special) -> Tokenizer:
    backend = fast(HARMONY, MARKS, **{"eos_token": "<|return|>", **special})
    return Tokenizer(backend, [backend.convert_tokens_to_ids("<|end|>")])


THOUGHT = "<|channel|>analysis<|message|>The answer is 5? No.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 7.<|return|>"
SHOWN = "<think>The answer is 5? No.</think>"


@pytest.mark.parametrize(
    ("sampled", "shown", "said"),
    [
        (THOUGHT + FINAL, SHOWN + "It is 7.", "It is 7."),
        (FINAL.removeprefix("<|start|>assistant"), "It is 7.", "It is 7."),
        (f"{THOUGHT}<|start|>assistant{THOUGHT}{FINAL}", SHOWN * 2 + "It is 7.", "It is 7."),
        (
            THOUGHT + "<|start|>assistant<|channel|>commentary<|message|>I add.<|end|>" + FINAL,
            SHOWN + "<think>I add.</think>It is 7.",
            "It is 7.",
        ),
        (
            THOUGHT + "<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json"
            '<|message|>{"a": 5}',
            SHOWN + '<think>{"a": 5}',
            "",
        ),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", "{}", "{}"),
        (THOUGHT[:-11], "<think>The answer is 5?", ""),  # cut off in a thought
        (THOUGHT, SHOWN, ""),
        (THOUGHT + FINAL[:20], SHOWN, ""),  # cut off in a head
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "<think>a</think>b", "b"),
        ("<|channel|>analysis<|message|>a<|end|>b<|return|>", "<think>a</think>b", "b"),
        ("<|start|>assistant<|message|>b<|return|>", "b", "b"),
        ("analysis is final", "analysis is final", "analysis is final"),  # without a mark
        ("<|message|>final analysis<|return|>", "final analysis", "final analysis"),
        ("a <|end|> b", "a  b", "a  b"),
    ],
)
def test_the_final_channel_is_what_gpt_oss_says_and_the_others_are_thinking(sampled, shown, said):
    tok = harmony()
    ids = tok.encode(sampled)
    assert (tok.decode(ids), without_thinking(tok.decode(ids))) == (shown, said)
    assert tok.decode(ids, special=True) == sampled
    assert "".join(transcripts.pieces(ids, tok.decode)) == shown
    for end in range(len(ids)):  # what is streamed is never taken back
        assert shown.startswith(tok.decode(ids[:end]))


def test_a_message_of_gpt_oss_is_continued_and_shown_without_its_thoughts():
    tok = harmony()
    assert tok.decode(tok.eos_ids, special=True) == "<|return|>" and tok.eos_ids == (tok.end_id,)
    again = [{"role": "user", "content": "now"}]
    told = {"role": "assistant", "content": SHOWN + "It is 7."}
    prompt = tok.decode(tok.chat([USER, told, *again]), special=True)
    assert "final<|message|>It is 7.<|end|><|start|>user<|message|>now" in prompt
    reply = tok.decode(tok.reply(again), special=True)
    assert reply == "<|start|>user<|message|>now<|end|><|start|>assistant"


@pytest.mark.parametrize("marks", [("[THINK]", "[/THINK]"), ("<think>", "</think>")])
def test_thinking_between_any_special_tokens_is_kept_in_the_text(marks):
    tok = Tokenizer(fast(TURNS, (*marks, "</s>"), eos_token="</s>"))
    ids = tok.encode(f"{marks[0]}5?{marks[1]}It is 7.</s>")
    assert tok.decode(ids) == "<think>5?</think>It is 7."
    told = {"role": "assistant", "content": tok.decode(ids)}
    assert "assistant:It is 7.<end>" in tok.decode(tok.chat([USER, told, USER]), special=True)


def test_special_tokens_of_one_name_alone_are_no_channels():
    tok = Tokenizer(fast(TURNS, ("<|end|>", "<|message|>", "<end>"), eos_token="<|end|>"))
    assert tok.decode(tok.encode("a<|message|>b<|end|>")) == "ab" and not tok.marks
