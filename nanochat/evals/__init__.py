"""Evaluations: how well a model predicts, chooses, answers and programs.

Every evaluation takes a model, a tokenizer and a Compute, shares the work among the ranks and
returns the same frozen score on all of them. Read in this order:

- loss.py: bits per byte, which the training stages measure too; domains.py splits it by language.
- likelihood.py: how likely a model finds continuations of prompts; branches.py reads a prefix that
  prompts share once. core.py (CORE) and choices.py (multiple choice as text) are built on both.
- chat.py: chat tasks, by the logits of letters or by grading written replies.
- records.py: the file in which every answer is saved.
- preferences.py: the loss of DPO and the log-probabilities of its reference model.
- sandbox.py, sandbox_child.py, system_calls.py: run the programs that a model wrote for HumanEval.
"""
