"""Evaluations, which measure how well a model predicts, chooses, answers and programs.

The ranks divide the work of an evaluation, and each of them returns the scores over all ranks. Read
the files in this order:

- loss.py: measures bits per byte; domains.py does so by language and domain.
- likelihood.py: measures how likely a model finds continuations of prompts. branches.py makes the
  model read a shared prefix only once. core.py (CORE) and choices.py (multiple choice) use both.
- chat.py: evaluates chat tasks, by the logits of letters or by grading written replies.
- records.py: saves every answer in a file.
- sandbox.py, sandbox_child.py, system_calls.py: run the programs that a model wrote for HumanEval.
"""
