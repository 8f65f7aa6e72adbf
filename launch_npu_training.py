"""The name that older guides use for runs/launch_npu_training.py."""

import os
import sys

script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "runs/launch_npu_training.py")
os.execv(sys.executable, [sys.executable, script, *sys.argv[1:]])
