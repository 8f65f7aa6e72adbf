"""Predicts the speed, memory and disk space of training before it starts, and plans its flags.

`python -m nanochat.planner` plans pretraining on accelerators, and forecasts the memory of
fine-tuning. Pretraining is predicted by arithmetic. Read these modules in order:

- work.py counts the FLOPs, bytes and operators of a step. programs.py describes how this project
  and upstream compute the model.
- cards.py gives the speed of each kind of card from data sheets, and calibration.py as measured.
- roofline.py predicts the time of a step. plan.py chooses the flags, and predicts the hours and the
  disk space of a whole run. expected.py predicts a step of the run that is about to start.
- tables.py makes tables of plans. published.py compares predictions with published runs.

The memory of fine-tuning is counted by running a step without data:

- forecast.py counts the bytes of a step. tuning.py checks whether it fits a card, and otherwise
  finds settings that do.
- published_tuning.py compares forecasts with published runs.
"""
