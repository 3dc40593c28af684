"""nanoGPT's command for this dataset: the same as `python prepare.py openwebtext`."""

import os
import subprocess
import sys

top = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
command = [sys.executable, os.path.join(top, 'prepare.py'), 'openwebtext', *sys.argv[1:]]
sys.exit(subprocess.run(command).returncode)
