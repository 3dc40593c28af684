"""nanoGPT's command (a download of 24 GB). From any folder the same as: python prepare.py openwebtext"""

import os
import runpy
import sys

if __name__ == '__main__':
    repo = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.path[0] = repo
    sys.argv[:1] = [os.path.join(repo, 'prepare.py'), 'openwebtext']
    runpy.run_path(sys.argv[0], run_name='__main__')
