"""Your own conversations, one JSON line each."""

import json
from pathlib import Path

from nanochat.common import UserError
from nanochat.data.conversation import Conversation
from tasks.common import Ungraded, read_messages

_SHAPE = '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'


class CustomJSON(Ungraded):
    """A file in which each line is a list of messages or {"messages": [...]}. Empty lines are skipped.

    The whole file is checked at once. UserError names the file, the line and the rule of the first mistake.
    """

    def __init__(self, filepath: str | Path):
        path = Path(filepath).expanduser()
        self.name = path.stem
        if not path.is_file():
            raise UserError(
                f"there is no file {path}. Check the path; the file should hold one conversation per line: {_SHAPE}", 2
            )
        self._conversations: list[Conversation] = []
        for n, line in enumerate(path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
            try:
                text = line.decode("utf-8").strip()
                if not text:
                    continue
                value = json.loads(text)
                messages = value.get("messages") if isinstance(value, dict) else value
                self._conversations.append(read_messages(messages))
            except ValueError as broken:  # not UTF-8, not JSON, not a conversation
                raise UserError(f"{path}, line {n}: {broken}. A line should look like {_SHAPE}") from broken
        if not self._conversations:
            raise UserError(f"{path} holds no conversation. Write one conversation per line: {_SHAPE}")

    def __len__(self) -> int:
        return len(self._conversations)

    def __getitem__(self, i: int) -> Conversation:
        return self._conversations[i]
