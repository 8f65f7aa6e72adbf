"""The examples of docs/chat.md: every curl command is sent to a server as it stands, and answered."""

import json
import re
import shlex
from pathlib import Path

from tests.support.served import serving

ROOT = Path(__file__).resolve().parent.parent.parent
SERVER = "http://127.0.0.1:8000"


def test_every_curl_command_is_answered() -> None:
    """tests/repository compares the commands of the Chinese guide with these."""
    text = (ROOT / "docs/chat.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [shlex.split(line) for line in re.findall(r"^curl .*$", text, re.MULTILINE)]
    assert len(commands) == 7
    with serving(length=300) as served:
        for _, address, *options in commands:
            address = address.replace("$ANTHROPIC_BASE_URL", SERVER)
            assert address.startswith(SERVER)
            given = dict(zip(reversed(options[::2]), reversed(options[1::2]), strict=True))  # of two headers, the first
            path = address.removeprefix(SERVER)
            if "-d" in given:
                assert given["-H"] == "Content-Type: application/json"
                assert served.ok(path, **json.loads(given["-d"]))
            else:
                assert served.client.get(path).status_code == 200
