"""Chat with a trained model in the browser, or through an OpenAI-compatible API.

python -m scripts.chat_web                           # the last model, at http://127.0.0.1:8000
python -m scripts.chat_web -i sft -g d20             # stage sft of the model with tag d20
python -m scripts.chat_web --host 0.0.0.0 --api_key SECRET    # for other machines, with this key
python -m scripts.chat_web --headless                # the API without the page
python -m scripts.chat_web -i rl -g d4 --also sft/d4          # two models, which a request names
python -m scripts.chat_web --model ./Qwen3-0.6B --adapter pip=./pip    # a model and its adapter
python -m scripts.chat_web --runs                    # training seen live at /runs, without a model
python -m scripts.chat_web --runs=start              # fine-tuning started at /runs too
"""

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from tyro.conf import UseAppendAction, arg

from nanochat.checkpoint_manager.load import PUBLISHED
from nanochat.checkpoint_manager.locate import trained, updates
from nanochat.common import UserError, base_dir, language, log, tr, warn
from nanochat.data.command_line import run
from nanochat.data.traits import Drawing, traits
from nanochat.device import Compute, compute_cleanup, compute_init
from nanochat.engine import Engine
from nanochat.generate.adapters import Adapters
from nanochat.generate.drafts import Drafts
from nanochat.generate.sampling import chat_drawing
from nanochat.serve.address import addresses, listen
from nanochat.serve.app import create_app, create_runs_app
from nanochat.serve.chosen import (
    MOST_SLOTS,
    Chosen,
    ModelFlags,
    adapter_folders,
    choose,
    choose_also,
    drafts_for,
    load_adapters,
    names_adapter,
    plan_caches,
)
from nanochat.serve.cli.terminal import harmless
from nanochat.serve.connections import Caps, is_loopback
from nanochat.serve.listening import App, serve
from nanochat.serve.models import Announced, Loadable
from nanochat.serve.server import Settings

KEY_VARIABLE = "NANOCHAT_API_KEY"
ONCE = "once-"  # how a key begins that was made for one start of the server
# The names by which Docker and Podman let programs in containers reach the machine itself.
CONTAINER_HOSTS = ("host.docker.internal", "host.containers.internal", "gateway.docker.internal")
# A model with fewer updates, over all stages, has not learned its corpus. The model of the preset
# smoke has 43.
FEW_UPDATES = 100
# How long a step may take in which prompts are read beside running replies.
MOST_SECONDS = 0.2


@dataclass(frozen=True)
class Config(ModelFlags):
    """Chat with a trained model in the browser."""

    adapter: UseAppendAction[tuple[str, ...]] = ()
    """Adapter (LoRA) for the model of --model, as NAME=FOLDER or FOLDER;
    scripts.finetune or peft wrote the folder. Repeat the flag for several:
    all share the model's memory and slots. The first answers requests that name no model."""
    also: tuple[str, ...] = ()
    """Further models to serve: STAGE/TAG such as sft/d4, STAGE/TAG/STEP, or NAME=FOLDER.
    A folder holds a published model, or an adapter as with --adapter.
    Each model has its own memory and slots."""
    temperature: Annotated[float | Literal["auto"], arg(aliases=["-t"])] = "auto"
    """Randomness of the answers, 0 to 2: 0 always takes the likeliest token. auto:
    1 for a TinyWorld model, the value of a published model's generation_config.json, else 0.6.
    A request may set its own."""
    top_k: Annotated[int | Literal["auto"], arg(aliases=["-k"])] = "auto"
    """Sample from the k likeliest tokens; 0 samples from all. auto: the publisher's value,
    else 50. A request may set its own."""
    min_p: float | Literal["auto"] = "auto"
    """Never draw a token less likely than this share of the likeliest, 0 to 1;
    0 draws from all of top_k. auto: 0.5 for a TinyWorld model, else 0.
    A request may set its own."""
    max_tokens: Annotated[int | Literal["auto"], arg(aliases=["-m"])] = "auto"
    """Longest answer, in tokens. auto: 512,
    or half of the context for a model that thinks before it answers. A request may set its own."""
    num_gpus: Annotated[int, arg(aliases=["-n"])] = 1
    """Number of devices. Must be 1: one model on one device answers many chats at once."""
    slots: int | Literal["auto"] = "auto"
    """Chats to answer at the same time; further chats wait. auto: up to 32,
    as many as fit into four fifths of the free memory."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], arg(aliases=["-d"])] = (
        "auto"
    )
    """Number format of the computation. auto: the device's best. Use float32 to compare devices."""
    device_type: str = ""
    """Device to use: npu, cuda, mps or cpu. Default: the first usable one, except mps."""
    host: str = "127.0.0.1"
    """Address to listen on. 127.0.0.1 serves only this machine; 0.0.0.0 lets other machines in."""
    port: Annotated[int, arg(aliases=["-p"])] = 8000
    """Port to listen on; 0 takes any free port."""
    api_key: str = ""
    """Key that clients must send, as Authorization: Bearer KEY. Default:
    the value of NANOCHAT_API_KEY. It has only printable ASCII characters, without spaces,
    since browsers cannot send others. Other users of this machine can see a flag,
    but not the variable. Without either, no key is needed."""
    per_address: int = 0
    """Requests that one address may have at the same time; more get status 429.
    0 sets no such limit. Addresses take turns in any case. Leave it at 0 behind a proxy,
    which is one address."""
    headless: bool = False
    """Serve the API without the web page."""
    runs: bool | Literal["start"] = False
    """Show the training runs at /runs: curves and samples, updated while a training writes them.
    If no model is trained yet, the server shows only the runs.
    --runs=start lets the page start fine-tuning, and stop and resume runs, for readers with the key.
    Without --api_key, it makes a key for this start and prints an address with it."""
    runs_only: bool = False
    """Show the training runs and load no model. Use it on the machine that trains,
    which needs its memory for that."""
    served_model_name: str = ""
    """Name of the model in the API. Default: the name of its folder, or nanochat-STAGE-TAG."""
    allow_origin: tuple[str, ...] = ()
    """Websites whose pages may call the API, such as https://chat.example.org; "*" allows all.
    Needs a key, unless the site is on this machine (http://localhost:3000)."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names under which browsers reach this server,
    such as the name of a proxy in front of it."""


def check(cfg: Config) -> None:
    """Raise UserError (exit code 2) if a flag or the key is unusable, or if flags conflict."""
    if cfg.num_gpus != 1:
        raise UserError(
            tr(
                "--num_gpus must be 1, got {num_gpus}: this server runs on one device, where "
                "each model answers {slots} chats at once. To use more devices, start one "
                "server per device, each with its own --port.",
                num_gpus=cfg.num_gpus,
                slots=MOST_SLOTS if cfg.slots == "auto" else cfg.slots,
            ),
            exit_code=2,
        )
    limits = {
        "temperature": (0, 2),
        "min_p": (0, 1),
        "top_k": (0, 10**6),
        "max_tokens": (1, 10**6),
        "slots": (1, 1024),
        "port": (0, 65535),
        "per_address": (0, 10**6),
    }
    for name, (low, high) in limits.items():
        value = getattr(cfg, name)
        if value != "auto" and not low <= value <= high:
            raise UserError(
                tr(
                    "--{name} must be from {low} to {high:,}, got {value}",
                    name=name,
                    low=low,
                    high=high,
                    value=value,
                ),
                exit_code=2,
            )
    if cfg.headless and (cfg.runs or cfg.runs_only):
        raise UserError(
            tr("--headless serves no page, and --runs is one: leave one of them out"), exit_code=2
        )
    if cfg.runs_only and names_model(cfg):
        raise UserError(
            tr("--runs_only loads no model: leave out the flags that name one, or use --runs"),
            exit_code=2,
        )
    check_key(cfg)
    check_origins(cfg)
    check_starts(cfg)


def check_starts(cfg: Config) -> None:
    """Raise UserError (exit code 2) if --runs=start cannot be used here, or would let others in."""
    if cfg.runs != "start":
        return
    if not is_loopback(cfg.host) and not key_of(cfg):
        raise UserError(
            tr(
                "--runs=start on --host {host} would let everyone who can reach this machine start "
                "programs on it: set --api_key or {key_variable}, or leave --host out",
                host=cfg.host,
                key_variable=KEY_VARIABLE,
            ),
            exit_code=2,
        )
    if not hasattr(os, "pidfd_open"):
        raise UserError(
            tr("--runs=start needs Linux, which tells processes apart: use --runs here"),
            exit_code=2,
        )


def check_origins(cfg: Config) -> None:
    """Raise UserError (exit code 2) if a value of --allow_origin is not a site or needs a key."""
    for origin in cfg.allow_origin:
        site = urlsplit(origin)
        is_site = site.scheme in ("http", "https") and site.netloc
        if origin != "*" and (not is_site or origin != f"{site.scheme}://{site.netloc}".lower()):
            raise UserError(
                tr(
                    "--allow_origin must be * or a site without a path and in lower case, "
                    "such as https://chat.example.org or http://localhost:3000, got "
                    "{origin!r}",
                    origin=origin,
                ),
                exit_code=2,
            )
        if not key_of(cfg) and not is_loopback(site.hostname or ""):
            raise UserError(
                tr(
                    "--allow_origin {origin} would let pages of another machine use the "
                    "model without a key: set --api_key or {key_variable}",
                    origin=origin,
                    key_variable=KEY_VARIABLE,
                ),
                exit_code=2,
            )


def check_key(cfg: Config) -> None:
    """Raise UserError (exit code 2) if some clients could not send the API key in a header."""
    for position, letter in enumerate(key_of(cfg), 1):
        if not "!" <= letter <= "~":
            text = tr(
                "the key of {source} must have only printable ASCII characters, without spaces, "
                "got {letter} at place "
                "{place}: choose a key of English letters, digits and signs",
                source="--api_key" if cfg.api_key else KEY_VARIABLE,
                letter=repr(letter),
                place=position,
            )
            raise UserError(text, exit_code=2)


def names_model(cfg: Config) -> bool:
    """Return whether a flag says which model to load."""
    named = (cfg.source, cfg.model_tag, cfg.step, cfg.model)
    return bool(cfg.also or cfg.adapter or cfg.draft) or any(flag is not None for flag in named)


def only_runs(cfg: Config) -> bool:
    """Return whether to show the training runs without loading a model.

    That is so with --runs_only, or with --runs if no flag names a model and no model is trained
    yet.
    """
    if cfg.runs_only or not cfg.runs or names_model(cfg):
        return cfg.runs_only
    try:
        trained()
    except UserError:
        return True
    return False


def key_of(cfg: Config) -> str:
    """Return the key that clients must send, or "" if they need none."""
    return cfg.api_key or os.environ.get(KEY_VARIABLE, "")


def with_key(cfg: Config) -> Config:
    """Return the flags, with a key for this start if --runs=start has none.

    Without it, every user of this machine could start programs as the one who serves.
    """
    if cfg.runs != "start" or key_of(cfg):
        return cfg
    return replace(cfg, api_key=ONCE + secrets.token_urlsafe(24))


# --- serving -------------------------------------------------------------------------------------


def about(chosen: Chosen) -> dict[str, Any]:
    """Return a dict of what the page shows about the model, besides its name.

    It holds the corpus, the number of parameters, what the model knows (None if that is unknown or
    not learned yet), and a list of the flags that choose other models.
    """
    corpus = chosen.loaded.corpus
    knows = traits(corpus).knows
    if knows is not None and updates(chosen.loaded.meta) < FEW_UPDATES:
        knows = None  # the model has not learned it
    return {
        "corpus": corpus,
        "parameters": chosen.parameters,
        "knows": knows,
        "others": chosen.other_models,
    }


def loadable(
    name: str,
    chosen: Chosen,
    cfg: Config,
    adapters: Adapters | None = None,
    drafts: Drafts | None = None,
) -> tuple[Loadable, Drawing]:
    """Return the Loadable of a chosen model, and the model's sampling settings.

    The model gets an engine of its own, which holds `adapters` and follows `drafts`.
    """
    loaded = chosen.loaded
    drawing = chat_drawing(
        loaded.corpus, cfg.temperature, cfg.min_p, cfg.top_k, loaded.tokenizer.sampling
    )
    announced = Announced(
        model=name,
        stage=loaded.stage,
        tag=loaded.tag,
        step=loaded.step,
        temperature=drawing.temperature,
        min_p=drawing.min_p,
        top_k=min(drawing.top_k, loaded.tokenizer.vocab_size),
        top_p=drawing.top_p,
        repetition_penalty=drawing.repetition_penalty,
        max_tokens=chosen.max_tokens if cfg.max_tokens == "auto" else cfg.max_tokens,
        about=about(chosen),
    )
    engine = Engine(
        loaded.model,
        loaded.tokenizer,
        slots=MOST_SLOTS if cfg.slots == "auto" else cfg.slots,
        length=chosen.context,
        adapters=adapters,
        graphs=chosen.captures,
        drafts=drafts,
        most_seconds=MOST_SECONDS,
    )
    return Loadable(engine, loaded.tokenizer, announced), drawing


def with_adapter(base: Loadable, name: str, folder: Path) -> Loadable:
    """Return the Loadable of a base model with an adapter.

    The engine of the base model already holds the adapter under `name`.
    """
    announced = replace(
        base.announced,
        model=name,
        tag=f"{base.announced.tag} + {folder.name}",
        about={**base.announced.about, "parent": base.announced.model},
    )
    return replace(base, announced=announced, adapter=name)


def settings_of(cfg: Config) -> Settings:
    """Return the server's settings, as the flags say."""
    slots = MOST_SLOTS if cfg.slots == "auto" else cfg.slots
    return Settings(
        per_address=cfg.per_address,
        api_key=key_of(cfg),
        page=not cfg.headless,
        hosts=hosts_of(cfg),
        origins=cfg.allow_origin,
        caps=Caps(
            connections=max(Caps.connections, 4 * slots),
            per_address=max(Caps.per_address, 2 * slots),
        ),
        runs=base_dir() if cfg.runs else None,
        starts=cfg.runs == "start",
    )


def hosts_of(cfg: Config) -> tuple[str, ...]:
    """Return the host names, besides localhost, under which clients may reach the server.

    With a key, these include the names by which programs in containers reach their host.
    """
    containers = CONTAINER_HOSTS if key_of(cfg) else ()
    return (cfg.host, socket.gethostname(), *containers, *cfg.allowed_hosts)


def models_of(cfg: Config, compute: Compute) -> list[Loadable]:
    """Load and log the models and adapters to serve, and return their Loadables, the default first.

    Raises UserError if one of them cannot be served.
    """
    also = [value for value in cfg.also if not names_adapter(value)]
    also_adapters = [value for value in cfg.also if names_adapter(value)]
    folders = adapter_folders([*cfg.adapter, *also_adapters], cfg.model)
    if cfg.graphs and also:
        raise UserError(
            tr(
                "--graphs serves one model and its adapters: leave out --graphs, or the "
                "models of --also"
            ),
            2,
        )
    if also:  # the threads of several models would disturb a capture
        cfg = replace(cfg, graphs=False)
    first = choose(cfg, compute)
    chosen = named_models(cfg, first, also, folders, compute)
    adapters = load_adapters(first, folders, compute)
    drafts = drafts_for(cfg, first, compute)
    caches = plan_caches([*chosen.values()], cfg.slots, cfg.context, compute.platform)
    cfg = replace(cfg, slots=caches.slots)
    models: list[Loadable] = []
    planned = zip(chosen.items(), caches.contexts, caches.sizes, strict=True)
    for (name, model), context, cache_size in planned:
        own_adapters = adapters if model is first else None
        own_drafts = drafts if model is first else None
        model = replace(model, context=context)
        served, drawing = loadable(name, model, cfg, own_adapters, own_drafts)
        models.append(served)
        api_name = harmless(name) if cfg.also or folders or cfg.served_model_name else ""
        log_model(model, caches.slots, cache_size, drawing, api_name)
    adapted = [with_adapter(models[0], name, folder) for name, folder in folders.items()]
    for model in adapted:
        tag = harmless(model.announced.tag)
        log(
            tr(
                "适配器 / adapter: {tag}, in the API {model}",
                tag=tag,
                model=harmless(model.announced.model),
            )
        )
    if first.other_models and not cfg.also:
        log(
            tr(
                "其他模型 / other models: {other_models}",
                other_models=harmless(" | ".join(first.other_models)),
            )
        )
    # The adapters of --adapter come before their base, and those of --also come after it.
    count = len(cfg.adapter)
    return [*adapted[:count], models[0], *adapted[count:], *models[1:]]


def named_models(
    cfg: Config,
    first: Chosen,
    also: list[str],
    folders: Mapping[str, Path],
    compute: Compute,
) -> dict[str, Chosen]:
    """Load the models of --also, and return a dict, API name -> model, that begins with `first`.

    Raises UserError (exit code 2) if a name is already taken.
    """
    loaded = first.loaded
    name = loaded.tag if loaded.stage == PUBLISHED else f"nanochat-{loaded.stage}-{loaded.tag}"
    name = cfg.served_model_name or name
    if name in folders:
        raise UserError(
            tr(
                "an adapter would have the name of its base, {name}: give it another one, "
                "as NAME=FOLDER",
                name=name,
            ),
            2,
        )
    chosen = {name: first}
    for value in also:
        name, further = choose_also(value, cfg, compute)
        if name in chosen or name in folders:
            raise UserError(
                tr(
                    "--also {value} names a model that is served already, as {name}: leave it out",
                    value=value,
                    name=name,
                ),
                2,
            )
        chosen[name] = further
    return chosen


def log_model(
    chosen: Chosen,
    slots: int,
    cache_bytes: int,
    drawing: Drawing,
    name: str,
) -> None:
    """Log which model is served, the size of its cache, and its sampling settings.

    `name` is the model's name in the API, or "" if clients do not need it.
    """
    loaded = chosen.loaded
    api = tr(", in the API {name}", name=name) if name else ""
    about: dict[str, Any] = {"tag": harmless(loaded.tag), "context": chosen.context, "api": api}
    about |= {"stage": loaded.stage, "step": loaded.step}
    if loaded.stage == PUBLISHED:
        log(tr("模型 / model: {tag} (published), context of {context} tokens{api}", **about))
    else:
        log(
            tr(
                "模型 / model: stage {stage}, tag {tag}, step {step}, context of {context} "
                "tokens{api}",
                **about,
            )
        )
    log(
        tr(
            "缓存 / cache: {slots} chats of {context:,} tokens: up to {gigabytes:.2g} GB",
            slots=slots,
            context=chosen.context,
            gigabytes=cache_bytes / 1e9,
        )
    )
    if chosen.latest:
        log(
            tr(
                "这是最近训练完的模型 / this is the last finished model: {latest}",
                latest=chosen.latest,
            )
        )
    if chosen.state:
        log(
            tr(
                "这个模型的训练没有完成 / the run of this model is {state}",
                state=chosen.state,
            )
        )
    if chosen.passed:
        log(
            tr(
                "还有更新的模型（没有训练完，或只是试跑） / a newer model, unfinished or a test run, "
                "is chosen by: {passed}",
                passed=harmless(chosen.passed),
            )
        )
    chinese, english = drawing.reason["zh"], drawing.reason["en"]
    reason = chinese if language() == "zh" else f"{chinese} / {english}"
    log(
        tr(
            "温度 / temperature {temperature:g}, top-k {top_k}, top-p {top_p:g}, "
            "min-p {min_p:g}: {reason}",
            temperature=drawing.temperature,
            top_k=drawing.top_k,
            top_p=drawing.top_p,
            min_p=drawing.min_p,
            reason=reason,
        )
    )


def chat_web(
    cfg: Config,
    compute: Compute,
    listener: socket.socket,
) -> None:
    """Load the models, and serve them until Ctrl-C."""
    serve_until_stopped(cfg, create_app(models_of(cfg, compute), settings_of(cfg)), listener)


def show_runs(cfg: Config, listener: socket.socket) -> None:
    """Serve the page of training runs, without a model, until Ctrl-C."""
    log(tr("训练过程 / training runs under: {base_dir}", base_dir=harmless(str(base_dir()))))
    if not cfg.runs_only:
        log(
            tr(
                "还没有训练好的模型，因此只显示训练过程 / "
                "no model is trained yet, so there are only the runs to see"
            )
        )
    starts = cfg.runs == "start"
    app = create_runs_app(base_dir(), hosts_of(cfg), key_of(cfg), starts)
    serve_until_stopped(cfg, app, listener)


def serve_until_stopped(
    cfg: Config,
    app: App,
    listener: socket.socket,
) -> None:
    """Log where the server can be reached, warn if it is open to all, and serve until Ctrl-C."""
    if not is_loopback(cfg.host) and not key_of(cfg):
        action = tr("use the model") if app.threads else tr("see the training runs")
        warn(
            tr(
                "--host {host} lets everyone who can reach this machine {action}, without a "
                "key, and all messages travel unencrypted. To ask for a key, set --api_key. "
                "To serve only this machine, leave --host out",
                host=cfg.host,
                action=action,
            )
        )
    # The page reads a key of this start from its address, and no server sees that part of it.
    place = f"#key={cfg.api_key}" if cfg.api_key.startswith(ONCE) else ""
    for address in addresses(listener, cfg.host):
        if cfg.headless:
            log(tr("API 地址 / the API is at: {address}/v1", address=address))
        elif app.threads:
            page = f"{address}/{place}" if place else address
            log(tr("在浏览器中打开 / open in a browser: {address}", address=page))
        if cfg.runs or cfg.runs_only:
            log(tr("查看训练 / watch training at: {address}", address=f"{address}/runs{place}"))
    log(tr("按 Ctrl-C 停止 / Ctrl-C stops"))
    serve(app, listener)
    log(tr("已停止 / stopped"))


def main(cfg: Config) -> None:
    """Check the flags, open the port, and serve."""
    check(cfg)
    cfg = with_key(cfg)
    with listen(cfg.host, cfg.port) as listener:
        if only_runs(cfg):
            return show_runs(cfg, listener)
        compute = compute_init(cfg.device_type or None).in_format(cfg.dtype)
        try:
            chat_web(cfg, compute, listener)
        finally:
            compute_cleanup()


if __name__ == "__main__":
    run(main, Config, __doc__)
