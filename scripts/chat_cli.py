"""Chat with a trained model in the terminal.

python -m scripts.chat_cli                            # the latest stage
python -m scripts.chat_cli -i sft -g d20              # stage sft of the model with tag d20
python -m scripts.chat_cli -p "What is 37 * 48?"      # one answer, alone on standard output
echo "法国的首都是哪里？" | python -m scripts.chat_cli
"""

import contextlib
import io
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TextIO

from tyro.conf import arg

from nanochat.checkpoint_manager.load import Loaded, load_model
from nanochat.common import UserError, base_dir, run
from nanochat.data.conversation import Conversation, Message, Part, assistant, system, user
from nanochat.device import DTYPES, compute_cleanup, compute_init
from nanochat.engine import Engine
from nanochat.generate.reply import TextStream, reply_parts
from nanochat.generate.sampling import Sampling, chat_temperature
from nanochat.serve.terminal import dim, harmless, history, keyboard, language, stoppable
from nanochat.serve.transcript import instructions, read_transcript, write_transcript


@dataclass(frozen=True)
class Config:
    """Chat with a trained model in the terminal."""

    source: Annotated[Literal["base", "mid", "sft", "rl"] | None, arg(aliases=["-i"])] = None
    """Stage of the model. Unset: the latest there is of rl > sft > mid > base."""
    model_tag: Annotated[str | None, arg(aliases=["-g"])] = None
    """Tag of the model, such as d20. Unset: the newest."""
    step: Annotated[int | None, arg(aliases=["-s"])] = None
    """Step of the checkpoint. Unset: the last."""
    prompt: Annotated[str | None, arg(aliases=["-p"])] = None
    """Answer this and end. Unset: chat, or answer what comes through a pipe."""
    system: str = ""
    """Instructions that go before the chat."""
    temperature: Annotated[float | Literal["auto"], arg(aliases=["-t"])] = "auto"
    """How freely words are drawn; 0 takes the likeliest. auto: 0 for a TinyWorld model, else 0.6."""
    top_k: Annotated[int, arg(aliases=["-k"])] = 50
    """Draw among the k likeliest tokens; 0 takes all."""
    max_tokens: Annotated[int, arg(aliases=["-m"])] = 512
    """Longest reply in tokens."""
    seed: int = 42
    """Of the draws: the same seed and the same words give the same replies."""
    lang: Literal["auto", "en", "zh"] = "auto"
    """Language of the messages. auto: that of the terminal (LC_ALL, LC_MESSAGES, LANG)."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], arg(aliases=["-d"])] = "auto"
    """Number format of the computation. auto: the device's best."""
    device_type: str = ""
    """Device to use. Unset: the best there is."""


TEXTS = {
    "en": {
        "model": "model: stage {stage}, tag {tag}, step {step}, context of {context} tokens",
        "temperature": "temperature {value:g}: {reason}",
        "base": "this model was not taught to chat: it continues what you type",
        "hello": "/help lists the commands, Ctrl-C stops a reply, Ctrl-D ends",
        "help": """/help         this list
/new          start a new chat
/system TEXT  set the instructions and start a new chat; without TEXT, none
/temp X       temperature, 0 takes the likeliest words (now {temperature:g})
/topk N       draw among the N likeliest tokens, 0 takes all (now {top_k})
/max N        longest reply in tokens (now {max_tokens})
/save FILE    write the chat to a file
/load FILE    go on with a chat from a file
/quit         end
\"\"\"           before and after a text of several lines""",
        "new": "a new chat",
        "set": "temperature {temperature:g}, top-k {top_k}, at most {max_tokens} tokens",
        "number": "{command} needs a number, got {given!r}",
        "file": "{command} needs a file name",
        "saved": "{count} messages written to {path}",
        "loaded": "{count} messages read from {path}",
        "unknown": "there is no command {command}, see /help; before a text that begins with / put a space",
        "forgotten": "the context is full: the model no longer sees the first {count} messages",
        "length": "the reply was cut at its limit; /max N sets another, /new makes room",
        "stopped": "stopped",
        "empty": "the model said nothing",
        "speed": "{tokens} tokens, {rate:.0f} tokens/s, context {used} of {context}",
        "bye": "Ctrl-D or /quit ends",
    },
    "zh": {
        "model": "模型：阶段 {stage}，标签 {tag}，第 {step} 步，上下文 {context} 个词元",
        "temperature": "温度 {value:g}：{reason}",
        "base": "此模型还没有学过对话，只会接着您输入的文字往下写",
        "hello": "输入 /help 查看命令；Ctrl-C 停止回答，Ctrl-D 退出",
        "help": """/help         显示本列表
/new          开始新对话
/system 文字  设置系统提示并开始新对话；不写文字则清除
/temp X       温度，0 表示总取最可能的词（现为 {temperature:g}）
/topk N       只在最可能的 N 个词元中抽取，0 表示不限（现为 {top_k}）
/max N        回答的最大词元数（现为 {max_tokens}）
/save 文件    把对话写入文件
/load 文件    从文件读入对话并继续
/quit         退出
\"\"\"           放在多行文字的前后""",
        "new": "已开始新对话",
        "set": "温度 {temperature:g}，top-k {top_k}，最多 {max_tokens} 个词元",
        "number": "{command} 后面要写一个数字，而不是 {given!r}",
        "file": "{command} 后面要写文件名",
        "saved": "已把 {count} 条消息写入 {path}",
        "loaded": "已从 {path} 读入 {count} 条消息",
        "unknown": "没有命令 {command}，请看 /help；要发送以 / 开头的文字，请在前面加一个空格",
        "forgotten": "上下文已满：模型看不到最前面的 {count} 条消息了",
        "length": "回答到了长度上限，被截断；/max N 可改上限，/new 可腾出上下文",
        "stopped": "已停止",
        "empty": "模型没有说话",
        "speed": "{tokens} 个词元，每秒 {rate:.0f} 个，上下文 {used}/{context}",
        "bye": "按 Ctrl-D 或输入 /quit 退出",
    },
}


@dataclass
class Chat:
    """A conversation with a loaded model; replies go to `out`, everything else to `notes`."""

    loaded: Loaded
    engine: Engine
    sampling: Sampling
    lang: str
    out: TextIO
    notes: TextIO
    messages: list[Message] = field(default_factory=list)  # whole pairs of turns, a system turn before them or not
    replies: int = 0

    @property
    def settings(self) -> dict[str, Any]:
        """Of the draws, as the commands take them."""
        given = self.sampling
        return {"temperature": given.temperature, "top_k": given.top_k or 0, "max_tokens": given.max_tokens}

    def note(self, name: str, **values: Any) -> None:
        """Say something about the chat, beside it."""
        self.dim(TEXTS[self.lang][name].format(**values))

    def dim(self, text: str) -> None:
        print(dim(text, self.notes), file=self.notes, flush=True)


# --- replies -------------------------------------------------------------------------------------


def prompt_tokens(chat: Chat, question: str) -> list[int]:
    """What the model is given: the chat and the question, without its first turns if they no longer fit."""
    tokenizer, length = chat.loaded.tokenizer, chat.engine.length
    if chat.loaded.stage == "base":
        return [tokenizer.bos, *tokenizer.encode(question)]
    head = instructions(chat.messages)
    turns = [*chat.messages[len(head) :], user(question)]
    room = length - min(chat.sampling.max_tokens, length // 4)  # what a reply is left at least
    for forgotten in range(0, len(turns), 2):
        seen = Conversation((*head, *turns[forgotten:]))
        tokens = tokenizer.render_prompt(seen)
        if len(tokens) <= room or forgotten == len(turns) - 1:
            break
    if forgotten:
        chat.note("forgotten", count=forgotten)
    return tokens


def show(part: Part, chat: Chat, call: str) -> str:
    """Print a part as it comes; a calculator call waits for its answer. Returns the call that waits."""
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
    """Answer a question word by word and add both turns to the chat. False if Ctrl-C stopped it.

    UserError, with the chat as it was, if the question does not fit the context.
    """
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


# --- commands ------------------------------------------------------------------------------------


def command(chat: Chat, line: str) -> bool:
    """Do what a line that begins with / says. False if it ends the chat. UserError if it cannot be done."""
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
    """Write the chat to a file, or go on with one from a file."""
    if not given:
        raise UserError(TEXTS[chat.lang]["file"].format(command=name))
    path = Path(given).expanduser()
    if name == "/save":
        write_transcript(path, chat.messages)
    else:
        chat.messages = read_transcript(path)
    chat.note("saved" if name == "/save" else "loaded", count=len(chat.messages), path=path)


def set_number(chat: Chat, name: str, given: str) -> None:
    """Change a setting of the draws; without a number, only say what they are."""
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
    chat.note("set", **chat.settings)


# --- modes ---------------------------------------------------------------------------------------


def converse(chat: Chat) -> None:
    """Chat until /quit or the end of input."""
    with history(base_dir() / "chat_history"), keyboard() as ask:
        chat.note("hello")
        while True:
            try:
                text = ask()
            except EOFError:
                print(file=chat.out)
                return
            except KeyboardInterrupt:  # at the keyboard it only drops the line
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
    """Load the model and say which."""
    given = 0.0 if cfg.temperature == "auto" else cfg.temperature
    sampling = Sampling(given, cfg.top_k or None, cfg.max_tokens, cfg.seed)  # before all else: it checks the flags
    with contextlib.redirect_stdout(notes):  # standard output is for replies
        compute = compute_init(cfg.device_type or None)
        if cfg.dtype != "auto":
            compute = replace(compute, dtype=DTYPES[cfg.dtype], dtype_reason="--dtype")
        loaded = load_model(cfg.source, cfg.model_tag, cfg.step, compute)
    engine = Engine(loaded.model, loaded.tokenizer, slots=1)
    temperature = chat_temperature(cfg.temperature, loaded.corpus)
    sampling = replace(sampling, temperature=temperature.value)
    chat = Chat(loaded, engine, sampling, language(cfg.lang), sys.stdout, notes)
    chat.messages = [system(cfg.system)] if cfg.system.strip() else []
    chat.note("model", stage=loaded.stage, tag=loaded.tag, step=loaded.step, context=engine.length)
    chat.note("temperature", value=temperature.value, reason=temperature.reason[chat.lang])
    if loaded.stage == "base":
        chat.note("base")
    return chat


def main(cfg: Config) -> None:
    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? for what it lacks
    piped = cfg.prompt is None and not sys.stdin.isatty()
    prompt = sys.stdin.read() if piped else cfg.prompt
    if prompt is not None and not prompt.strip():
        raise UserError('the prompt is empty: write it after -p, such as -p "What is 37 * 48?"', exit_code=2)
    try:
        chat = open_chat(cfg, sys.stdout if prompt is None and sys.stdout.isatty() else sys.stderr)
        if prompt is None:
            converse(chat)
        elif not reply(chat, prompt.strip()):
            raise KeyboardInterrupt
    except BrokenPipeError:  # the reader of the answer has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    finally:
        compute_cleanup()


if __name__ == "__main__":
    run(main, Config, __doc__)
