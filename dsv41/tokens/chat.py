"""Chat in the vendor's own encoding: messages to prompt tokens, and generated text back to a message.

Roles, tools, reasoning effort, what plain text may not spell and how the output is parsed are all
``deepseek-recipe``'s (extra ``[chat]``). Here stands what is ours: which fields are served, pictures as local
files, and the special tokens as the packaged vocabulary spells them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from dsv41.config import ModelConfig
from dsv41.tokens.tokenizer import Tokenizer

CHAT_FIELDS = ("messages", "tools", "tool_choice", "reasoning_effort", "thinking")
"""What makes a prompt; ``messages`` is needed. A line of a prompt file may have these in place of ``prompt``."""

_MODEL = "DeepSeek-V4.1-Flash"
_PACKAGE = "deepseek_recipe"

# The packaged vocabulary is V4's, in which V4.1's <｜System｜> is still an unused place holder of the same id.
_SYSTEM_TOKEN = 128_799

# The fields of the chat-completions form that say how to sample, by the names that a request has for them.
_OPTION_FIELDS = {
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "seed": "seed",
    "stop": "stop",
}
# Every request to a server has them; here the checkpoint is the model, and text is always streamed.
_FIELDS_WITHOUT_EFFECT = ("model", "stream")

_MESSAGE_FIELDS = {
    "system": ("content",),
    "user": ("content",),
    "assistant": ("content", "reasoning_content", "tool_calls", "prefix"),
    "tool": ("content", "tool_call_id"),
    "latest_reminder": ("content",),
}
_PART_FIELDS = {"text": ("text",), "image_url": ("image_url",)}
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_CALL_FIELDS = ("name", "arguments")
# The library takes a picture by address only. This one is never looked up; its last part is the picture's number.
_PICTURE_ADDRESS = "https://picture.invalid/"


class ChatError(ValueError):
    """A conversation that cannot be rendered (the message names field and value), or no library to render it."""


@dataclasses.dataclass(frozen=True)
class ChatPiece:
    """Something that became certain while a reply is generated.

    Attributes:
      kind: "reasoning" or "content"; "call" opens a tool call, "arguments" continues it.
      text: reasoning, content, the tool's name, or a part of the arguments' JSON text. Never empty.
      call: of "call" and "arguments": the number of the tool call, from 0; else None.
    """

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    call: int | None = None


@dataclasses.dataclass(frozen=True)
class ChatReply:
    """A generated message.

    Attributes:
      message: role ("assistant") and content; reasoning_content where the conversation has reasoning switched on;
        tool_calls (id, type, function) if there are any. It may stand in the ``messages`` of the next turn.
      finish_reason: "stop", "length", or "tool_calls" (the reply ended by itself and calls tools).
      pieces: what was still waiting when the text ended.
    """

    message: dict[str, Any]
    finish_reason: Literal["stop", "length", "tool_calls"]
    pieces: tuple[ChatPiece, ...]


class ChatReader:
    """Parses the text that continues a :class:`ChatPrompt`, in pieces of any length."""

    def __init__(self, request: Any) -> None:
        library = _library()
        generator = library.ChatCompletionRequest.chunk_generator(request, "", _MODEL)
        self._processor = library.StreamProcessor(generator, request.parsing_options)
        self._response = library.ChatCompletionResponse("", _MODEL, 0, 0, 0)
        self._chunk = library.InferenceChunk
        self._ends = {
            "stop": library.InferenceFinishReason.Stop,
            "length": library.InferenceFinishReason.Length,
        }
        self._pieces(self._processor.push(self._chunk.ready()))

    def push(self, text: str) -> tuple[ChatPiece, ...]:
        """What became certain with this text; a beginning that may still turn into markup waits."""
        return self._pieces(self._processor.push(self._chunk.text(text)))

    def finish(self, finish_reason: Literal["stop", "length"] = "stop") -> ChatReply:
        """The whole message; nothing can be pushed afterwards.

        Args:
          finish_reason: why the generation ended. A tool call in which the text ended stays, with arguments as far
            as they were written, and so does the beginning of a tag, as text.
        """
        chunks = self._processor.push(self._chunk.finish(self._ends[finish_reason])) + self._processor.finish()
        pieces = self._pieces(chunks)
        choice = json.loads(self._response.to_json())["choices"][0]
        message = choice["message"]
        for call in message.get("tool_calls", ()):
            del call["index"]  # belongs to the stream; the next turn's messages have no such field
        return ChatReply(message, choice["finish_reason"], pieces)

    def _pieces(self, chunks: Sequence[Any]) -> tuple[ChatPiece, ...]:
        pieces = []
        for chunk in chunks:
            for choice in json.loads(chunk.to_json())["choices"]:
                delta = choice["delta"]
                pieces.append(ChatPiece("reasoning", delta.get("reasoning_content") or ""))
                pieces.append(ChatPiece("content", delta.get("content") or ""))
                for call in delta.get("tool_calls", ()):
                    function = call["function"]
                    pieces.append(ChatPiece("call", function.get("name") or "", call["index"]))
                    pieces.append(ChatPiece("arguments", function.get("arguments") or "", call["index"]))
            self._response.accumulate(chunk)
        return tuple(piece for piece in pieces if piece.text)


@dataclasses.dataclass(frozen=True)
class ChatPrompt:
    """A rendered conversation.

    Attributes:
      tokens: token ids, begin-of-sequence token included; one image token stands for each picture.
      images: the pictures' files, in the order of their tokens.
      options: fields of a generation request that the conversation gave (max_new_tokens, temperature, top_p, seed,
        stop), not yet checked.
    """

    tokens: tuple[int, ...]
    images: tuple[pathlib.Path, ...]
    options: dict[str, Any]
    _request: Any = dataclasses.field(repr=False, compare=False)

    def reader(self) -> ChatReader:
        """A parser for one generated continuation."""
        return ChatReader(self._request)


class ChatFormat:
    """Renders conversations for one model; made once, since it reads the whole vocabulary (half a second).

    Args:
      tokenizer: of the model; None, or another one than the packaged, has no chats.

    Raises:
      ChatError: not the packaged tokenizer, or ``deepseek-recipe`` is not installed.
    """

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        if tokenizer is None or not tokenizer.is_packaged:
            raise ChatError(
                f"messages: the model's vocabulary of {config.text.vocab_size} tokens is not the packaged tokenizer's; "
                "there is no chat encoding for it"
            )
        library = _library()
        special = library.SpecialTokens(
            system=tokenizer.token_form(_SYSTEM_TOKEN), image=tokenizer.token_form(config.image_token_id)
        )
        vocabulary = library.Tokenizer.from_str(tokenizer.to_json())
        self._conversion = library.ConversionOptions().with_special_tokens(special)
        self._encoding = library.DeepseekV41Encoding().with_special_tokens(special).with_tokenizer(vocabulary)
        self._request = library.ChatCompletionRequest
        self._conversion_error = library.ConversionError

    def read(self, path: pathlib.Path) -> ChatPrompt:
        """Renders a JSON file: a list of messages, or an object in the chat-completions form.

        Raises:
          ChatError: see :meth:`render`; names the file.
          OSError: the file cannot be read.
        """
        try:
            data = json.loads(path.read_bytes())
        except ValueError as error:  # neither JSON nor UTF-8
            raise ChatError(f"{path}: not JSON ({error})") from None
        try:
            return self.render({"messages": data} if isinstance(data, list) else data, path.parent)
        except ChatError as error:
            raise ChatError(f"{path}: {error}") from None

    def render(self, conversation: Mapping[str, Any], directory: pathlib.Path) -> ChatPrompt:
        """Renders a conversation up to the point where the assistant goes on.

        Text that spells a special token (``<｜User｜>``, ``</think>``, …) stays text: it can open no turn. Only in
        the assistant's own messages marks for places in a picture (``<｜box｜>``, …) are read as tokens. Reasoning
        of earlier turns is kept where the conversation has tools.

        Args:
          conversation: the fields of :data:`CHAT_FIELDS` and, optionally, max_tokens or max_completion_tokens,
            temperature, top_p, seed, stop; model and stream are accepted and have no effect. null is not given.
            Reasoning is on unless ``thinking`` is ``{"type": "disabled"}`` or ``reasoning_effort`` is "none".
            Pictures are parts ``{"type": "image_url", "image_url": {"url": FILE}}`` of a content.
          directory: picture files are relative to it.

        Raises:
          ChatError: an unknown field or role, no messages, a picture that is no local file, or what the library
            refuses; names field and value.
        """
        if not isinstance(conversation, Mapping):
            raise ChatError(f"{_shown(conversation)} is neither a list of messages nor an object that has one")
        _check_fields(conversation, (*CHAT_FIELDS, *_OPTION_FIELDS, *_FIELDS_WITHOUT_EFFECT), "")
        given = {name: value for name, value in conversation.items() if value is not None}
        body = {name: given[name] for name in CHAT_FIELDS if name in given}
        body["messages"], images = _messages(given.get("messages"), directory)
        _check_nested(body.get("tools"), _FUNCTION_FIELDS, "tools", ("type", "function"))
        if isinstance(body.get("thinking"), Mapping):
            _check_fields(body["thinking"], ("type",), "thinking")
        try:
            request = self._request(json.dumps({"model": _MODEL, **body}, ensure_ascii=False)).convert(self._conversion)
            prompt = self._encoding.render_conversation(request.conversation)
            tokens = self._encoding.encode(request.conversation)
        except UnicodeEncodeError as error:
            raise ChatError(f"messages: a text holds half of a surrogate pair ({error})") from None
        except (self._conversion_error, ValueError) as error:
            raise ChatError(str(error)) from None
        # In the order of the prompt: tool results are put in the order of their calls.
        ordered = (images[int(source.url.removeprefix(_PICTURE_ADDRESS))] for source in prompt.image_sources)
        return ChatPrompt(tuple(tokens), tuple(ordered), _options(given), request)


def take_conversation(line: Mapping[str, Any]) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Splits a line of a prompt file: the conversation in it, if it has ``messages``, and all other fields."""
    if "messages" not in line:
        return None, dict(line)
    chat = {name: value for name, value in line.items() if name in CHAT_FIELDS}
    return chat, {name: value for name, value in line.items() if name not in CHAT_FIELDS}


def _library() -> Any:
    try:
        return importlib.import_module(_PACKAGE)
    except ModuleNotFoundError:
        raise ChatError(
            "the chat encoding comes with the package 'deepseek-recipe', which is not installed: "
            "pip install 'dsv41[chat]'"
        ) from None


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields by the names of a generation request."""
    options: dict[str, Any] = {}
    for field, name in _OPTION_FIELDS.items():
        if field not in given:
            continue
        if name in options:
            raise ChatError(f"{field}: {given[field]!r} is given beside another field for {name}")
        options[name] = given[field]
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    return options


def _messages(messages: Any, directory: pathlib.Path) -> tuple[list[dict[str, Any]], list[pathlib.Path]]:
    """The messages, checked, with a numbered address for each picture; and the pictures' files by number."""
    if messages is None or messages == []:
        raise ChatError("messages: there are none")
    if not isinstance(messages, list):
        raise ChatError(f"messages: {_shown(messages)} is not a list")
    checked, images = [], []
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str):
            raise ChatError(f"{where}: {_shown(message)} is not an object that has a role")
        if role not in _MESSAGE_FIELDS:
            raise ChatError(f"{where}.role: {role!r} is none of {', '.join(_MESSAGE_FIELDS)}")
        _check_fields(message, ("role", *_MESSAGE_FIELDS[role]), where)
        _check_nested(message.get("tool_calls"), _CALL_FIELDS, f"{where}.tool_calls", ("id", "type", "function"))
        if isinstance(message.get("content"), list):
            parts = [
                _part(part, f"{where}.content[{place}]", directory, images)
                for place, part in enumerate(message["content"])
            ]
            message = {**message, "content": parts}
        checked.append(message)
    return checked, images


def _part(part: Any, where: str, directory: pathlib.Path, images: list[pathlib.Path]) -> dict[str, Any]:
    """One part of a content; a picture is appended to ``images`` and its number takes the file's place."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in _PART_FIELDS:
        raise ChatError(f"{where}.type: {kind!r} is none of {', '.join(_PART_FIELDS)}")
    _check_fields(part, ("type", *_PART_FIELDS[kind]), where)
    if kind != "image_url":
        return part
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else None
    if not isinstance(url, str):
        raise ChatError(f"{where}.image_url: {_shown(image)} is not an object with the path of a file as its 'url'")
    _check_fields(image, ("url", "detail"), f"{where}.image_url")
    if image.get("detail") == "low":
        raise ChatError(f"{where}.image_url.detail: 'low' is not served; a picture is always read in full detail")
    path = directory / url
    try:
        local = path.is_file()
    except OSError:  # pictures inside of the address make names that are too long for a file
        local = False
    if not local:
        raise ChatError(f"{where}.image_url.url: {_shown(url)} is not a local file")
    images.append(path)
    return {**part, "image_url": {**image, "url": f"{_PICTURE_ADDRESS}{len(images) - 1}"}}


def _check_nested(entries: Any, function_fields: Sequence[str], where: str, entry_fields: Sequence[str]) -> None:
    """Unknown fields of tools or tool calls and of the functions in them; wrong types are left to the library."""
    for number, entry in enumerate(entries if isinstance(entries, list) else ()):
        if isinstance(entry, dict):
            _check_fields(entry, entry_fields, f"{where}[{number}]")
            if isinstance(entry.get("function"), dict):
                _check_fields(entry["function"], function_fields, f"{where}[{number}].function")


def _check_fields(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for name in value:
        if name not in known:
            place = f"{where}.{name}" if where else name
            raise ChatError(f"{place}: unknown field with {_shown(value[name])}; known are {', '.join(known)}")


def _shown(value: Any) -> str:
    """A value for an error message, at most a line."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
