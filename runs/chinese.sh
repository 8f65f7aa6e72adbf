#!/usr/bin/env bash
# Trains a chat model of Chinese and English from nothing: tokenizer, pretraining, midtraining, SFT and their measures.
#   bash runs/chinese.sh                                        12 layers, six rows in ten Chinese, four English
#   bash runs/chinese.sh --data fineweb-zh:0.8,climbmix:0.2     other corpora and weights
#   bash runs/chinese.sh --data fineweb-zh-v2.1:0.6,mytexts:0.4 --shards 400 --from modelscope
#   bash runs/chinese.sh --mix ~/chats.jsonl                    adds your Chinese conversations; the published are English
#   bash runs/chinese.sh --plan                                 only says what the run needs
#   bash runs/chinese.sh --preset cpu                           4 layers of 256 channels, for a laptop; chats of TinyWorld
#   bash runs/chinese.sh --preset tiny                          every stage in minutes, on TinyWorld, to see that it works
# --depth N sets the number of layers of the full preset, --shards N the files of each published corpus. Typed again after
# a stop, it resumes.

# 从零训练一个会中文和英文的聊天模型：分词器、预训练、中期训练、监督微调，以及各项评测。
#   bash runs/chinese.sh                                        12 层，十行里六行中文、四行英文
#   bash runs/chinese.sh --data fineweb-zh:0.8,climbmix:0.2     换用其他语料和权重
#   bash runs/chinese.sh --data fineweb-zh-v2.1:0.6,mytexts:0.4 --shards 400 --from modelscope
#   bash runs/chinese.sh --mix ~/chats.jsonl                    加入你的中文对话；公开的对话数据是英文的
#   bash runs/chinese.sh --plan                                 只说明这次训练要用多少资源
#   bash runs/chinese.sh --preset cpu                           4 层、256 通道，适合笔记本电脑；对话来自 TinyWorld
#   bash runs/chinese.sh --preset tiny                          在 TinyWorld 上几分钟跑遍每个阶段，看看是否一切正常
# --depth N 设置完整预设的层数，--shards N 设置每份公开语料的文件数。停止之后再次输入，会继续。

set -euo pipefail
typed_in=$PWD
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
source runs/common.sh

preset=full data='' depth='' shards='' from=hub mix='' plan=''
while [ $# -gt 0 ]; do
    case $1 in
    --*=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" ;;
    --preset | --data | --depth | --shards | --from | --mix) flag "${1#--}" "${2-}" && shift 2 ;;
    --plan) plan=yes && shift ;;
    -h | --help) show_help runs/chinese.sh ;;
    *)
        tell "error: runs/chinese.sh takes --preset full|cpu|tiny, --data, --depth, --shards, --from, --mix and --plan, got $1" "错误：runs/chinese.sh 的选项有 --preset full|cpu|tiny、--data、--depth、--shards、--from、--mix 和 --plan，得到的是 $1" >&2
        exit 2
        ;;
    esac
done
chats=() few=() conversations=() vocabulary=65536 tokens=0
if [ -n "$mix" ]; then
    case $mix in
    '~'/*) mix=$HOME/${mix#*/} ;;
    /*) ;;
    *) [ "$typed_in" -ef . ] || mix=$typed_in/$mix ;;
    esac
    if ! [ -f "$mix" ] || ! [ -r "$mix" ]; then
        tell "error: --mix must be a JSONL file of conversations that can be read, got $mix; check the path" "错误：--mix 必须是能读取的 JSONL 对话文件，得到的是 $mix；请检查路径" >&2
        exit 2
    fi
    chats=(--mix "$mix")
fi
case $preset in
full)
    : "${depth:=12}" "${shards:=16}"
    tag=zh-d$depth
    size=(--depth "$depth")
    ;;
cpu)
    refuse_flags cpu depth
    : "${shards:=1}"
    tag=zh-cpu vocabulary=16384 tokens=4915200
    size=(--depth=4 --model_dim=256 --head_dim=64 --max_seq_len=512)
    few=(--window_pattern=L --num_iterations=600)
    conversations=(--conversations tinyworld)
    ;;
tiny)
    refuse_flags tiny data depth shards
    data=tinyworld shards=0 tag=zh-tiny vocabulary=1024 tokens=82000
    size=(--depth=2 --model_dim=64 --head_dim=32 --max_seq_len=256)
    few=(--num_iterations=10 --no_compile)
    ;;
*)
    tell "error: --preset must be full, cpu or tiny, got $preset" "错误：--preset 必须是 full、cpu 或 tiny，得到的是 $preset" >&2
    exit 2
    ;;
esac
: "${data:=fineweb-zh:0.6,fineweb:0.4}"

sft_tag=$tag # of the fine-tuned model, as chat_sft would name it
if [ -n "$mix" ]; then
    name=${mix##*/}
    name=${name%.gz}
    sft_tag=$tag-${name%.*}
fi

prepare
choose_matmul
if [ "$preset" = cpu ]; then
    few+=("$(fit total_batch_size 8192 512)")
    sft=("$(fit target_examples_per_step 16)" --device_batch_size=16 --init_lr_frac=0.5 --num_iterations=320)
else
    sft=("$(fit target_examples_per_step 32)" "${few[@]}")
fi
echo
tell "== what the run needs: $data, files in $base" "== 这次训练需要的资源：$data，文件放在 $base"
python -m scripts.preflight --data "$data" --shards "$shards" --from "$from" "${size[@]}" --vocab_size "$vocabulary" \
    --tokens "$tokens" --devices "$devices" --model_tag "$tag" "${conversations[@]}"
if [ -n "$plan" ]; then exit 0; fi
python -m nanochat.report begin --key "chinese:$sft_tag:$data" # drops the costs of earlier runs

if [ "$preset" = cpu ]; then fetch "$data,tinyworld" "$shards" "$from"; else fetch "$data" "$shards" "$from"; fi
stage tok_train python -m scripts.tok_train --data "$data" --vocab_size "$vocabulary"
stage tok_eval python -m scripts.tok_eval --data "$data"
stage prepare python -m nanochat.prepare --data "$data"
train base_train scripts.base_train --data "$data" --model_tag "$tag" "${size[@]}" "${few[@]}" "${matmul_flags[@]}"
train base_loss scripts.base_loss --model_tag "$tag" --once
if [ "$preset" = cpu ]; then
    train chat_sft scripts.chat_sft --source base --model_tag "$tag" --data tinyworld "${chats[@]}" \
        --out_tag "$sft_tag" --documents "$data" --documents_every 2 "${sft[@]}" "${matmul_flags[@]}"
else
    train mid_train scripts.mid_train --model_tag "$tag" "${few[@]}" "${matmul_flags[@]}"
    train chat_sft scripts.chat_sft --model_tag "$tag" --out_tag "$sft_tag" "${sft[@]}" "${chats[@]}" "${matmul_flags[@]}"
fi
train forgetting scripts.base_loss --source sft --model_tag "$sft_tag" --data "$data" --once # on the documents that the base model learned
if [ "$preset" = full ]; then train sft_eval scripts.chat_eval -i sft --model_tag "$sft_tag" --once; fi
python -m nanochat.report generate
python -m nanochat.report show
tell "Chat with it:  $(activation) && python -m scripts.chat_web" "和它聊天：  $(activation) && python -m scripts.chat_web"
