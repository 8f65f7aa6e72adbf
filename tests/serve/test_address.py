"""The address at which a server listens."""

import re
import socket
from collections.abc import Iterator

import pytest

from nanochat.common import UserError
from nanochat.serve.address import addresses, listen


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_taken_port_is_refused_with_one_that_is_free(taken):
    with pytest.raises(UserError, match=f"port {taken} is taken") as caught:
        listen("127.0.0.1", taken)
    assert caught.value.exit_code == 1
    free = re.search(r"--port (\d+)", str(caught.value))
    assert free
    listen("127.0.0.1", int(free[1])).close()


@pytest.mark.parametrize("host", ["192.0.2.1", "no such name"])
def test_address_of_another_machine_is_refused(host):
    with pytest.raises(UserError, match="must be an address of this machine"):
        listen(host, 0)


def test_addresses_are_ones_a_browser_takes():
    with listen("127.0.0.1", 0) as one, listen("0.0.0.0", 0) as all_of_them:
        assert addresses(one, "127.0.0.1") == [f"http://127.0.0.1:{one.getsockname()[1]}"]
        assert addresses(one, "::1") == [f"http://[::1]:{one.getsockname()[1]}"]
        port = all_of_them.getsockname()[1]
        named = [f"http://127.0.0.1:{port}", f"http://{socket.gethostname()}:{port}"]
        assert addresses(all_of_them, "0.0.0.0") == named
