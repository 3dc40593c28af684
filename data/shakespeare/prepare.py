"""nanoGPT's command (tinyshakespeare in GPT-2's tokens). From any folder the same as: python prepare.py shakespeare"""

import os
import runpy
import sys

if __name__ == '__main__':
    repo = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path[0] = repo
    sys.argv[:1] = [os.path.join(repo, 'prepare.py'), 'shakespeare']
    runpy.run_path(sys.argv[0], run_name='__main__')
