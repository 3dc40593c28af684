"""run.json: what a run was asked to do, on which machine and code, and how it ended."""

import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time

from configurator import warn
from support.files import read_json, write_json

PACKAGES = ('torch', 'numpy', 'tiktoken', 'tokenizers', 'wandb')


class RunRecord:
    """The run.json of `out_dir`: `knobs` is a dict, `facts` what follows from them. Each start is a session;
    if the run is `continued`, those of before are kept."""

    def __init__(self, out_dir, knobs, facts, continued, iter_num, enabled=True):
        self.path = os.path.join(out_dir, 'run.json') if enabled else None
        if not enabled:
            return
        earlier = read_json(self.path).get('sessions') if continued else []
        earlier = earlier if isinstance(earlier, list) else []  # a file may say anything
        sessions = [*earlier, describe_session(iter_num)]
        self.content = {**facts, 'knobs': knobs, 'outcome': None, 'sessions': sessions}
        self.write()

    def end(self, outcome, **figures):
        """`outcome`: 'done', 'stopped by ...', 'gave up: ...'. `figures`: iterations=1000, ..."""
        if self.path:
            self.content.update(outcome=outcome, **figures)
            session = self.content['sessions'][-1]
            session.update(outcome=outcome, ended=now(), to_iter=figures.get('iterations'))
            self.write()

    def write(self):
        try:
            write_json(self.path, self.content)
        except OSError as e:  # a full disk must not end a run
            warn(f"{self.path} could not be written ({e.strerror}), the run continues")


def describe_session(iter_num):
    """When, how, where and with which code this process starts."""
    return {
        'started': now(),
        'from_iter': iter_num,
        'command': shlex.join([os.path.basename(sys.executable), *sys.argv]),
        'machine': platform.node(),
        'system': platform.platform(),
        'cpus': os.cpu_count(),
        'python': platform.python_version(),
        **{name: version(name) for name in PACKAGES if name in sys.modules},
        **code_version(),
        'outcome': None,
    }


def now():
    return time.strftime('%Y-%m-%d %H:%M:%S %z')


def version(package):
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # used from its source tree
        return getattr(sys.modules[package], '__version__', None)


def code_version():
    """The commit of the code, and whether any of its files was changed since."""
    try:
        changes = git('status', '--porcelain', '--untracked-files=no')
        return {'commit': git('rev-parse', 'HEAD'), 'changed_since': changes != ''}
    except (OSError, subprocess.SubprocessError):
        return {'commit': None}


def git(*args):
    command = ['git', '-C', os.path.dirname(os.path.abspath(__file__)), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()
