"""Chat: conversations as prompt tokens, generated text as messages, and what is refused."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.config import load_config
from dsv41.tokens.chat import ChatError, ChatFormat, ChatPiece, ChatPrompt, ChatReply, take_conversation
from dsv41.tokens.tokenizer import Tokenizer

pytest.importorskip("deepseek_recipe")

ROOT = pathlib.Path(__file__).parent.parent
CONFIG = load_config(ROOT / "configs" / "deepseek-v4.1-flash")
TOKENIZER = Tokenizer()
CHAT = ChatFormat(CONFIG, TOKENIZER)
NOWHERE = pathlib.Path("no such directory")

BOS, EOS, IMAGE = CONFIG.bos_token_id, CONFIG.eos_token_id, CONFIG.image_token_id
SYSTEM, USER, ASSISTANT, THINK, THINK_END, DSML = 128_799, 128_803, 128_804, 128_821, 128_822, 128_825
ADDED = {0, 1, 2, *range(128_000, TOKENIZER.vocab_size)}

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather of a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
]
QUIET = {"thinking": {"type": "disabled"}}


def says(role: str, content: object, **fields: object) -> dict:
    return {"role": role, "content": content, **fields}


def calls(*arguments: object) -> list[dict]:
    return [
        {
            "id": f"c{i}",
            "type": "function",
            "function": {"name": "weather", "arguments": json.dumps(a, ensure_ascii=False)},
        }
        for i, a in enumerate(arguments)
    ]


def picture(url: object, **fields: object) -> dict:
    return {"type": "image_url", "image_url": {"url": url, **fields}}


def render(*messages: object, directory: pathlib.Path = NOWHERE, **fields: object) -> ChatPrompt:
    return CHAT.render({"messages": list(messages), **fields}, directory)


def ids(*parts: str | int) -> tuple[int, ...]:
    """Tokens of texts, and special tokens by their ids."""
    return tuple(i for part in parts for i in ([part] if isinstance(part, int) else TOKENIZER.encode(part)))


def text_of(prompt: ChatPrompt) -> str:
    return TOKENIZER.decode(prompt.tokens)


def parse(
    prompt: ChatPrompt, text: str, size: int | None = None, finish_reason: str = "stop"
) -> tuple[list[ChatPiece], ChatReply]:
    """All pieces of a text that is pushed ``size`` characters at a time, and the reply."""
    reader, size = prompt.reader(), size or len(text) or 1
    pieces = [piece for at in range(0, len(text), size) for piece in reader.push(text[at : at + size])]
    reply = reader.finish(finish_reason)
    return [*pieces, *reply.pieces], reply


def without_ids(message: dict) -> dict:
    """A message whose tool calls have no ids and have their arguments as values."""
    functions = [call["function"] for call in message.get("tool_calls", ())]
    values = [{**function, "arguments": json.loads(function["arguments"])} for function in functions]
    return {**message, "tool_calls": values}


# ---------------------------------------------------------------- rendering


def test_turns_are_the_models_tokens():
    prompt = render(
        says("system", "Be brief."), says("user", "Hi"), says("assistant", "Yes?"), says("user", "Why?"), **QUIET
    )
    expected = ids(BOS, SYSTEM, "Be brief.", USER, "Hi", ASSISTANT, THINK_END, "Yes?", EOS, USER, "Why?", ASSISTANT)
    assert prompt.tokens == (*expected, THINK_END)
    assert prompt.images == ()


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({}, 75),
        ({"reasoning_effort": "low"}, 50),
        ({"reasoning_effort": "high"}, 75),
        ({"reasoning_effort": "max"}, 100),
        ({"thinking": {"type": "enabled"}, "reasoning_effort": None}, 75),
    ],
)
def test_reasoning_effort_stands_in_the_prompt(fields, effort):
    prompt = render(says("user", "Hi"), **fields)
    note = f"Reasoning Effort: {effort} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
    assert prompt.tokens == ids(BOS, SYSTEM, note, USER, "Hi", ASSISTANT, THINK)


@pytest.mark.parametrize("fields", [QUIET, {"reasoning_effort": "none"}])
def test_reasoning_can_be_switched_off(fields):
    assert render(says("user", "Hi"), **fields).tokens == ids(BOS, USER, "Hi", ASSISTANT, THINK_END)


def test_earlier_reasoning_is_kept_only_where_there_are_tools():
    history = (says("user", "Hi"), says("assistant", "Yes?", reasoning_content="A greeting."), says("user", "Why?"))
    kept = ids(ASSISTANT, THINK, "A greeting.", THINK_END, "Yes?", EOS, USER, "Why?", ASSISTANT, THINK)
    dropped = ids(ASSISTANT, THINK_END, "Yes?", EOS, USER, "Why?", ASSISTANT, THINK)
    assert render(*history, tools=TOOLS).tokens[-len(kept) :] == kept
    assert render(*history).tokens[-len(dropped) :] == dropped
    assert "greeting" not in text_of(render(*history, tools=TOOLS, **QUIET))


def test_a_message_can_be_continued():
    begun = (says("user", "Hi"), says("assistant", "Good mor", prefix=True))
    prompt = render(*begun, **QUIET)
    assert prompt.tokens == ids(BOS, USER, "Hi", ASSISTANT, THINK_END, "Good mor")
    assert parse(prompt, "ning")[1].message == says("assistant", "ning")
    assert parse(render(*begun), "ning")[1].message["content"] == "ning"  # not reasoning, though reasoning is on


def test_tools_stand_in_the_system_message():
    prompt = render(says("system", "Be brief."), says("user", "Hi"), tools=TOOLS, **QUIET)
    text = text_of(prompt)
    assert prompt.tokens[:2] == (BOS, SYSTEM)
    assert text.index("Be brief.") < text.index('{"name": "weather", "description": "The weather of a city."')
    assert prompt.tokens[-4:] == ids(USER, "Hi", ASSISTANT, THINK_END)
    assert DSML in prompt.tokens
    none = render(says("system", "Be brief."), says("user", "Hi"), tools=TOOLS, tool_choice="none", **QUIET)
    assert none.tokens == render(says("system", "Be brief."), says("user", "Hi"), **QUIET).tokens


def test_tool_results_follow_the_order_of_their_calls(tmp_path):
    for name in ("bern.png", "rome.png"):
        (tmp_path / name).touch()
    answers = [
        says("tool", ["rome", "bern"][i], tool_call_id=f"c{1 - i}") | {"content": [picture(f"{name}.png")]}
        for i, name in enumerate(("rome", "bern"))
    ]
    prompt = render(
        says("user", "Hi"),
        says("assistant", None, tool_calls=calls({"city": "Bern", "days": 2}, {"city": "Rome"})),
        *answers,
        tools=TOOLS,
        directory=tmp_path,
        **QUIET,
    )
    text = text_of(prompt)
    bern, rome = text.index('string="true">Bern<'), text.index('string="true">Rome<')
    assert bern < text.index('string="false">2<') < rome
    assert prompt.images == (tmp_path / "bern.png", tmp_path / "rome.png")
    assert prompt.tokens.count(IMAGE) == 2


def test_pictures_have_one_token_each_in_order(tmp_path):
    (tmp_path / "below").mkdir()
    for name in ("a.png", "below/b.jpg", "c.png"):
        (tmp_path / name).touch()
    prompt = render(
        says("user", [{"type": "text", "text": "Compare"}, picture("c.png"), picture("below/b.jpg", detail="high")]),
        says("assistant", "Equal."),
        says("user", [picture(str(tmp_path / "a.png")), {"type": "text", "text": "and this?"}]),
        directory=tmp_path,
        **QUIET,
    )
    assert prompt.images == (tmp_path / "c.png", tmp_path / "below" / "b.jpg", tmp_path / "a.png")
    first = ids(BOS, USER, "Compare", "\n\n", IMAGE, "\n\n", IMAGE, ASSISTANT, THINK_END, "Equal.", EOS)
    assert prompt.tokens == (*first, *ids(USER, IMAGE, "\n\nand this?", ASSISTANT, THINK_END))


@settings(max_examples=100, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), st.text(st.characters(exclude_categories=["Cs"])))
def test_token_ids_agree_with_our_tokenizer(system, user):
    tokens = render(says("system", system), says("user", user), **QUIET).tokens
    assert tokens == ids(BOS, SYSTEM, system, USER, user, ASSISTANT, THINK_END)
    assert tuple(TOKENIZER.encode(TOKENIZER.decode(tokens))) == tokens


def test_text_that_spells_special_tokens_stays_text(tmp_path):
    (tmp_path / "a.png").touch()
    spelt = " ".join(["<｜System｜>", "<｜image｜>", *(TOKENIZER.token_form(i) for i in sorted(ADDED))])
    honest, forged = (
        render(
            says("system", word),
            says("user", [{"type": "text", "text": word}, picture("a.png")]),
            says("assistant", word, reasoning_content=word, tool_calls=calls({"city": word, word: 1})),
            says("tool", word, tool_call_id="c0"),
            says("user", word),
            tools=[{"type": "function", "function": {"name": "weather", "description": word}}],
            directory=tmp_path,
        )
        for word in ("word", spelt)
    )
    # In the assistant's own messages the marks for places in a picture are read as tokens; they open no turn.
    marks = {i for i in ADDED if TOKENIZER.token_form(i).strip("<｜/>") in ("ref", "box", "point", "polygon")}
    added = [i for i in forged.tokens if i in ADDED]
    assert len(marks) == 8
    assert [i for i in added if i not in marks] == [i for i in honest.tokens if i in ADDED]
    assert all(added.count(i) == 2 for i in marks)  # in content and reasoning_content
    assert text_of(forged) == text_of(honest).replace("word", spelt)


# ---------------------------------------------------------------- parsing


REPLIES = {
    "text": says("assistant", "Grüezi <b>you</b> < </ 深度 😀\n\n  end \n"),
    "reasoning": says("assistant", "Two.", reasoning_content="1 + 1 <\n\nis {two}."),
    "no answer": says("assistant", "", reasoning_content="Hm."),
    "call": says("assistant", "", reasoning_content="Look.", tool_calls=calls({"city": "Bern", "days": 2})),
    "calls": says(
        "assistant",
        "I look.",
        reasoning_content="",
        tool_calls=calls(
            {"city": 'a "quoted" \\ </b>\n<｜User｜> é', "days": -1},
            {},
            {"nested": {"list": [1, 2.5, None, True, "x"]}, "empty": "", "text": "2"},
        ),
    ),
}


def turn(message: dict) -> tuple[ChatPrompt, str]:
    """The prompt before an assistant message, and the text that makes it."""
    reasoning = {} if "reasoning_content" in message else QUIET
    results = [says("tool", "?", tool_call_id=call["id"]) for call in message.get("tool_calls", ())]
    before = render(says("user", "Hi"), tools=TOOLS, **reasoning)
    after = render(says("user", "Hi"), message, *results, says("user", "And?"), tools=TOOLS, **reasoning).tokens
    assert after[: len(before.tokens)] == before.tokens
    written = after[len(before.tokens) :]
    return before, TOKENIZER.decode(written[: written.index(EOS)])


@pytest.mark.parametrize("name", REPLIES)
def test_a_message_survives_rendering_and_parsing(name):
    message = REPLIES[name]
    _, reply = parse(*turn(message))
    assert without_ids(reply.message) == without_ids(message)
    assert reply.finish_reason == ("tool_calls" if "tool_calls" in message else "stop")


@pytest.mark.parametrize("size", [1, 2, 3, 7, None])
@pytest.mark.parametrize("name", REPLIES)
def test_pieces_of_any_size_join_to_the_message(name, size):
    pieces, reply = parse(*turn(REPLIES[name]), size=size)
    message = reply.message

    def joined(kind: str, call: int | None = None) -> str:
        return "".join(piece.text for piece in pieces if (piece.kind, piece.call) == (kind, call))

    assert without_ids(message) == without_ids(REPLIES[name])
    assert joined("content") == message["content"]
    assert joined("reasoning") == message.get("reasoning_content", "")
    for number, call in enumerate(message.get("tool_calls", ())):
        assert joined("call", number) == call["function"]["name"]
        assert joined("arguments", number) == call["function"]["arguments"]
    assert all(piece.text for piece in pieces)


def test_text_is_shown_as_soon_as_it_is_certain():
    reader = render(says("user", "Hi")).reader()
    assert reader.push("So ") == (ChatPiece("reasoning", "So "),)
    assert reader.push("it <is") == (ChatPiece("reasoning", "it <is"),)
    assert reader.push("</thi") == ()
    assert reader.push("nk>") == ()
    assert reader.push("Yes") == (ChatPiece("content", "Yes"),)
    assert reader.push("") == ()


@pytest.mark.parametrize("name", ["reasoning", "calls"])
def test_a_reply_may_be_cut_anywhere(name):
    prompt, text = turn(REPLIES[name])
    whole = parse(prompt, text)[1].message

    def is_cut(value: str, full: str, tag: str) -> bool:
        # A tag that was cut before it was one stays text.
        return value in {full[:kept] + tag[: len(value) - kept] for kept in range(len(value) + 1)}

    for end in range(len(text)):
        reply = parse(prompt, text[:end], size=5, finish_reason="length")[1]
        assert reply.finish_reason == "length"
        reasoning, content = reply.message["reasoning_content"], reply.message["content"]
        if "</think>" not in text[:end]:
            assert (reasoning, content) == (text[:end], "")
            continue
        assert reasoning == whole["reasoning_content"]
        assert is_cut(content, whole["content"], "\n\n<｜DSML｜ calls>")
        for call, full in zip(reply.message.get("tool_calls", ()), whole.get("tool_calls", ()), strict=False):
            assert call["function"]["name"] == full["function"]["name"]
            assert is_cut(call["function"]["arguments"], full["function"]["arguments"], "</｜DSML｜ parameter>")
    assert "tool_calls" in reply.message or name == "reasoning"


def test_a_required_call_is_opened_by_the_prompt():
    prompt = render(says("user", "Hi"), tools=TOOLS, tool_choice="required", **QUIET)
    opening = text_of(prompt).rsplit("</think>", 1)[1]
    message = says("assistant", "", tool_calls=calls({"city": "Bern"}))
    _, text = turn(message)
    assert text.startswith(opening)
    assert without_ids(parse(prompt, text.removeprefix(opening))[1].message) == without_ids(message)
    # What the library takes for markup depends on the tools that the prompt offered.
    assert parse(render(says("user", "Hi"), **QUIET), text)[1].message == says("assistant", text.lstrip("\n"))


def test_a_reply_goes_into_the_next_turn_and_a_prompt_has_many_readers():
    prompt, text = turn(REPLIES["call"])
    first, second = (parse(prompt, text)[1].message for _ in range(2))
    assert without_ids(first) == without_ids(second)
    result = says("tool", "Sunny", tool_call_id=first["tool_calls"][0]["id"])
    following = render(says("user", "Hi"), first, result, tools=TOOLS)
    assert text_of(following).startswith(text_of(prompt) + text)


# ---------------------------------------------------------------- files and what is refused


def test_files_are_lists_or_objects(tmp_path):
    (tmp_path / "a.png").touch()
    message = says("user", [picture("a.png")])
    file = tmp_path / "chat.json"
    file.write_text(json.dumps([message]))
    plain = CHAT.read(file)
    assert plain.images == (tmp_path / "a.png",)
    assert plain.options == {}
    sampling = {"max_tokens": 7, "temperature": 0.5, "top_p": None, "seed": 3, "stop": "END"}
    file.write_text(json.dumps({"model": "any", "stream": True, "messages": [message], **sampling}))
    prompt = CHAT.read(file)
    assert prompt.tokens == plain.tokens
    assert prompt.options == {"max_new_tokens": 7, "temperature": 0.5, "seed": 3, "stop": ["END"]}


def test_lines_of_a_prompt_file_may_hold_a_conversation():
    line = {"id": 4, "messages": [says("user", "Hi")], "tools": TOOLS, "max_new_tokens": 9}
    chat, others = take_conversation(line)
    assert chat == {"messages": [says("user", "Hi")], "tools": TOOLS}
    assert others == {"id": 4, "max_new_tokens": 9}
    assert take_conversation({"prompt": "Hi", "tools": TOOLS}) == (None, {"prompt": "Hi", "tools": TOOLS})


HI = [says("user", "Hi")]


@pytest.mark.parametrize(
    ("conversation", "message"),
    [
        ({}, "messages: there are none"),
        ({"messages": []}, "messages: there are none"),
        ({"messages": "Hi"}, "messages: 'Hi' is not a list"),
        ({"messages": ["Hi"]}, r"messages\[0\]: 'Hi' is not an object that has a role"),
        ({"messages": [{"content": "Hi"}]}, r"messages\[0\]: .*'Hi'.* is not an object that has a role"),
        ({"messages": [*HI, says("bob", "Hi")]}, r"messages\[1\]\.role: 'bob' is none of system, user"),
        ({"messages": [says("user", "Hi", name="Bob")]}, r"messages\[0\]\.name: unknown field with 'Bob'"),
        ({"messages": HI, "n": 2}, "^n: unknown field with 2"),
        ({"messages": HI, "response_format": {"type": "json_object"}}, "response_format: unknown field"),
        ({"messages": HI, "thinking": {"type": "enabled", "budget": 5}}, "thinking.budget: unknown field with 5"),
        ({"messages": HI, "reasoning_effort": "huge"}, "`huge`"),
        ({"messages": HI, "tools": [{"type": "web_search"}]}, "`web_search`"),
        ({"messages": HI, "tools": [TOOLS[0] | {"extra": 1}]}, r"tools\[0\]\.extra: unknown field with 1"),
        (
            {"messages": HI, "tools": [{"type": "function", "function": {"name": "w", "x": 1}}]},
            r"tools\[0\]\.function\.x: unknown",
        ),
        ({"messages": HI, "tools": TOOLS, "tool_choice": "required"}, "does not support this tool_choice"),
        ({"messages": [says("user", 5)]}, "content should be a string or a list"),
        ({"messages": [says("user", [{"type": "audio"}])]}, r"messages\[0\]\.content\[0\]\.type: 'audio' is none of"),
        ({"messages": [says("tool", "Hi", tool_call_id="c0")]}, "'tool' must be a response to a preceding message"),
        ({"messages": [says("user", "\ud800")]}, "half of a surrogate pair"),
        ({"messages": HI, "max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens: 2 is given beside"),
        (["Hi"], "is neither a list of messages nor an object"),
    ],
)
def test_a_wrong_conversation_is_refused_by_name(conversation, message):
    with pytest.raises(ChatError, match=message):
        CHAT.render(conversation, NOWHERE)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (picture("missing.png"), r"messages\[0\]\.content\[0\]\.image_url\.url: 'missing\.png' is not a local file"),
        (picture("."), "'.' is not a local file"),
        (picture("https://example.com/a.png"), "'https://example.com/a.png' is not a local file"),
        (picture("data:image/png;base64," + "A" * 5000), "'data:image/png;base64,A.*… is not a local file"),
        (picture("a\0b"), "is not a local file"),
        (picture("a.png", detail="low"), r"image_url\.detail: 'low' is not served"),
        (picture("a.png", detail="zz"), "`zz`"),
        (picture("a.png", size=3), r"image_url\.size: unknown field with 3"),
        (picture(None), r"image_url: \{'url': None\} is not an object with the path"),
        ({"type": "image_url", "image_url": "a.png"}, "image_url: 'a.png' is not an object with the path"),
    ],
)
def test_a_wrong_picture_is_refused_by_name(tmp_path, image, message):
    (tmp_path / "a.png").touch()
    with pytest.raises(ChatError, match=message):
        render(says("user", [image]), directory=tmp_path)


@pytest.mark.parametrize("content", [b"{", b"\xff[]", b"7", b"[]"])
def test_a_wrong_file_is_refused_by_its_name(tmp_path, content):
    file = tmp_path / "chat.json"
    file.write_bytes(content)
    with pytest.raises(ChatError, match=r"chat\.json: "):
        CHAT.read(file)


def test_a_model_of_another_vocabulary_is_refused():
    with pytest.raises(ChatError, match="vocabulary of 129280 tokens is not the packaged"):
        ChatFormat(CONFIG, None)


def test_without_the_library_only_chat_is_refused_and_the_extra_named():
    code = """
import sys
sys.modules["deepseek_recipe"] = None
from dsv41.config import load_config
from dsv41.tokens.chat import ChatError, ChatFormat
from dsv41.tokens.tokenizer import Tokenizer
try:
    ChatFormat(load_config(sys.argv[1]), Tokenizer())
except ChatError as error:
    print(error)
"""
    directory = str(ROOT / "configs" / "deepseek-v4.1-flash")
    done = subprocess.run([sys.executable, "-c", code, directory], capture_output=True, text=True, check=True)
    assert "'deepseek-recipe', which is not installed: pip install 'dsv41[chat]'" in done.stdout
