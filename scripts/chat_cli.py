"""Chat with a trained model in the terminal.

python -m scripts.chat_cli                            # the model whose training finished last
python -m scripts.chat_cli -i sft -g d20              # stage sft of the model with tag d20
python -m scripts.chat_cli -p "What is 37 * 48?"      # one answer; standard output has nothing else
echo "法国的首都是哪里？" | python -m scripts.chat_cli
python -m scripts.chat_cli --url http://127.0.0.1:8000    # the model of an OpenAI-compatible server
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from tyro.conf import arg

from nanochat.checkpoint_manager.load import PUBLISHED, Loaded
from nanochat.common import UserError, base_dir, tr
from nanochat.data.command_line import given, run
from nanochat.data.conversation import (
    Conversation,
    Message,
    Part,
    assistant,
    merge_texts,
    system,
    user,
)
from nanochat.device import compute_cleanup, compute_init
from nanochat.engine import Engine
from nanochat.generate.reply import TextStream, broken_model
from nanochat.generate.sampling import Sampling, chat_drawing
from nanochat.serve.chosen import MAX_TOKENS, ModelFlags, choose, drafts_for
from nanochat.serve.cli.remote import LARGEST_SETTING, SETTINGS, Remote
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
from nanochat.serve.formats.pieces import Thought, Words
from nanochat.serve.formats.thoughts import Thoughts, thought_state, without_thought


@dataclass(frozen=True)
class Config(ModelFlags):
    """Chat with a trained model in the terminal."""

    adapter: Path | None = None
    """Folder of an adapter (LoRA) for the model of --model, as scripts.finetune or peft wrote it;
    it is merged, except with --weights nf4."""
    prompt: Annotated[str | None, arg(aliases=["-p"])] = None
    """Answer this prompt and exit. Default: chat interactively,
    or answer the text that comes through a pipe."""
    url: str = ""
    """Chat with the server at this address, such as http://127.0.0.1:8000,
    instead of loading a model. Any server that speaks OpenAI's format will do."""
    api_key: str = ""
    """Key for the server of --url. Default: the value of NANOCHAT_API_KEY."""
    system: str = ""
    """Instructions for the model, placed in front of the chat. Default: none."""
    temperature: Annotated[float | Literal["auto"], arg(aliases=["-t"])] = "auto"
    """Randomness of the replies: 0 always takes the likeliest token. Raise it for more variety.
    auto: a published model's own default, 1 for a TinyWorld model, else 0.6;
    with --url, the server's default."""
    top_k: Annotated[int | Literal["auto"], arg(aliases=["-k"])] = "auto"
    """Sample from the k likeliest tokens; 0 samples from all.
    auto: a published model's own default, or that of the server of --url, else 50."""
    min_p: float | Literal["auto"] = "auto"
    """Never draw a token less likely than this share of the likeliest, 0 to 1;
    0 draws from all of top_k. auto: 0.5 for a TinyWorld model, else 0; with --url,
    the server's default."""
    max_tokens: Annotated[int | Literal["auto"], arg(aliases=["-m"])] = "auto"
    """Longest reply, in tokens. auto: 512,
    or half of the context for a model that thinks before it answers;
    with --url, the server's default, but at most half of its context."""
    thinking: Literal["auto", "on", "off"] = "auto"
    """Whether the model thinks before it answers, if its chat template has a switch for that.
    Thoughts are shown in grey, or on standard error. auto: as the template does by default."""
    seed: int = 42
    """Random seed. The same seed and the same messages give the same replies."""
    lang: Literal["auto", "en", "zh"] = "auto"
    """Language of this program's own messages. auto: the language of the terminal (LC_ALL,
    LC_MESSAGES, LANG)."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], arg(aliases=["-d"])] = (
        "auto"
    )
    """Number format of the computation. auto: the device's best. Use float32 to compare devices."""
    device_type: str = ""
    """Device to use: npu, cuda, mps or cpu. Default: the first usable one, except mps."""


# For a model that is loaded here, if the flags are auto.
TOP_K = 50
HOTTEST = 100  # the highest temperature: all tokens are about equally likely long before it
SWITCHES = ("/think", "/no_think")  # words of a question that switch thoughts of Qwen3 on and off
SMOKE = "smoke"  # the tag of the model of `speedrun.sh --preset smoke`; the web page knows it too


@dataclass
class Local:
    """A model that is loaded here.

    After a reply, `finish` says why the reply ended (None: Ctrl-C stopped it), `tokens` how long it
    was, and `used` how many tokens of the context the reply and its prompt took.
    """

    loaded: Loaded
    engine: Engine
    finish: str | None = None
    tokens: int = 0
    used: int = 0


@dataclass
class Chat:
    """A chat with a speaker: a model that is loaded here, or a server.

    Replies go to `out`, and everything else goes to `notes`.
    """

    speaker: Local | Remote
    sampling: Sampling
    lang: str
    out: TextIO
    notes: TextIO
    # Complete exchanges, possibly after a system message.
    messages: list[Message] = field(default_factory=list)
    replies: int = 0
    # The settings that the user changed. Only these are sent to a server, which has defaults of its
    # own for the others.
    changed: set[str] = field(default_factory=set)
    thinks: bool | None = None  # whether the model should think; None leaves that to its template
    in_thought: bool = False  # whether the line that is being printed belongs to a thought

    @property
    def template_options(self) -> dict[str, Any]:
        """The variables of the model's chat template that the user has set."""
        return {} if self.thinks is None else {"enable_thinking": self.thinks}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the next reply, by name.

        `top_k` is 0 if any token may be drawn. A setting is None if it is a default that the server
        does not report.
        """
        settings: dict[str, Any] = {name: getattr(self.sampling, name) for name in SETTINGS}
        settings["top_k"] = self.sampling.top_k or 0
        if isinstance(self.speaker, Local):
            return settings
        return self.speaker.settings({name: settings[name] for name in self.changed})

    def note_settings(self, name: str) -> None:
        """Print a message that shows the settings of the next reply.

        `name` is the key of the message in TEXTS.
        """
        display_values: dict[str, Any] = {}
        for key, value in self.settings.items():
            if value is None:
                value = TEXTS[self.lang]["unsaid"]
            display_values[key] = f"{value:g}" if isinstance(value, float) else value
        self.note(name, **display_values)
        self.note_longest()

    def note_longest(self) -> None:
        """Print a note if the server's context has no room for replies of the requested length."""
        if isinstance(self.speaker, Local) or "max_tokens" not in self.changed:
            return
        longest = self.settings["max_tokens"]
        if longest < self.sampling.max_tokens:
            self.note("most", most=longest, context=self.speaker.context)

    def note(self, name: str, **values: Any) -> None:
        """Print the message TEXTS[lang][name] to the notes, filled in with `values`."""
        self.dim(TEXTS[self.lang][name].format(**values))

    def dim(self, text: str) -> None:
        """Print a text to the notes, in grey if they go to a terminal."""
        print(dim(text, self.notes), file=self.notes, flush=True)


# --- replies -------------------------------------------------------------------------------------


def prompt_tokens(chat: Chat, local: Local, question: str) -> list[int]:
    """Return the tokens of the prompt for a model that is loaded here: the chat and the question.

    If these leave too little of the context for a reply, the earliest exchanges are left out, and a
    note says how many messages that are. A base model gets the question alone.
    """
    tokenizer = local.loaded.tokenizer
    length = local.engine.length
    if local.loaded.stage == "base":
        return [tokenizer.bos, *tokenizer.encode(question)]
    head = instructions(chat.messages)
    turns = [*chat.messages[len(head) :], user(question)]
    if tokenizer.thought_marks is None:  # a model that thinks may have begun the chat
        turns = [*map(without_thought, turns)]
    least_reply = length // 4  # always leave room for a reply of this length
    room = length - min(chat.sampling.max_tokens, least_reply)
    for forgotten in range(0, len(turns), 2):
        visible = Conversation((*head, *turns[forgotten:]), options=chat.template_options)
        tokens = tokenizer.render_prompt(visible)
        if len(tokens) <= room or forgotten == len(turns) - 1:
            break
    if forgotten:
        chat.note("forgotten", count=forgotten)
    return tokens


def show(piece: Part | Thought, chat: Chat, call: str) -> str:
    """Print a piece of a reply, and return the calculator call that is still open, or "".

    `call` is the call that the pieces before this one left open, or "". When its result arrives,
    the call and the result are printed to the notes. Thoughts are printed to the notes as well.
    """
    if isinstance(piece, Thought):
        print(dim(harmless(piece.text), chat.notes), end="", file=chat.notes, flush=True)
        chat.in_thought = True
        return call
    end_thought(chat)
    if piece.kind == "python":
        return piece.text
    if piece.kind == "text":
        print(harmless(piece.text), end="", file=chat.out, flush=True)
        return call
    show_calculation(chat, f"[{call} = {piece.text}]")
    return ""


def show_calculation(chat: Chat, calculation: str) -> None:
    """Print a call of the calculator to the notes."""
    end = "" if chat.notes is chat.out else "\n"
    chat.out.flush()
    print(dim(harmless(calculation), chat.notes), end=end, file=chat.notes, flush=True)


def show_unfinished(chat: Chat, call: str) -> None:
    """Print the calculator call within which a reply has ended, if there is one."""
    if call:
        show_calculation(chat, f"[{call} ...]")


def end_thought(chat: Chat) -> None:
    """End the line of a thought, if one is being printed."""
    if chat.in_thought:
        print("\n", file=chat.notes, flush=True)
    chat.in_thought = False


def thoughts_apart(
    parts: Iterable[Part],
    thoughts: Thoughts | None,
    last: bool = False,
) -> Iterator[Part | Thought]:
    """Yield the parts of a reply, with the texts that `thoughts` takes for thoughts as such.

    With `last`, the reply ends with these parts.
    """
    if thoughts is None:
        yield from parts
        return
    ending = [Part("text", "")] if last else []
    for part in [*parts, *ending]:
        if part.kind != "text":
            yield part
            continue
        for piece in thoughts.push(part.text, last):
            if isinstance(piece, Thought):
                yield piece
            elif isinstance(piece, Words):
                yield Part("text", piece.text)


def message_of(pieces: Iterable[Part | Thought]) -> Message | None:
    """Return the pieces of a reply as a message, or None if the reply holds nothing but a thought."""
    pieces = list(pieces)
    parts = merge_texts(*(piece for piece in pieces if isinstance(piece, Part)))
    if not parts:
        return None
    message = assistant(*parts)
    thought = "".join(piece.text for piece in pieces if isinstance(piece, Thought))
    return replace(message, fields={"reasoning_content": thought}) if thought else message


def reply(chat: Chat, question: str) -> bool:
    """Print the reply to a question as it is generated, and add the exchange to the chat.

    Returns False if Ctrl-C stopped the reply, else True. An exchange with an empty reply is not
    added. Raises UserError if the question does not fit into the context, or if the model or the
    server fails; the chat then stays unchanged.
    """
    speaker = chat.speaker
    pieces: list[Part | Thought] = []
    call = ""
    start = time.monotonic()
    with stoppable() as stopped:
        if isinstance(speaker, Local):
            reply_pieces = local_reply(chat, speaker, question, stopped)
        else:
            reply_pieces = server_reply(chat, speaker, question, stopped)
        with contextlib.closing(reply_pieces):
            for piece in reply_pieces:
                pieces.append(piece)
                call = show(piece, chat, call)
    end_thought(chat)
    show_unfinished(chat, call)
    print(file=chat.out, flush=True)
    seconds = time.monotonic() - start
    message = message_of(pieces)
    if message:
        chat.messages += [user(question), message]
        chat.replies += 1
    if isinstance(speaker, Remote) and speaker.forgotten:
        chat.note("forgotten", count=speaker.forgotten)
    note_ending(chat, speaker.finish, message is not None)
    rate = speaker.tokens / max(seconds, 1e-6)
    if isinstance(speaker, Local):
        context = speaker.engine.length
        chat.note("speed", tokens=speaker.tokens, rate=rate, used=speaker.used, context=context)
    elif speaker.tokens:
        chat.note("rate", tokens=speaker.tokens, rate=rate)
    return speaker.finish is not None


def local_reply(
    chat: Chat,
    local: Local,
    question: str,
    stopped: Callable[[], bool],
) -> Generator[Part | Thought, None, None]:
    """Yield the parts and thoughts of a reply that is generated here.

    The reply ends by itself, or when `stopped` returns true.
    """
    engine = local.engine
    tokenizer = local.loaded.tokenizer
    prompt = prompt_tokens(chat, local, question)
    sampling = replace(chat.sampling, seed=chat.sampling.seed + chat.replies)
    request_number = engine.submit(prompt, sampling)
    local.finish = None
    local.tokens = 0
    stream = TextStream(tokenizer, tokenizer.strips_space and local.loaded.stage != "base")
    marks, is_opened, _ = thought_state(prompt, tokenizer)
    thoughts = Thoughts(marks, is_opened) if marks else None
    try:
        while engine.busy and not stopped():
            for event in engine.step():
                if event.broken:
                    raise UserError(broken_model())
                local.tokens += 1
                local.finish = event.finish
                yield from thoughts_apart(stream.push(event.token), thoughts)
    finally:
        engine.cancel(request_number)
    local.used = len(prompt) + local.tokens
    yield from thoughts_apart(stream.flush(), thoughts, last=True)


def server_reply(
    chat: Chat,
    server: Remote,
    question: str,
    stopped: Callable[[], bool],
) -> Generator[Part | Thought, None, None]:
    """Yield the parts and thoughts of a reply that a server generates, as local_reply() does."""
    settings: dict[str, Any] = {"seed": chat.sampling.seed + chat.replies}
    for name, value in chat.settings.items():
        if name in chat.changed or name == "max_tokens":
            settings[name] = value
    if chat.template_options:
        settings["chat_template_kwargs"] = chat.template_options
    return server.reply([*chat.messages, user(question)], settings, stopped)


def note_ending(
    chat: Chat,
    finish: str | None,
    has_parts: bool,
) -> None:
    """Print a note if a reply was stopped or cut off, or is empty."""
    if finish is None:
        chat.note("stopped")
    elif finish == "length":
        chat.note("length")
    elif not has_parts:
        chat.note("empty")


# --- commands ------------------------------------------------------------------------------------


def is_command(line: str) -> bool:
    """Return whether a line is a command, and no words for the model, as its switches are."""
    return line.startswith("/") and line.split()[0] not in SWITCHES


def command(chat: Chat, line: str) -> bool:
    """Carry out a command, which is a line that begins with /.

    Returns False if the command ends the chat, else True. Raises UserError if the command is
    unknown or its argument cannot be used.
    """
    name, _, argument = line.partition(" ")
    argument = argument.strip()
    if name in ("/quit", "/exit"):
        return False
    if name == "/help":
        chat.note_settings("help")
    elif name == "/new":
        chat.messages = instructions(chat.messages)
        chat.note("new")
    elif name == "/system":
        chat.messages = [system(argument)] if argument else []
        chat.note("new")
    elif name in ("/temp", "/topk", "/max"):
        set_number(chat, name, argument)
    elif name in ("/save", "/load"):
        use_file(chat, name, argument)
    else:
        raise UserError(TEXTS[chat.lang]["unknown"].format(command=name))
    return True


def use_file(chat: Chat, name: str, argument: str) -> None:
    """Save the chat to a file ("/save"), or load a chat from a file to continue it ("/load").

    Raises UserError if no path is given, if the path cannot be used, or if an empty chat would replace
    a file.
    """
    texts = TEXTS[chat.lang]
    if not argument:
        raise UserError(texts["file"].format(command=name))
    try:
        path = Path(argument).expanduser()
    except RuntimeError:  # the user in ~user does not exist, or has no home folder
        raise UserError(texts["home"].format(command=name, given=argument)) from None
    if name == "/save":
        if chat.messages == instructions(chat.messages) and path.exists():
            raise UserError(texts["nothing"].format(path=path))
        write_transcript(path, chat.messages)
        chat.note("saved", count=len(chat.messages), path=path)
    else:
        chat.messages = read_transcript(path)
        chat.note("loaded", count=len(chat.messages), path=path)


def set_number(chat: Chat, name: str, argument: str) -> None:
    """Carry out the command `name` (/temp, /topk or /max), and print all settings.

    The setting becomes the number `argument`. If that is empty, nothing is changed. Raises
    UserError if the number is not valid.
    """
    changes: dict[str, Any] = {}
    try:
        if name == "/temp" and argument:
            changes["temperature"] = float(argument)
        elif name == "/topk" and argument:
            changes["top_k"] = int(argument) or None
        elif argument:
            changes["max_tokens"] = int(argument)
    except ValueError:
        template = TEXTS[chat.lang]["number" if name == "/temp" else "whole"]
        raise UserError(template.format(command=name, given=argument)) from None
    if "temperature" in changes:
        check_temperature(changes["temperature"], name, chat.lang)
    if "max_tokens" in changes:
        check_longest(chat, changes["max_tokens"], name)
    chat.sampling = replace(chat.sampling, **changes)
    chat.changed |= changes.keys()  # only now, because a value out of range is refused above
    chat.note_settings("set")


def check_temperature(temperature: float, name: str, lang: str) -> None:
    """Raise UserError (exit code 2) if a temperature is out of range; `name` is a flag or command."""
    if not 0 <= temperature <= HOTTEST:  # true for NaN
        template = TEXTS[lang]["hot"]
        raise UserError(template.format(name=name, most=HOTTEST, given=temperature), exit_code=2)


def check_longest(chat: Chat, max_tokens: int, name: str) -> None:
    """Raise UserError if a reply cannot have so many tokens; `name` is the command that asks."""
    limit = LARGEST_SETTING if isinstance(chat.speaker, Remote) else chat.speaker.engine.length
    if not 1 <= max_tokens <= limit:
        template = TEXTS[chat.lang]["long"]
        raise UserError(template.format(name=name, most=limit, given=max_tokens))


# --- modes ---------------------------------------------------------------------------------------


def converse(chat: Chat) -> None:
    """Answer typed lines and carry out typed commands, until /quit, /exit or the end of input."""
    path = base_dir() / "chat_history"
    with history(path) as problem, keyboard() as ask:
        if problem:
            chat.note("unkept", path=path, why=problem)
        chat.note("hello")
        while True:
            try:
                line = ask()
            except EOFError:
                print(file=chat.out)
                return
            except KeyboardInterrupt:  # Ctrl-C while typing drops only the line
                print(file=chat.out)
                chat.note("bye")
                continue
            try:
                if is_command(line):
                    if not command(chat, line):
                        return
                elif line.strip():
                    reply(chat, line.strip())
            except UserError as mistake:
                chat.dim(str(mistake))
            except KeyboardInterrupt:  # a second Ctrl-C, before the first one had any effect
                end_thought(chat)
                print(file=chat.out)
                chat.note("stopped")


def open_chat(cfg: Config, notes: TextIO) -> Chat:
    """Load the model or connect to the server, and return the chat.

    Prints which model answers and, for a model that is loaded here, how it samples.
    """
    if cfg.temperature != "auto":
        check_temperature(cfg.temperature, "--temperature", language(cfg.lang))
    drawing = chat_drawing(None, cfg.temperature, cfg.min_p)
    # This checks the flags before the model loads.
    top_k = TOP_K if cfg.top_k == "auto" else cfg.top_k
    max_tokens = MAX_TOKENS if cfg.max_tokens == "auto" else cfg.max_tokens
    sampling = Sampling(
        drawing.temperature, top_k or None, max_tokens, cfg.seed, min_p=drawing.min_p
    )
    chat = chat_with_server(cfg, sampling, notes) if cfg.url else chat_here(cfg, sampling, notes)
    if cfg.thinking != "auto":
        chat.thinks = cfg.thinking == "on"
    if cfg.system.strip():
        chat.messages.append(system(cfg.system))
    return chat


def check_remote(cfg: Config) -> None:
    """Raise UserError (exit code 2) if a flag is about a model here, and --url names a server."""
    about_models = (*(flag.name for flag in fields(ModelFlags)), "adapter", "dtype", "device_type")
    for name in given(cfg, about_models):
        raise UserError(
            tr(
                "--{name} is about a model that is loaded here, and --url chats with the model "
                "of a server: leave one of the two out",
                name=name,
            ),
            exit_code=2,
        )


def chat_with_server(cfg: Config, sampling: Sampling, notes: TextIO) -> Chat:
    """Connect to the server of --url, print notes about the server, and return the chat."""
    check_remote(cfg)
    api_key = cfg.api_key or os.environ.get("NANOCHAT_API_KEY", "")
    server = Remote(cfg.url, api_key)
    chat = Chat(server, sampling, language(cfg.lang), sys.stdout, notes)
    chat.changed = {name for name in SETTINGS if getattr(cfg, name) != "auto"}
    chat.note("server", model=harmless(server.model), url=server.url)
    chat.note_longest()
    return chat


def chat_here(cfg: Config, sampling: Sampling, notes: TextIO) -> Chat:
    """Load the model, print notes about the model, and return the chat."""
    with contextlib.redirect_stdout(notes):  # standard output is for replies
        compute = compute_init(cfg.device_type or None).in_format(cfg.dtype)
        chosen = choose(cfg, compute, cfg.adapter)
    loaded = chosen.loaded
    if cfg.thinking != "auto":
        check_switch(loaded.tokenizer)
    engine = Engine(
        loaded.model,
        loaded.tokenizer,
        slots=1,
        length=chosen.context,
        graphs=chosen.captures,
        drafts=drafts_for(cfg, chosen, compute),
    )
    drawing = chat_drawing(
        loaded.corpus, cfg.temperature, cfg.min_p, cfg.top_k, loaded.tokenizer.sampling
    )
    sampling = replace(
        sampling,
        temperature=drawing.temperature,
        max_tokens=chosen.max_tokens if cfg.max_tokens == "auto" else cfg.max_tokens,
        min_p=drawing.min_p,
        top_k=drawing.top_k or None,
        top_p=drawing.top_p,
        repetition_penalty=drawing.repetition_penalty,
    )
    chat = Chat(Local(loaded, engine), sampling, language(cfg.lang), sys.stdout, notes)
    chat.note(
        "published" if loaded.stage == PUBLISHED else "model",
        stage=loaded.stage,
        tag=harmless(loaded.tag),
        step=loaded.step,
        context=chosen.context,
    )
    if chosen.latest:
        chat.note("latest", saved=chosen.latest)
    if chosen.state:
        chat.note("unfinished", state=chosen.state)
    if chosen.passed:
        chat.note("passed", flags=harmless(chosen.passed))
    if chosen.other_models:
        chat.note("others", flags=harmless(" | ".join(chosen.other_models)))
    chat.note(
        "drawing",
        temperature=sampling.temperature,
        min_p=sampling.min_p,
        reason=drawing.reason[chat.lang],
    )
    if loaded.stage == "base":
        chat.note("base")
    if loaded.tag == SMOKE:
        chat.note("smoke")
    return chat


def check_switch(tokenizer: Any) -> None:
    """Raise UserError (exit code 2) if the model's chat template has no switch for thoughts."""
    if tokenizer.thinks_by_default is None:
        raise UserError(
            tr(
                "--thinking needs a model whose chat template reads enable_thinking, and this one "
                "does not: leave the flag out"
            ),
            exit_code=2,
        )


def main(cfg: Config) -> None:
    """Chat interactively, or answer one prompt from the command line or a pipe."""
    take_any_text()
    piped = cfg.prompt is None and not sys.stdin.isatty()
    prompt = sys.stdin.read() if piped else cfg.prompt
    if prompt is not None and not prompt.strip():
        raise UserError(
            tr('the prompt is empty: write a question after -p, such as -p "What is 37 * 48?"'),
            exit_code=2,
        )
    notes = sys.stdout if prompt is None and sys.stdout.isatty() else sys.stderr
    try:
        chat = open_chat(cfg, notes)
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
