"""nanoGPT's command (tinyshakespeare by characters): python prepare.py shakespeare_char, from any folder."""
import os, runpy, sys

if __name__ == '__main__':  # not in the workers, which import this file where processes cannot be forked
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.argv[:1] = [os.path.join(sys.path[0], 'prepare.py'), 'shakespeare_char']
    runpy.run_path(sys.argv[0], run_name='__main__')
