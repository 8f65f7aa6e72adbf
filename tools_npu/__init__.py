"""What setup_ascend.sh and check_npu.py know about an Ascend host: the standard library alone, Python 3.8 and later.

Nothing here imports nanochat or torch but numerics.py and collectives.py, which run in processes of their own.
"""
