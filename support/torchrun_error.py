"""An error for torchrun, which shows it at the end of its own report, instead of a link."""

import contextlib
import json
import os
import time


def tell_torchrun(problems):
    """Write what torch's @record would write of an exception."""
    text = '; '.join(' '.join(problem.splitlines()) for problem in problems)
    message = {'message': f'error: {text}', 'extraInfo': {'timestamp': str(int(time.time()))}}
    with contextlib.suppress(OSError), open(os.environ['TORCHELASTIC_ERROR_FILE'], 'x') as f:
        json.dump({'message': message}, f)
