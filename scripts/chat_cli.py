"""Chat with a trained model in the terminal.

python -m scripts.chat_cli                            # the model that was trained last
python -m scripts.chat_cli -i sft -g d20              # stage sft of the model with tag d20
python -m scripts.chat_cli -p "What is 37 * 48?"      # one answer; standard output has nothing else
echo "法国的首都是哪里？" | python -m scripts.chat_cli
python -m scripts.chat_cli --url http://127.0.0.1:8000    # the model of an OpenAI-compatible server
"""

import contextlib
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from tyro.conf import arg

from nanochat.checkpoint_manager.load import Loaded
from nanochat.common import UserError, base_dir, run
from nanochat.data.conversation import Conversation, Message, Part, assistant, system, user
from nanochat.device import compute_cleanup, compute_init
from nanochat.engine import Engine
from nanochat.generate.reply import BROKEN, TextStream, reply_parts
from nanochat.generate.sampling import Sampling, chat_drawing
from nanochat.serve.chosen import ModelFlags, choose
from nanochat.serve.cli.remote import SETTINGS, Remote
from nanochat.serve.cli.terminal import (
    dim,
    harmless,
    history,
    keyboard,
    language,
    stoppable,
    take_any_text,
)
from nanochat.serve.cli.texts import TEXTS
from nanochat.serve.cli.transcript import instructions, read_transcript, write_transcript


@dataclass(frozen=True)
class Config(ModelFlags):
    """Chat with a trained model in the terminal."""

    adapter: Path | None = None
    """Folder of an adapter (LoRA) for the model of --model, as scripts.finetune or peft wrote it; it is merged."""
    prompt: Annotated[str | None, arg(aliases=["-p"])] = None
    """Answer this prompt and exit. Default: chat interactively, or answer the text that comes through a pipe."""
    url: str = ""
    """Chat with the server at this address, such as http://127.0.0.1:8000, instead of loading a model.
    Any server that speaks OpenAI's format will do."""
    api_key: str = ""
    """Key for the server of --url. Default: the value of NANOCHAT_API_KEY."""
    system: str = ""
    """Instructions for the model, placed in front of the chat. Default: none."""
    temperature: Annotated[float | Literal["auto"], arg(aliases=["-t"])] = "auto"
    """Randomness of the replies: 0 always takes the likeliest token. Raise it for more variety.
    auto: 1 for a TinyWorld model, else 0.6; with --url, the server's default."""
    top_k: Annotated[int | Literal["auto"], arg(aliases=["-k"])] = "auto"
    """Sample from the k likeliest tokens; 0 samples from all. auto: 50, or the default of the server of --url."""
    min_p: float | Literal["auto"] = "auto"
    """Never draw a token less likely than this share of the likeliest, 0 to 1; 0 draws from all of top_k.
    auto: 0.5 for a TinyWorld model, else 0; with --url, the server's default."""
    max_tokens: Annotated[int | Literal["auto"], arg(aliases=["-m"])] = "auto"
    """Longest reply, in tokens. auto: 512; with --url, the server's default, but at most half of its context."""
    seed: int = 42
    """Random seed. The same seed and the same messages give the same replies."""
    lang: Literal["auto", "en", "zh"] = "auto"
    """Language of this program's own messages. auto: the language of the terminal (LC_ALL, LC_MESSAGES, LANG)."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], arg(aliases=["-d"])] = (
        "auto"
    )
    """Number format of the computation. auto: the device's best. Use float32 to compare devices."""
    device_type: str = ""
    """Device to use: npu, cuda or cpu. Default: the first of these that is usable."""


TOP_K, MAX_TOKENS = 50, 512  # of a model that is loaded here, where the flags are auto
SMOKE = "smoke"  # the tag of what `speedrun.sh --preset smoke` trains; the page knows it too


@dataclass
class Chat:
    """A chat with a loaded model. Replies go to `out`, everything else to `notes`."""

    loaded: Loaded | None  # this and the engine are None if a server answers
    engine: Engine | None
    sampling: Sampling
    lang: str
    out: TextIO
    notes: TextIO
    messages: list[Message] = field(
        default_factory=list
    )  # whole exchanges, perhaps after a system message
    replies: int = 0
    server: Remote | None = None
    # The settings that the user gave. A server is told only these; its own defaults hold for the others.
    asked: set[str] = field(default_factory=set)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the next reply, as the commands take them: top_k 0 means all tokens. None is a default that
        the server does not tell."""
        given = self.sampling
        numbers: dict[str, Any] = {name: getattr(given, name) for name in SETTINGS} | {
            "top_k": given.top_k or 0
        }
        if self.server is None:
            return numbers
        return self.server.settings({name: numbers[name] for name in self.asked})

    def note_settings(self, name: str) -> None:
        """Print a text that shows the settings of the next reply."""
        unsaid = TEXTS[self.lang]["unsaid"]
        settings = {key: unsaid if value is None else value for key, value in self.settings.items()}
        self.note(
            name,
            **{
                key: f"{value:g}" if isinstance(value, float) else value
                for key, value in settings.items()
            },
        )
        self.note_most()

    def note_most(self) -> None:
        """Say so if the server's context has no room for replies as long as the user asked for."""
        most = self.settings["max_tokens"]
        if self.server and "max_tokens" in self.asked and most < self.sampling.max_tokens:
            self.note("most", most=most, context=self.server.context)

    def note(self, name: str, **values: Any) -> None:
        """Print one of TEXTS to the notes."""
        self.dim(TEXTS[self.lang][name].format(**values))

    def dim(self, text: str) -> None:
        """Print a text to the notes, in grey on a terminal."""
        print(dim(text, self.notes), file=self.notes, flush=True)


# --- replies -------------------------------------------------------------------------------------


def prompt_tokens(chat: Chat, question: str) -> list[int]:
    """The tokens of the chat and the question, without the first exchanges if they no longer fit."""
    tokenizer, length = chat.loaded.tokenizer, chat.engine.length
    if chat.loaded.stage == "base":
        return [tokenizer.bos, *tokenizer.encode(question)]
    head = instructions(chat.messages)
    turns = [*chat.messages[len(head) :], user(question)]
    room = length - min(
        chat.sampling.max_tokens, length // 4
    )  # the rest is the least room for a reply
    for forgotten in range(0, len(turns), 2):
        seen = Conversation((*head, *turns[forgotten:]))
        tokens = tokenizer.render_prompt(seen)
        if len(tokens) <= room or forgotten == len(turns) - 1:
            break
    if forgotten:
        chat.note("forgotten", count=forgotten)
    return tokens


def show(part: Part, chat: Chat, call: str) -> str:
    """Print a part of a reply. A calculator call waits for its answer: return the call that waits, or an empty text."""
    if part.kind == "python":
        return part.text
    if part.kind == "text":
        print(harmless(part.text), end="", file=chat.out, flush=True)
        return call
    answered = dim(harmless(f"[{call} = {part.text}]"), chat.notes)
    chat.out.flush()
    print(answered, end="" if chat.notes is chat.out else "\n", file=chat.notes, flush=True)
    return ""


def reply(chat: Chat, question: str) -> bool:
    """Answer a question word by word, and add question and reply to the chat. False if Ctrl-C stopped the reply.

    UserError if the question does not fit into the context, or if the model is broken; the chat
    then stays unchanged.
    """
    if chat.server:
        return reply_of_server(chat, chat.server, question)
    prompt = prompt_tokens(chat, question)
    request = chat.engine.submit(
        prompt, replace(chat.sampling, seed=chat.sampling.seed + chat.replies)
    )
    stream, call = TextStream(chat.loaded.tokenizer), ""
    tokens: list[int] = []
    finish, start = None, time.monotonic()
    with stoppable() as stopped:
        while chat.engine.busy and not stopped():
            for event in chat.engine.step():
                if event.broken:
                    raise UserError(BROKEN)
                tokens.append(event.token)
                finish = event.finish
                for part in stream.push(event.token):
                    call = show(part, chat, call)
        chat.engine.cancel(request)
    for part in stream.flush():
        call = show(part, chat, call)
    print(file=chat.out, flush=True)
    seconds = time.monotonic() - start
    parts = reply_parts(tokens, chat.loaded.tokenizer)
    if parts:
        chat.messages += [user(question), assistant(*parts)]
        chat.replies += 1
    if ended := {None: "stopped", "length": "length", "stop": "" if parts else "empty"}[finish]:
        chat.note(ended)
    used, context = len(prompt) + len(tokens), chat.engine.length
    chat.note(
        "speed",
        tokens=len(tokens),
        rate=len(tokens) / max(seconds, 1e-6),
        used=used,
        context=context,
    )
    return finish is not None


def reply_of_server(chat: Chat, server: Remote, question: str) -> bool:
    """What reply() does where a server answers."""
    asked, parts, call, start = [*chat.messages, user(question)], [], "", time.monotonic()
    settings = {
        name: value
        for name, value in chat.settings.items()
        if name in chat.asked or name == "max_tokens"
    }
    settings["seed"] = chat.sampling.seed + chat.replies
    with stoppable() as stopped:
        for part in server.reply(asked, settings, stopped):
            parts.append(part)
            call = show(part, chat, call)
    print(file=chat.out, flush=True)
    if parts:
        chat.messages = [*asked, assistant(*parts)]
        chat.replies += 1
    if ended := {None: "stopped", "length": "length"}.get(server.finish, "" if parts else "empty"):
        chat.note(ended)
    chat.note(
        "rate", tokens=server.tokens, rate=server.tokens / max(time.monotonic() - start, 1e-6)
    )
    return server.finish is not None


# --- commands ------------------------------------------------------------------------------------


def command(chat: Chat, line: str) -> bool:
    """Carry out a line that begins with /. False if the line ends the chat. UserError if the command is wrong."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name in ("/quit", "/exit"):
        return False
    if name == "/help":
        chat.note_settings("help")
    elif name in ("/new", "/system"):
        given = [system(rest)] if rest else []
        chat.messages = instructions(chat.messages) if name == "/new" else given
        chat.note("new")
    elif name in ("/temp", "/topk", "/max"):
        set_number(chat, name, rest)
    elif name in ("/save", "/load"):
        use_file(chat, name, rest)
    else:
        raise UserError(TEXTS[chat.lang]["unknown"].format(command=name))
    return True


def use_file(chat: Chat, name: str, given: str) -> None:
    """Save the chat to a file, or load a chat from a file and continue it."""
    if not given:
        raise UserError(TEXTS[chat.lang]["file"].format(command=name))
    try:
        path = Path(given).expanduser()
    except RuntimeError:  # such a user does not exist, or has no home folder
        raise UserError(TEXTS[chat.lang]["home"].format(command=name, given=given)) from None
    if name == "/save":
        write_transcript(path, chat.messages)
    else:
        chat.messages = read_transcript(path)
    chat.note("saved" if name == "/save" else "loaded", count=len(chat.messages), path=path)


def set_number(chat: Chat, name: str, given: str) -> None:
    """Change a sampling setting and print all of them; without a number, only print them."""
    changes: dict[str, Any] = {}
    try:
        if name == "/temp" and given:
            changes["temperature"] = float(given)
        elif name == "/topk" and given:
            changes["top_k"] = int(given) or None
        elif given:
            changes["max_tokens"] = int(given)
    except ValueError:
        raise UserError(TEXTS[chat.lang]["number"].format(command=name, given=given)) from None
    chat.sampling = replace(chat.sampling, **changes)
    chat.asked |= changes.keys()  # only now, since a value out of range is refused above
    chat.note_settings("set")


# --- modes ---------------------------------------------------------------------------------------


def converse(chat: Chat) -> None:
    """Chat until /quit or the end of input."""
    path = base_dir() / "chat_history"
    with history(path) as unkept, keyboard() as ask:
        if unkept:
            chat.note("unkept", path=path, why=unkept)
        chat.note("hello")
        while True:
            try:
                text = ask()
            except EOFError:
                print(file=chat.out)
                return
            except KeyboardInterrupt:  # Ctrl-C while typing drops only the line
                print(file=chat.out)
                chat.note("bye")
                continue
            try:
                if text.startswith("/"):
                    if not command(chat, text):
                        return
                elif text.strip():
                    reply(chat, text.strip())
            except UserError as mistake:
                chat.dim(str(mistake))


def open_chat(cfg: Config, notes: TextIO) -> Chat:
    """Load the model, and print which one it is and how it samples."""
    drawing = chat_drawing(None, cfg.temperature, cfg.min_p)
    # This checks the flags before the model loads.
    top_k = TOP_K if cfg.top_k == "auto" else cfg.top_k
    max_tokens = MAX_TOKENS if cfg.max_tokens == "auto" else cfg.max_tokens
    sampling = Sampling(
        drawing.temperature, top_k or None, max_tokens, cfg.seed, min_p=drawing.min_p
    )
    messages = [system(cfg.system)] if cfg.system.strip() else []
    if cfg.url:
        server = Remote(cfg.url, cfg.api_key or os.environ.get("NANOCHAT_API_KEY", ""))
        asked = {name for name in SETTINGS if getattr(cfg, name) != "auto"}
        chat = Chat(
            None, None, sampling, language(cfg.lang), sys.stdout, notes, messages, 0, server, asked
        )
        chat.note("server", model=harmless(server.model), url=server.url)
        chat.note_most()
        return chat
    with contextlib.redirect_stdout(notes):  # standard output is for replies
        compute = compute_init(cfg.device_type or None)
        chosen = choose(cfg, cfg.dtype, compute, cfg.adapter)
    loaded = chosen.loaded
    engine = Engine(
        loaded.model, loaded.tokenizer, slots=1, length=chosen.context, graphs=chosen.captures
    )
    drawing = chat_drawing(loaded.corpus, cfg.temperature, cfg.min_p)
    sampling = replace(sampling, temperature=drawing.temperature, min_p=drawing.min_p)
    chat = Chat(loaded, engine, sampling, language(cfg.lang), sys.stdout, notes, messages)
    chat.note(
        "model",
        stage=loaded.stage,
        tag=harmless(loaded.tag),
        step=loaded.step,
        context=engine.length,
    )
    if chosen.latest:
        chat.note("latest", saved=chosen.latest)
    if chosen.others:
        chat.note("others", flags=harmless(" | ".join(chosen.others)))
    chat.note(
        "drawing",
        temperature=drawing.temperature,
        min_p=drawing.min_p,
        reason=drawing.reason[chat.lang],
    )
    if loaded.stage == "base":
        chat.note("base")
    if loaded.tag == SMOKE:
        chat.note("smoke")
    return chat


def main(cfg: Config) -> None:
    """Chat, or answer one prompt from the command line or a pipe."""
    take_any_text()
    piped = cfg.prompt is None and not sys.stdin.isatty()
    prompt = sys.stdin.read() if piped else cfg.prompt
    if prompt is not None and not prompt.strip():
        raise UserError(
            'the prompt is empty: write a question after -p, such as -p "What is 37 * 48?"',
            exit_code=2,
        )
    try:
        chat = open_chat(cfg, sys.stdout if prompt is None and sys.stdout.isatty() else sys.stderr)
        if prompt is None:
            converse(chat)
        elif not reply(chat, prompt.strip()):
            raise KeyboardInterrupt
    except BrokenPipeError:  # the program that reads the answer has closed the pipe, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        compute_cleanup()


if __name__ == "__main__":
    run(main, Config, __doc__)
