"""Commands that were once published still work."""

from tests.repository.test_docs import commands, problem

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
"""


def test_the_commands_of_the_published_guides_are_understood() -> None:
    published = list(commands(PUBLISHED))
    assert len(published) == 26
    assert [f"{words}: {why}" for words in published if (why := problem(words))] == []
