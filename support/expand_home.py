"""The home folder in a knob's value."""

import os


def expand_home(name, value):
    """No shell expands the ~ in --out_dir=~/runs or resume:~/runs; a prompt may begin with one."""
    if isinstance(value, list):
        return [expand_home(name, item) for item in value]
    prefix, colon, path = str(value).rpartition(':')
    if path.startswith('~/') and (prefix == 'FILE' or name not in ('start', 'stop')):
        return prefix + colon + os.path.expanduser(path)
    return value
