"""Evaluations, which measure how well a model predicts, chooses, answers and programs.

Every evaluation takes a model, a tokenizer and a Compute, divides the work among the ranks and
returns the same frozen score on all of them. Read in this order:

- loss.py: measures bits per byte, as the training stages do; domains.py splits it by language.
- likelihood.py: measures how likely a model finds continuations of prompts. branches.py reads a
  prefix that prompts share only once. core.py (CORE) and choices.py (multiple choice) use both.
- chat.py: evaluates chat tasks, by the logits of letters or by grading written replies.
- records.py: saves every answer in a file.
- preferences.py: computes the loss of DPO and the log-probabilities of its reference model.
- sandbox.py, sandbox_child.py, system_calls.py: run the programs that a model wrote for HumanEval.
"""
