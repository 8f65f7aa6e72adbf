"""Commands that were once published still work, and the documents answer whatever else the guides write."""

from pathlib import Path

import pytest

from tests.repository.test_docs import ROOT, commands, problem

# What the published guides tell their readers to type, some files have moved to runs/.
PUBLISHED = r"""
bash setup_ascend.sh
source setup_ascend.sh
python check_npu.py
bash speedrun_npu.sh
bash speedrun.sh
python -m scripts.tok_train
python -m scripts.base_train --depth=12 --device_batch_size=16
python -m scripts.base_train --depth=8 --device_batch_size=8
python -m scripts.base_train --depth=8 --device_batch_size=4 --gradient_accumulation_steps=4
python -m scripts.mid_train --device_batch_size=8
python -m scripts.chat_sft --device_batch_size=4
python -m scripts.chat_rl --device_batch_size=4
torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- \
    --depth=12 --device_batch_size=16 --total_batch_size=262144
torchrun --standalone --nproc_per_node=8 -m scripts.base_train -- --depth=12 --max_seq_len=2048
torchrun --standalone --nproc_per_node=8 -m scripts.mid_train -- --device_batch_size=16 --total_batch_size=262144
torchrun --standalone --nproc_per_node=8 -m scripts.chat_sft -- --device_batch_size=8 --target_examples_per_step=32
torchrun --standalone --nproc_per_node=8 -m scripts.chat_rl -- --device_batch_size=4 --examples_per_step=16
python -m scripts.chat_cli
python -m scripts.chat_web
bash runs/download_fineweb_data.sh
bash runs/quick_fineweb_test.sh
bash runs/train_with_fineweb.sh
bash runs/train_distributed_npu.sh 8
bash runs/train_distributed_npu.sh 4
python runs/launch_npu_training.py --npus 8
python runs/launch_npu_training.py --npus 4
bash check_npu_env.sh
source setup_npu_env.sh
bash fix_ascend_env.sh
bash emergency_npu_cleanup.sh
bash download_fineweb_data.sh
bash quick_fineweb_test.sh
bash train_with_fineweb.sh
bash train_distributed_npu.sh 8
"""


# What else the guides write: variables, functions, settings and commands of other programs. A name without an answer
# leaves its reader alone, even if nothing of ours has it.
ANSWERED = """
venv_npu|conda create|pip install -e .|pip install torch_npu|decorator|deepspeed|requirements.txt|torch>=2.1.0
pip config set global.index-url|Ascend-cann-toolkit|set_env.sh|npu-smi info|watch -n 1 npu-smi info|npu-smi info -t topo
npu-smi info -t board|curl -I https://hf-mirror.com|HF_ENDPOINT|hostname -I
ASCEND_HOME|LD_LIBRARY_PATH|PYTHONPATH|ASCEND_RT_VISIBLE_DEVICES|CUDA_VISIBLE_DEVICES|ASCEND_GLOBAL_LOG_LEVEL
ASCEND_LAUNCH_BLOCKING|ASCEND_SLOG_PRINT_TO_STDOUT|PYTORCH_NPU_ALLOC_CONF|HCCL_WHITELIST_DISABLE|HCCL_IF_IP
MASTER_ADDR|MASTER_PORT|NPROC_PER_NODE|plog
CUDA out of memory|HCCL initialization failed|Ubuntu 18.04|Python 3.8|CANN 7.0|310P
is_torch_npu_available|torch.npu.is_available|torch.npu.device_count|max_memory_allocated|empty_cache|synchronize
torch.amp.autocast|.half()|fp16=True|gradient_checkpointing|dataloader_num_workers|pin_memory|NpuFusedAdamW|torch.compile
gradient_accumulation_steps|--matrix_optimizer=adamw|--max_seq_len|--model_type|--dataset|--num_train_epochs|--sft_type
--output_dir|default-zero2|default-zero3|swift infer|--ckpt_dir|--load_dataset_config
check_npu_env.sh|setup_npu_env.sh|fix_ascend_env.sh|emergency_npu_cleanup.sh|download_fineweb_data.sh
quick_fineweb_test.sh|train_with_fineweb.sh|train_distributed_npu.sh|launch_npu_training.py|train_model_npu.py
train_config_npu.py|qwen_trajectory_model_npu|base_data
"""
OF_ASCEND = {
    "zh": ("README_ASCEND.md", "华为昇腾运行指南.md", "故障排除手册.md", "NPU使用技巧.md"),
    "en": ("README_ASCEND.en.md", "docs/en/ascend-guide.md", "docs/en/troubleshooting.md", "docs/en/npu-tips.md"),
}


@pytest.mark.parametrize("language", OF_ASCEND)
def test_the_documents_answer_every_name_of_the_published_guides(language: str) -> None:
    text = "\n".join(Path(ROOT, name).read_text(encoding="utf-8") for name in OF_ASCEND[language])
    names = [name for line in ANSWERED.split("\n") for name in line.split("|") if name]
    assert len(names) > 70 and [name for name in names if name not in text] == []


def test_the_commands_of_the_published_guides_are_understood() -> None:
    published = list(commands(PUBLISHED))
    assert len(published) == 34
    assert [f"{words}: {why}" for words in published if (why := problem(words))] == []
