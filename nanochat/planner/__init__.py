"""The planner: predicts speed, memory and disk of training before it starts, and plans its flags.

`python -m nanochat.planner` plans pretraining on accelerators and forecasts the memory of
fine-tuning. Pretraining is predicted by arithmetic; read these in order:

- work.py: what a step asks of a card, in FLOPs, bytes and operators; programs.py: how this project
  and upstream compute the model.
- cards.py: what a card does in a second, by data sheets; calibration.py: the same, measured.
- roofline.py: how long a step takes; plan.py: the flags, hours and disk of a whole run.
- tables.py: tables of plans; published.py: the prediction beside runs that others have published.

The memory of fine-tuning is counted on a step without data:

- forecast.py: counts the bytes of a step; tuning.py: whether it fits a card, and what would fit.
- published_tuning.py: the forecast beside runs that others have published.
"""
