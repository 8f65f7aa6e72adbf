"""Chat with a trained model in the browser, or through an OpenAI-compatible API.

python -m scripts.chat_web                      # the model that was trained last, at http://127.0.0.1:8000
python -m scripts.chat_web -i sft -g d20        # stage sft of the model with tag d20
python -m scripts.chat_web --host 0.0.0.0 --api_key SECRET    # other machines can use it too, with this key
python -m scripts.chat_web --headless           # the API without the page
"""

import errno
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from tyro.conf import arg

from nanochat.checkpoint_manager.load import PUBLISHED, Loaded
from nanochat.common import UserError, log, run, tr, warn
from nanochat.data.traits import traits
from nanochat.device import Compute, compute_cleanup, compute_init
from nanochat.engine import Engine
from nanochat.generate.sampling import chat_temperature
from nanochat.serve.chosen import ModelFlags, choose
from nanochat.serve.connections import Caps
from nanochat.serve.listening import serve
from nanochat.serve.server import Settings, create_app
from nanochat.serve.terminal import harmless

KEY_VARIABLE = "NANOCHAT_API_KEY"


@dataclass(frozen=True)
class Config(ModelFlags):
    """Chat with a trained model in the browser."""

    temperature: Annotated[float | Literal["auto"], arg(aliases=["-t"])] = "auto"
    """Randomness of the answers, 0 to 2: 0 always takes the likeliest token. auto: 0 for a TinyWorld model, else 0.6.
    A request may set its own."""
    top_k: Annotated[int, arg(aliases=["-k"])] = 50
    """Sample from the k likeliest tokens; 0 samples from all. A request may set its own."""
    max_tokens: Annotated[int, arg(aliases=["-m"])] = 512
    """Longest answer, in tokens. A request may set its own."""
    num_gpus: Annotated[int, arg(aliases=["-n"])] = 1
    """Number of devices. Must be 1: one model on one device answers many chats at once."""
    slots: int = 32
    """Chats to answer at the same time; further chats wait. Lower it if the device runs out of memory."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], arg(aliases=["-d"])] = "auto"
    """Number format of the computation. auto: the device's best. Use float32 to compare devices."""
    device_type: str = ""
    """Device to use: npu, cuda or cpu. Default: the first of these that is usable."""
    host: str = "127.0.0.1"
    """Address to listen on. 127.0.0.1 serves only this machine; 0.0.0.0 lets other machines in."""
    port: Annotated[int, arg(aliases=["-p"])] = 8000
    """Port to listen on; 0 takes any free port."""
    api_key: str = ""
    """Key that clients must send, as Authorization: Bearer KEY. Default: the value of NANOCHAT_API_KEY.
    Other users of this machine can see a flag, but not the variable. Without either, no key is needed."""
    per_address: int = 0
    """Requests that one address may have at the same time; more get status 429. 0 sets no such limit.
    Addresses take turns in any case. Leave it at 0 behind a proxy, which is one address."""
    headless: bool = False
    """Serve the API without the web page."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names under which browsers reach this server, such as the name of a proxy in front of it."""


def check(cfg: Config) -> None:
    """Raise UserError (code 2) for settings out of range."""
    if cfg.num_gpus != 1:
        raise UserError(
            f"--num_gpus must be 1, got {cfg.num_gpus}: this server runs one model on one device, which answers "
            f"{cfg.slots} chats at once. To use more devices, start one server per device, each with its own --port.",
            exit_code=2,
        )
    limits = {
        "temperature": (0, 2),
        "top_k": (0, 10**6),
        "max_tokens": (1, 10**6),
        "slots": (1, 1024),
        "port": (0, 65535),
        "per_address": (0, 10**6),
    }
    for name, (low, high) in limits.items():
        value = getattr(cfg, name)
        if value != "auto" and not low <= value <= high:
            raise UserError(f"--{name} must be from {low} to {high:,}, got {value}", exit_code=2)
    if not all(" " < letter != "\x7f" for letter in key_of(cfg)):
        raise UserError("the key of --api_key must have no spaces or control characters: choose another", exit_code=2)


def key_of(cfg: Config) -> str:
    """The key that clients must send; empty if they need none."""
    return cfg.api_key or os.environ.get(KEY_VARIABLE, "")


# --- the address ---------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """Open the port before the model loads, so that a port in use fails at once. UserError says what to do."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as failure:
        text = (
            f"--host must be an address of this machine, got {host!r} ({failure.strerror}): leave it out for 127.0.0.1"
        )
        raise UserError(text) from None
    try:
        return _bound(family, address)
    except OSError as failure:
        if failure.errno == errno.EADDRINUSE:
            free = next(_free_ports(family, address))
            text = tr("port {port} is taken by another program. Port {free} is free: add --port {free}", port=port,
                      free=free)  # fmt: skip
        elif failure.errno == errno.EACCES:
            text = tr("port {port} needs administrator rights: use a port from 1024 on, such as --port 8000", port=port)
        elif failure.errno == errno.EADDRNOTAVAIL:
            text = f"--host must be an address of this machine, got {host}: leave it out for 127.0.0.1"
        else:
            raise
        raise UserError(text) from None


def _bound(family: int, address: tuple) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def _free_ports(family: int, address: tuple) -> Iterator[int]:
    """Free ports, starting just above the wanted one."""
    host, port, *rest = address
    for other in (*range(port + 1, min(port + 100, 65535)), 0):
        try:
            with _bound(family, (host, other, *rest)) as listener:
                yield listener.getsockname()[1]
        except OSError:
            continue


def is_local(host: str) -> bool:
    """Whether the address is reachable only from this machine."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def addresses(listener: socket.socket, host: str) -> list[str]:
    """The addresses to open in a browser."""
    port = listener.getsockname()[1]
    everywhere = host in ("0.0.0.0", "::", "")
    names = ["127.0.0.1", socket.gethostname()] if everywhere else [f"[{host}]" if ":" in host else host]
    return [f"http://{name}:{port}" for name in names]


# --- serving -------------------------------------------------------------------------------------


def about(loaded: Loaded, others: list[str]) -> dict[str, Any]:
    """What the page tells its visitors of the model, besides its name: data, size, knowledge, and the other models."""
    parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
    knows = traits(loaded.corpus).knows
    return {"corpus": loaded.corpus, "parameters": parameters, "knows": knows, "others": others}


def settings_of(cfg: Config, loaded: Loaded, temperature: float, others: list[str]) -> Settings:
    """The server's settings, from the flags and the loaded model."""
    return Settings(
        model=loaded.tag if loaded.stage == PUBLISHED else f"nanochat-{loaded.stage}-{loaded.tag}",
        stage=loaded.stage,
        tag=loaded.tag,
        step=loaded.step,
        temperature=temperature,
        top_k=min(cfg.top_k, loaded.tokenizer.vocab_size),
        max_tokens=cfg.max_tokens,
        per_address=cfg.per_address,
        api_key=key_of(cfg),
        page=not cfg.headless,
        hosts=(cfg.host, socket.gethostname(), *cfg.allowed_hosts),
        caps=Caps(connections=max(Caps.connections, 4 * cfg.slots), per_address=max(Caps.per_address, 2 * cfg.slots)),
        about=about(loaded, others),
    )


def chat_web(cfg: Config, compute: Compute, listener: socket.socket) -> None:
    """Load the model and serve it until Ctrl-C."""
    chosen = choose(cfg, cfg.dtype, compute)
    loaded, others = chosen.loaded, chosen.others
    engine = Engine(loaded.model, loaded.tokenizer, slots=cfg.slots, length=chosen.context)
    temperature = chat_temperature(cfg.temperature, loaded.corpus)
    app = create_app(engine, loaded.tokenizer, settings_of(cfg, loaded, temperature.value, others))
    tag = harmless(loaded.tag)
    log(f"模型 / model: stage {loaded.stage}, tag {tag}, step {loaded.step}, context of {engine.length} tokens")
    if chosen.latest:
        log(f"这是最近训练的模型 / this is the model that was trained last: {chosen.latest}")
    if others:
        log(f"其他模型 / other models, newest first: {harmless(' | '.join(others))}")
    log(f"温度 / temperature {temperature.value:g}: {temperature.reason['zh']} / {temperature.reason['en']}")
    if not is_local(cfg.host) and not key_of(cfg):
        warn(
            f"--host {cfg.host} lets everyone who can reach this machine use the model, without a key, and all "
            "messages travel unencrypted. To ask for a key, set --api_key. To serve only this machine, leave --host out"
        )
    for address in addresses(listener, cfg.host):
        if cfg.headless:
            log(f"API 地址 / the API is at: {address}/v1")
        else:
            log(f"在浏览器中打开 / open in a browser: {address}")
    log("按 Ctrl-C 停止 / Ctrl-C stops")
    serve(app, listener)
    log("已停止 / stopped")


def main(cfg: Config) -> None:
    """Check the flags, open the port, and serve."""
    check(cfg)
    with listen(cfg.host, cfg.port) as listener:
        compute = compute_init(cfg.device_type or None)
        try:
            chat_web(cfg, compute, listener)
        finally:
            compute_cleanup()


if __name__ == "__main__":
    run(main, Config, __doc__)
