"""Benchmarks: each folder is a program that measures ours beside its peers, in turns.

`python -m bench.NAME` prints a table and, as its last line, one JSON object. The programs:

train        speed and memory of pretraining on one CPU thread; bench.train.ranks: two ranks
multiplier   how many times more a baseline spends to reach our loss; bench.multiplier.corpus
             makes its text
serve        the chat server beside other servers; bench.serve.soak: half of its clients misbehave
finetune     fine-tuning of published models beside transformers and peft
tokenizer    training and encoding beside other tokenizers
data         preparing and loading rows; bench.data.evaluation and bench.data.checkpoint
rl           a step of reinforcement learning; bench.rl.control: whether the rewards teach
npu_ops      operators and bytes of a step on the emulated NPU
gpu          pretraining on one accelerator

Every side runs in a process of its own: processes.py starts it, and child.py is its other end.
training.py makes the model that our side of several programs trains, updates.py makes its updates,
text.py makes its rows, batches.py random ones, and tables.py prints what was measured.
"""
