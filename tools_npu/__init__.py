"""The code behind setup_ascend.sh and check_npu.py.

It runs on Python 3.8 and later with the standard library alone. Only device_checks.py, numerics.py,
collectives.py and bench.py import torch or nanochat, and they run in processes of their own. Read
in this order:

- host.py: what a host shows without torch: CANN, the driver, cards, npu-smi.
- versions.py: which torch_npu fits which CANN and Python.
- environment.py: the variables that a job on NPUs needs, and those that harm it.
- setup.py: sets a host up; the implementation of setup_ascend.sh.
- lines.py: the lines that check_npu.py prints. host_checks.py makes those that need no torch, and
  device_checks.py makes the others with numerics.py, collectives.py (HCCL) and bench.py (speed).
- processes.py: lists your training processes, and ends those that you pick.
"""
