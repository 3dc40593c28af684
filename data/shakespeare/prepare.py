"""nanoGPT's command for this dataset: the same as `python prepare.py shakespeare`."""

import os
import subprocess
import sys

top = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
command = [sys.executable, os.path.join(top, 'prepare.py'), 'shakespeare', *sys.argv[1:]]
sys.exit(subprocess.run(command).returncode)
