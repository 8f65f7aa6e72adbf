"""The code behind setup_ascend.sh and check_npu.py; it runs on Python 3.8 and later with the standard library alone.

Only device_checks.py, numerics.py and collectives.py import torch or nanochat, and they run in separate processes.
"""
