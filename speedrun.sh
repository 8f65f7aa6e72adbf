#!/usr/bin/env bash
# Trains a chat model from nothing: runs the whole pipeline on the device that this machine has.
#   bash speedrun.sh                    on a CPU the embedded corpus TinyWorld; on a GPU FineWeb-Edu, 20 layers
#   bash speedrun.sh --data tinyworld   the embedded corpus on any device; needs no network
#   bash speedrun.sh --preset smoke     every stage in two minutes, to see that everything works
#   bash speedrun.sh --preset d12       FineWeb-Edu, 12 layers, as published for Ascend; the default of speedrun_npu.sh
#   bash speedrun.sh --preset gpt2      ClimbMix (CC BY-NC 4.0, not for commercial use), 24 layers: GPT-2's CORE on 8 GPUs or 8 to 16 NPUs
#   bash speedrun.sh --preset gpt2 --plan             hours, memory, disk and FLOPs of d12, d20 or gpt2, and nothing else
#   bash speedrun.sh --preset gpt2 --recipe upstream  d12, d20 or gpt2 as upstream's model, without what ours adds to it
#   bash speedrun.sh --family qwen3     a model of Qwen3's shape, which transformers, vLLM and llama.cpp load once exported
#   bash speedrun.sh --other_code       resume a stage that started before you changed the code
# Set NPROC_PER_NODE to use fewer devices than the machine has.
# You can stop the command at any moment: typed again, it resumes; typed again after the end, it says that all is done.
# Data, checkpoints and the report go to NANOCHAT_BASE_DIR (default ~/.cache/nanochat).

# 从零训练一个聊天模型：在本机的设备上跑完整个流程。
#   bash speedrun.sh                    CPU 上用内置语料 TinyWorld；GPU 上用 FineWeb-Edu，20 层
#   bash speedrun.sh --data tinyworld   任何设备上都用内置语料，不需要网络
#   bash speedrun.sh --preset smoke     两分钟跑遍每个阶段，看看是否一切正常
#   bash speedrun.sh --preset d12       FineWeb-Edu，12 层，即为昇腾公布的配置；speedrun_npu.sh 的默认值
#   bash speedrun.sh --preset gpt2      ClimbMix（CC BY-NC 4.0，禁止商用），24 层：用 8 张 GPU 或 8 到 16 张 NPU 达到 GPT-2 的 CORE
#   bash speedrun.sh --preset gpt2 --plan             只打印 d12、d20 或 gpt2 要用的小时、内存、磁盘和 FLOPs
#   bash speedrun.sh --preset gpt2 --recipe upstream  用上游的模型训练 d12、d20 或 gpt2，不含我们加入的部分
#   bash speedrun.sh --family qwen3     Qwen3 形状的模型，导出后 transformers、vLLM 和 llama.cpp 都能加载
#   bash speedrun.sh --other_code       阶段开始之后改过代码，仍然续训
# 设置 NPROC_PER_NODE，可以少用几个设备。
# 随时可以停止：再次输入同一条命令就会继续；全部完成之后再输入，它会说已经完成。
# 数据、检查点和报告放在 NANOCHAT_BASE_DIR（默认 ~/.cache/nanochat）。

set -euo pipefail
CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
source ./setup_env.sh
source runs/sizes.sh
source runs/words.sh

refuse() { # ENGLISH CHINESE: a flag or a variable that cannot be used
    tell "error: $1" "错误：$2" >&2
    exit 2
}

words=("$@")
preset=auto
data=auto
family=gpt
recipe=ours
plan=
train_flags=() # for all training stages
while [ $# -gt 0 ]; do
    case $1 in
    --preset=* | --data=* | --family=* | --recipe=*) set -- "${1%%=*}" "${1#*=}" "${@:2}" && continue ;;
    --preset | --data | --family | --recipe)
        if [ $# -lt 2 ]; then
            refuse \
                "$1 needs a value; bash speedrun.sh --help lists the flags" \
                "$1 需要一个值；bash speedrun.sh --help 列出全部选项"
        fi
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
    --plan) plan=yes && shift ;;
    --other_code | --other-code) train_flags+=(--other_code) && shift ;;
    -h | --help) show_help speedrun.sh ;;
    *)
        refuse \
            "speedrun.sh takes --preset auto|smoke|tinyworld|tinyworld-small|d12|d20|gpt2, --data NAME, --family gpt|qwen3, --recipe ours|upstream, --plan and --other_code, got $1; bash speedrun.sh --help lists the flags" \
            "speedrun.sh 的选项有 --preset auto|smoke|tinyworld|tinyworld-small|d12|d20|gpt2、--data 名称、--family gpt|qwen3、--recipe ours|upstream、--plan 和 --other_code，得到的是 $1；说明见 bash speedrun.sh --help"
        ;;
    esac
done
case $preset in auto | smoke | tinyworld | tinyworld-small | d12 | d20 | gpt2) ;; *)
    refuse \
        "--preset must be auto, smoke, tinyworld, tinyworld-small, d12, d20 or gpt2, got $preset; bash speedrun.sh --help lists the flags" \
        "--preset 必须是 auto、smoke、tinyworld、tinyworld-small、d12、d20 或 gpt2，得到的是 $preset；说明见 bash speedrun.sh --help"
    ;;
esac
case $family in gpt | qwen3) ;; *)
    refuse \
        "--family must be gpt or qwen3, got $family; bash speedrun.sh --help lists the flags" \
        "--family 必须是 gpt 或 qwen3，得到的是 $family；说明见 bash speedrun.sh --help"
    ;;
esac
case $recipe in ours | upstream) ;; *)
    refuse \
        "--recipe must be ours or upstream, got $recipe; bash speedrun.sh --help lists the flags" \
        "--recipe 必须是 ours 或 upstream，得到的是 $recipe；说明见 bash speedrun.sh --help"
    ;;
esac
if [ $recipe = upstream ] && { [ $family != gpt ] || [[ ! $preset =~ ^(d12|d20|gpt2)$ ]]; }; then
    refuse \
        "--recipe upstream goes with --preset d12, d20 or gpt2 and without --family qwen3; add --preset gpt2" \
        "--recipe upstream 只能与 --preset d12、d20 或 gpt2 同用，且不能加 --family qwen3；请加 --preset gpt2"
fi
if [ -n "$plan" ] && { [ $family != gpt ] || [ "$data" != auto ]; }; then
    refuse \
        "--plan is for the GPT and the corpus of a preset, without --family qwen3 and --data; leave them out" \
        "--plan 只适用于预设的 GPT 和语料，不能加 --family qwen3 和 --data；请去掉它们"
fi

# speedrun_npu.sh sets NPUs up; it sets NANOCHAT_DEVICE, or `speedrun_npu` where it finds no NPU to use.
if [ -z "${NANOCHAT_DEVICE:-}${speedrun_npu:-}" ] && compgen -G "${ASCEND_ROOT_PREFIX:-}/dev/davinci[0-9]*" >/dev/null; then
    tell "speedrun: this host has NPUs, so speedrun_npu.sh runs instead; NANOCHAT_DEVICE=cpu trains on the CPU" "speedrun：本机有 NPU，改为运行 speedrun_npu.sh；想用 CPU 训练：NANOCHAT_DEVICE=cpu"
    exec bash speedrun_npu.sh "${words[@]}"
fi

# shellcheck disable=SC2119  # setup_env must not get the flags of this script
setup_env
export OMP_WAIT_POLICY=PASSIVE # threads that wait long must not spin on cores that other processes need

take_d12_devices() { # lower `devices` to 1, 2, 4, 8 or 16, which share the step of d12 equally
    local cards=16
    while [ $cards -gt "$devices" ]; do cards=$((cards / 2)); done
    if [ $cards -lt "$devices" ]; then
        tell "speedrun: using $cards of $devices devices, because 262,144 tokens per step must divide evenly among them" "speedrun：使用 $devices 个设备中的 $cards 个，因为每步 262,144 个词元必须平均分给它们"
        devices=$cards
    fi
}

if [ -n "$plan" ]; then
    read -r device _ devices _ < <(ask nanochat.device)
    all=$devices plan_flags=()
    take_processes
    if [ "$preset" = d12 ]; then take_d12_devices; fi
    if [ "$device" != cpu ] && [ "$devices" -ne "$all" ]; then plan_flags=(--ranks "$devices"); fi
    exec python -m nanochat.planner --preset "$preset" --recipe "$recipe" "${plan_flags[@]}"
fi
base=$(python -m nanochat.common)
export NANOCHAT_BASE_DIR=$base # one folder for this script and for Python, also if it was given with a ~

finish() { # print the table of results and what to type next
    local script=speedrun.sh
    if [ "${NANOCHAT_DEVICE:-}" = npu ]; then script=speedrun_npu.sh; fi
    python -m nanochat.report show
    echo
    if [ "$preset" = smoke ]; then
        tell "Every stage works. 20 steps teach a model nothing, so its answers are nonsense; to train one that answers:" "所有阶段都能运行。20 步学不到东西，所以它的回答没有意义；要训练一个会回答的模型："
        if [ "$data" = tinyworld ] && [ "$script" = speedrun_npu.sh ]; then script+=" --data tinyworld"; fi
        echo "  bash $script"
        echo
        tell "To look at the chat all the same:" "也可以先看看聊天界面："
    else
        tell "Chat with it:" "和它聊天："
    fi
    echo "  $(activation)"
    tell "  python -m scripts.chat_cli        # in the terminal" "  python -m scripts.chat_cli        # 在终端里"
    tell "  python -m scripts.chat_web        # in the browser" "  python -m scripts.chat_web        # 在浏览器里"
}

key="$preset $data" # identifies a finished run by the flags that it was started with
[ "$family" = gpt ] || key+=" $family"
[ "$recipe" = ours ] || key+=" $recipe"
if python -m nanochat.report finished --key "$key"; then
    tell "Everything is done already." "全部阶段都已完成。"
    finish
    exit 0
fi

# Only one run at a time: after a killed shell, its last stage may still be running.
exec 9>>"$base/.speedrun.lock"
code=0
flock -n 9 2>/dev/null || code=$?
if [ $code -eq 1 ]; then
    tell "Another speedrun, or the last stage of a stopped one, is still running in $base; waiting for it to end ..." "$base 里还有另一个 speedrun，或一个已停止的 speedrun 的最后阶段在运行；等它结束……"
    flock 9
elif [ $code -ne 0 ]; then # no program flock, or a file system without locks (Lustre, some NFS)
    tell "warning: $base cannot be locked (flock ended with code $code), so do not start a second speedrun there while this one runs" "警告：无法给 $base 加锁（flock 退出码 $code），运行期间不要在同一目录再启动 speedrun" >&2
fi

# --- what to train ---------------------------------------------------------------------------------

read -r device dtype devices speed matmul eight_bits < <(ask nanochat.device)
take_processes
if [ "$preset" = auto ]; then
    if [ "$device" != cpu ] && [ "$speed" = fast ] && [ "$data" != tinyworld ]; then
        preset=d20
    elif [ "$speed" = slow ]; then
        preset=tinyworld-small # such a CPU takes two to three times as long
    else
        preset=tinyworld
    fi
fi
if [ "$data" = auto ]; then
    data=tinyworld
    case $preset in d12 | d20) data=fineweb ;; gpt2) data=climbmix ;; esac
fi
case $preset in smoke | tinyworld*) # their sizes, steps and evaluations suit no other corpus
    if [ "$data" != tinyworld ]; then
        refuse \
            "the preset $preset trains on TinyWorld only, got --data $data; add --preset d12, d20 or gpt2, or run the stages one by one as docs/data.md shows" \
            "预设 $preset 只用 TinyWorld 训练，得到的是 --data $data；请加 --preset d12、d20 或 gpt2，或按 docs/zh/data.md 逐个运行各阶段"
    fi
    ;;
esac
python -m nanochat.report begin --key "$key"
if [ "$device" = cpu ]; then
    cores=$(python -c 'from nanochat.data.limits import cores; print(cores())')
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > 4 ? 4 : cores))} # so small a model gains nothing from more threads
    export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-10000} # they wait awake for less than a millisecond, since steps have hundreds of short waits
fi
tell "speedrun: preset $preset, corpus $data, on $device in $dtype ($devices device(s)); files in $base" "speedrun：预设 $preset，语料 $data，在 $device 上以 $dtype 运行（$devices 个设备）；文件放在 $base"
if [ "$family" = gpt ] && [ "$matmul" = int8 ]; then # a Qwen3 trains without
    train_flags+=(--matmul=int8)
    tell "speedrun: this CPU multiplies int8 faster than bf16, so the stages train with --matmul=int8" "speedrun：这个 CPU 计算 int8 比 bf16 快，因此各阶段用 --matmul=int8 训练"
fi

interrupted=
trap 'interrupted=1' INT # on Ctrl-C a stage saves by itself and ends with code 0
reason_file=$(mktemp) # in which a stage leaves the reason of its failure, which it does not print then
trap 'rm -f "$reason_file"' EXIT

stop_if_interrupted() { # NAME of the stage
    if [ -z "$interrupted" ]; then return; fi
    tell "speedrun: stopped in the stage $1; type the same command again to resume" "speedrun：在阶段 $1 中停止；再次输入同一条命令即可继续" >&2
    exit 130
}

run_stage() { # NAME COMMAND...: run a stage; each stage skips or resumes its own work
    local name=$1 code=0 reason
    shift
    : >"$reason_file"
    echo
    echo "== $name"
    NANOCHAT_REASON_FILE=$reason_file python -m nanochat.runtime.cost "$name" -- "$@" || code=$?
    stop_if_interrupted "$name"
    if [ $code -ne 0 ]; then
        tell "speedrun: the stage $name ended with code $code; when the cause is gone, type the same command again to resume" "speedrun：阶段 $name 以退出码 $code 结束；排除原因后，再次输入同一条命令即可继续" >&2
        reason=$(cat "$reason_file")
        tell "${reason:-error: the lines above say why}" "${reason:-错误：原因见上文}" >&2 # last, where it is seen
        exit $code
    fi
}

stage() { # NAME MODULE FLAGS...: run a stage on all devices
    if [ "$devices" -gt 1 ]; then
        run_stage "$1" python -m nanochat.runtime.launch --nproc_per_node="$devices" -m "$2" -- "${@:3}"
    else
        run_stage "$1" python -m "$2" "${@:3}"
    fi
}

train() { # NAME MODULE FLAGS...: run a training stage, which saves checkpoints and can resume
    stage "$@" "${train_flags[@]}"
}

preflight() { # FLAGS...: stop now if a later stage would lack data, disk or memory
    echo
    echo "== preflight"
    python -m scripts.preflight --data "$data" --devices "$devices" --model_tag "$tag" "${family_flags[@]}" "${recipe_flags[@]}" "$@"
}

tokenizer_flags=() family_flags=() of_family=
if [ $family = qwen3 ]; then
    tokenizer_flags=(--pattern qwen2) # the only one of ours that llama.cpp knows
    family_flags=(--family qwen3)
    of_family=-qwen3
fi
recipe_flags=()
if [ $recipe = upstream ]; then # what base_train adds to upstream's model; its rates and schedules are upstream's
    recipe_flags=(--bigram_rows=0 --offset_layers=0 --exclusive_layers=0)
    of_family=-upstream
fi

tinyworld() { # VOCABULARY TOKENS; takes the name of the model from tag, its size from size, and the flags of the stages from base_flags, mid_flags, sft_flags, rl_flags and eval_flags, and of the evaluations reply
    preflight "${size[@]}" --vocab_size "$1" --tokens "$2"
    run_stage dataset python -m nanochat.dataset --data tinyworld
    run_stage tok_train python -m scripts.tok_train --data tinyworld --vocab_size "$1" "${tokenizer_flags[@]}"
    run_stage tok_eval python -m scripts.tok_eval --data tinyworld
    train base_train scripts.base_train --data tinyworld --model_tag $tag "${family_flags[@]}" "${size[@]}" "${base_flags[@]}"
    stage base_loss scripts.base_loss --model_tag $tag --split_tokens 65536 --once
    train mid_train scripts.mid_train --model_tag $tag "${mid_flags[@]}"
    stage mid_eval scripts.chat_eval -i mid -g $tag -m $reply -b 128 --once "${eval_flags[@]}"
    train chat_sft scripts.chat_sft --model_tag $tag "${sft_flags[@]}"
    stage sft_eval scripts.chat_eval -i sft -g $tag -m $reply -b 128 --once "${eval_flags[@]}"
    train chat_rl scripts.chat_rl --model_tag $tag "${rl_flags[@]}"
    stage rl_eval scripts.chat_eval -i rl -g $tag -m $reply -b 128 --once "${eval_flags[@]}"
}

fineweb() { # SHARDS DEPTH; takes the corpus to fetch from corpus, the vocabulary from vocabulary, and the flags of the stages from base_flags, mid_flags, sft_flags and rl_flags
    tag=d$2$of_family
    local every=(--model_tag="$tag") shards=0
    if [ "$data" = "$corpus" ]; then shards=$1; fi
    preflight --depth "$2" --shards "$shards" --vocab_size "$vocabulary" "${horizon[@]}"
    if [ "$shards" -gt 0 ]; then run_stage dataset python -m nanochat.dataset --data "$corpus" -n "$shards"; fi
    run_stage tok_train python -m scripts.tok_train --data "$data" --max_chars=2000000000 --vocab_size="$vocabulary" "${tokenizer_flags[@]}"
    run_stage tok_eval python -m scripts.tok_eval --data "$data"
    train base_train scripts.base_train --data "$data" --model_tag="$tag" "${family_flags[@]}" "${recipe_flags[@]}" "${base_flags[@]}"
    stage base_loss scripts.base_loss --once "${every[@]}"
    stage base_eval scripts.base_eval "${every[@]}"
    train mid_train scripts.mid_train "${every[@]}" "${mid_flags[@]}"
    stage mid_eval scripts.chat_eval -i mid --once "${every[@]}"
    train chat_sft scripts.chat_sft "${every[@]}" "${sft_flags[@]}"
    stage sft_eval scripts.chat_eval -i sft --once "${every[@]}"
    train chat_rl scripts.chat_rl "${every[@]}" "${rl_flags[@]}"
    stage rl_eval scripts.chat_eval -i rl -a GSM8K --once "${every[@]}"
}

ascend_d12() { # set the flags that the guides for Ascend publish, for 1, 2, 4, 8 or 16 cards; memory sets the rows per pass
    local rows
    take_d12_devices
    base_flags=(--depth=12 --total_batch_size=262144)
    mid_flags=(--total_batch_size=262144)
    if [ "$device" = npu ]; then
        plan=$(ask nanochat.planner --depth=12 --total_batch_size=262144 --vocab_size=65536 --ranks="$devices")
        rows=${plan##*--device_batch_size=}
        read -ra base_flags <<<"$plan"
        mid_flags+=(--device_batch_size="${rows%% *}")
    fi
    sft_flags=(--device_batch_size=8 --target_examples_per_step=32)
    rl_flags=(--device_batch_size=4 --examples_per_step=16)
}

# --- the presets -----------------------------------------------------------------------------------
# dev/LOG.md has the experiments: the tinyworld preset takes six minutes on two cores of a CPU with bf16 matmuls.

size=(--depth=4 --model_dim=192 --head_dim=64 --max_seq_len=256)
eval_flags=()
reply=160 # tokens: no story is longer
corpus=fineweb vocabulary=65536 horizon=()
case $preset in
smoke)
    reply=48
    tag=smoke$of_family
    size=(--depth=2 --model_dim=64 --head_dim=32 --max_seq_len=256)
    step=$(fit total_batch_size 2048 256)
    base_flags=(--window_pattern=L "$step" --num_iterations=20 --no_compile --eval_every=20)
    mid_flags=("$step" --num_iterations=10 --no_compile)
    sft_flags=("$(fit target_examples_per_step 8)" --num_iterations=10 --no_compile)
    rl_flags=("$(fit examples_per_step 4)" --num_samples=4 --max_new_tokens=8 --num_iterations=3 --eval_examples=20)
    eval_flags=(-x 20)
    tinyworld 1024 82000
    ;;
tinyworld | tinyworld-small)
    tag=speedrun$of_family
    tokens=4400000 step_tokens=3072 examples=12
    if [ "$preset" = tinyworld-small ]; then tokens=2700000 step_tokens=4096 examples=16; fi
    step=$(fit total_batch_size $step_tokens 256)
    # With an offset in the keys of every layer it answers fewer Chinese questions in new wordings, and with exclusive
    # attention it gets fewer sums right. The rates fall in mid alone, since they would only rise again after base. The
    # mean of mid's and SFT's weights answers more. A text of few facts, read often, takes three times the weight decay
    # that other short runs have (dev/LOG.md).
    layers=()
    if [ $family = gpt ]; then layers=(--offset_layers=1 --exclusive_layers=0); fi
    base_flags=(--window_pattern=L "$step" --num_iterations=250 "${layers[@]}" --warmdown_ratio=0 --weight_decay=0.84 --eval_every=125)
    mid_flags=("$step" --num_iterations=880 --warmdown_ratio=1 --answers_only --eval_every=440)
    sft_flags=("$(fit target_examples_per_step $examples)" --device_batch_size="$examples" --init_lr_frac=0.5 --num_iterations=300 --start_share=0.5 --eval_every=150)
    rl_flags=("$(fit examples_per_step 32)" --num_samples=16 --max_new_tokens=24 --device_batch_size=128
        --init_lr_frac=0.052 --kl=0.5 --embedding_lr=0.03 --scalar_lr=0.05 --num_iterations=100)
    if [ "$preset" = tinyworld-small ]; then
        tag=speedrun-small$of_family
        base_flags=(--window_pattern=L "$step" --num_iterations=200 "${layers[@]}" --warmdown_ratio=0 --weight_decay=0.84)
        mid_flags=("$step" --num_iterations=330 --warmdown_ratio=1 --answers_only)
        sft_flags=("${sft_flags[@]:0:2}" --init_lr_frac=0.5 --num_iterations=110 --start_share=0.5)
    fi
    tinyworld 4096 $tokens
    ;;
d12)
    ascend_d12
    fineweb 40 12 # the run needs 1.6 billion tokens, and a shard holds 50 million
    ;;
d20)
    # base_train and mid_train choose a step that the devices share
    base_flags=(--depth=20) mid_flags=()
    sft_flags=("$(fit target_examples_per_step 32)")
    rl_flags=("$(fit examples_per_step 16)")
    fineweb 120 20
    ;;
gpt2)
    # The sizes of upstream's fastest published run: 8 tokens per parameter, in FP8 where the GPUs have it.
    corpus=climbmix vocabulary=32768 horizon=(--tokens 5.84e9)
    base_flags=(--depth=24 --target_param_data_ratio=8) mid_flags=()
    if [ $family = gpt ] && [ "$eight_bits" = fp8 ]; then base_flags+=(--matmul=fp8); fi
    sft_flags=("$(fit target_examples_per_step 32)")
    rl_flags=("$(fit examples_per_step 16)")
    # With CORE's tasks here, base_train measures CORE as it trains.
    code=0
    python -m scripts.base_eval --download_only || code=$?
    stop_if_interrupted base_eval
    [ $code -eq 0 ] || tell "speedrun: without CORE's tasks the run has every other figure" "speedrun：没有 CORE 的题目，其他指标照常测量"
    fineweb 130 24
    ;;
esac

python -m nanochat.report generate --key "$key"
echo
finish
