"""What Ascend NPUs compute with operators of their own: attention, norm, rotary embedding; chosen in kernels.py."""
