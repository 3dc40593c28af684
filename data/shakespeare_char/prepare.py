"""nanoGPT's command (tinyshakespeare by characters). From any folder the same as: python prepare.py shakespeare_char"""

import os
import runpy
import sys

if __name__ == '__main__':
    repo = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path[0] = repo
    sys.argv[:1] = [os.path.join(repo, 'prepare.py'), 'shakespeare_char']
    runpy.run_path(sys.argv[0], run_name='__main__')
