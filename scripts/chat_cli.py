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
from nanochat.generate.reply import TextStream, reply_parts
from nanochat.generate.sampling import Sampling, chat_drawing
from nanochat.serve.chosen import ModelFlags, choose
from nanochat.serve.cli.remote import Remote
from nanochat.serve.cli.terminal import dim, harmless, history, keyboard, language, stoppable, take_any_text
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
    """Randomness of the replies: 0 always takes the likeliest token. auto: 1 for a TinyWorld model, else 0.6.
    Raise it for more variety."""
    top_k: Annotated[int, arg(aliases=["-k"])] = 50
    """Sample from the k likeliest tokens; 0 samples from all."""
    min_p: float | Literal["auto"] = "auto"
    """Never draw a token less likely than this share of the likeliest, 0 to 1; 0 draws from all of top_k.
    auto: 0.5 for a TinyWorld model, else 0."""
    max_tokens: Annotated[int, arg(aliases=["-m"])] = 512
    """Longest reply, in tokens."""
    seed: int = 42
    """Random seed. The same seed and the same messages give the same replies."""
    lang: Literal["auto", "en", "zh"] = "auto"
    """Language of this program's own messages. auto: the language of the terminal (LC_ALL, LC_MESSAGES, LANG)."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], arg(aliases=["-d"])] = "auto"
    """Number format of the computation. auto: the device's best. Use float32 to compare devices."""
    device_type: str = ""
    """Device to use: npu, cuda or cpu. Default: the first of these that is usable."""


DRAWING = {"temperature", "min_p"}  # the flags that may be auto
SMOKE = "smoke"  # the tag of what `speedrun.sh --preset smoke` trains; the page knows it too
TEXTS = {
    "en": {
        "model": "model: stage {stage}, tag {tag}, step {step}, context of {context} tokens",
        "server": "model: {model}, at {url}",
        "latest": "this is the model that was trained last, at {saved}",
        "others": "other models, newest first: {flags}",
        "drawing": "temperature {temperature:g}, min-p {min_p:g}: {reason}",
        "base": "this is a base model, which has not learned to chat: it continues the text that you type",
        "smoke": "the smoke preset trained this model for a few steps to test the installation: it can answer nothing. "
        "Train one that answers with: bash speedrun.sh",
        "hello": "/help lists the commands, Ctrl-C stops a reply, Ctrl-D ends the chat",
        "help": """/help         show this list
/new          start a new chat; the instructions stay
/system TEXT  set the instructions and start a new chat; without TEXT, clear the instructions
/temp X       set the temperature; 0 always takes the likeliest token (now {temperature:g})
/topk N       sample from the N likeliest tokens; 0 samples from all (now {top_k})
/max N        set the longest reply in tokens (now {max_tokens})
/save FILE    save the chat to a file
/load FILE    load a chat from a file and continue it
/quit         end the chat
\"\"\"           type this before and after a text of several lines""",
        "new": "started a new chat",
        "set": "temperature {temperature:g}, top-k {top_k}, at most {max_tokens} tokens",
        "number": "{command} needs a number, got {given!r}: type {command} 1, for example",
        "file": "{command} needs a file name: type {command} chat.json, for example",
        "saved": "saved {count} messages to {path}",
        "loaded": "loaded {count} messages from {path}",
        "unknown": "there is no command {command}: see /help. To send a text that begins with /, put a space first",
        "forgotten": "the context is full: the model no longer sees the first {count} messages",
        "length": "the reply was cut off at its length limit: /max N sets another limit, /new makes room",
        "stopped": "stopped",
        "empty": "the model said nothing",
        "speed": "{tokens} tokens, {rate:.0f} tokens/s, context {used} of {context}",
        "rate": "{tokens} tokens, {rate:.0f} tokens/s",
        "bye": "Ctrl-D or /quit ends the chat",
        "unkept": "what you type will not be there in the next chat: {path} cannot be written ({why})",
    },
    "zh": {
        "model": "模型：阶段 {stage}，标签 {tag}，第 {step} 步，上下文 {context} 个词元",
        "server": "模型：{model}，服务器 {url}",
        "latest": "这是最近训练的模型（{saved}）",
        "others": "其他模型（从新到旧）：{flags}",
        "drawing": "温度 {temperature:g}，min-p {min_p:g}：{reason}",
        "base": "这是基座模型，还没有学过对话，只会接着你输入的文字往下写",
        "smoke": "smoke 预设只训练几步，用来检验安装，这个模型什么也答不出来；要训练能回答问题的：bash speedrun.sh",
        "hello": "输入 /help 查看命令；Ctrl-C 停止回答，Ctrl-D 退出",
        "help": """/help         显示本列表
/new          开始新对话，系统提示不变
/system 文字  设置系统提示并开始新对话；不写文字则清除系统提示
/temp X       设置温度，0 表示总取最可能的词元（现为 {temperature:g}）
/topk N       只从最可能的 N 个词元中采样，0 表示不限（现为 {top_k}）
/max N        设置回答的最大词元数（现为 {max_tokens}）
/save 文件    把对话保存到文件
/load 文件    从文件载入对话并继续
/quit         退出
\"\"\"           输入多行文字时，放在开头和结尾""",
        "new": "已开始新对话",
        "set": "温度 {temperature:g}，top-k {top_k}，最多 {max_tokens} 个词元",
        "number": "{command} 后面要写数字，不能写 {given!r}；例如 {command} 1",
        "file": "{command} 后面要写文件名，例如 {command} chat.json",
        "saved": "已把 {count} 条消息保存到 {path}",
        "loaded": "已从 {path} 载入 {count} 条消息",
        "unknown": "没有命令 {command}，输入 /help 查看命令；要发送以 / 开头的文字，请在前面加一个空格",
        "forgotten": "上下文已满，模型看不到最前面的 {count} 条消息了",
        "length": "回答达到长度上限，已截断；/max N 可调整上限，/new 可腾出上下文",
        "stopped": "已停止",
        "empty": "模型没有给出回答",
        "speed": "{tokens} 个词元，每秒 {rate:.0f} 个，上下文 {used}/{context}",
        "rate": "{tokens} 个词元，每秒 {rate:.0f} 个",
        "bye": "按 Ctrl-D 或输入 /quit 退出",
        "unkept": "这次输入的内容不会留到下次：{path} 无法写入（{why}）",
    },
}


@dataclass
class Chat:
    """A chat with a loaded model. Replies go to `out`, everything else to `notes`."""

    loaded: Loaded | None  # this and the engine are None if a server answers
    engine: Engine | None
    sampling: Sampling
    lang: str
    out: TextIO
    notes: TextIO
    messages: list[Message] = field(default_factory=list)  # whole exchanges, perhaps after a system message
    replies: int = 0
    server: Remote | None = None
    asked: set[str] = field(default_factory=set)  # what a server is told of the drawing; else its own defaults hold

    @property
    def settings(self) -> dict[str, Any]:
        """The sampling settings as the commands take them: top_k 0 means all tokens."""
        given = self.sampling
        numbers = {"temperature": given.temperature, "min_p": given.min_p}
        return {**numbers, "top_k": given.top_k or 0, "max_tokens": given.max_tokens}

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
    room = length - min(chat.sampling.max_tokens, length // 4)  # the rest is the least room for a reply
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

    UserError if the question does not fit into the context; the chat then stays unchanged.
    """
    if chat.server:
        return reply_of_server(chat, chat.server, question)
    prompt = prompt_tokens(chat, question)
    request = chat.engine.submit(prompt, replace(chat.sampling, seed=chat.sampling.seed + chat.replies))
    stream, call = TextStream(chat.loaded.tokenizer), ""
    tokens: list[int] = []
    finish, start = None, time.monotonic()
    with stoppable() as stopped:
        while chat.engine.busy and not stopped():
            for event in chat.engine.step():
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
    chat.note("speed", tokens=len(tokens), rate=len(tokens) / max(seconds, 1e-6), used=used, context=context)
    return finish is not None


def reply_of_server(chat: Chat, server: Remote, question: str) -> bool:
    """What reply() does where a server answers."""
    asked, parts, call, start = [*chat.messages, user(question)], [], "", time.monotonic()
    settings = {**chat.settings, "seed": chat.sampling.seed + chat.replies}
    settings.update({name: None for name in DRAWING - chat.asked})
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
    chat.note("rate", tokens=server.tokens, rate=server.tokens / max(time.monotonic() - start, 1e-6))
    return server.finish is not None


# --- commands ------------------------------------------------------------------------------------


def command(chat: Chat, line: str) -> bool:
    """Carry out a line that begins with /. False if the line ends the chat. UserError if the command is wrong."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    if name in ("/quit", "/exit"):
        return False
    if name == "/help":
        chat.note("help", **chat.settings)
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
    path = Path(given).expanduser()
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
            chat.asked.add("temperature")
        elif name == "/topk" and given:
            changes["top_k"] = int(given) or None
        elif given:
            changes["max_tokens"] = int(given)
    except ValueError:
        raise UserError(TEXTS[chat.lang]["number"].format(command=name, given=given)) from None
    chat.sampling = replace(chat.sampling, **changes)
    chat.note("set", **chat.settings)


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
    sampling = Sampling(drawing.temperature, cfg.top_k or None, cfg.max_tokens, cfg.seed, min_p=drawing.min_p)
    messages = [system(cfg.system)] if cfg.system.strip() else []
    if cfg.url:
        server = Remote(cfg.url, cfg.api_key or os.environ.get("NANOCHAT_API_KEY", ""))
        asked = {name for name in DRAWING if getattr(cfg, name) != "auto"}
        chat = Chat(None, None, sampling, language(cfg.lang), sys.stdout, notes, messages, 0, server, asked)
        chat.note("server", model=harmless(server.model), url=server.url)
        return chat
    with contextlib.redirect_stdout(notes):  # standard output is for replies
        compute = compute_init(cfg.device_type or None)
        chosen = choose(cfg, cfg.dtype, compute, cfg.adapter)
    loaded = chosen.loaded
    engine = Engine(loaded.model, loaded.tokenizer, slots=1, length=chosen.context, graphs=chosen.captures)
    drawing = chat_drawing(loaded.corpus, cfg.temperature, cfg.min_p)
    sampling = replace(sampling, temperature=drawing.temperature, min_p=drawing.min_p)
    chat = Chat(loaded, engine, sampling, language(cfg.lang), sys.stdout, notes, messages)
    chat.note("model", stage=loaded.stage, tag=harmless(loaded.tag), step=loaded.step, context=engine.length)
    if chosen.latest:
        chat.note("latest", saved=chosen.latest)
    if chosen.others:
        chat.note("others", flags=harmless(" | ".join(chosen.others)))
    chat.note("drawing", temperature=drawing.temperature, min_p=drawing.min_p, reason=drawing.reason[chat.lang])
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
        raise UserError('the prompt is empty: write a question after -p, such as -p "What is 37 * 48?"', exit_code=2)
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
