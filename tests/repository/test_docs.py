"""The documents hold what they promise: commands parse, links lead somewhere, the two languages match."""

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt

from nanochat.common import UserError
from nanochat.data import command_line

ROOT = Path(__file__).resolve().parent.parent.parent
SHELL = ("bash", "sh", "shell")
COMMAND = re.compile(r"(python|torchrun|bash|echo) ")  # how a command in the middle of a sentence begins
OURS = ("nanochat", "scripts", "bench")
NO_CONFIG = ("nanochat.device", "nanochat.runtime.cost")  # they read no flags
LAUNCHER = "nanochat.runtime.launch"
LINKS = ("link_open", "image")
IN_HTML = re.compile(r'(?:href|src|srcset)="([^"]*)"')  # of <picture>, which Markdown has no form for
EMULATOR = "tests.emulated_npu"  # python -m tests.emulated_npu FLAGS -- COMMAND
# Scripts that hand their flags on: to the module that is their first word, or to one of their own.
HANDS_ON = {
    "runs/multinode_npu.sh": "",
    "runs/supervise.sh": "",
    "runs/train_with_fineweb.sh": "scripts.base_train",
}
# Scripts that hand their flags to scripts.finetune after a number of cards; a file names the model and the data.
TUNING = r"runs/(train_distributed_npu\.sh|launch_npu_training\.py)( \d+| --npus[ =]\d+)?"

# Documents whose twin is not called X.zh.md, X.en.md or zh/X.md.
TWINS = {
    "华为昇腾运行指南.md": "docs/en/ascend-guide.md",
    "故障排除手册.md": "docs/en/troubleshooting.md",
    "NPU使用技巧.md": "docs/en/npu-tips.md",
}

# What the documents may name as a variable although nothing of ours reads it, by who does.
FOREIGN_VARIABLES = {
    "uv": "MACOSX_DEPLOYMENT_TARGET",
    "anthropic": "ANTHROPIC_BASE_URL ANTHROPIC_API_KEY ANTHROPIC_MODEL",
    "torch_npu": """
        TASK_QUEUE_ENABLE CPU_AFFINITY_CONF PYTORCH_NPU_ALLOC_CONF TORCH_NPU_FALLBACK_CPU_DISABLE HCCL_EVENT_TIMEOUT
    """,
    "torch": """
        PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF TORCH_DEVICE_BACKEND_AUTOLOAD TORCHINDUCTOR_CACHE_DIR
        CUDA_VISIBLE_DEVICES CUDA_LAUNCH_BLOCKING GLOO_SOCKET_IFNAME OMP_NUM_THREADS OMP_WAIT_POLICY GOMP_SPINCOUNT
        LOCAL_RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
    """,
    "CANN": """
        ASCEND_RT_VISIBLE_DEVICES ASCEND_LAUNCH_BLOCKING ASCEND_GLOBAL_LOG_LEVEL ASCEND_SLOG_PRINT_TO_STDOUT
        ASCEND_PROCESS_LOG_PATH ASCEND_WORK_PATH HCCL_CONNECT_TIMEOUT HCCL_EXEC_TIMEOUT HCCL_BUFFSIZE
        HCCL_IF_BASE_PORT HCCL_WHITELIST_DISABLE HCCL_IF_IP HCCL_SOCKET_IFNAME ASCEND_HOME_PATH ASCEND_OPP_PATH
        LD_LIBRARY_PATH
    """,
    "the hub's client, wandb": "HF_ENDPOINT HF_TOKEN HF_HOME WANDB_MODE",
    "earlier versions of ours": "NANOCHAT_INT8",
    "pip": "PIP_INDEX_URL PIP_NO_INDEX PIP_FIND_LINKS",
    "the tokenizer's trainer": "RAYON_NUM_THREADS",
}


@dataclass(frozen=True)
class Document:
    """What the tests compare, in order: heading levels, code blocks as (language, text), links, code in lines."""

    headings: tuple[int, ...]
    blocks: tuple[tuple[str, str], ...]
    links: tuple[str, ...]
    inline: tuple[str, ...]


def read(text: str) -> Document:
    tokens = MarkdownIt("commonmark").parse(text)
    inline = [child for token in tokens for child in token.children or []]
    return Document(
        tuple(int(token.tag[1]) for token in tokens if token.type == "heading_open"),
        tuple((token.info.strip(), token.content) for token in tokens if token.type == "fence"),
        (
            *(unquote(str(t.attrs.get("href") or t.attrs.get("src"))) for t in inline if t.type in LINKS),
            *(link for t in [*tokens, *inline] if t.type.startswith("html") for link in IN_HTML.findall(t.content)),
        ),
        tuple(t.content for t in inline if t.type == "code_inline"),
    )


@cache
def document(name: str) -> Document:
    return read((ROOT / name).read_text(encoding="utf-8"))


HISTORY = {"CHANGELOG.md", "dev/LOG.md"}  # their commands are those of their day


def documents() -> list[str]:
    folders = [ROOT, ROOT / "docs", ROOT / "docs/en", ROOT / "docs/zh", ROOT / "dev", ROOT / "rustbpe"]
    return sorted(file.relative_to(ROOT).as_posix() for folder in folders for file in folder.glob("*.md"))


def twins() -> list[tuple[str, str]]:
    """Pairs of one document in two languages: X.md with X.zh.md, X.en.md or zh/X.md, and those of TWINS."""
    pairs = [(re.sub(r"\.(zh|en)\.md$", ".md", name.replace("docs/zh/", "docs/")), name) for name in documents()]
    return [*((plain, other) for plain, other in pairs if plain != other), *TWINS.items()]


def without_comments(block: tuple[str, str]) -> tuple[str, str]:
    """A code block without its comments, which are translated."""
    language, text = block
    lines = [re.sub(r"(^|\s)#(?!!).*", "", line).rstrip() for line in text.splitlines()]
    return language, "\n".join(line for line in lines if line)


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a shell block as words: lines joined, comments, variables and pipes taken off."""
    for line in text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for word in [*lexer, ";"]:
            if set(word) <= set("();<>|&"):
                while words and re.fullmatch(r"[A-Za-z_]\w*=.*", words[0]):
                    words.pop(0)
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def launched(words: list[str]) -> tuple[str, list[str]] | None:
    """The module that `python -m M ARGS` or `torchrun FLAGS -m M -- ARGS` runs, and what it is given."""
    program = words[0].rsplit("/", 1)[-1]
    if program not in ("python", "python3", "torchrun") or "-m" not in words:
        return None
    at = words.index("-m")
    if words[at + 1] == LAUNCHER:  # it takes torchrun's flags
        return launched(["torchrun", *words[at + 2 :]])
    return words[at + 1], words[at + 2 :]


def problem(words: list[str]) -> str | None:
    """What is wrong with a command of the documents; None if it would be understood."""
    if run := launched(words):
        module, arguments = run
        if module == EMULATOR and "--" in arguments:
            return problem(arguments[arguments.index("--") + 1 :])
        if module.split(".")[0] not in OURS:
            return None
        if importlib.util.find_spec(module) is None:
            return f"no module {module}"
        return parse_problem(module, arguments)
    files = [word for word in words[:2] if re.fullmatch(r"(\./)?[\w./-]+\.(sh|py)", word)]
    missing = [word for word in files if not (ROOT / word).exists()]
    if missing or not files:
        return f"no file {missing[0]}" if missing else None
    rest = words[words.index(files[0]) + 1 :]
    if tuning := re.match(TUNING, " ".join(words[words.index(files[0]) :])):
        rest = words[words.index(files[0]) + len(tuning[0].split()) :]
        return problem(["python", "-m", "scripts.finetune", "--model=.", "--data", "chats.jsonl", *rest])
    if (handed := HANDS_ON.get(files[0].removeprefix("./"))) is not None:
        return problem(["python", "-m", *([handed] if handed else []), *rest])
    known = said_by(ROOT / files[0])
    unknown = [word for word in words if word.startswith("--") and word.partition("=")[0] not in known]
    return f"{files[0]} knows no {unknown[0]}" if unknown else None


def said_by(script: Path) -> str:
    """A script, with the Python module that it hands its flags to."""
    text = script.read_text(encoding="utf-8")
    module = re.search(r"from (tools_npu\.\w+) import main", text)
    return text + ((ROOT / f"{module[1].replace('.', '/')}.py").read_text(encoding="utf-8") if module else "")


def parse_problem(module: str, arguments: list[str]) -> str | None:
    """What the module's own command line says to the arguments."""
    if module in NO_CONFIG:
        return None
    found = importlib.import_module(module)
    if hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.__main__"):  # a folder that can be launched
        found = importlib.import_module(f"{module}.__main__")
    config = getattr(found, "Config", None)
    if not inspect.isclass(config):
        return f"{module} has no Config, so it cannot be launched"
    try:
        command_line.parse(config, arguments)
    except SystemExit as refusal:
        return f"{module} refuses {shlex.join(arguments)}" if refusal.code else None
    except UserError as refusal:
        return f"{module} refuses {shlex.join(arguments)}: {refusal}"
    return None


def shell_blocks(name: str) -> list[str]:
    return [text for language, text in document(name).blocks if language in SHELL]


def test_commands_are_understood() -> None:
    texts: list[str] = []
    places: dict[tuple[str, ...], set[str]] = {}  # each command once, with the documents that have it
    for name in {*documents()} - HISTORY:
        for text in (*shell_blocks(name), *filter(COMMAND.match, document(name).inline)):
            texts.append(text)
            for words in commands(text):
                places.setdefault(tuple(words), set()).add(name)
    # One shell for all: in a process of its own, each would take longer than everything else here.
    functions = "".join(f"f{i}() {{\n{text}\n:\n}}\n" for i, text in enumerate(texts))
    shell = subprocess.run(["bash", "-n"], input=functions, capture_output=True, text=True)
    assert shell.returncode == 0, shell.stderr
    found = [
        f"{sorted(names)}: {shlex.join(words)}: {why}" for words, names in places.items() if (why := problem([*words]))
    ]
    assert not found, "\n".join(found)


FEW = 50  # steps: a base_train of so few tries something out


def test_a_trial_in_the_documents_cannot_meet_a_run_of_the_reader() -> None:
    runs = [
        (name, *run)
        for name in documents()
        if not name.startswith("dev/")
        for text in shell_blocks(name)
        for words in commands(text)
        if (run := launched(words))
    ]
    for name, module, arguments in runs:
        few = re.search(r"--num_iterations[= ](\d+)", " ".join(arguments))
        if module == "scripts.base_train" and few and int(few[1]) <= FEW:
            # Under the tag of the depth, the settings differ from the reader's run, and the trial is refused.
            assert {"--model_tag=test", "--resume=none"} <= set(arguments), (name, arguments)
        # What `bash speedrun.sh` calls its model depends on the machine.
        assert "speedrun-persona" not in arguments, (name, arguments)


NAME = r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+"


def variables(page: Document) -> set[str]:
    """Environment variables that a document names: as `NAME` or `NAME=value`, or in its shell blocks."""
    named = {found[1] for text in page.inline if (found := re.fullmatch(rf"\$?({NAME})(=.*)?", text))}
    for language, text in page.blocks:
        if language in SHELL:
            named |= set(re.findall(rf"(?:^|\s|-e )({NAME})=", text)) | set(re.findall(rf"\$\{{?({NAME})", text))
    return named


def read_by_us() -> set[str]:
    """Variables that a program of ours reads, or a script."""
    folders = ("nanochat", "scripts", "tasks", "tools_npu", "bench", "tests/emulated_npu", "runs", "dev")
    python = [*ROOT.glob("*.py"), *(file for folder in folders for file in (ROOT / folder).rglob("*.py"))]
    shell = [*ROOT.glob("*.sh"), *(file for folder in folders for file in (ROOT / folder).glob("*.sh"))]
    quoted = (name for file in python for name in re.findall(rf"[\"']({NAME})[\"']", file.read_text(encoding="utf-8")))
    expanded = (name for file in shell for name in re.findall(rf"\$\{{?({NAME})", file.read_text(encoding="utf-8")))
    return {*quoted, *expanded}


def test_variables_that_are_named_are_read_by_something() -> None:
    known = read_by_us() | {word for words in FOREIGN_VARIABLES.values() for word in words.split()}
    assert {name: unread for name in documents() if (unread := variables(document(name)) - known)} == {}


def launch_lines() -> Iterator[tuple[str, str]]:
    """The commands in the docstrings of modules, which --help shows: (file, line)."""
    for package in OURS:
        for file in sorted([*(ROOT / package).glob("*.py"), *(ROOT / package).glob("*/__main__.py")]):
            lines = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()
            yield from ((file.relative_to(ROOT).as_posix(), line) for line in lines if COMMAND.match(line))


def test_launch_lines_of_modules_are_understood() -> None:
    lines = list(launch_lines())
    assert [
        f"{file}: {line}: {why}" for file, line in lines for words in commands(line) if (why := problem(words))
    ] == []
    launchable = {file for file, _ in lines if file.startswith("scripts/")}
    assert launchable == {f"scripts/{file.name}" for file in (ROOT / "scripts").glob("[!_]*.py")}


@cache
def anchors(file: Path) -> set[str]:
    """What `#` of a link may name: headings in lower case, blanks as hyphens, without punctuation."""
    tokens = MarkdownIt("commonmark").parse(file.read_text(encoding="utf-8"))
    titles = (tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open")
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def is_broken(name: str, link: str) -> bool:
    """Whether a link of a document leads to no file, or to no heading of a document."""
    if re.match(r"[a-z]+:", link):
        return False
    page, _, mark = link.partition("#")
    file = (ROOT / name).parent / page if page else ROOT / name
    return not file.exists() or bool(mark and file.suffix == ".md" and mark not in anchors(file.resolve()))


def test_links_lead_to_files_and_headings_that_exist() -> None:
    assert [(name, link) for name in documents() for link in document(name).links if is_broken(name, link)] == []
    assert [link for link in ("#no", "no.md", "docs/terms.md#no") if not is_broken("README.md", link)] == []


def test_two_languages_match() -> None:
    assert [other for plain, other in twins() if plain not in documents()] == []
    for plain, other in twins():
        one, two = document(plain), document(other)
        assert one.headings == two.headings, f"heading levels of {plain} and {other}"
        first, second = ([*map(without_comments, page.blocks)] for page in (one, two))
        assert first == second, f"code blocks of {plain} and {other}"


# --- the checks themselves -----------------------------------------------------------------------


def test_what_a_document_gets_wrong_is_found() -> None:
    text = "A=1 torchrun --nproc_per_node=2 \\\n  -m scripts.x -- --depth=2  # why\ncd a && bash b.sh | tail\n"
    run, *others = commands(text)
    assert launched(run) == ("scripts.x", ["--", "--depth=2"])
    assert others == [["cd", "a"], ["bash", "b.sh"], ["tail"]]
    for line, why in (
        ("python -m scripts.no_such_stage", "no module scripts.no_such_stage"),
        ("python -m scripts.base_train --width=2", "refuses --width=2"),
        ("python -m scripts.base_train --depth=x", "refuses --depth=x"),
        ("python -m nanochat.gpt", "has no Config"),
        (f"python -m {EMULATOR} --devices 2 -- bash no_such_file.sh", "no file no_such_file.sh"),
        ("bash speedrun.sh --no_such_flag 1", "speedrun.sh knows no --no_such_flag"),
        ("bash setup_ascend.sh --mend", "knows no --mend"),
        ("bash runs/multinode_npu.sh scripts.base_train --width=2", "refuses --width=2"),
        ("bash runs/train_distributed_npu.sh 8 --width=2", "refuses"),
    ):
        assert why in str(problem(line.split())), line
    named = read("`NO_SUCH_NAME` `A_B=1` C_D\n\n```bash\nexport E_F=1\necho $G_H ${I_J}\n```\n")
    assert variables(named) == {"NO_SUCH_NAME", "A_B", "E_F", "G_H", "I_J"} and "NO_SUCH_NAME" not in read_by_us()
    assert read('<picture>\n  <source srcset="a.svg">\n</picture>\n').links == ("a.svg",)
