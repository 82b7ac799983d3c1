"""Files of prompts and completions, one JSON object a line; a run that was cut off can go on where it stopped."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from dsv41.commands.options import OptionError, read_text
from dsv41.config import ModelConfig
from dsv41.inference.requests import Completion, Request, RequestError
from dsv41.tokens.chat import ChatError, ChatFormat, ChatPrompt, take_conversation
from dsv41.tokens.tokenizer import Tokenizer


class ChatFormats:
    """The chat encoding of a model, made when the first conversation is met."""

    def __init__(self, config: ModelConfig, tokenizer: Tokenizer | None) -> None:
        self._make, self._format = functools.partial(ChatFormat, config, tokenizer), None

    def get(self) -> ChatFormat:
        """The encoding.

        Raises:
          ChatError: the model or the installation has none.
        """
        if self._format is None:
            self._format = self._make()
        return self._format


def read_requests(
    path: pathlib.Path, defaults: dict[str, Any], check: Callable[[Request], object], chat: ChatFormats
) -> tuple[list[Request], dict[str | int, ChatPrompt]]:
    """Reads and checks every line of a prompt file; blank lines are skipped, pictures are relative to the file.

    Args:
      defaults: values of request fields that a line does not give.
      check: raises :class:`RequestError` for a request that the model cannot serve.

    Returns:
      the requests, one without ``id`` has its line number, counted from 1; and by id the conversations among them.

    Raises:
      ChatError: a conversation is wrong; names file and line.
      OptionError: a line is not an object of known fields, or an id stands twice; names file and line.
      RequestError: a value is wrong; names file and line.
    """
    fields = {field.name for field in dataclasses.fields(Request)}
    requests, conversations, lines = [], {}, {}
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            data = json.loads(line)
        except json.JSONDecodeError as error:
            raise OptionError(f"{where}: not JSON ({error})") from error
        if not isinstance(data, dict):
            raise OptionError(f"{where}: {line.strip()[:40]!r} is not an object")
        conversation, data = take_conversation(data)
        prompt = None
        if conversation is not None:
            try:
                prompt = chat.get().render(conversation, path.parent)
            except ChatError as error:
                raise ChatError(f"{where}: {error}") from None
            if taken := sorted({"prompt", "tokens", "images"} & set(data)):
                raise OptionError(f"{where}: {taken} beside messages")
            data |= {"tokens": prompt.tokens, "images": prompt.images}
        if unknown := sorted(set(data) - fields):
            raise OptionError(f"{where}: unknown field(s) {unknown}; known are {sorted(fields)}")
        images = data.get("images")
        if isinstance(images, list) and all(isinstance(image, str) for image in images):
            data["images"] = [path.parent / image for image in images]
        try:
            request = Request(**{**defaults, "id": number, **data})
            check(request)
        except RequestError as error:
            raise RequestError(f"{where}: {error}") from None
        if request.id is None:
            request = dataclasses.replace(request, id=number)
        if request.id in lines:
            raise OptionError(f"{where}: id {request.id!r} stands in line {lines[request.id]} already")
        lines[request.id] = number
        requests.append(request)
        if prompt is not None:
            conversations[request.id] = prompt
    if not requests:
        raise OptionError(f"{path}: no requests")
    return requests, conversations


class CompletionFile:
    """Completions appended line by line, each flushed as soon as it is there.

    Attributes:
      done: ids that have a completion in the file.
      dropped_line: the file ended in the middle of a line (an interrupted run); that piece was cut off.
    """

    def __init__(self, path: pathlib.Path, writes: bool = True) -> None:
        """Opens or creates the file and reads what is done.

        Args:
          writes: False only reads: of several processes on a mesh one writes.

        Raises:
          OptionError: a whole line is not a completion; names file and line.
        """
        self.done: set[str | int] = set()
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        for number, line in enumerate(whole.split(b"\n")[:-1], start=1):
            try:
                data = json.loads(line)
                self.done.add(data["id"])
                complete = data["finish_reason"] in ("stop", "length")
            except (ValueError, KeyError, TypeError):
                complete = False
            if not complete:
                raise OptionError(f"{path}:{number}: not a completion; give another --out file or mend the line")
        self.dropped_line = len(whole) < len(content)
        self._file = None
        if writes:
            if self.dropped_line:
                os.truncate(path, len(whole))
            self._file = path.open("ab")

    def write(self, completion: Completion, conversation: ChatPrompt | None = None) -> None:
        """Appends one completion; one of a conversation has its message, parsed, as ``message``."""
        self.done.add(completion.id)
        if self._file is None:
            return
        line = completion.to_json()
        if conversation is not None:
            reader = conversation.reader()
            reader.push(completion.text)
            line["message"] = reader.finish(completion.finish_reason).message
        self._file.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def __enter__(self) -> CompletionFile:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()
